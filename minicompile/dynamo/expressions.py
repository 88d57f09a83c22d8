"""What Python's expressions mean: truth, operators, comparisons and text.

A tensor operand makes a graph node; symbolic numbers become formulas; classes that define an operator in
Python have it interpreted; everything else is Python's own.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from minicompile.dynamo.containers import python_method
from minicompile.dynamo.interpreter import (
    BINARY,
    COMPARE,
    METHOD_OF,
    UNARY,
)
from minicompile.dynamo.variables import (
    IDENTITY_TYPES,
    MISSING,
    OBJECT_EQ,
    builtin_base,
    find,
    is_constant,
    is_numpy_scalar,
    raw_base,
    raw_items,
)
from minicompile.dynamo.world import World, operation
from minicompile.shapes.symnode import SYMBOLIC

NUMBERS = (int, float, *SYMBOLIC)

REFLECTED = {"<": ">", "<=": ">=", "==": "==", "!=": "!=", ">": "<", ">=": "<="}


@operation
def truth(world: World, value: Any) -> bool:
    if value is True or value is False or value is None:
        return bool(value)
    if isinstance(value, torch.Tensor):
        world.unsupported("branch-on-tensor", "Python branches on a tensor's data")
    if isinstance(value, torch.SymFloat):
        return bool(world.computed("bool({0})", value, function=bool))
    if is_constant(value) or isinstance(value, type | types.FunctionType | types.ModuleType):
        return bool(value)
    if (found := world.call_special(value, "__bool__")) is not NotImplemented:
        return bool(found)
    if builtin_base(value) is not None or python_method(value, "__len__") is not None:
        return bool(world.length(value))
    cls = type(value)
    always_true = not hasattr(cls, "__bool__") and not hasattr(cls, "__len__")
    if world.tracker(value) is not None and not always_true:
        world.unsupported_kind("outside-object", "the truth of a {} from outside", value)
    return bool(value)


# -- operators


@operation
def binary(world: World, symbol: str, left: Any, right: Any) -> Any:
    if type(left) in (int, float, str) and type(right) in (int, float, str) and symbol != "%":
        return BINARY[symbol](left, right)
    plain = symbol.removesuffix("=")
    tensors = [isinstance(value, torch.Tensor) for value in (left, right)]
    if any(tensors) and not has_operators(right if tensors[0] else left):
        function = BINARY[symbol if tensors[0] else plain]
        return world.torch_call(function, (left, right), {})
    if isinstance(left, SYMBOLIC) or isinstance(right, SYMBOLIC):
        if isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
            return number_operator(world, plain, left, right)
        left, right = world.pinned(left), world.pinned(right)
    name = METHOD_OF[plain]
    if symbol != plain:
        found = world.call_special(left, f"__i{name}__", right)
        if found is NotImplemented:
            found = world.in_place(symbol, left, right)
        if found is not NotImplemented:
            return found
    found = python_operator(world, f"__{name}__", f"__r{name}__", left, right)
    if found is not NotImplemented:
        return found
    if plain == "%" and isinstance(left, str):
        right = world.as_text(right)
    return BINARY[symbol](world.operand(left), world.operand(right))


def has_operators(value: Any) -> bool:
    """Whether an operand besides a tensor may have an operator of its own."""
    simple = isinstance(value, (torch.Tensor, complex, *NUMBERS)) or is_numpy_scalar(value)
    return not simple and find(type(value), "__torch_function__") is MISSING


@operation
def in_place(world: World, symbol: str, left: Any, right: Any) -> Any:
    """`left += right` and its like, as C code defines them for containers that can change."""
    base, name = raw_base(left), f"__i{METHOD_OF[symbol.removesuffix('=')]}__"
    if (base not in (list, set) and not isinstance(left, dict)) or not hasattr(base, name):
        return NotImplemented
    if isinstance(left, dict):
        world.fill_dict(left, right)
    elif symbol == "+=":
        world.extend(left, world.items(right))
    else:
        found = getattr(base, name)(world.mutable(left), world.operand(right))
        return NotImplemented if found is NotImplemented else left
    return left


def number_operator(world: World, symbol: str, left: Any, right: Any) -> Any:
    """An operator one of whose operands is symbolic: algebra on ints, else Python's before the graph."""
    operands, function = (left, right), {**BINARY, **COMPARE}[symbol]
    if all(isinstance(value, int | torch.SymInt) for value in operands):
        if symbol in ("+", "-", "*") or symbol in COMPARE:
            return function(left, right)
        if symbol in ("//", "%") and right > 0:
            return function(left, right)
    return world.computed(f"({{0}} {symbol} {{1}})", left, right, function=function)


