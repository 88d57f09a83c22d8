"""Calls of `cond`, `while_loop`, `scan` and `map` during capture: each becomes one node.

Their functions are captured as graphs inside the graph. As torch does, we refuse functions that write to
tensors from outside, return what shares memory with these, or give another kind of tensor than they must;
torch's own call then raises its error, after a graph break.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from minicompile import compat
from minicompile.dynamo.builtins import means
from minicompile.dynamo.world import World
from minicompile.plugins.control_flow.operators import Body, Branch, ControlFlow, Loop, Scan
from minicompile.plugins.function_graphs.called import without_effects
from minicompile.plugins.function_graphs.mapped_functions import example_of
from minicompile.plugins.function_graphs.subgraph import subgraph

COND, WHILE, SCAN, _, MAP = compat.CONTROL_FLOW


class Captured:
    """A function's graph: what it was called with and took from around itself, and what it gave."""

    def __init__(
        self,
        world: World,
        what: str,
        function: Any,
        args: Sequence[Any],
        examples: Sequence[Tensor] = (),
    ) -> None:
        """`examples`: fakes that stand for other tensors in `args`."""
        self.world, self.what = world, what
        before = objects_of_frame(world, [function, *args])
        with subgraph(world) as self.inner, without_effects(world, f"a function under {what}"):
            for example in examples:
                self.inner.argument(example, "x")
            found = world.deep(world.call(function, tuple(args), {}))
            self.leaves, self.structure = compat.tree_flatten(found)
            tensors = all(isinstance(leaf, Tensor) for leaf in self.leaves)
            if not tensors or not self.leaves:
                refuse(world, what, "gives something other than tensors")
            self.graph = self.inner.completed(map(self.inner.lift, self.leaves), what)
        if any(list(map(id, parts)) != list(map(id, parts_of(x))) for x, parts in before):
            refuse(world, what, "changes an object that the frame made")
        memory = [compat.storage_id(x) for x in self.leaves]
        outside = map(compat.storage_id, (*self.inner.values, *examples))
        if len(set(memory)) < len(memory) or not set(memory).isdisjoint(outside):
            refuse(
                world, what, "returns a tensor of the frame, a view of it, or the same one twice"
            )

    def body(self, operands: Sequence[Tensor]) -> Body:
        feeds = [
            next(i for i, x in enumerate(operands) if x is node.meta["val"])
            for node in self.inner.placeholders
        ]
        return Body(self.graph, feeds)

    def must_be_like(self, other: Sequence[Any], structure: Any) -> None:
        """Refuse results of another kind."""
        alike = self.structure == structure and all(map(same_kind, self.leaves, other))
        if not alike:
            refuse(self.world, self.what, "gives other shapes, types or containers than it must")


def refuse(world: World, what: str, why: str) -> None:
    world.unsupported("control-flow", f"a function under {what} {why}")


def objects_of_frame(world: World, values: list[Any]) -> list[tuple[Any, list[Any]]]:
    """The objects that the frame made and that these values lead to, each with the parts it has now."""
    found: dict[int, tuple[Any, list[Any]]] = {}
    while values:
        value = values.pop()
        if id(value) not in found and world.tracker(value) is None:
            found[id(value)] = value, parts_of(value)
            values = [*values, *parts_of(value)]
    return list(found.values())


def parts_of(value: Any) -> list[Any]:
    """What an object holds that Python code may replace."""
    match value:
        case types.FunctionType():
            cells = list(value.__closure__ or ())
            return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        case types.CellType():
            return [value.cell_contents] if value != types.CellType() else []
        case dict():
            return [*value, *value.values()]
        case list() | tuple() | set() | collections.deque():
            return list(value)
        case functools.partial():
            return [value.func, *value.args, *value.keywords.values()]
        case types.MethodType():
            return [value.__func__, value.__self__]
        case (
            Tensor()
            | torch.SymInt()
            | torch.SymFloat()
            | torch.SymBool()
            | type()
            | types.ModuleType()
        ):
            return []
    return list(getattr(value, "__dict__", {}).values())


def same_kind(one: Tensor, other: Tensor) -> bool:
    """Are two tensors alike but for their elements and strides?"""
    return (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)


def taken(*functions: Captured) -> list[Tensor]:
    """What functions took from around themselves, each tensor once."""
    return [*{id(x): x for function in functions for x in function.inner.values}.values()]


def record(world: World, operator: ControlFlow, args: Iterable[Tensor], structure: Any) -> Any:
    """Add the node."""
    values = world.recorder.record("call_function", operator, tuple(args), {})
    return compat.tree_unflatten(list(values), structure)


