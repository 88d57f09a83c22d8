"""Built-in decompositions, one module per family. Importing this package registers them."""

from minicompile.aot.decompositions import (
    activations,
    attention,
    creation,
    indexing,
    linear,
    losses,
    normalization,
    pointwise,
    pooling,
    reductions,
    softmax,
    views,
)
from minicompile.aot.decompositions.registry import (
    Decomposition,
    decompose,
    decomposition,
    rule_for,
)

__all__ = [
    "Decomposition",
    "activations",
    "attention",
    "creation",
    "decompose",
    "decomposition",
    "indexing",
    "linear",
    "losses",
    "normalization",
    "pointwise",
    "pooling",
    "reductions",
    "rule_for",
    "softmax",
    "views",
]
