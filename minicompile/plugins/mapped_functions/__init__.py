"""Mapped functions: `torch.vmap(f)(...)` becomes a node of the graph (vmap.py).

Without this plug-in the graph ends at such a call.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "mapped_functions",
    "Captures torch.vmap, at whose call the graph would end.",
    (f"{__name__}.vmap",),
    cases=("mapped_norm, large, training",),
)
