"""Special functions: entropy terms, logit, sinc and others as formulas (formulas.py), so that they fuse.

Without this plug-in they are extern calls, as other special functions always are.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "special_functions",
    "Computes entropy terms, logit, sinc and other rare functions in kernels, where they fuse.",
    (f"{__name__}.formulas",),
    cases=("row_entropy, cache", "row_entropy, cache, training"),
)
