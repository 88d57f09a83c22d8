"""Kernels that users write in Triton: a launch becomes one operator of the graph (launches.py).

Without this plug-in the graph ends at such a launch.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "triton_kernels",
    "Captures launches of Triton kernels that users wrote, at which the graph would end.",
    (f"{__name__}.launches",),
)