@operation
def operand(world: World, value: Any) -> Any:
    """A value for a native operator: no outside object may take part in it unread."""
    if isinstance(value, dict):
        world.check_overrides(value)
    inside = world.imported(value)
    fixed = isinstance(value, (*IDENTITY_TYPES, torch.Tensor))
    if inside is value and world.tracker(value) is not None and not fixed:
        world.unsupported_kind("outside-object", "an operator on a {} from outside", value)
    return inside


def python_operator(world: World, name: str, reflected: str, left: Any, right: Any) -> Any:
    """The operator as a class defines it in Python; NotImplemented if none does."""
    order = [(left, name, right), (right, reflected, left)]
    if type(left) is type(right):
        order.pop()
    elif isinstance(right, type(left)) and python_method(right, reflected) is not None:
        order.reverse()
    for value, method, other in order:
        if (found := world.call_special(value, method, other)) is not NotImplemented:
            return found
    return NotImplemented


@operation
def compare(world: World, symbol: str, left: Any, right: Any) -> Any:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return world.torch_call(COMPARE[symbol], (left, right), {})
    if isinstance(left, SYMBOLIC) or isinstance(right, SYMBOLIC):
        if isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
            return bool(number_operator(world, symbol, left, right))
        left, right = world.pinned(left), world.pinned(right)
    if is_constant(left) and is_constant(right):
        return COMPARE[symbol](left, right)
    name, reflected = f"__{METHOD_OF[symbol]}__", f"__{METHOD_OF[REFLECTED[symbol]]}__"
    found = python_operator(world, name, reflected, left, right)
    if found is not NotImplemented:
        return found
    base = builtin_base(left)
    if base in (list, tuple, dict) and base is builtin_base(right):
        items = [*raw_items(world.inside(left)), *raw_items(world.inside(right))]
        if not all(map(is_constant, items)):
            what = "containers of more than constants are compared"
            world.unsupported("own-equality", what)
    if symbol in ("==", "!="):
        if symbol == "!=" and (python_method(left, "__eq__") or python_method(right, "__eq__")):
            return not world.truth(world.compare("==", left, right))
        for value in (left, right):
            if world.tracker(value) is not None and type(value).__eq__ is OBJECT_EQ:
                return world.same(left, right) == (symbol == "==")
    return COMPARE[symbol](world.operand(world.deep(left)), world.operand(world.deep(right)))


@operation
def unary(world: World, symbol: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return world.torch_call(UNARY[symbol], (value,), {})
    if isinstance(value, torch.SymInt) and symbol != "~":
        return UNARY[symbol](value)
    if isinstance(value, SYMBOLIC):
        return world.computed(f"({symbol}{{0}})", value, function=UNARY[symbol])
    found = world.call_special(value, f"__{UNARY[symbol].__name__}__")
    if found is not NotImplemented:
        return found
    return UNARY[symbol](world.operand(value))


# -- text


@operation
def convert(world: World, kind: int, value: Any) -> str:
    """`str`, `repr` or `ascii` of a value: 1, 2 or 3."""
    return (str, repr, ascii)[kind - 1](world.as_text(value))


@operation
def formatted(world: World, value: Any, spec: str = "") -> str:
    return format(world.as_text(value), spec)


@operation
def as_text(world: World, value: Any) -> Any:
    """A value to be turned into text: a constant, whose symbolic numbers become plain ones, a class, or an
    exception made in the frame. Refuses what may print otherwise at run time, or runs code to do so."""
    if isinstance(value, torch.Tensor):
        world.unsupported("tensor-as-text", "a tensor is turned into text")
    shown_by_c = not python_method(value, "__str__") and not python_method(value, "__repr__")
    if isinstance(value, BaseException) and shown_by_c and world.tracker(value) is None:
        world.as_text(value.args)
        return value
    if is_constant(value) or isinstance(value, type | types.ModuleType):
        return world.pinned(value)
    return world.unsupported_kind("object-as-text", "a {} is turned into text", value)
