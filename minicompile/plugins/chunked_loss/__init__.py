"""Chunked loss: cross-entropy of a linear layer, one chunk of rows after the other (cross_entropy.py)."""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "chunked_loss",
    "Computes the loss of a language model in chunks of rows, so that all logits never lie in memory.",
    (f"{__name__}.cross_entropy",),
    cases=("next_token_loss, large, training", "next_token_loss, gpu, training"),
)
