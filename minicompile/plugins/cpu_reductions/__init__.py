"""Reductions on CPUs: C kernels that reduce rows and columns in vectors, and share few long rows.

choose.py    which kernels do, the width of their tiles, how threads share rows
rows.py      prints kernels whose rows are reduced by helpers
chunks.py    prints kernels whose rows threads share
columns.py   prints kernels of columns
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "cpu_reductions",
    "On CPUs, reduces rows and columns in vectors, and shares few long rows among threads.",
    tuple(
        f"minicompile.plugins.cpu_reductions.{name}"
        for name in ("choose", "rows", "chunks", "columns")
    ),
    cases=(
        "square_sum, large",
        "column_sums, cache",
        "column_sums, large",
        "layer_norm, large, training",
    ),
)
