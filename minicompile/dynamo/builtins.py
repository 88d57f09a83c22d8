"""Rules for Python's builtins and a few standard-library functions.

Plug-in point: `@call_rules(function)` on `(tracer, args, kwargs) -> value`; it may replace any of these.
The real compiler: torch/_dynamo/variables/builtin.py, polyfills/.
"""

from __future__ import annotations

import abc
import collections
import functools
import inspect
import itertools
import operator
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from minicompile import compat
from minicompile.dynamo.attributes import STANDS_FOR
from minicompile.dynamo.calls import CallRule, Calls, call_rules
from minicompile.dynamo.containers import Containers, python_method, unless_defined
from minicompile.dynamo.interpreter import (
    BINARY,
    COMPARE,
    METHOD_OF,
    UNARY,
    UNBOUND,
    TracedGenerator,
)
from minicompile.dynamo.refusals import FUNCTIONS
from minicompile.dynamo.result import Source
from minicompile.dynamo.variables import (
    MISSING,
    is_constant,
    is_fixed,
    raw_base,
    raw_items,
    words,
)
from minicompile.shapes.symnode import SYMBOLIC

ORDERED = collections.OrderedDict
Meaning = TypeVar("Meaning", bound=Callable[..., Any])


def means(*functions: Any, named: bool = False) -> Callable[[Meaning], Meaning]:
    """`call_rules` for a meaning that takes `(tracer, ...)` and the call's own arguments.

    Arguments that it has no parameter for are refused. `named`: it takes `(tracer, function, ...)`.
    """

    def register(meaning: Meaning) -> Meaning:
        def rule(function: Any, tracer: Calls, args: Any, kwargs: dict[str, Any]) -> Any:
            given = (tracer, function, *args) if named else (tracer, *args)
            try:
                return meaning(*given, **kwargs)
            except TypeError:
                try:
                    inspect.signature(meaning).bind(*given, **kwargs)
                except TypeError:
                    tracer.unsupported("unusual-arguments", f"these arguments of {function}")
                raise

        for function in functions:
            call_rules(function)(functools.partial(rule, function))
        return meaning

    return register


def refuse(id: str, what: str, *functions: Any) -> None:
    """Calls that are left to Python, with a reason of their own."""
    call_rules(*functions)(lambda tracer, args, kwargs: tracer.unsupported(id, what))


for _id, _what, _owner, _names in FUNCTIONS:
    refuse(_id, _what, *(getattr(_owner, name) for name in _names.split()))
refuse("several-processes", "processes exchange tensors", *compat.COLLECTIVES)


# -- functions that are operations of the interpreter

