"""Comparing with eager: what a call gives, and that a compiled call gives the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def fresh(tree: Any) -> Any:
    """A copy of all tensors: what shares memory still does, strides and bits are kept."""
    storages: dict[int, Any] = {}
    copies: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = copy_of(value, storages).requires_grad_(value.requires_grad)
        return copies[id(value)]

    return pytree.tree_map(copy, tree)


def copy_of(value: Tensor, storages: dict[int, Any]) -> Tensor:
    value = value.detach()
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return value.clone()
    memory = value.untyped_storage()
    if memory._cdata not in storages:
        storages[memory._cdata] = memory.clone()
    place = value.storage_offset(), value.size(), value.stride()
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    new = empty.set_(storages[memory._cdata], *place)
    new = torch._conj(new) if value.is_conj() else new
    return torch._neg_view(new) if value.is_neg() else new


def in_double(values: Sequence[Any]) -> list[Any]:
    """Return detached float64 copies of floating-point tensors, requiring grad as before; others as is."""
    return [
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in values
    ]


def strides_of(value: Tensor) -> list[int]:
    """A tensor's strides, but of dimensions that lead to no other element."""
    sizes = zip(value.shape, value.stride(), strict=True)
    return [step if size > 1 and value.numel() else 0 for size, step in sizes]


def alias_pattern(values: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Which tensors are the same object, which share memory, and where they start in it, in bytes."""
    objects: dict[int, int] = {}
    starts: dict[int, tuple[int, int]] = {}
    pattern = []
    for i, x in enumerate(values):
        shared = None
        if x.layout is torch.strided and x.numel():
            place = x.storage_offset() * x.element_size()
            first, start = starts.setdefault(x.untyped_storage()._cdata, (i, place))
            shared = first, place - start
        pattern.append((objects.setdefault(id(x), i), shared))
    return pattern


@dataclass
class Answer:
    """What a call gives: results, arguments and buffers afterwards, gradients; or an exception."""

    results: Any = None
    written: list[Tensor] = field(default_factory=list)
    memory: list[tuple[Any, ...]] = field(default_factory=list)
    """How arguments and results share it."""
    gradients: list[Tensor | None] = field(default_factory=list)
    drawn: Tensor | None = None
    """The random number that comes next."""
    raised: Exception | None = None


def cotangent(value: Tensor) -> Tensor:
    """Numbers of both signs, the same ones each time, that every dtype has."""
    numbers = (torch.arange(value.numel(), device=value.device) % 7 - 3.5) / 4
    numbers = numbers * (1 + 0.5j) if value.is_complex() else numbers
    return numbers.view(value.shape).to(value.dtype)


def answer(
    fn: Callable[..., Any],
    args: Sequence[Any],
    module: nn.Module | None = None,
    outputs_of: Callable[[Any], Any] = lambda results: results,
) -> Answer:
    """Call with copies of the arguments, and differentiate the results by every leaf.

    The module's parameters are leaves as well; its buffers are put back.
    """
    args, parameters = fresh(list(args)), [*module.parameters()] if module else []
    state = {name: value.clone() for name, value in module.state_dict().items()} if module else {}
    answered = Answer(written=tensors(args))
    torch.manual_seed(0)
    try:
        answered.results = fn(*args)
        answered.memory = alias_pattern([*answered.written, *tensors(answered.results)])
        leaves = [x for x in (*answered.written, *parameters) if x.requires_grad and x.is_leaf]
        outputs = [y for y in tensors(outputs_of(answered.results)) if y.requires_grad]
        if leaves and outputs:
            down = [cotangent(y) for y in outputs]
            grads = torch.autograd.grad(outputs, leaves, down, allow_unused=True)
            answered.gradients = list(grads)
    except Exception as error:
        answered.raised = error
    answered.drawn = torch.rand(1)
    if module:
        answered.written += [buffer.clone() for buffer in module.buffers()]
        module.load_state_dict(state)
    return answered


def equal(left: Any, right: Any) -> bool:
    """Whether types, structure, plain values and the bits of tensors are the same, and how tensors lie."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        facts = ("dtype", "shape", "device", "requires_grad")
        same = all(getattr(left, fact) == getattr(right, fact) for fact in facts)
        return (
            same
            and strides_of(left) == strides_of(right)
            and torch.equal(left.detach().nan_to_num(), right.detach().nan_to_num())
        )
    if dataclasses.is_dataclass(left):
        return equal(vars(left), vars(right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    if type(left).__eq__ is object.__eq__ and hasattr(left, "__dict__"):
        return equal(vars(left), vars(right))
    return bool(left == right)


def assert_same(found: Any, expected: Any, strides: bool = True, **tolerance: float) -> None:
    """The same structure, types and numbers; tensors of the same dtype, and lying the same way in memory."""
    flat, structure = pytree.tree_flatten(found)
    wanted, expected_structure = pytree.tree_flatten(expected)
    assert structure == expected_structure
    for mine, eagers in zip(flat, wanted, strict=True):
        if not isinstance(eagers, Tensor):
            assert type(mine) is type(eagers)
            assert mine == eagers or (mine != mine and eagers != eagers)
            continue
        torch.testing.assert_close(mine, eagers, equal_nan=True, **tolerance)  # type: ignore[arg-type]
        assert mine.requires_grad == eagers.requires_grad
        if strides:
            assert strides_of(mine) == strides_of(eagers)


def assert_near(
    found: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor], roundings: float = 4
) -> None:
    """Check that the error is at most twice eager's, plus `roundings` times the largest number's rounding."""
    for mine, eagers, right in zip(found, eager, map(Tensor.double, exact), strict=True):
        assert (mine.dtype, strides_of(mine)) == (eagers.dtype, strides_of(eagers))
        bound = 2 * (eagers.double() - right).abs().max()
        bound += roundings * torch.finfo(mine.dtype).eps * right.abs().max()
        near = {"rtol": 0.0, "atol": float(bound.nan_to_num())}
        torch.testing.assert_close(mine.double(), right, equal_nan=True, **near)


def assert_answer(
    found: Answer, expected: Answer, gradient_strides: bool = False, **tolerance: float
) -> None:
    assert_same(found.results, expected.results, **tolerance)
    assert_same(found.written, expected.written, **tolerance)
    assert found.memory == expected.memory
    assert_same(found.gradients, expected.gradients, gradient_strides, **tolerance)
    assert found.drawn == expected.drawn


def assert_as_eager(
    call: Callable[..., Any],
    fn: Callable[..., Any],
    *args: Any,
    module: nn.Module | None = None,
    gradient_strides: bool = False,
    **tolerance: float,
) -> None:
    """A compiled call gives eager's results, writes, aliases, gradients and types of exceptions, and draws as
    many random numbers.

    `rtol=0, atol=0` asks for equal bits.
    """
    expected, found = answer(fn, args, module), answer(call, args, module)
    if found.raised is not None and expected.raised is None:
        raise found.raised
    if expected.raised is not None:
        assert isinstance(found.raised, type(expected.raised))
        return
    assert_answer(found, expected, gradient_strides, **tolerance)


def assert_scenario(
    scenario: Callable[[Callable[..., Any]], Any],
    compile: Callable[..., Any],
    strides: bool = False,
    **tolerance: float,
) -> None:
    """Check that `scenario(compile)` returns what it returns when `compile` leaves a function as it is."""
    found = []
    for compile_with in (compile, lambda function: function):
        torch.manual_seed(0)
        found.append(scenario(compile_with))
    assert_same(*found, strides=strides, **tolerance)
