"""Functional collectives: exchanges between processes become operators of the graph (groups.py).

Without this plug-in the graph ends at such a call.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "functional_collectives",
    "Captures torch.distributed's functional collectives, at whose call the graph would end.",
    (f"{__name__}.groups",),
)
