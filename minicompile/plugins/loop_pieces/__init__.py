"""Loops without choices, in C kernels: cut where conditions change, written out where short.

pieces.py    makes the pieces
printer.py   prints them
windows.py   keeps loops that are to be cut out of reductions
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "loop_pieces",
    "On CPUs, cuts loops where a condition on their variable changes, and writes out short inner loops.",
    tuple(f"minicompile.plugins.loop_pieces.{name}" for name in ("pieces", "printer", "windows")),
    cases=("rope, cache", "rope, large"),
)
