"""Built-in decompositions, one module per family. Importing this package registers them."""

from minicompile.aot.decompositions import (  # noqa: F401
    activations,
    creation,
    indexing,
    linear,
    losses,
    normalization,
    pointwise,
    pooling,
    reductions,
    views,
)
from minicompile.aot.decompositions.registry import decompose, decomposition, rule_for

__all__ = ["decompose", "decomposition", "rule_for"]
