"""Split reductions: programs of a GPU share long rows, and sums of columns ride in kernels of rows.

choose.py   whether programs share the rows of a kernel: the plan rule "triton:split"
split.py    the launches of a kernel whose rows are shared
join.py     which kernels of rows take over sums of columns
fold.py     the launches of such a kernel
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "split_reductions",
    "On GPUs, shares few long rows among many programs, and adds up columns while it holds rows.",
    tuple(f"minicompile.plugins.split_reductions.{name}" for name in ("choose", "join", "fold")),
    cases=(
        "column_sums, gpu",
        "square_sum, gpu",
        "batch_norm, gpu, training",
        "layer_norm, gpu, training",
    ),
)
