"""Kernels of a GPU are launched by the driver, without Triton's launcher (launch.py)."""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "fast_launcher",
    "Launches a GPU's kernels in under a microsecond, and keeps their machine code on disk.",
    (f"{__name__}.launch",),
    cases=("call", "gpt2_block"),
)
