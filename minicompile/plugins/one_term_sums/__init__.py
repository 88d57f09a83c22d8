"""Sums of which at most one term isn't zero need no loop (sums.py)."""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "one_term_sums",
    "Computes a sum without a loop where at most one term isn't zero, as in the gradient of cross-entropy.",
    ("minicompile.plugins.one_term_sums.sums",),
    cases=("cross_entropy, large, training", "cross_entropy, gpu, training"),
)
