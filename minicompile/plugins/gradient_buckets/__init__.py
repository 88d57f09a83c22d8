"""Gradients for DistributedDataParallel, a bucket at a time while the backward still runs (groups.py).

Without this plug-in all gradients come out at the backward's end, and are summed over processes then.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "gradient_buckets",
    "Hands gradients to DistributedDataParallel while the backward still runs.",
    (f"{__name__}.groups",),
)
