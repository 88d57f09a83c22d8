"""Functions that torch calls later or with other tensors: each becomes a node of the graph (called.py),
which runs a graph of its own (subgraph.py).

    autograd_functions   `Fn.apply(...)` of a torch.autograd.Function
    mapped_functions     `torch.vmap(f)(...)`
    checkpointed         `torch.utils.checkpoint.checkpoint(f, ...)`
    transforms           `torch.func.grad(f)(...)`, `jvp`, `jacrev`, `hessian`, ..., `functional_call`

Without this plug-in the graph ends at such a call.
"""

from minicompile.ops.plugins import Plugin

PLUGIN = Plugin(
    "function_graphs",
    "Captures torch.autograd.Function, torch.func and checkpoints, at whose calls the graph would end.",
    tuple(
        f"{__name__}.{module}"
        for module in ("autograd_functions", "mapped_functions", "checkpointed", "transforms")
    ),
    cases=(
        "swiglu_function, large, training",
        "mapped_norm, large, training",
        "checkpointed_gelu, large, training",
    ),
)
