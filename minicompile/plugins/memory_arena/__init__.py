"""Large memory on the CPU is kept and used again by later calls (arena.py).

Without this plug-in each call gets fresh memory, and pays a page fault for every 4 KiB of it.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "memory_arena",
    "Keeps large memory on the CPU for later calls, which needn't fill fresh pages.",
    (f"{__name__}.arena",),
    cases=("gelu_bias, large", "layer_norm, large, training"),
)
