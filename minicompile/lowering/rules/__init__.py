"""The built-in rules by family. Importing this package registers them."""

from minicompile.lowering.rules import (
    activations,
    creation,
    externs,
    indexing,
    joining,
    pointwise,
    reductions,
    scatters,
    sizes,
    view,
)

__all__ = [
    "activations",
    "creation",
    "externs",
    "indexing",
    "joining",
    "pointwise",
    "reductions",
    "scatters",
    "sizes",
    "view",
]