@means(COND)
def cond(world: World, pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    """A Python condition, also one about sizes, chooses now; a guard sees when it would choose otherwise."""
    operands = world.items(operands)
    if not isinstance(pred, Tensor):
        return world.call(true_fn if world.truth(pred) else false_fn, tuple(operands), {})
    if pred.numel() != 1:
        refuse(world, "torch.cond", "has a condition of several elements")
    if_true = Captured(world, "cond", true_fn, operands)
    if_false = Captured(world, "cond", false_fn, operands)
    if_false.must_be_like(if_true.leaves, if_true.structure)
    args = taken(if_true, if_false)
    parts = {"true": if_true.body(args), "false": if_false.body(args)}
    operator = Branch("cond", parts, if_true.leaves)
    return record(world, operator, (pred, *args), if_true.structure)


def examples_of(world: World, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Fakes that stand for the tensors of one step of a loop."""
    with world.recorder.mode:
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).requires_grad_(
                x.requires_grad
            )
            for x in tensors
        ]


def flat(world: World, what: str, value: Any) -> tuple[list[Tensor], Any]:
    """The tensors in a container, and the container's structure."""
    leaves, structure = compat.tree_flatten(world.deep(value))
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        world.unsupported("control-flow", f"{what} is called with something other than tensors")
    return leaves, structure


@means(WHILE)
def while_loop(world: World, cond_fn: Any, body_fn: Any, carried_inputs: Any) -> Any:
    carry, structure = flat(world, "while_loop", carried_inputs)
    examples = examples_of(world, carry)
    args = compat.tree_unflatten(examples, structure)
    test = Captured(world, "while_loop", cond_fn, args, examples)
    if len(test.leaves) != 1 or test.leaves[0].numel() != 1:
        refuse(world, "while_loop", "gives no single condition")
    step = Captured(world, "while_loop", body_fn, args, examples)
    step.must_be_like(carry, structure)
    closure = taken(test, step)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*carry, *closure)):
        what = "while_loop with gradients, whose backward would need the values of every turn"
        world.unsupported("control-flow", what, "use scan, or call it under torch.no_grad()")
    parts = {"test": test.body([*examples, *closure]), "step": step.body([*examples, *closure])}
    return record(world, Loop("while_loop", parts, carry), (*carry, *closure), structure)


@means(SCAN)
def scan(
    world: World, combine_fn: Any, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False
) -> Any:
    carry, structure = flat(world, "scan", init)
    rows, row_structure = flat(world, "scan", xs)
    dim = world.pinned(dim) % rows[0].dim()
    rows = [world.torch_call(torch.movedim, (x, dim, 0), {}) if dim else x for x in rows]
    carried, given = over_rows(
        world, "scan", combine_fn, carry, structure, rows, row_structure, reverse, ()
    )
    leaves, outer = compat.tree_flatten(given)
    if dim:
        leaves = [
            world.torch_call(torch.movedim, (y, 0, dim), {}) if dim < y.dim() else y for y in leaves
        ]
    return carried, compat.tree_unflatten(leaves, outer)


@means(MAP)
def map_rows(world: World, f: Any, xs: Any, *args: Any) -> Any:
    rows, structure = flat(world, "map", xs)
    _, none = compat.tree_flatten(())
    return over_rows(world, "map", f, [], none, rows, structure, False, args)


def over_rows(
    world: World,
    name: str,
    function: Any,
    carry: list[Tensor],
    structure: Any,
    rows: list[Tensor],
    row_structure: Any,
    reverse: bool,
    args: Sequence[Any],
) -> Any:
    """A Scan; without a carry the function gets rows, then `args`."""
    length = rows[0].shape[0]
    if length == 0 or any(x.shape[0] != length for x in rows):
        world.unsupported("control-flow", f"{name} over no rows, or over different numbers of them")
    count, mode = len(carry), world.recorder.mode
    examples = examples_of(world, carry)
    examples += [example_of(x, 0, mode) for x in rows]
    row = compat.tree_unflatten(examples[count:], row_structure)
    first = [compat.tree_unflatten(examples[:count], structure)] if carry else []
    step = Captured(world, name, function, [*first, row, *args], examples)
    ys, y_structure = step.leaves[count:], step.structure
    if carry:
        given = compat.tree_unflatten(step.leaves, step.structure)
        if not isinstance(given, tuple) or len(given) != 2:
            refuse(world, name, "does not give a pair: the next carry and a row of results")
        leaves, carried = compat.tree_flatten(given[0])
        y_structure = compat.tree_flatten(given[1])[1]
        step.leaves, step.structure = leaves, carried
        step.must_be_like(carry, structure)
    closure = taken(step)
    with mode:
        stacked = [torch.empty((length, *y.shape), dtype=y.dtype, device=y.device) for y in ys]
    body = step.body([*examples, *closure])
    operator = Scan(name, body, [*carry, *stacked], count, len(rows), world.truth(reverse))
    values = world.recorder.record("call_function", operator, (*carry, *rows, *closure), {})
    found = compat.tree_unflatten(list(values[count:]), y_structure)
    return (compat.tree_unflatten(list(values[:count]), structure), found) if carry else found
