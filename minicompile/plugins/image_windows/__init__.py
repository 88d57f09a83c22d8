"""Windows of images: pooling (pooling.py) and resampling (resampling.py), by windows.py.

Without this plug-in their operators are extern calls, as are adaptive and three-dimensional pooling, bicubic
resampling, padding by reflection, and windows as columns (`unfold`).
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "image_windows",
    "Pools and resamples in loops that fuse with what is around them, forward and backward.",
    tuple(f"{__name__}.{module}" for module in ("pooling", "resampling")),
    cases=("max_pool, cache", "max_pool, cache, training", "avg_pool, cache, training",
           "upsample_nearest, cache, training", "upsample_bilinear, cache"),
)  # fmt: skip
