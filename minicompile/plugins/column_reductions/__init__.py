"""Column reductions: C kernels that reduce columns side by side, in vectors, and share few long rows.

choose.py    which kernels do, the width of their tiles, how threads share rows
chunks.py    prints kernels whose rows threads share
columns.py   prints kernels of columns
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "column_reductions",
    "On CPUs, reduces columns in vectors, and shares few long rows among threads.",
    tuple(
        f"minicompile.plugins.column_reductions.{name}" for name in ("choose", "chunks", "columns")
    ),
    cases=(
        "square_sum, large",
        "column_sums, cache",
        "column_sums, large",
        "layer_norm, large, training",
    ),
)
