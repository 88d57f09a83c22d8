"""Windows of images: pooling (pooling.py), resampling, and padding with a tensor's own elements (resampling.py).

Both describe each dimension by its windows (windows.py). Without this plug-in these operators are extern calls.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "image_windows",
    "Pools, resamples and pads in loops that fuse with what is around them, forward and backward.",
    tuple(f"{__name__}.{module}" for module in ("pooling", "resampling")),
    cases=("max_pool, cache", "max_pool, cache, training", "avg_pool, cache, training",
           "upsample_nearest, cache, training", "upsample_bilinear, cache"),
)  # fmt: skip
