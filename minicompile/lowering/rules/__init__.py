"""The built-in rules by family. Importing this package registers them."""

from minicompile.lowering.rules import (
    creation,
    externs,
    indexing,
    pointwise,
    pooling,
    products,
    reductions,
    resampling,
    scans,
    view,
)

__all__ = [
    "creation", "externs", "indexing", "pointwise", "pooling", "products", "reductions", "resampling",
    "scans", "view",
]  # fmt: skip
