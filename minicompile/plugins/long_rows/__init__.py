"""Long rows: kernels of a GPU that sweep rows load them widely, and keep in the cache what they read again.

choose.py    which kernels do: the plan rules "triton:cached_rows" and "triton:long_rows"
rows.py      prints them
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "long_rows",
    "On GPUs, loads rows of any length widely, and keeps those in the cache that are read again.",
    tuple(f"minicompile.plugins.long_rows.{name}" for name in ("choose", "rows")),
    cases=("softmax_64k, gpu", "cross_entropy, gpu"),
)
