"""Built-in decompositions, one module per family, imported when the first rule is looked up."""

from minicompile.aot.decompositions.registry import decompose, decomposition, rule_for

__all__ = ["decompose", "decomposition", "rule_for"]

FAMILIES = (
    "activations creation from_torch indexing losses normalization pointwise reductions views"
)
decomposition.modules += [f"{__name__}.{family}" for family in FAMILIES.split()]
