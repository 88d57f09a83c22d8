"""Activation checkpoints: a checkpointed function becomes a node of the graph (checkpointed.py).

Without this plug-in the graph ends at such a call.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "activation_checkpoints",
    "Captures functions under torch.utils.checkpoint, at whose call the graph would end.",
    (f"{__name__}.checkpointed",),
    cases=("checkpointed_gelu, large, training",),
)