OPERATIONS: dict[Any, tuple[Any, ...]] = {
    setattr: ("store_attr",),
    delattr: ("delete_attr",),
    object.__getattribute__: ("generic_attribute",),
    type.__getattribute__: ("class_attribute",),
    object.__setattr__: ("generic_store",),
    object.__delattr__: ("generic_delete",),
    len: ("length",),
    repr: ("convert", 2),
    format: ("format",),
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
"""`len(x)` is `tracer.length(x)`, `operator.add(x, y)` is `tracer.binary("+", x, y)`."""


BY_METHOD: dict[str, Callable[..., Any]] = {
    "__getitem__": Containers.subscript.__wrapped__,  # type: ignore[attr-defined]
    "__setitem__": Containers.store_subscript.__wrapped__,  # type: ignore[attr-defined]
    "__delitem__": Containers.delete_subscript.__wrapped__,  # type: ignore[attr-defined]
    "__iter__": Containers.iterate.__wrapped__,  # type: ignore[attr-defined]
    "__len__": Containers.length.__wrapped__,  # type: ignore[attr-defined]
    "__contains__": Containers.holds,
    **{
        f"__i{METHOD_OF[symbol]}__": functools.partial(
            lambda symbol, tracer, left, right: tracer.in_place(symbol, left, right), f"{symbol}="
        )
        for symbol in METHOD_OF.keys() & BINARY.keys()
    },
}
"""`list.__len__(x)` is the operation without a look at what the class of x defines in Python."""


def operation(name: str, *first: Any) -> CallRule:
    return lambda tracer, args, kwargs: getattr(tracer, name)(*first, *args, **kwargs)


for _function, _operation in OPERATIONS.items():
    call_rules(_function)(operation(*_operation))


for _cls in (list, tuple, dict, ORDERED, set, frozenset):
    for _name in BY_METHOD.keys() & _cls.__dict__.keys():
        means(_cls.__dict__[_name])(BY_METHOD[_name])

means(operator.not_)(lambda tracer, value: not tracer.truth(value))
means(operator.is_not)(lambda tracer, a, b: not tracer.same(a, b))
means(bool)(lambda tracer, value=False: tracer.truth(value))
means(divmod)(lambda tracer, a, b: (tracer.binary("//", a, b), tracer.binary("%", a, b)))
means(pow)(lambda tracer, a, b: tracer.binary("**", a, b))


# -- attributes and types


@means(getattr)
def builtin_getattr(tracer: Calls, value: Any, name: str, default: Any = UNBOUND) -> Any:
    try:
        return tracer.load_attr(value, name)
    except AttributeError:
        if default is UNBOUND or tracer.abort is not None:
            raise
        return default


means(hasattr)(
    lambda tracer, value, name: builtin_getattr(tracer, value, name, MISSING) is not MISSING
)
means(object.__init__)(lambda tracer, /, *args, **kwargs: None)
means(super)(lambda tracer, *args: super(*args) if args else tracer.zero_argument_super())
means(type)(
    lambda tracer, *args, **kwargs: (
        tracer.construct(type, args, kwargs) if len(args) > 1 else tracer.type_of(args[0])
    )
)
means(callable)(lambda tracer, value: callable(value))


@means(isinstance, issubclass, named=True)
def check_class(tracer: Calls, check: Any, value: Any, classes: Any) -> bool:
    """isinstance or issubclass, with what metaclasses define in Python interpreted."""
    if type(value) in STANDS_FOR:
        return check_class(tracer, issubclass, tracer.type_of(value), classes)
    if classes is compat.FakeTensor:
        return False  # the value is no fake when the program runs
    if isinstance(classes, tuple):
        return any(check_class(tracer, check, value, c) for c in tracer.imported(classes))
    if isinstance(classes, abc.ABCMeta):
        registered = tracer.hold(abc.get_cache_token, "abc.get_cache_token").source
        token = Source("setting", (), registered)
        tracer.guard("equals", token, abc.get_cache_token(), "classes registered with others")
    name = "__instancecheck__" if check is isinstance else "__subclasscheck__"
    own = python_method(classes, name)
    if own is None or is_fixed(own.__module__) or type(value) is classes:
        found: bool = check(value, classes)
        return found
    return tracer.truth(tracer.call(tracer.special(classes, name), (value,), {}))


# -- iteration


def generator_method(tracer: Calls, method: Any, generator: Any, *args: Any) -> Any:
    if type(generator) is not TracedGenerator:
        tracer.unsupported_kind("outside-object", "a method of a {} from outside", generator)
    return getattr(generator, method.__name__)(*args)


for _method in words("send throw close __iter__ __next__"):
    means(getattr(types.GeneratorType, _method), named=True)(generator_method)


@means(iter)
def builtin_iter(tracer: Calls, value: Any, sentinel: Any = UNBOUND) -> Any:
    if sentinel is UNBOUND:
        return tracer.iterate(value)
    results = map(functools.partial(tracer.call, value), itertools.repeat(()), itertools.repeat({}))
    return itertools.takewhile(lambda found: not tracer.equal(sentinel, found), results)


@means(next)
def builtin_next(tracer: Calls, iterator: Any, default: Any = UNBOUND) -> Any:
    try:
        return tracer.advance(iterator)
    except StopIteration:
        if default is UNBOUND:
            raise
        return default


means(zip)(lambda tracer, *parts, **options: zip(*[tracer.lazily(p) for p in parts], **options))
means(enumerate)(lambda tracer, items, start=0: enumerate(tracer.lazily(items), start))
means(any)(lambda tracer, items: any(map(tracer.truth, tracer.lazily(items))))
means(all)(lambda tracer, items: all(map(tracer.truth, tracer.lazily(items))))


means(map)(
    lambda tracer, function, *parts: (
        tracer.call(function, row, {}) for row in zip(*[tracer.lazily(part) for part in parts])
    )
)
means(sum)(
    lambda tracer, items, start=0: functools.reduce(
        functools.partial(tracer.binary, "+"), tracer.lazily(items), start
    )
)
means(functools.reduce)(
    lambda tracer, function, items, *first: functools.reduce(
        lambda found, item: tracer.call(function, (found, item), {}), tracer.lazily(items), *first
    )
)


@means(filter)
def builtin_filter(tracer: Calls, function: Any, items: Any) -> Any:
    keep = bool if function is None else function
    return (item for item in tracer.lazily(items) if tracer.truth(tracer.call(keep, (item,), {})))


@means(reversed)
@unless_defined("__reversed__")
def builtin_reversed(tracer: Calls, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tracer.call(tracer.load_attr(value, "__reversed__"), (), {})
    base = raw_base(value)
    if base is None and python_method(value, "__getitem__") is not None:
        return (tracer.subscript(value, i) for i in range(tracer.length(value) - 1, -1, -1))
    if base in (None, set, frozenset):
        return reversed(tracer.native_argument(value))  # may raise TypeError
    return iter(list(base.__iter__(tracer.inside(value)))[::-1])


def sort_keys(tracer: Calls, items: list[Any], key: Any) -> list[Any]:
    return items if key is None else [tracer.call(key, (item,), {}) for item in items]


@means(sorted)
def builtin_sorted(tracer: Calls, items: Any, **options: Any) -> list[Any]:
    found = tracer.items(items)
    list_sort(tracer, found, **options)
    return found


@means(list.sort)
def list_sort(tracer: Calls, items: Any, key: Any = None, reverse: Any = False) -> None:
    target = raw_items(tracer.mutable(items))
    keys = sort_keys(tracer, target, key)

    def less(i: int, j: int) -> int:
        return -tracer.truth(tracer.compare("<", keys[i], keys[j]))

    order = sorted(range(len(keys)), key=functools.cmp_to_key(less), reverse=bool(reverse))
    list.__setitem__(tracer.mutable(items), slice(None), [target[i] for i in order])


@means(min, max, named=True)
def extreme(tracer: Calls, choose: Any, *args: Any, key: Any = None, default: Any = UNBOUND) -> Any:
    """The first item that no other beats."""
    items = tracer.items(args[0]) if len(args) == 1 else list(args)
    if not items:
        return choose(()) if default is UNBOUND else default
    keys, best = sort_keys(tracer, items, key), 0
    for index in range(1, len(items)):
        if tracer.truth(tracer.compare("<" if choose is min else ">", keys[index], keys[best])):
            best = index
    return items[best]


# -- making containers


@means(list, tuple, set, frozenset, torch.Size, named=True)
def make_container(tracer: Calls, kind: Any, items: Any = ()) -> Any:
    if type(items) is kind and kind in (tuple, frozenset):
        return items
    return kind(hashed_items(tracer, items) if kind in (set, frozenset) else tracer.items(items))


def hashed_items(tracer: Calls, items: Any) -> list[Any]:
    """What a set is filled with: another set is not asked for an iterator."""
    if isinstance(items, set | frozenset):
        return raw_items(tracer.inside(items))
    return list(map(tracer.pinned, tracer.items(items)))


means(tuple.__new__)(lambda tracer, cls, items=(): tuple.__new__(cls, tracer.items(items)))
means(dict)(Calls.pairs)
means(ORDERED)(lambda tracer, /, *args, **kwargs: ORDERED(tracer.pairs(*args, **kwargs)))


@means(collections.defaultdict)
def make_defaultdict(tracer: Calls, factory: Any = None, /, *args: Any, **kwargs: Any) -> Any:
    made: Any = collections.defaultdict(factory)
    tracer.fill_dict(made, *args, **kwargs)
    return made


means(ORDERED.__init__, ORDERED.update, dict.__init__, dict.update)(Calls.fill_dict)


means(collections.defaultdict.__missing__)(Calls.default_item)


KEYED = words("get pop setdefault")


@means(
    *(cls.__dict__[name] for cls in (dict, ORDERED) for name in KEYED & vars(cls).keys()),
    named=True,
)
def dict_method(tracer: Calls, method: Any, owner: Any, key: Any, default: Any = MISSING) -> Any:
    """A method that looks at one key."""
    name = method.__name__
    if name != "get" and raw_base(owner) is ORDERED:
        tracer.check_overrides(owner)
    found = tracer.dict_find(owner, key)
    if name == "pop" and (found is not MISSING or default is MISSING):
        BY_METHOD["__delitem__"](tracer, owner, key)  # may raise KeyError
    if found is not MISSING:
        return found
    made = None if default is MISSING else default
    if name == "setdefault":
        tracer.store_dict_item(owner, key, made)
    return made


means(list.append)(lambda tracer, target, item: tracer.extend(target, [item]))
means(list.extend)(lambda tracer, target, items: tracer.extend(target, tracer.items(items)))
means(list.__init__)(
    lambda tracer, target, items=(): list.__init__(tracer.mutable(target), tracer.items(items))
)
means(
    *(set.update, set.difference_update, set.intersection_update, set.__init__),
    set.symmetric_difference_update,
    named=True,
)(
    lambda tracer, method, target, *others: method(
        tracer.mutable(target), *(hashed_items(tracer, other) for other in others)
    )
)


@means(list.index, list.count, list.remove, tuple.index, tuple.count, named=True)
def search(tracer: Calls, method: Any, owner: Any, item: Any) -> Any:
    """A method that looks for an item."""
    name, items = method.__name__, raw_items(tracer.inside(owner))
    if name == "count":
        return sum(tracer.equal(other, item) for other in items)
    for index, other in enumerate(items):
        if tracer.equal(other, item):
            if name == "index":
                return index
            return list.__delitem__(tracer.mutable(owner), index)
    return method(method.__objclass__(), item)  # raises ValueError


# -- numbers and text


@means(int, float, complex, named=True)
def number(tracer: Calls, kind: Any, *args: Any, **kwargs: Any) -> Any:
    """Of constants, and of objects that define the conversion in Python."""
    value, name = args[0] if args else 0, f"__{kind.__name__}__"
    if isinstance(value, torch.Tensor):
        what = f"a tensor is turned into a Python number by {kind.__name__}()"
        tracer.unsupported("item", what)
    if len(args) == 1 and isinstance(value, SYMBOLIC):
        if tracer.type_of(value) is kind:
            return value
        return tracer.computed(f"{kind.__name__}({{0}})", value, function=kind)
    if python_method(value, name) is not None:
        return tracer.call(tracer.special(value, name), (), {})
    return kind(*map(tracer.operand, args), **kwargs)


@means(str)
def builtin_str(tracer: Calls, *args: Any, **kwargs: Any) -> str:
    return tracer.convert(1, args[0]) if len(args) == 1 and not kwargs else str(*args, **kwargs)


@means(hash)
@unless_defined("__hash__")
def builtin_hash(tracer: Calls, value: Any) -> int:
    if not is_constant(value):
        tracer.unsupported("memory-address", "hash() depends on memory addresses")
    return hash(tracer.pinned(value))


@means(abs)
@unless_defined("__abs__")
def builtin_abs(tracer: Calls, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tracer.torch_call(torch.abs, (value,), {})
    return tracer.run_native(abs, (value,), {})


@means(round)
def builtin_round(tracer: Calls, value: Any, *ndigits: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tracer.torch_call(torch.round, (value,), dict(zip(["decimals"], ndigits)))
    return tracer.run_native(round, (value, *ndigits), {})
