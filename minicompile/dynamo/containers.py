"""Subscripts, iteration, `in`, truth and operators on tensors, on objects that the frame was given (outside)
and that it made (inside).

A tensor operand makes a graph node; an outside container is read through an inside copy of it (which guards
what was read); classes that define the operation in Python have it interpreted; everything else is Python's
own.
"""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from minicompile.dynamo.interpreter import (
    BINARY,
    COMPARE,
    METHOD_OF,
    UNARY,
    TracedGenerator,
)
from minicompile.dynamo.result import Source
from minicompile.dynamo.variables import (
    FACTORY,
    IDENTITY_TYPES,
    MISSING,
    OBJECT_EQ,
    builtin_base,
    find,
    is_constant,
    raw_base,
    raw_items,
    refilled,
    words,
)
from minicompile.dynamo.world import Meaning, World, operation
from minicompile.shapes.symnode import SYMBOLIC

NO_OPERANDS = (list, tuple, str, dict)
"""Never operands of a tensor operator."""

NUMBERS = (int, float, *SYMBOLIC)

OVERRIDES = words("__iter__ __getitem__ __setitem__ __delitem__ __contains__ __init__ __new__ keys")
"""Methods that C code calls on subclasses of dict."""
DICT_ITER = dict.__dict__["__iter__"]

LARGEST_POWER = 4
"""Of a size, as an expression; others are computed by Python."""

REFLECTED = {"<": ">", "<=": ">=", "==": "==", "!=": "!=", ">": "<", ">=": "<="}


def python_method(value: Any, name: str) -> types.FunctionType | None:
    """The method that a value's class defines in Python."""
    if isinstance(value, (torch.Tensor, TracedGenerator, *SYMBOLIC)):
        return None
    found = find(type(value), name)
    return found if isinstance(found, types.FunctionType) else None


def unless_defined(name: str) -> Callable[[Meaning], Meaning]:
    """The operation is the method `name` where a value's class defines it in Python."""

    def decorate(operation: Meaning) -> Meaning:
        @functools.wraps(operation)
        def run(world: World, value: Any, *args: Any) -> Any:
            if python_method(value, name) is None:
                return operation(world, value, *args)
            return world.call_special(value, name, *args)

        return cast(Meaning, run)

    return decorate


