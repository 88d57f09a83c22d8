"""Rules for Python's builtins and a few standard-library functions.

Plug-in point: `@call_rules(function)` on `(world, args, kwargs) -> value`; it may replace any of these.
The real compiler: torch/_dynamo/variables/builtin.py, polyfills/.
"""

from __future__ import annotations

import abc
import collections
import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from minicompile import compat
from minicompile.dynamo import containers
from minicompile.dynamo.attributes import STANDS_FOR
from minicompile.dynamo.containers import python_method, unless_defined
from minicompile.dynamo.interpreter import (
    BINARY,
    COMPARE,
    DELETED,
    METHOD_OF,
    UNARY,
    UNBOUND,
    TracedGenerator,
)
from minicompile.dynamo.refusals import FUNCTIONS, LAUNCHES
from minicompile.dynamo.result import Source
from minicompile.dynamo.variables import (
    MISSING,
    is_constant,
    is_fixed,
    raw_base,
    raw_items,
    words,
)
from minicompile.dynamo.world import CallRule, Meaning, World, call_rules
from minicompile.shapes.symnode import SYMBOLIC

ORDERED = collections.OrderedDict


def means(*functions: Any, named: bool = False) -> Callable[[Meaning], Meaning]:
    """`call_rules` for a meaning that takes `(world, ...)` and the call's own arguments.

    Arguments that it has no parameter for are refused. `named`: it takes `(world, function, ...)`.
    """

    def register(meaning: Meaning) -> Meaning:
        def rule(function: Any, world: World, args: Any, kwargs: dict[str, Any]) -> Any:
            given = (world, function, *args) if named else (world, *args)
            try:
                return meaning(*given, **kwargs)
            except TypeError:
                try:
                    inspect.signature(meaning).bind(*given, **kwargs)
                except TypeError:
                    world.unsupported("unusual-arguments", f"these arguments of {function}")
                raise

        for function in functions:
            call_rules(function)(functools.partial(rule, function))
        return meaning

    return register


def refuse(id: str, what: str, *functions: Any) -> None:
    """World that are left to Python, with a reason of their own."""
    call_rules(*functions)(lambda world, args, kwargs: world.unsupported(id, what))


for _id, _owner, _names in FUNCTIONS:
    for _function in (getattr(_owner, _name) for _name in _names.split() if hasattr(_owner, _name)):
        refuse(_id, f"{_function.__qualname__} is called", _function)
refuse("autograd-function", "a torch.autograd.Function is applied", compat.function_apply)
refuse("control-flow", "a function of torch's for control flow is called", *compat.CONTROL_FLOW)
refuse("triton-kernel", "a Triton kernel is launched", *LAUNCHES)
refuse(
    "function-transform",
    "flex_attention is called",
    "torch.nn.attention.flex_attention.flex_attention",
)


# -- functions that are operations of the interpreter

OPERATIONS: dict[Any, tuple[Any, ...]] = {
    setattr: ("store_attr",),
    object.__getattribute__: ("generic_attribute",),
    type.__getattribute__: ("class_attribute",),
    object.__setattr__: ("generic_store",),
    len: ("length",),
    repr: ("convert", 2),
    format: ("formatted",),
    operator.getitem: ("subscript",),
    operator.setitem: ("store_subscript",),
    operator.delitem: ("delete_subscript",),
    operator.contains: ("contains",),
    operator.truth: ("truth",),
    operator.is_: ("same",),
    **{function: ("binary", symbol) for symbol, function in BINARY.items()},
    **{function: ("compare", symbol) for symbol, function in COMPARE.items()},
    **{function: ("unary", symbol) for symbol, function in UNARY.items()},
}
"""`len(x)` is `world.length(x)`, `operator.add(x, y)` is `world.binary("+", x, y)`."""


BY_METHOD: dict[str, Callable[..., Any]] = {
    "__getitem__": containers.subscript.__wrapped__,  # type: ignore[attr-defined]
    "__setitem__": containers.store_subscript.__wrapped__,  # type: ignore[attr-defined]
    "__delitem__": containers.delete_subscript.__wrapped__,  # type: ignore[attr-defined]
    "__iter__": containers.iterate.__wrapped__,  # type: ignore[attr-defined]
    "__len__": containers.length.__wrapped__,  # type: ignore[attr-defined]
    "__contains__": containers.holds,
    **{
        f"__i{METHOD_OF[symbol]}__": functools.partial(
            lambda symbol, world, left, right: world.in_place(symbol, left, right), f"{symbol}="
        )
        for symbol in METHOD_OF.keys() & BINARY.keys()
    },
}
"""`list.__len__(x)` is the operation without a look at what the class of x defines in Python."""


def by_operation(name: str, *first: Any) -> CallRule:
    return lambda world, args, kwargs: getattr(world, name)(*first, *args, **kwargs)


for _function, _operation in OPERATIONS.items():
    call_rules(_function)(by_operation(*_operation))


for _cls in (list, tuple, dict, ORDERED, set, frozenset):
    for _name in BY_METHOD.keys() & _cls.__dict__.keys():
        means(_cls.__dict__[_name])(BY_METHOD[_name])

