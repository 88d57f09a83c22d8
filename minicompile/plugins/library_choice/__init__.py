"""Library choice: large matrix products are called in the way that is fastest (products.py)."""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "library_choice",
    "Calls oneDNN for large products on AMD's processors, and pads them for a GPU's tensor cores.",
    (f"{__name__}.products",),
    needs_torch=True,
    cases=(
        "word_logits, large, training",
        "word_logits, gpu, training",
        "mlp",
        "gpt2_block_training",
    ),
)
