"""`checkpoint(f, ...)`: f as a graph inside the graph, which the backward runs again.

The real compiler: torch/_dynamo/variables/higher_order_ops.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import checkpoint

from minicompile import compat
from minicompile.dynamo.variables import is_constant
from minicompile.dynamo.world import World, call_rules
from minicompile.plugins.function_graphs.called import Called, without_effects
from minicompile.plugins.function_graphs.subgraph import subgraph


class Checkpointed(Called):
    """A function whose intermediate values are computed again in the backward.

    A compiler that traces it gets the plain function, and recomputes what it made there.
    """

    options: dict[str, Any]
    recomputed = True

    def __call__(self, closure: tuple[torch.Tensor, ...]) -> Any:
        tensors = [closure[i] for i in self.feeds]
        if any(isinstance(tensor, compat.FakeTensor) for tensor in tensors):
            return self.graph.function(*tensors)
        return checkpoint.checkpoint(
            self.graph.function, *tensors, use_reentrant=False, **self.options
        )


OPTIONS = ("preserve_rng_state", "determinism_check", "debug", "early_stop")


@call_rules(checkpoint.checkpoint)
def capture_checkpointed(world: World, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function, *given = args
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    if kwargs.pop("use_reentrant", None) is not False or "context_fn" in kwargs:
        what = "activation checkpointing that is reentrant, or has a context_fn"
        world.unsupported("checkpoint", what, "pass use_reentrant=False, and no context_fn")
    if not torch.is_grad_enabled():
        return world.call(function, tuple(given), kwargs)
    with subgraph(world) as inner, without_effects(world, "a checkpointed function"):
        found = world.deep(world.call(function, tuple(given), kwargs))
        leaves, structure = compat.tree_flatten(found)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if not all(i in places or is_constant(leaf) for i, leaf in enumerate(leaves)):
            what = "a checkpointed function gives something other than tensors"
            world.unsupported("checkpoint", what)
        graph = inner.completed([inner.lift(leaves[i]) for i in places], "checkpointed")
    name = getattr(function, "__qualname__", type(function).__name__)
    made = Checkpointed(f"checkpoint.{name.rpartition('.')[2]}", inner, graph, [])
    made.options = options
    values = world.recorder.record("call_function", made, (tuple(made.closure),), {})
    for i, value in zip(places, values):
        leaves[i] = value
    return compat.tree_unflatten(leaves, structure)
