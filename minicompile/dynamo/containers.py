"""Containers: subscripts, iteration, `in` and length, and copies of them for native code.

An outside container is read through an inside copy of it (which guards what was read); classes that define
the operation in Python have it interpreted; everything else is Python's own. Graph nodes read tensors.
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
    TracedGenerator,
)
from minicompile.dynamo.result import Source
from minicompile.dynamo.variables import (
    FACTORY,
    MISSING,
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

OVERRIDES = words("__iter__ __getitem__ __setitem__ __delitem__ __contains__ __init__ __new__ keys")
"""Methods that C code calls on subclasses of dict."""
DICT_ITER = dict.__dict__["__iter__"]


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
    if torch.SymInt not in kinds or {*kinds} - {int, slice, torch.SymInt}:
        return tensor, key
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


# -- membership


@operation
def contains(world: World, container: Any, item: Any) -> bool:
    found = world.call_special(container, "__contains__", item)
    return world.holds(container, item) if found is NotImplemented else world.truth(found)


@operation
def holds(world: World, container: Any, item: Any) -> bool:
    """`in` as C code defines it."""
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
    in_c = not by_python and not isinstance(container, TracedGenerator | torch.Tensor)
    if in_c and world.tracker(container) is None:
        return item in container
    return any(world.equal(other, item) for other in world.lazily(container))


@operation
def equal(world: World, left: Any, right: Any) -> bool:
    """Whether a container takes two items for the same."""
    return left is right or world.truth(world.compare("==", left, right))


@operation
@unless_defined("__len__")
def length(world: World, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
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


# -- filling dicts


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
