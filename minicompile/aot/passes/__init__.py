"""Graph passes of AOT; importing this registers them. See passes/manager.py for the stages."""

from minicompile.aot.passes import cleanup  # noqa: F401
from minicompile.aot.passes.rewriting import pattern_passes
from minicompile.ops.plugins import rules
from minicompile.passes.manager import Pass, passes
from minicompile.passes.patterns import patterns


def known_passes(selected: tuple[str, ...] | None = None) -> list[Pass]:
    """Every registered pass and pattern; of plug-ins only those of the selected ones."""
    if selected is None:
        return [*passes.values(), *pattern_passes(patterns)]
    return [*rules(passes, selected).values(), *pattern_passes(rules(patterns, selected))]
