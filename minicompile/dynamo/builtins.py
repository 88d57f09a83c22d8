"""Rules for Python's builtins and a few standard-library functions.

Plug-in point: `@call_rules(function)` on `(tracer, args, kwargs) -> value`; it may replace any of these.
The real compiler: torch/_dynamo/variables/builtin.py, polyfills/.
"""

from __future__ import annotations

import abc
import builtins
import collections
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from minicompile.dynamo.calls import CallRule, Calls, call_rules
from minicompile.dynamo.containers import python_method, unless_defined
from minicompile.dynamo.interpreter import BINARY, COMPARE, UNARY, UNBOUND, TracedGenerator
from minicompile.dynamo.refusals import FUNCTIONS
from minicompile.dynamo.result import Source
from minicompile.dynamo.variables import (
    MISSING,
    SYMBOLIC,
    VariableTracker,
    is_constant,
    is_fixed,
)

Meaning = TypeVar("Meaning", bound=Callable[..., Any])


def means(*functions: Any) -> Callable[[Meaning], Meaning]:
    """`call_rules` for a meaning that takes `(tracer, ...)` and the call's own arguments.

    Arguments that it has no parameter for are refused.
    """

    def register(meaning: Meaning) -> Meaning:
        def rule(tracer: Calls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return meaning(tracer, *args, **kwargs)
            except TypeError:
                try:
                    inspect.signature(meaning).bind(tracer, *args, **kwargs)
                except TypeError:
                    tracer.unsupported("unusual-arguments", f"these arguments of {functions[0]}")
                raise

        call_rules(*functions)(rule)
        return meaning

    return register


def refuse(id: str, what: str, *functions: Any) -> None:
    """Calls that are left to Python, with a reason of their own."""
    call_rules(*functions)(lambda tracer, args, kwargs: tracer.unsupported(id, what))


for _id, _what, _owner, _names in FUNCTIONS:
    refuse(_id, _what, *(getattr(_owner, name) for name in _names.split()))


# -- functions that are operations of the interpreter

OPERATIONS: dict[Any, tuple[Any, ...]] = {
    setattr: ("store_attr",),
    delattr: ("delete_attr",),
    object.__getattribute__: ("generic_attribute",),
    object.__setattr__: ("generic_store",),
    object.__delattr__: ("generic_delete",),
    len: ("length",),
    repr: ("convert", 2),
    ascii: ("convert", 3),
    format: ("format",),
    dict.__getitem__: ("dict_item",),
    dict.__setitem__: ("store_dict_item",),
    collections.OrderedDict.__setitem__: ("store_dict_item",),
    list.__iadd__: ("binary", "+="),
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


def operation(name: str, *first: Any) -> CallRule:
    return lambda tracer, args, kwargs: getattr(tracer, name)(*first, *args, **kwargs)


for _function, _operation in OPERATIONS.items():
    call_rules(_function)(operation(*_operation))

means(operator.not_)(lambda tracer, value: not tracer.truth(value))
means(operator.is_not)(lambda tracer, a, b: not tracer.same(a, b))
means(bool)(lambda tracer, value=False: tracer.truth(value))
means(divmod)(lambda tracer, a, b: (tracer.binary("//", a, b), tracer.binary("%", a, b)))
means(pow)(
    lambda tracer, a, b, *mod: (
        pow(*map(tracer.pinned, (a, b, *mod))) if mod else tracer.binary("**", a, b)
    )
)
means(torch.Size)(lambda tracer, items=(): torch.Size(tracer.items(items)))


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
means(object.__init__, object.__init_subclass__)(lambda tracer, /, *args, **kwargs: None)
means(super)(lambda tracer, *args: super(*args) if args else tracer.zero_argument_super())
means(type)(
    lambda tracer, *args, **kwargs: (
        tracer.construct(type, args, kwargs) if len(args) > 1 else tracer.type_of(args[0])
    )
)
call_rules(builtins.__build_class__)(lambda tracer, args, kwargs: tracer.build_class(args, kwargs))
means(callable)(lambda tracer, value: callable(value))


def class_list(tracer: Calls, classes: Any) -> Any:
    """The second argument of isinstance, tuples flattened."""
    if isinstance(classes, tuple):
        return tuple(class_list(tracer, cls) for cls in tracer.imported(classes))
    return classes


@means(isinstance)
def builtin_isinstance(tracer: Calls, value: Any, classes: Any) -> bool:
    classes = class_list(tracer, classes)
    if isinstance(value, SYMBOLIC):
        return issubclass(tracer.type_of(value), classes)
    if isinstance(value, TracedGenerator):
        return issubclass(types.GeneratorType, classes)
    return checked(tracer, value, classes, isinstance)


@means(issubclass)
def builtin_issubclass(tracer: Calls, cls: Any, classes: Any) -> bool:
    return checked(tracer, cls, class_list(tracer, classes), issubclass)


def checked(tracer: Calls, value: Any, classes: Any, check: Callable[[Any, Any], bool]) -> bool:
    """isinstance or issubclass, with what metaclasses define in Python interpreted."""
    if isinstance(classes, tuple):
        return any(checked(tracer, value, cls, check) for cls in classes)
    if isinstance(classes, abc.ABCMeta):
        registered = tracer.hold(abc.get_cache_token, "abc.get_cache_token").source
        token = Source("setting", (), registered)
        tracer.guard("equals", token, abc.get_cache_token(), "classes registered with others")
    name = "__instancecheck__" if check is isinstance else "__subclasscheck__"
    own = python_method(classes, name)
    if own is None or is_fixed(own.__module__) or type(value) is classes:
        return check(value, classes)
    return tracer.truth(tracer.call(tracer.special(classes, name), (value,), {}))


# -- iteration

means(TracedGenerator.send)(lambda tracer, generator, value: generator.send(value))
means(TracedGenerator.throw)(lambda tracer, generator, *error: generator.throw(*error))
means(TracedGenerator.close)(lambda tracer, generator: generator.close())


@means(iter)
def builtin_iter(tracer: Calls, value: Any, sentinel: Any = UNBOUND) -> Any:
    return tracer.iterate(value) if sentinel is UNBOUND else until(tracer, value, sentinel)


def until(tracer: Calls, function: Any, sentinel: Any) -> Iterator[Any]:
    while True:
        item = tracer.call(function, (), {})
        if tracer.truth(tracer.compare("==", item, sentinel)):
            return
        yield item


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


@means(map)
def builtin_map(tracer: Calls, function: Any, *parts: Any) -> Any:
    rows = zip(*[tracer.lazily(part) for part in parts])
    return (tracer.call(function, row, {}) for row in rows)


@means(filter)
def builtin_filter(tracer: Calls, function: Any, items: Any) -> Any:
    keep = bool if function is None else function
    return (item for item in tracer.lazily(items) if tracer.truth(tracer.call(keep, (item,), {})))


@means(reversed)
@unless_defined("__reversed__")
def builtin_reversed(tracer: Calls, value: Any) -> Any:
    if python_method(value, "__getitem__") is not None and not isinstance(value, dict):
        return (tracer.subscript(value, i) for i in range(tracer.length(value) - 1, -1, -1))
    return iter(tracer.items(value)[::-1])


@means(sum)
def builtin_sum(tracer: Calls, items: Any, start: Any = 0) -> Any:
    return functools.reduce(functools.partial(tracer.binary, "+"), tracer.lazily(items), start)


@means(functools.reduce)
def reduce(tracer: Calls, function: Any, items: Any, *first: Any) -> Any:
    def step(found: Any, item: Any) -> Any:
        return tracer.call(function, (found, item), {})

    return functools.reduce(step, tracer.lazily(items), *first)


def sort_keys(tracer: Calls, items: list[Any], key: Any) -> list[Any]:
    return items if key is None else [tracer.call(key, (item,), {}) for item in items]


@means(sorted)
def builtin_sorted(tracer: Calls, items: Any, **options: Any) -> list[Any]:
    found = tracer.items(items)
    list_sort(tracer, found, **options)
    return found


@means(list.sort)
def list_sort(tracer: Calls, items: Any, key: Any = None, reverse: Any = False) -> None:
    target = tracer.mutable(items)
    keys = sort_keys(tracer, target, key)
    if not all(map(is_constant, keys)):
        tracer.unsupported("own-equality", "values without a built-in order are sorted")
    order = sorted(range(len(keys)), key=keys.__getitem__, reverse=bool(reverse))
    target[:] = [target[i] for i in order]


def extreme(symbol: str, name: str) -> Callable[..., Any]:
    """min and max: the first item that no other beats."""

    def meaning(tracer: Calls, *args: Any, key: Any = None, default: Any = UNBOUND) -> Any:
        items = tracer.items(args[0]) if len(args) == 1 else list(args)
        if not items and default is UNBOUND:
            raise ValueError(f"{name}() arg is an empty sequence")
        if not items:
            return default
        keys, best = sort_keys(tracer, items, key), 0
        for index in range(1, len(items)):
            if tracer.truth(tracer.compare(symbol, keys[index], keys[best])):
                best = index
        return items[best]

    return meaning


means(min)(extreme("<", "min"))
means(max)(extreme(">", "max"))


# -- making containers


def container(kind: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tracer, items=(): kind(tracer.items(items))


for _kind in (list, tuple, set, frozenset):
    means(_kind)(container(_kind))
means(tuple.__new__)(lambda tracer, cls, items=(): tuple.__new__(cls, tracer.items(items)))


def pairs(tracer: Calls, /, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    """The items that `dict(...)` or `dict.update(...)` were given."""
    found: dict[Any, Any] = {}
    for source in args:
        if hasattr(type(source), "keys"):
            found.update(tracer.mapping(source))
        else:
            found.update(map(tracer.items, tracer.lazily(source)))  # type: ignore[arg-type]
    found.update(kwargs)
    return found


means(dict)(pairs)
means(collections.OrderedDict)(
    lambda tracer, /, *args, **kwargs: collections.OrderedDict(pairs(tracer, *args, **kwargs))
)
means(collections.defaultdict)(
    lambda tracer, factory=None, /, *args, **kwargs: collections.defaultdict(
        factory, pairs(tracer, *args, **kwargs)
    )
)


@means(dict.__init__, collections.OrderedDict.__init__)
@means(dict.update, collections.OrderedDict.update)
def dict_update(tracer: Calls, owner: Any, /, *args: Any, **kwargs: Any) -> None:
    for key, value in pairs(tracer, *args, **kwargs).items():
        tracer.store_dict_item(owner, key, value)


def dict_method(name: str) -> Callable[[Meaning], Meaning]:
    """A method of dict by what it does to an outside dict; on the frame's own it is Python's."""

    def register(outside: Meaning) -> Meaning:
        # what OrderedDict inherits is one method
        for native in {getattr(cls, name) for cls in (dict, collections.OrderedDict)}:

            def meaning(tracer: Calls, owner: Any, *args: Any, native: Any = native) -> Any:
                tracker = tracer.tracker(owner)
                key, *rest = [tracer.pinned(args[0]), *args[1:]] if args else [None]
                given = (key, *rest) if args else ()
                return (
                    native(owner, *given) if tracker is None else outside(tracer, tracker, *given)
                )

            means(native)(meaning)
        return outside

    return register


@dict_method("__contains__")
def dict_contains(tracer: Calls, owner: VariableTracker, key: Any) -> bool:
    return tracer.dict_get(owner, key) is not MISSING


@dict_method("get")
def dict_get(tracer: Calls, owner: VariableTracker, key: Any, default: Any = None) -> Any:
    found = tracer.dict_get(owner, key)
    return default if found is MISSING else found


@dict_method("pop")
def dict_pop(tracer: Calls, owner: VariableTracker, key: Any, default: Any = UNBOUND) -> Any:
    found = tracer.dict_get(owner, key)
    if found is MISSING and default is not UNBOUND:
        return default
    tracer.dict_delete(owner, key)
    return found


@dict_method("setdefault")
def dict_setdefault(tracer: Calls, owner: VariableTracker, key: Any, default: Any = None) -> Any:
    found = tracer.dict_get(owner, key)
    if found is not MISSING:
        return found
    tracer.dict_set(owner, key, default)
    return default


@dict_method("clear")
@dict_method("popitem")
def dict_clear(tracer: Calls, owner: VariableTracker, *last: Any) -> Any:
    return tracer.unsupported(
        *("outside-change", "a dict from outside is cleared"),
        "assign its keys one by one, or make the change outside",
    )


means(list.extend)(lambda tracer, target, items: tracer.mutable(target).extend(tracer.items(items)))
means(set.update)(
    lambda tracer, target, *others: tracer.mutable(target).update(*map(tracer.items, others))
)


# -- numbers and text


def number(kind: Callable[..., Any]) -> Callable[..., Any]:
    """int(x), float(x): of constants, and of objects that define the conversion in Python."""

    def meaning(tracer: Calls, *args: Any, **kwargs: Any) -> Any:
        value, name = args[0] if args else 0, f"__{kind.__name__}__"
        if isinstance(value, torch.Tensor):
            what = f"a tensor is turned into a Python number by {kind.__name__}()"
            tracer.unsupported("item", what)
        if len(args) == 1 and isinstance(value, SYMBOLIC):
            if (kind, type(value)) in ((int, torch.SymInt), (float, torch.SymFloat)):
                return value
            return tracer.computed(f"{kind.__name__}({{0}})", value, function=kind)
        if python_method(value, name) is not None:
            return tracer.call(tracer.special(value, name), (), {})
        return kind(*map(tracer.operand, args), **kwargs)

    return meaning


for _number in (int, float, complex):
    means(_number)(number(_number))


@means(str)
def builtin_str(tracer: Calls, *args: Any, **kwargs: Any) -> str:
    return tracer.convert(1, args[0]) if len(args) == 1 and not kwargs else str(*args, **kwargs)


@means(hash)
def builtin_hash(tracer: Calls, value: Any) -> int:
    if python_method(value, "__hash__") is not None:
        return int(tracer.call(tracer.special(value, "__hash__"), (), {}))
    if not is_constant(value):
        tracer.unsupported("memory-address", "hash() depends on memory addresses")
    return hash(tracer.pinned(value))


@means(abs)
@unless_defined("__abs__")
def builtin_abs(tracer: Calls, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tracer.torch_call(torch.abs, (value,), {})
    if isinstance(value, SYMBOLIC):
        return tracer.computed("abs({0})", value, function=abs)
    return abs(tracer.operand(value))


@means(round)
def builtin_round(tracer: Calls, value: Any, ndigits: Any = None) -> Any:
    if isinstance(value, torch.Tensor):
        decimals = {} if ndigits is None else {"decimals": ndigits}
        return tracer.torch_call(torch.round, (value,), decimals)
    if isinstance(value, SYMBOLIC) and ndigits is None:
        return tracer.computed("round({0})", value, function=round)
    return round(*map(tracer.pinned, (tracer.operand(value), tracer.operand(ndigits))))
