"""Graph passes of AOT; importing this registers them. See passes/manager.py for the stages."""

from minicompile.aot.passes import (  # noqa: F401
    attention,
    chunked_loss,
    cleanup,
    flash_attention,
    images,
    linear,
    random,
)
from minicompile.aot.passes.patterns import pattern_passes
from minicompile.passes.manager import Pass, passes


def known_passes() -> list[Pass]:
    """Every registered pass and pattern."""
    return [*passes.values(), *pattern_passes()]