means(delattr)(lambda world, value, name: world.store_attr(value, name, DELETED))
means(object.__delattr__)(lambda world, value, name: world.generic_store(value, name, DELETED))
means(operator.not_)(lambda world, value: not world.truth(value))
means(operator.is_not)(lambda world, a, b: not world.same(a, b))
means(bool)(lambda world, value=False: world.truth(value))
means(divmod)(lambda world, a, b: (world.binary("//", a, b), world.binary("%", a, b)))
means(pow)(lambda world, a, b: world.binary("**", a, b))


# -- attributes and types


@means(getattr)
def builtin_getattr(world: World, value: Any, name: str, default: Any = UNBOUND) -> Any:
    try:
        return world.load_attr(value, name)
    except AttributeError:
        if default is UNBOUND or world.frames.abort is not None:
            raise
        return default


means(hasattr)(
    lambda world, value, name: builtin_getattr(world, value, name, MISSING) is not MISSING
)
means(object.__init__)(lambda world, /, *args, **kwargs: None)
means(super)(lambda world, *args: super(*args) if args else world.zero_argument_super())
means(type)(
    lambda world, *args, **kwargs: (
        world.construct(type, args, kwargs) if len(args) > 1 else world.type_of(args[0])
    )
)
means(callable)(lambda world, value: callable(value))


@means(isinstance, issubclass, named=True)
def check_class(world: World, check: Any, value: Any, classes: Any) -> bool:
    """isinstance or issubclass, with what metaclasses define in Python interpreted."""
    if type(value) in STANDS_FOR:
        return check_class(world, issubclass, world.type_of(value), classes)
    if classes is compat.FakeTensor:
        return False  # the value is no fake when the program runs
    if isinstance(classes, tuple):
        return any(check_class(world, check, value, c) for c in world.imported(classes))
    if isinstance(classes, abc.ABCMeta):
        registered = world.hold(abc.get_cache_token, "abc.get_cache_token").source
        token = Source("setting", (), registered)
        world.guard("equals", token, abc.get_cache_token(), "classes registered with others")
    name = "__instancecheck__" if check is isinstance else "__subclasscheck__"
    own = python_method(classes, name)
    if own is None or is_fixed(own.__module__) or type(value) is classes:
        found: bool = check(value, classes)
        return found
    return world.truth(world.call_special(classes, name, value))


# -- iteration


def generator_method(world: World, method: Any, generator: Any, *args: Any) -> Any:
    if type(generator) is not TracedGenerator:
        world.unsupported_kind("outside-object", "a method of a {} from outside", generator)
    return getattr(generator, method.__name__)(*args)


for _method in words("send throw close __iter__ __next__"):
    means(getattr(types.GeneratorType, _method), named=True)(generator_method)


means(iter)(lambda world, value: world.iterate(value))


@means(next)
def builtin_next(world: World, iterator: Any, default: Any = UNBOUND) -> Any:
    try:
        return world.advance(iterator)
    except StopIteration:
        if default is UNBOUND:
            raise
        return default


means(zip)(lambda world, *parts, **options: zip(*[world.lazily(p) for p in parts], **options))
means(enumerate)(lambda world, items, start=0: enumerate(world.lazily(items), start))
means(any)(lambda world, items: any(map(world.truth, world.lazily(items))))
means(all)(lambda world, items: all(map(world.truth, world.lazily(items))))


means(map)(
    lambda world, function, *parts: (
        world.call(function, row, {}) for row in zip(*[world.lazily(part) for part in parts])
    )
)
means(sum)(
    lambda world, items, start=0: functools.reduce(
        functools.partial(world.binary, "+"), world.lazily(items), start
    )
)
means(functools.reduce)(
    lambda world, function, items, *first: functools.reduce(
        lambda found, item: world.call(function, (found, item), {}), world.lazily(items), *first
    )
)


@means(filter)
def builtin_filter(world: World, function: Any, items: Any) -> Any:
    keep = bool if function is None else function
    return (item for item in world.lazily(items) if world.truth(world.call(keep, (item,), {})))


@means(reversed)
@unless_defined("__reversed__")
def builtin_reversed(world: World, value: Any) -> Any:
    base = raw_base(value)
    if base is None and python_method(value, "__getitem__") is not None:
        return (world.subscript(value, i) for i in range(world.length(value) - 1, -1, -1))
    if base in (None, set, frozenset):
        return world.run_native(reversed, (value,), {})  # may raise TypeError
    return iter(list(base.__iter__(world.inside(value)))[::-1])


def sort_keys(world: World, items: list[Any], key: Any) -> list[Any]:
    return items if key is None else [world.call(key, (item,), {}) for item in items]


@means(sorted)
def builtin_sorted(world: World, items: Any, **options: Any) -> list[Any]:
    found = world.items(items)
    list_sort(world, found, **options)
    return found


