"""`torch.vmap(f)(...)`: f as a graph over one example, which a node of the graph maps over all of them.

The real compiler: torch/_dynamo/variables/higher_order_ops.py.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from minicompile import compat
from minicompile.dynamo.builtins import means
from minicompile.dynamo.world import World
from minicompile.plugins.function_graphs.called import Called, without_effects
from minicompile.plugins.function_graphs.subgraph import subgraph


class MappedFunction(Called):
    """A function of one example, run for all of them at once."""

    in_dims: tuple[int | None, ...]
    """Of what the function took from around itself and was given: where the examples are numbered."""
    out_dims: tuple[int, ...]
    randomness: str

    def __call__(self, closure: tuple[torch.Tensor, ...], *given: torch.Tensor) -> Any:
        tensors = (*closure, *given)

        def one(*examples: torch.Tensor) -> Any:
            return self.graph.function(*(examples[i] for i in self.feeds))

        in_dims: Any = self.in_dims
        return torch.vmap(one, in_dims, self.out_dims, self.randomness)(*tensors)


@means(torch.vmap)
def vmap(
    world: World,
    function: Any,
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
) -> Any:
    return functools.partial(run_mapped, function, in_dims, out_dims, randomness)


def run_mapped(function: Any, in_dims: Any, out_dims: Any, randomness: str, *args: Any) -> Any:
    return torch.vmap(function, in_dims, out_dims, randomness)(*args)


def example_of(leaf: torch.Tensor, dim: int, mode: Any) -> torch.Tensor:
    """A tensor without the dimension that numbers the examples, of which there may be none."""
    shape, strides = list(leaf.shape), list(leaf.stride())
    del shape[dim], strides[dim]
    with mode:
        return leaf.new_empty_strided(shape, strides).requires_grad_(leaf.requires_grad)


@means(run_mapped)
def capture_mapped(
    world: World, function: Any, in_dims: Any, out_dims: Any, randomness: str, *args: Any
) -> Any:
    recorder, name = world.recorder, getattr(function, "__qualname__", "function")
    in_dims, out_dims = world.deep(in_dims), world.deep(out_dims)
    leaves, structure = compat.tree_flatten(tuple(map(world.deep, args)))
    dims = compat.tree_spread(in_dims, structure)
    mapped = [(leaf, dim) for leaf, dim in zip(leaves, dims or ()) if dim is not None]
    if not mapped or not all(isinstance(leaf, torch.Tensor) for leaf, _ in mapped):
        world.unsupported("function-transform", "torch.vmap over something other than tensors")
    with subgraph(world) as inner, without_effects(world, f"{name}, under torch.vmap,"):
        examples = [example_of(leaf, dim, recorder.mode) for leaf, dim in mapped]
        for example in examples:
            inner.argument(example, "example")
        rest = iter(
            examples
        )  # an argument that is not mapped is like a tensor from around the function
        arguments = [leaf if dim is None else next(rest) for leaf, dim in zip(leaves, dims)]
        found = world.call(function, compat.tree_unflatten(arguments, structure), {})
        found = world.deep(found)
        results, outer_structure = compat.tree_flatten(found)
        result_dims = compat.tree_spread(out_dims, outer_structure)
        if not all(isinstance(r, torch.Tensor) for r in results) or result_dims is None:
            what = f"{name}, under torch.vmap, gives something other than tensors"
            world.unsupported("function-transform", what)
        graph = inner.completed(map(inner.lift, results), "mapped")
    made = MappedFunction(f"torch.vmap.{name.rpartition('.')[2]}", inner, graph, examples)
    made.in_dims = (*(None for _ in made.closure), *(dim for _, dim in mapped))
    made.out_dims, made.randomness = tuple(result_dims), randomness
    values = recorder.record(
        "call_function", made, (tuple(made.closure), *(leaf for leaf, _ in mapped)), {}
    )
    return compat.tree_unflatten(list(values), outer_structure)
