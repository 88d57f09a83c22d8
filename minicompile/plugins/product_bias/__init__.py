"""Product and bias: mm and the addition after it are one call of the library again (addmm.py)."""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "product_bias",
    "Adds a bias inside of the library's matrix product where no kernel follows that could add it.",
    (f"{__name__}.addmm",),
    cases=("gpt2_block", "gpt2_block_training"),
)
