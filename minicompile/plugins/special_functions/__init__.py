"""Special functions: derivatives of log gamma, logit, sinc and their like as formulas (expansions.py).

Without this plug-in they are extern calls.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "special_functions",
    "Computes digamma, polygamma, logit, sinc and entr in kernels, so that they fuse.",
    (f"{__name__}.expansions",),
    cases=("gamma_entropy, cache", "gamma_entropy, cache, training"),
)
