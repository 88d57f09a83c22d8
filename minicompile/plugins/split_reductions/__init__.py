"""Split reductions: programs of a GPU share long rows.

choose.py   whether programs share the rows of a kernel: the plan rule "triton:split"
split.py    the launches of a kernel whose rows are shared
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "split_reductions",
    "On GPUs, shares few long rows among many programs.",
    ("minicompile.plugins.split_reductions.choose",),
    cases=("column_sums, gpu", "square_sum, gpu"),
)
