"""Matrix products in kernels of our own, and tiles that are measured: mode="max-autotune".

loops.py      which products become loops that a template computes
fuse.py       which other loops its kernel takes over
tiles.py      which tiles are worth measuring, and what else could compute the same
template.py   prints the kernel
autotune.py   measures tiles and rivals on the device, at a kernel's first call
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "matrix_products",
    'Multiplies matrices in kernels that take over what follows, with tiles measured: mode="max-autotune".',
    tuple(
        f"minicompile.plugins.matrix_products.{name}"
        for name in ("loops", "fuse", "template", "autotune")
    ),
    needs=("fast_launcher",),
    cases=("gpt2_block", "mlp"),
    options=(("mode", "max-autotune"),),
)