@operation
def call_special(world: World, value: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method that a value's class defines in Python; NotImplemented if it defines none."""
    if python_method(value, name) is None:
        return NotImplemented
    return world.call(world.special(value, name), args, kwargs)


# -- copies for native code


@operation
def deep(world: World, value: Any) -> Any:
    """A value for native code to read: outside containers become inside copies, all the way down."""
    plain = isinstance(value, torch.Tensor) or is_constant(value)
    if plain or builtin_base(value) is None:
        return value
    inside = world.imported(value)
    if isinstance(inside, set | frozenset):
        return inside
    before = raw_items(inside)
    items = list(map(world.deep, before))
    return inside if all(map(operator.is_, items, before)) else refilled(inside, items)


@operation
def check_overrides(world: World, value: Any) -> None:
    """C code runs methods of OrderedDict and defaultdict that a subclass defines in Python."""
    if any(python_method(value, name) is not None for name in OVERRIDES):
        what = "C code would run methods that {} defines"
        world.unsupported_kind("outside-object", what, value)


# -- subscripts


@operation
@unless_defined("__getitem__")
def subscript(world: World, value: Any, key: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return world.torch_call(operator.getitem, selected(world, value, world.deep(key)), {})
    if isinstance(value, dict):
        return dict_item(world, value, key)
    if not isinstance(key, int) and python_method(key, "__index__") is not None:
        key = world.call_special(key, "__index__")
    if isinstance(key, torch.Tensor):
        world.unsupported("tensor-as-index", "a tensor indexes a Python container")
    if world.tracker(value) is None:
        if python_method(value, "__getitem__") is None:
            return value[key]
        return raw_base(value).__getitem__(value, key)  # that method asks for it
    if isinstance(value, list | tuple):
        return sequence_item(world, value, key)
    if isinstance(value, type):
        return value[key]  # type: ignore[index]
    return world.unsupported_kind("outside-object", "a {} from outside is subscripted", value)


def selected(world: World, tensor: Any, key: Any) -> tuple[Any, Any]:
    """A tensor and a key for `tensor[key]`: by `select` for symbolic ints, which torch would fix."""
    parts = list(key) if type(key) is tuple else [key]
    kinds = list(map(type, parts))
    if torch.SymInt not in kinds or {*kinds} - {int, slice, torch.SymInt, types.EllipsisType}:
        return tensor, key
    if types.EllipsisType in kinds:
        place = kinds.index(types.EllipsisType)
        parts[place : place + 1] = [slice(None)] * (tensor.dim() - len(parts) + 1)
    for dim in reversed(range(len(parts))):
        if type(parts[dim]) is torch.SymInt:
            tensor = world.torch_call(torch.Tensor.select, (tensor, dim, parts.pop(dim)), {})
    return tensor, tuple(parts) or ...


def sequence_item(world: World, value: Any, key: Any) -> Any:
    tracker = world.tracker(value)
    assert tracker is not None
    base: Any = list if isinstance(value, list) else tuple
    if tracker.contents is not None or tracker.appended or isinstance(key, slice):
        return base.__getitem__(world.inside(value), key)
    size = base.__len__(value)
    world.guard("length", tracker.source, size, "an item is read by position")
    found = base.__getitem__(value, key)  # may raise IndexError
    return world.wrap(found, Source("item", range(size)[key], tracker.source))


def dict_item(world: World, value: Any, key: Any) -> Any:
    """`dict.__getitem__`, with `__missing__` and default factories."""
    found = world.dict_get(value, key)
    if found is not MISSING:
        return found
    if python_method(value, "__missing__") is not None:
        return world.call(world.special(value, "__missing__"), (key,), {})
    if isinstance(value, collections.defaultdict):
        return default_item(world, value, key)
    raise KeyError(key)


def default_item(world: World, value: collections.defaultdict[Any, Any], key: Any) -> Any:
    """Make and store a missing item as `defaultdict.__missing__` does."""
    factory = world.below(value, "slot", "default_factory", FACTORY.__get__(value))
    if factory is None:
        raise KeyError(key)
    made = world.call(factory, (), {})
    world.store_subscript(value, key, made)
    return made


@operation
@unless_defined("__setitem__")
def store_subscript(world: World, value: Any, key: Any, new: Any) -> None:
    if isinstance(value, torch.Tensor):
        place = selected(world, value, world.deep(key))
        world.torch_call(operator.setitem, (*place, world.deep(new)), {})
    elif isinstance(value, dict):
        world.dict_set(value, key, new)
    elif isinstance(value, list):
        items = world.items(new) if isinstance(key, slice) else new
        list.__setitem__(world.mutable(value), key, items)
    elif world.tracker(value) is None:
        value[key] = new
    else:
        world.unsupported_kind("outside-change", "an item of a {} from outside is set", value)


@operation
@unless_defined("__delitem__")
def delete_subscript(world: World, value: Any, key: Any) -> None:
    if isinstance(value, list):
        list.__delitem__(world.mutable(value), world.pinned(key))
    elif isinstance(value, dict):
        world.dict_delete(value, key)
    elif world.tracker(value) is None:
        operator.delitem(value, world.pinned(key))
    else:
        world.unsupported_kind("outside-change", "an item of a {} is deleted", value)


# -- iteration


@operation
@unless_defined("__iter__")
def iterate(world: World, value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        return iter(world.torch_call(torch.Tensor.unbind, (value,), {}))
    base = raw_base(value)
    by_position = base is None and python_method(value, "__getitem__") is not None
    if by_position or (base is None and world.tracker(value) is not None):
        world.unsupported_kind("outside-object", "iteration over a {}", value)
    iterator: Iterator[Any] = iter(value) if base is None else base.__iter__(world.inside(value))
    world.note_native(iterator)
    return iterator


@operation
@unless_defined("__next__")
def advance(world: World, iterator: Any) -> Any:
    if world.tracker(iterator) is not None:
        world.unsupported("iterator-from-outside", "an iterator made outside is advanced")
    return next(iterator)


@operation
def items(world: World, value: Any) -> list[Any]:
    if type(value) in (list, tuple) and world.tracker(value) is None:
        return list(value)
    return list(world.lazily(value))


@operation
def lazily(world: World, value: Any) -> Iterator[Any]:
    """An iterator for native code whose steps the interpreter runs."""
    iterator = world.iterate(value)
    if world.tracker(iterator) is None and python_method(iterator, "__next__") is None:
        return iterator
    return world.steps(iterator)


@operation
def steps(world: World, iterator: Any) -> Iterator[Any]:
    while True:
        try:
            item = world.advance(iterator)
        except StopIteration:
            return
        yield item


@operation
def mapping(world: World, value: Any) -> dict[Any, Any]:
    if isinstance(value, dict) and find(type(value), "__iter__") is DICT_ITER:
        return dict(raw_items(world.inside(value)))  # as CPython: whatever else is overridden
    keys = world.items(world.call(world.load_attr(value, "keys"), (), {}))
    return {key: world.subscript(value, key) for key in keys}


# -- membership and truth


@operation
def contains(world: World, container: Any, item: Any) -> bool:
    found = world.call_special(container, "__contains__", item)
    return world.holds(container, item) if found is NotImplemented else world.truth(found)


@operation
def holds(world: World, container: Any, item: Any) -> bool:
    """`in` as C code defines it."""
    if isinstance(container, torch.Tensor):
        world.unsupported("branch-on-tensor", "`in` on a tensor needs its data")
    if isinstance(container, dict):
        return world.dict_get(container, item) is not MISSING
    if isinstance(container, list | tuple):
        return any(world.equal(other, item) for other in raw_items(world.inside(container)))
    if isinstance(container, set | frozenset):
        if world.tracker(container) is not None:
            world.check_key(item)
        inside, base = world.inside(container), raw_base(container)
        return bool(base.__contains__(inside, world.pinned(item)))
    by_python = any(python_method(container, name) for name in ("__iter__", "__getitem__"))
    if isinstance(container, TracedGenerator) or by_python:
        return any(world.equal(other, item) for other in world.lazily(container))
    if world.tracker(container) is None:
        return item in container
    return world.unsupported_kind("outside-object", "`in` on a {} from outside", container)


@operation
def equal(world: World, left: Any, right: Any) -> bool:
    """Whether a container takes two items for the same."""
    return left is right or world.truth(world.compare("==", left, right))


@operation
@unless_defined("__len__")
def length(world: World, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            raise TypeError("len() of a 0-d tensor")
        return value.shape[0]
    tracker, base = world.tracker(value), raw_base(value)
    if tracker is None:
        return len(value) if base is None else base.__len__(value)
    if base is None:
        return world.unsupported_kind("outside-object", "len() of a {} from outside", value)
    if tracker.contents is not None or tracker.appended:
        return base.__len__(world.inside(value))
    if tracker.writes:
        return len(world.dict_keys(tracker))
    size = base.__len__(value)
    world.guard("length", tracker.source, size, "its length is read")
    return size


def raises_if(world: World, truth: bool) -> bool:
    """Whether this truth of the condition of an `if` leads to a `raise`."""
    assert world.frame is not None
    program, jump, after = world.frame.program, world.frame.current, world.frame.pc
    if jump.opname == "TO_BOOL":
        jump, after = program.instructions[after], after + 1
    if jump.opname not in ("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE"):
        return False
    return program.raises(jump.target if jump.opname.endswith(str(truth).upper()) else after)


def branch(world: World, condition: torch.Tensor) -> bool:
    """The way that is left where Python branches on a tensor's data and the other way raises.

    The graph raises if that other way is the right one, and then the frame runs in eager: so it may not have
    written to inputs before. Under inference mode tensors have no versions that would tell. A GPU's kernel
    can't raise such that the program may go on.
    """
    recorder = world.recorder
    plain = (
        condition.dtype is torch.bool and condition.dim() == 0 and condition.device.type == "cpu"
    )
    if plain and not (recorder.mutated or recorder.inference):
        refused = [truth for truth in (True, False) if raises_if(world, truth)]
        if len(refused) == 1:  # where both raise, the values say which exception it is
            recorder.require(condition, not refused[0])
            return not refused[0]
    return world.unsupported("branch-on-tensor", "Python branches on a tensor's data")


@operation
def truth(world: World, value: Any) -> bool:
    if value is True or value is False or value is None:
        return bool(value)
    if isinstance(value, torch.Tensor):
        return branch(world, value)
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
    if any(tensors) and not isinstance(left if tensors[1] else right, NO_OPERANDS):
        return world.torch_call(BINARY[symbol], (left, right), {})
    return BINARY[symbol](world.operand(left), world.operand(right))


def has_operators(value: Any) -> bool:
    """Whether an operand besides a tensor may have an operator of its own."""
    if isinstance(value, NO_OPERANDS):
        return True
    simple = isinstance(value, torch.Tensor) or is_constant(value)
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


@operation
def fill_dict(world: World, owner: Any, items: Any = (), /, **kwargs: Any) -> None:
    """`owner.update(...)`: OrderedDict calls `__setitem__`, dict does not."""
    store = world.store_subscript if raw_base(owner) is not dict else world.dict_set
    for key, value in world.pairs(items, **kwargs).items():
        store(owner, key, value)


@operation
def pairs(world: World, items: Any = (), /, **kwargs: Any) -> dict[Any, Any]:
    """The items that `dict(...)` or `dict.update(...)` were given."""
    if hasattr(type(items), "keys"):
        return {**world.mapping(items), **kwargs}
    return dict(map(world.items, world.lazily(items)), **kwargs)  # type: ignore[arg-type]


def number_operator(world: World, symbol: str, left: Any, right: Any) -> Any:
    """An operator one of whose operands is symbolic: algebra on ints, else Python's before the graph."""
    operands, function = (left, right), {**BINARY, **COMPARE}[symbol]
    if all(isinstance(value, int | torch.SymInt) for value in operands):
        if symbol in ("+", "-", "*") or symbol in COMPARE:
            return function(left, right)
        if symbol in ("//", "%") and right > 0:
            return function(left, right)
        if symbol == "**" and type(right) is int and 0 <= right <= LARGEST_POWER:
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
    if base in (list, tuple) and base is builtin_base(right):
        return compare_items(world, symbol, left, right)
    if symbol in ("==", "!="):
        if symbol == "!=" and (python_method(left, "__eq__") or python_method(right, "__eq__")):
            return not world.truth(world.compare("==", left, right))
        if isinstance(left, dict) and isinstance(right, dict):
            ours, theirs = (dict(raw_items(world.inside(value))) for value in (left, right))
            if not all(map(is_constant, (*ours.values(), *theirs.values()))):
                world.unsupported("own-equality", "dicts of more than constants are compared")
        for value in (left, right):
            if world.tracker(value) is not None and type(value).__eq__ is OBJECT_EQ:
                return world.same(left, right) == (symbol == "==")
    return COMPARE[symbol](world.operand(world.deep(left)), world.operand(world.deep(right)))


def compare_items(world: World, symbol: str, left: Any, right: Any) -> Any:
    """Compare two lists or two tuples, as C code defines it: by the first items that differ."""
    ours, theirs = raw_items(world.inside(left)), raw_items(world.inside(right))
    if symbol in ("==", "!=") and len(ours) != len(theirs):
        return symbol == "!="
    for mine, other in zip(ours, theirs):
        if not world.equal(mine, other):
            return symbol == "!=" or (symbol != "==" and world.compare(symbol, mine, other))
    return COMPARE[symbol](len(ours), len(theirs))


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
    if kind == 3:
        world.unsupported("unusual-arguments", "text is written in ASCII (`!a`)")
    name = "__str__" if kind == 1 else "__repr__"
    shows_itself = find(type(value), name) is object.__str__  # which calls __repr__
    for method in (name, "__repr__") if shows_itself else (name,):
        if python_method(value, method) is not None and not isinstance(value, type):
            shown = world.call(world.special(value, method), (), {})
            if not isinstance(shown, str):
                raise TypeError(f"{method} returned non-string (type {type(shown).__name__})")
            return shown
    return (str if kind == 1 else repr)(world.as_text(value))


@operation
def formatted(world: World, value: Any, spec: str = "") -> str:
    if (found := world.call_special(value, "__format__", spec)) is not NotImplemented:
        return str(found)
    if not spec:
        return world.convert(1, value)
    return format(world.as_text(value), spec)


@operation
def as_text(world: World, value: Any) -> Any:
    """A value to be turned into text, in which symbolic numbers have become plain ones. Refuses what may
    print otherwise at run time."""
    if isinstance(value, torch.Tensor):
        world.unsupported("tensor-as-text", "a tensor is turned into text")
    if isinstance(value, BaseException):
        if world.tracker(value) is not None:
            world.unsupported("object-as-text", "an exception from outside is turned into text")
        world.as_text(value.args)
        return value
    if is_constant(value) or isinstance(value, type | types.ModuleType):
        return world.pinned(value)
    if type(value) in (list, tuple, dict, collections.OrderedDict):
        items = raw_items(world.inside(value))
        return refilled(value, map(world.as_text, items))
    return world.unsupported_kind("object-as-text", "a {} is turned into text", value)
