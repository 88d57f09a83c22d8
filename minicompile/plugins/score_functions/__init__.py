"""`flex_attention(q, k, v, score_mod, block_mask)` in the graph: attention written out (written_out.py).

Without this plug-in the graph ends at such a call.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "score_functions",
    "Captures torch's flex_attention as products, scores and a softmax, at which the graph would end.",
    (f"{__name__}.written_out",),
)
