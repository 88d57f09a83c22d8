"""Rules for Python's builtins and a few standard-library functions.

Plug-in point: `@call_rules(function)` on `(tracer, args, kwargs) -> value`; it may replace any of these.
The real compiler: torch/_dynamo/variables/builtin.py, polyfills/.
"""

from __future__ import annotations

import builtins
import collections
import functools
import inspect
import logging
import operator
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minicompile.dynamo.calls import CallRule, Calls, call_rules
from minicompile.dynamo.containers import SYMBOLIC, python_method
from minicompile.dynamo.interpreter import BINARY, COMPARE, UNARY, TracedGenerator
from minicompile.dynamo.variables import MISSING, VariableTracker, is_constant

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def refuse(reason: str, hint: str, *functions: Any) -> None:
    """Calls that run the frame in eager, with a reason of their own."""

    def rule(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
        return tracer.unsupported(reason, hint)

    call_rules(*functions)(rule)


refuse("print writes to the terminal", "print outside of the compiled function", print)
refuse("a warning is issued", "warn outside of the compiled function", warnings.warn)
refuse("a file is opened", "read it before the call", open)
refuse("input() asks the user", "", input)
refuse("code is evaluated from text", "", exec, eval, compile)
refuse("id() depends on memory addresses", "compare with `is` instead", id)
refuse(
    "the frame's variables are inspected",
    "",
    *(locals, vars, sys._getframe, inspect.currentframe, inspect.stack),
)
refuse(
    "a log message is written",
    "log outside of the compiled function",
    *(logging.Logger.debug, logging.Logger.info, logging.Logger.warning, logging.Logger.error),
    *(logging.Logger.critical, logging.Logger.log, logging.Logger.exception),
)


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

call_rules(operator.not_)(lambda tracer, args, kwargs: not tracer.truth(args[0]))
call_rules(operator.is_not)(lambda tracer, args, kwargs: not tracer.same(*args))
call_rules(bool)(lambda tracer, args, kwargs: bool(args) and tracer.truth(args[0]))


# -- attributes and types


@call_rules(getattr)
def builtin_getattr(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    value, name, *default = args
    if not default:
        return tracer.load_attr(value, name)
    try:
        return tracer.load_attr(value, name)
    except AttributeError:
        if tracer.abort is not None:
            raise
        return default[0]


@call_rules(hasattr)
def builtin_hasattr(tracer: Calls, args: Args, kwargs: Kwargs) -> bool:
    return builtin_getattr(tracer, (*args, MISSING), {}) is not MISSING


call_rules(object.__init__, object.__init_subclass__)(lambda tracer, args, kwargs: None)
call_rules(builtins.__build_class__)(lambda tracer, args, kwargs: tracer.build_class(args, kwargs))
call_rules(callable)(lambda tracer, args, kwargs: callable(args[0]))


@call_rules(type)
def builtin_type(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1:
        return tracer.type_of(args[0])
    return type(*args, **kwargs)


@call_rules(super)
def builtin_super(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return super(*args) if args else tracer.zero_argument_super()


def class_list(tracer: Calls, classes: Any) -> Any:
    """The second argument of isinstance, tuples flattened."""
    if isinstance(classes, tuple):
        return tuple(class_list(tracer, cls) for cls in tracer.imported(classes))
    return classes


@call_rules(isinstance)
def builtin_isinstance(tracer: Calls, args: Args, kwargs: Kwargs) -> bool:
    value, classes = args[0], class_list(tracer, args[1])
    if isinstance(value, torch.SymInt):
        return issubclass(int, classes)
    if isinstance(value, TracedGenerator):
        return issubclass(types.GeneratorType, classes)
    return isinstance(value, classes)


@call_rules(issubclass)
def builtin_issubclass(tracer: Calls, args: Args, kwargs: Kwargs) -> bool:
    return issubclass(args[0], class_list(tracer, args[1]))


# -- iteration


@call_rules(iter)
def builtin_iter(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1:
        return tracer.iterate(args[0])
    function, sentinel = args
    return until(tracer, function, sentinel)


def until(tracer: Calls, function: Any, sentinel: Any) -> Iterator[Any]:
    while True:
        item = tracer.call(function, (), {})
        if tracer.truth(tracer.compare("==", item, sentinel)):
            return
        yield item


@call_rules(next)
def builtin_next(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    try:
        return tracer.advance(args[0])
    except StopIteration:
        if len(args) == 1:
            raise
        return args[1]


def lazily(tracer: Calls, value: Any) -> Iterator[Any]:
    """An iterator whose steps the interpreter runs."""
    iterator = tracer.iterate(value)
    while True:
        try:
            item = tracer.advance(iterator)
        except StopIteration:
            return
        yield item


call_rules(zip)(lambda tracer, args, kwargs: zip(*[lazily(tracer, a) for a in args], **kwargs))
call_rules(enumerate)(
    lambda tracer, args, kwargs: enumerate(lazily(tracer, args[0]), *args[1:], **kwargs)
)
call_rules(any)(lambda tracer, args, kwargs: any(map(tracer.truth, lazily(tracer, args[0]))))
call_rules(all)(lambda tracer, args, kwargs: all(map(tracer.truth, lazily(tracer, args[0]))))


@call_rules(map)
def builtin_map(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    rows = zip(*[lazily(tracer, arg) for arg in args[1:]])
    return (tracer.call(args[0], row, {}) for row in rows)


@call_rules(filter)
def builtin_filter(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    function = bool if args[0] is None else args[0]
    items = lazily(tracer, args[1])
    return (item for item in items if tracer.truth(tracer.call(function, (item,), {})))


@call_rules(reversed)
def builtin_reversed(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    if python_method(value, "__reversed__") is not None:
        return tracer.call(tracer.special(value, "__reversed__"), (), {})
    if python_method(value, "__getitem__") is not None and not isinstance(value, dict):
        return (tracer.subscript(value, i) for i in range(tracer.length(value) - 1, -1, -1))
    return iter(tracer.items(value)[::-1])


@call_rules(sum)
def builtin_sum(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    items, start = args[0], args[1] if len(args) > 1 else kwargs.get("start", 0)
    for item in lazily(tracer, items):
        start = tracer.binary("+", start, item)
    return start


@call_rules(functools.reduce)
def reduce(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    function, items = args[0], lazily(tracer, args[1])
    found = args[2] if len(args) > 2 else next(items, MISSING)
    if found is MISSING:
        raise TypeError("reduce() of empty iterable with no initial value")
    for item in items:
        found = tracer.call(function, (found, item), {})
    return found


@call_rules(sorted)
def builtin_sorted(tracer: Calls, args: Args, kwargs: Kwargs) -> list[Any]:
    items = tracer.items(args[0])
    tracer.call(list.sort, (items,), kwargs)
    return items


@call_rules(list.sort)
def list_sort(tracer: Calls, args: Args, kwargs: Kwargs) -> None:
    target = tracer.mutable(args[0])
    key = kwargs.get("key")
    keys = target if key is None else [tracer.call(key, (item,), {}) for item in target]
    if not all(map(is_constant, keys)):
        tracer.unsupported("values without a built-in order are sorted")
    descending = bool(kwargs.get("reverse", False))
    order = sorted(range(len(keys)), key=lambda i: keys[i], reverse=descending)
    target[:] = [target[i] for i in order]


def extreme(symbol: str, name: str) -> CallRule:
    """min and max: the first item that no other beats."""

    def rule(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
        items = tracer.items(args[0]) if len(args) == 1 else list(args)
        if not items:
            if "default" in kwargs:
                return kwargs["default"]
            raise ValueError(f"{name}() arg is an empty sequence")
        key = kwargs.get("key")
        keys = items if key is None else [tracer.call(key, (item,), {}) for item in items]
        best = 0
        for index in range(1, len(items)):
            if tracer.truth(tracer.compare(symbol, keys[index], keys[best])):
                best = index
        return items[best]

    return rule


call_rules(min)(extreme("<", "min"))
call_rules(max)(extreme(">", "max"))


# -- making containers


def container(kind: Callable[..., Any]) -> CallRule:
    return lambda tracer, args, kwargs: kind(tracer.items(args[0])) if args else kind()


for _kind in (list, tuple, set, frozenset):
    call_rules(_kind)(container(_kind))


@call_rules(tuple.__new__)
def tuple_new(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return tuple.__new__(args[0], tracer.items(args[1]) if len(args) > 1 else ())


def pairs(tracer: Calls, args: Args, kwargs: Kwargs) -> dict[Any, Any]:
    """The items that `dict(...)` or `dict.update(...)` were given."""
    found: dict[Any, Any] = {}
    if args:
        source = args[0]
        if hasattr(type(source), "keys"):
            found.update(tracer.mapping(source))
        else:
            for pair in lazily(tracer, source):
                key, value = tracer.items(pair)
                found[key] = value
    found.update(kwargs)
    return found


call_rules(dict)(pairs)
call_rules(collections.OrderedDict)(
    lambda tracer, args, kwargs: collections.OrderedDict(pairs(tracer, args, kwargs))
)


@call_rules(collections.defaultdict)
def default_dict(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return collections.defaultdict(args[0] if args else None, pairs(tracer, args[1:], kwargs))


@call_rules(
    dict.__init__, collections.OrderedDict.__init__, dict.update, collections.OrderedDict.update
)
def dict_update(tracer: Calls, args: Args, kwargs: Kwargs) -> None:
    for key, value in pairs(tracer, args[1:], kwargs).items():
        tracer.store_dict_item(args[0], key, value)


def dict_method(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method of dict by what it does to an outside dict; on the frame's own it is Python's."""

    def register(outside: Callable[..., Any]) -> Callable[..., Any]:
        for cls in (dict, collections.OrderedDict):
            native = getattr(cls, name)

            def rule(tracer: Calls, args: Args, kwargs: Kwargs, native: Any = native) -> Any:
                tracker = tracer.tracker(args[0])
                if tracker is None:
                    return native(*args, **kwargs)
                return outside(tracer, tracker, *args[1:], **kwargs)

            call_rules(native)(rule)
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
def dict_pop(tracer: Calls, owner: VariableTracker, key: Any, default: Any = MISSING) -> Any:
    found = tracer.dict_get(owner, key)
    if found is not MISSING or default is MISSING:
        tracer.dict_delete(owner, key)
        return found
    return default


@dict_method("setdefault")
def dict_setdefault(tracer: Calls, owner: VariableTracker, key: Any, default: Any = None) -> Any:
    found = tracer.dict_get(owner, key)
    if found is MISSING:
        tracer.dict_set(owner, key, default)
        return default
    return found


@dict_method("clear")
@dict_method("popitem")
def dict_clear(tracer: Calls, owner: VariableTracker, last: bool = True) -> Any:
    return tracer.unsupported(
        "a dict from outside is cleared", "assign its keys one by one, or make the change outside"
    )


@call_rules(list.extend)
def list_extend(tracer: Calls, args: Args, kwargs: Kwargs) -> None:
    tracer.mutable(args[0]).extend(tracer.items(args[1]))


@call_rules(set.update)
def set_update(tracer: Calls, args: Args, kwargs: Kwargs) -> None:
    for other in args[1:]:
        tracer.mutable(args[0]).update(tracer.items(other))


# -- numbers and text


def number(kind: Callable[..., Any], name: str) -> CallRule:
    """int(x), float(x): of constants, and of objects that define the conversion in Python."""

    def rule(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            tracer.unsupported(
                f"a tensor is turned into a Python number by {kind.__name__}()",
                "keep it a tensor, or compute it outside of the compiled function",
            )
        if len(args) == 1 and isinstance(args[0], SYMBOLIC):
            return args[0] if kind is int and isinstance(args[0], torch.SymInt) else kind(args[0])
        if args and python_method(args[0], name) is not None:
            return tracer.call(tracer.special(args[0], name), (), {})
        return kind(*map(tracer.operand, args), **kwargs)

    return rule


call_rules(int)(number(int, "__int__"))
call_rules(float)(number(float, "__float__"))
call_rules(complex)(number(complex, "__complex__"))


@call_rules(str)
def builtin_str(tracer: Calls, args: Args, kwargs: Kwargs) -> str:
    return tracer.convert(1, args[0]) if len(args) == 1 and not kwargs else str(*args, **kwargs)


@call_rules(format)
def builtin_format(tracer: Calls, args: Args, kwargs: Kwargs) -> str:
    return tracer.format(args[0], args[1] if len(args) > 1 else "")


@call_rules(hash)
def builtin_hash(tracer: Calls, args: Args, kwargs: Kwargs) -> int:
    if python_method(args[0], "__hash__") is not None:
        return int(tracer.call(tracer.special(args[0], "__hash__"), (), {}))
    if not is_constant(args[0]):
        tracer.unsupported("hash() depends on memory addresses")
    return hash(args[0])


@call_rules(abs)
def builtin_abs(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], torch.Tensor):
        return tracer.torch_call(torch.abs, args, {})
    if isinstance(args[0], torch.SymInt):
        return args[0] if args[0] >= 0 else -args[0]
    if python_method(args[0], "__abs__") is not None:
        return tracer.call(tracer.special(args[0], "__abs__"), (), {})
    return abs(tracer.operand(args[0]))


@call_rules(round)
def builtin_round(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    if isinstance(args[0], torch.Tensor):
        decimals = {"decimals": args[1]} if len(args) > 1 else {}
        return tracer.torch_call(torch.round, args[:1], decimals)
    return round(*map(tracer.operand, args), **kwargs)


call_rules(divmod)(
    lambda tracer, args, kwargs: (tracer.binary("//", *args), tracer.binary("%", *args))
)
call_rules(pow)(
    lambda tracer, args, kwargs: tracer.binary("**", *args) if len(args) == 2 else pow(*args)
)
