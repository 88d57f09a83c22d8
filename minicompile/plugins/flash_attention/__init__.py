"""Attention that is written out, as one kernel or one call of a library: its weights are never held at once.

    s = q @ k.transpose(-2, -1) * scale           a product
    s = 20 * torch.tanh(s / 20) + bias            anything element by element
    s = s.masked_fill(j > i, -torch.inf)          a mask, perhaps a band
    out = torch.softmax(s, -1) @ v                a softmax of rows, and a product

    recognise.py   finds this in captured graphs
    operators.py   what it becomes: an operator, of which the text of a score function is an argument
    score.py       the score function over tiles, and the band of scores outside of which all are -inf
    kernels.py     the template of Triton kernels that calls it

Where scores are scaled and masked, F.scaled_dot_product_attention computes them: on a GPU if by a triangle
alone, on a CPU with any mask that is added. `device_codegen="triton"` asks for the template anywhere.

Off unless selected: both round differently, and the library gives 0 for a row whose every position is masked,
where softmax gives NaN.
"""

from minicompile.ops.plugins import Plugin

_PACKAGE = "minicompile.plugins.flash_attention"

PLUGIN = Plugin(
    "flash_attention",
    "Computes written-out attention tile by tile, so that scores and weights never lie in memory.",
    tuple(f"{_PACKAGE}.{name}" for name in ("recognise", "kernels")),
    default=False,
    cases=(
        "attention, large",
        "attention, large, training",
        "attention, gpu",
        "attention, gpu, training",
    ),
)