@means(list.sort)
def list_sort(world: World, items: Any, key: Any = None, reverse: Any = False) -> None:
    target = raw_items(world.mutable(items))
    keys = sort_keys(world, target, key)

    def less(i: int, j: int) -> int:
        return -world.truth(world.compare("<", keys[i], keys[j]))

    order = sorted(range(len(keys)), key=functools.cmp_to_key(less), reverse=bool(reverse))
    list.__setitem__(world.mutable(items), slice(None), [target[i] for i in order])


@means(min, max, named=True)
def extreme(world: World, choose: Any, *args: Any, key: Any = None, default: Any = UNBOUND) -> Any:
    """The first item that no other beats."""
    items = world.items(args[0]) if len(args) == 1 else list(args)
    if not items:
        return choose(()) if default is UNBOUND else default
    keys, best = sort_keys(world, items, key), 0
    for index in range(1, len(items)):
        if world.truth(world.compare("<" if choose is min else ">", keys[index], keys[best])):
            best = index
    return items[best]


# -- making containers


@means(list, tuple, set, frozenset, torch.Size, named=True)
def make_container(world: World, kind: Any, items: Any = ()) -> Any:
    if type(items) is kind and kind in (tuple, frozenset):
        return items
    return kind(hashed_items(world, items) if kind in (set, frozenset) else world.items(items))


def hashed_items(world: World, items: Any) -> list[Any]:
    """What a set is filled with: another set is not asked for an iterator."""
    if isinstance(items, set | frozenset):
        return raw_items(world.inside(items))
    return list(map(world.pinned, world.items(items)))


means(tuple.__new__)(lambda world, cls, items=(): tuple.__new__(cls, world.items(items)))
means(dict)(containers.pairs)
means(ORDERED)(lambda world, /, *args, **kwargs: ORDERED(world.pairs(*args, **kwargs)))


@means(collections.defaultdict)
def make_defaultdict(world: World, factory: Any = None, /, *args: Any, **kwargs: Any) -> Any:
    made: Any = collections.defaultdict(factory)
    world.fill_dict(made, *args, **kwargs)
    return made


means(ORDERED.__init__, ORDERED.update, dict.__init__, dict.update)(containers.fill_dict)


means(collections.defaultdict.__missing__)(containers.default_item)


KEYED = words("get pop setdefault")


@means(
    *(cls.__dict__[name] for cls in (dict, ORDERED) for name in KEYED & vars(cls).keys()),
    named=True,
)
def dict_method(world: World, method: Any, owner: Any, key: Any, default: Any = MISSING) -> Any:
    """A method that looks at one key."""
    name = method.__name__
    if name != "get" and raw_base(owner) is ORDERED:
        world.check_overrides(owner)
    found = world.dict_get(owner, key)
    if name == "pop" and (found is not MISSING or default is MISSING):
        BY_METHOD["__delitem__"](world, owner, key)  # may raise KeyError
    if found is not MISSING:
        return found
    made = None if default is MISSING else default
    if name == "setdefault":
        world.dict_set(owner, key, made)
    return made


means(list.append)(lambda world, target, item: world.extend(target, [item]))
means(list.extend)(lambda world, target, items: world.extend(target, world.items(items)))
means(list.__init__)(
    lambda world, target, items=(): list.__init__(world.mutable(target), world.items(items))
)
means(
    *(set.update, set.difference_update, set.intersection_update, set.__init__),
    set.symmetric_difference_update,
    named=True,
)(
    lambda world, method, target, *others: method(
        world.mutable(target), *(hashed_items(world, other) for other in others)
    )
)


@means(list.index, list.count, list.remove, tuple.index, tuple.count, named=True)
def search(world: World, method: Any, owner: Any, item: Any) -> Any:
    """A method that looks for an item."""
    if not all(map(is_constant, (*raw_items(world.inside(owner)), item))):
        world.unsupported("own-equality", f"list.{method.__name__} among more than constants")
    changed = world.mutable(owner) if method is list.remove else world.inside(owner)
    return method(changed, world.pinned(item))


# -- numbers and text


@means(int, float, complex, named=True)
def number(world: World, kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Of constants, and of objects that define the conversion in Python."""
    value, name = args[0] if args else 0, f"__{kind.__name__}__"
    if isinstance(value, torch.Tensor):
        what = f"a tensor is turned into a Python number by {kind.__name__}()"
        world.unsupported("item", what)
    if len(args) == 1 and isinstance(value, SYMBOLIC):
        if world.type_of(value) is kind:
            return value
        return world.computed(f"{kind.__name__}({{0}})", value, function=kind)
    if (found := world.call_special(value, name)) is not NotImplemented:
        return found
    return kind(*map(world.operand, args), **kwargs)


@means(str)
def builtin_str(world: World, *args: Any, **kwargs: Any) -> str:
    return world.convert(1, args[0]) if len(args) == 1 and not kwargs else str(*args, **kwargs)


@means(hash)
@unless_defined("__hash__")
def builtin_hash(world: World, value: Any) -> int:
    if not is_constant(value):
        world.unsupported("memory-address", "hash() depends on memory addresses")
    return hash(world.pinned(value))
