"""Mapped functions: a call under torch.vmap becomes a node of the graph (mapped.py).

Without this plug-in the graph ends at such a call.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "mapped_functions",
    "Captures functions under torch.vmap, at whose call the graph would end.",
    (f"{__name__}.mapped",),
)
