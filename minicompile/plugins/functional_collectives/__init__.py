"""Functional collectives: exchanges between processes that give a new tensor stay in the graph (groups.py).

Without this plug-in the graph ends at such a call.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "functional_collectives",
    "Captures functional collectives of torch.distributed, at whose call the graph would end.",
    (f"{__name__}.groups",),
)
