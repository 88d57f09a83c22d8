"""Column reductions: C kernels that reduce columns side by side, in vectors.

choose.py    which kernels do, the width of their tiles, how threads share rows
columns.py   prints them
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "column_reductions",
    "On CPUs, reduces columns in vectors: a tile of them at a time, several rows at once.",
    tuple(f"minicompile.plugins.column_reductions.{name}" for name in ("choose", "columns")),
    cases=("column_sums, cache", "column_sums, large", "layer_norm, large, training"),
)
