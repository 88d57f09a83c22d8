"""Random numbers in kernels: with `fallback_random=False` loops compute them from seeds (seeds.py).

Without this plug-in random numbers are eager's whatever that option says: the library draws them.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "random_kernels",
    "Draws random numbers in kernels, where they fuse with what reads them: fallback_random=False.",
    (f"{__name__}.seeds",),
    cases=("dropout_residual, large, training",),
    options=(("fallback_random", False),),
)
