"""Graph passes of AOT; importing this registers them. See passes/manager.py for the stages."""

from minicompile.aot.passes import cleanup  # noqa: F401
from minicompile.ops.plugins import rules
from minicompile.passes.manager import Pass, passes


def known_passes(selected: tuple[str, ...] | None = None) -> list[Pass]:
    """Every registered pass; of plug-ins only those of the selected ones."""
    return [*(passes if selected is None else rules(passes, selected)).values()]
