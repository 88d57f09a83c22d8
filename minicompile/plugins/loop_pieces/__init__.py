"""Loops without choices, in C kernels: cut where conditions change, written out where short (pieces.py)."""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "loop_pieces",
    "On CPUs, cuts loops where a condition on their variable changes, and writes out short inner loops.",
    ("minicompile.plugins.loop_pieces.pieces",),
    cases=("rope, cache", "rope, large"),
)
