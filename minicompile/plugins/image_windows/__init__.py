"""Windows of images: pooling (pooling.py) and nearest resampling (resampling.py), by windows.py.

Without this plug-in their operators are extern calls, as are the gradient of max pooling (a library adds
each number to one element, a loop would look for it), adaptive and three-dimensional pooling, linear
and bicubic resampling, padding by reflection, and windows as columns (`unfold`).
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "image_windows",
    "Pools images, and resamples them to the nearest element, in loops that fuse with what is around them.",
    tuple(f"{__name__}.{module}" for module in ("pooling", "resampling")),
    cases=("max_pool, cache", "avg_pool, cache, training", "upsample_nearest, cache, training"),
)
