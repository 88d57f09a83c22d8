"""Transposed tiles: kernels that read along another loop than they write work in squares.

choose.py    which loops a square spans: the plan rules "cpp:squares" and "triton:squares"
squares.py   prints C kernels whose loads are turned in a square of scratch memory
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "transposed_tiles",
    "Works in squares where a kernel reads along another loop than it writes, as x.t() + y does.",
    tuple(f"minicompile.plugins.transposed_tiles.{name}" for name in ("choose", "squares")),
    cases=("transposed_add, large", "transposed_add, gpu"),
)
