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

from minicompile.dynamo.calls import OPERATOR_SYMBOLS, CallRule, Calls, call_rules
from minicompile.dynamo.containers import SYMBOLIC, python_method
from minicompile.dynamo.interpreter import UNARY, TracedGenerator
from minicompile.dynamo.variables import MISSING, is_constant

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
refuse(
    "the frame's variables are inspected",
    "",
    locals,
    vars,
    sys._getframe,
    inspect.currentframe,
    inspect.stack,
)
refuse("id() depends on memory addresses", "compare with `is` instead", id)
refuse(
    "a log message is written",
    "log outside of the compiled function",
    *(
        logging.Logger.debug,
        logging.Logger.info,
        logging.Logger.warning,
        logging.Logger.error,
        logging.Logger.critical,
    ),
    *(logging.Logger.log, logging.Logger.exception),
)


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


@call_rules(setattr)
def builtin_setattr(tracer: Calls, args: Args, kwargs: Kwargs) -> None:
    tracer.store_attr(*args)


@call_rules(delattr)
def builtin_delattr(tracer: Calls, args: Args, kwargs: Kwargs) -> None:
    tracer.delete_attr(*args)


@call_rules(object.__getattribute__)
def object_getattribute(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return tracer.generic_attribute(*args)


@call_rules(object.__setattr__)
def object_setattr(tracer: Calls, args: Args, kwargs: Kwargs) -> None:
    tracer.generic_store(*args)


@call_rules(object.__delattr__)
def object_delattr(tracer: Calls, args: Args, kwargs: Kwargs) -> None:
    tracer.generic_delete(*args)


@call_rules(object.__init__, object.__init_subclass__)
def object_init(tracer: Calls, args: Args, kwargs: Kwargs) -> None:
    return None


@call_rules(type)
def builtin_type(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    if len(args) == 1:
        return tracer.type_of(args[0])
    return type(*args, **kwargs)


@call_rules(super)
def builtin_super(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return super(*args) if args else tracer.zero_argument_super()


@call_rules(builtins.__build_class__)
def build_class(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return tracer.build_class(args, kwargs)


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


@call_rules(callable)
def builtin_callable(tracer: Calls, args: Args, kwargs: Kwargs) -> bool:
    return callable(args[0])


# -- iteration


@call_rules(len)
def builtin_len(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return tracer.length(args[0])


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


@call_rules(zip)
def builtin_zip(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return zip(*[lazily(tracer, arg) for arg in args], **kwargs)


@call_rules(enumerate)
def builtin_enumerate(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return enumerate(lazily(tracer, args[0]), *args[1:], **kwargs)


@call_rules(map)
def builtin_map(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return (
        tracer.call(args[0], items, {}) for items in zip(*[lazily(tracer, a) for a in args[1:]])
    )


@call_rules(filter)
def builtin_filter(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    function, items = args
    if function is None:
        return (item for item in lazily(tracer, items) if tracer.truth(item))
    return (
        item for item in lazily(tracer, items) if tracer.truth(tracer.call(function, (item,), {}))
    )


@call_rules(reversed)
def builtin_reversed(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    if python_method(args[0], "__reversed__") is not None:
        return tracer.call(tracer.special(args[0], "__reversed__"), (), {})
    if isinstance(args[0], dict):
        return iter(tracer.items(args[0])[::-1])
    if python_method(args[0], "__getitem__") is not None:
        size = tracer.length(args[0])
        return (tracer.subscript(args[0], i) for i in range(size - 1, -1, -1))
    return iter(tracer.items(args[0])[::-1])


@call_rules(any)
def builtin_any(tracer: Calls, args: Args, kwargs: Kwargs) -> bool:
    return any(tracer.truth(item) for item in lazily(tracer, args[0]))


@call_rules(all)
def builtin_all(tracer: Calls, args: Args, kwargs: Kwargs) -> bool:
    return all(tracer.truth(item) for item in lazily(tracer, args[0]))


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
    order = sorted(
        range(len(keys)), key=lambda i: keys[i], reverse=bool(kwargs.get("reverse", False))
    )
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
        best, best_key = items[0], items[0] if key is None else tracer.call(key, (items[0],), {})
        for item in items[1:]:
            item_key = item if key is None else tracer.call(key, (item,), {})
            if tracer.truth(tracer.compare(symbol, item_key, best_key)):
                best, best_key = item, item_key
        return best

    return rule


call_rules(min)(extreme("<", "min"))
call_rules(max)(extreme(">", "max"))


# -- making containers


@call_rules(list)
def builtin_list(tracer: Calls, args: Args, kwargs: Kwargs) -> list[Any]:
    return tracer.items(args[0]) if args else []


@call_rules(tuple)
def builtin_tuple(tracer: Calls, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    return tuple(tracer.items(args[0])) if args else ()


@call_rules(tuple.__new__)
def tuple_new(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return tuple.__new__(args[0], tracer.items(args[1]) if len(args) > 1 else ())


@call_rules(set)
def builtin_set(tracer: Calls, args: Args, kwargs: Kwargs) -> set[Any]:
    return set(tracer.items(args[0])) if args else set()


@call_rules(frozenset)
def builtin_frozenset(tracer: Calls, args: Args, kwargs: Kwargs) -> frozenset[Any]:
    return frozenset(tracer.items(args[0])) if args else frozenset()


def pairs(tracer: Calls, args: Args, kwargs: Kwargs) -> dict[Any, Any]:
    """The items that `dict(...)` or `dict.update(...)` were given."""
    found: dict[Any, Any] = {}
    if args:
        source = args[0]
        if (
            isinstance(source, dict)
            or python_method(source, "keys") is not None
            or hasattr(type(source), "keys")
        ):
            found.update(tracer.mapping(source))
        else:
            for pair in lazily(tracer, source):
                key, value = tracer.items(pair)
                found[key] = value
    found.update(kwargs)
    return found


@call_rules(dict)
def builtin_dict(tracer: Calls, args: Args, kwargs: Kwargs) -> dict[Any, Any]:
    return pairs(tracer, args, kwargs)


@call_rules(collections.OrderedDict)
def ordered_dict(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return collections.OrderedDict(pairs(tracer, args, kwargs))


@call_rules(collections.defaultdict)
def default_dict(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return collections.defaultdict(args[0] if args else None, pairs(tracer, args[1:], kwargs))


@call_rules(
    dict.__init__, collections.OrderedDict.__init__, dict.update, collections.OrderedDict.update
)
def dict_update(tracer: Calls, args: Args, kwargs: Kwargs) -> None:
    for key, value in pairs(tracer, args[1:], kwargs).items():
        tracer.store_dict_item(args[0], key, value)


@call_rules(dict.__getitem__, collections.OrderedDict.__getitem__)
def dict_getitem(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return tracer.dict_item(*args)


@call_rules(dict.__setitem__, collections.OrderedDict.__setitem__)
def dict_setitem(tracer: Calls, args: Args, kwargs: Kwargs) -> None:
    tracer.store_dict_item(*args)


@call_rules(dict.__contains__, collections.OrderedDict.__contains__)
def dict_contains(tracer: Calls, args: Args, kwargs: Kwargs) -> bool:
    tracker = tracer.tracker(args[0])
    return (
        dict.__contains__(*args)
        if tracker is None
        else tracer.dict_get(tracker, args[1]) is not MISSING
    )


@call_rules(dict.get, collections.OrderedDict.get)
def dict_get(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    owner, key, *default = args
    tracker = tracer.tracker(owner)
    found = tracer.dict_get(tracker, key) if tracker is not None else dict.get(owner, key, MISSING)
    return found if found is not MISSING else default[0] if default else None


@call_rules(dict.pop, collections.OrderedDict.pop)
def dict_pop(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    owner, key, *default = args
    tracker = tracer.tracker(owner)
    if tracker is None:
        return dict.pop(owner, key, *default) if type(owner) is dict else owner.pop(key, *default)
    found = tracer.dict_get(tracker, key)
    if found is MISSING:
        if default:
            return default[0]
        raise KeyError(key)
    tracer.dict_delete(tracker, key)
    return found


@call_rules(dict.setdefault, collections.OrderedDict.setdefault)
def dict_setdefault(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    owner, key, *default = args
    found = dict_get(tracer, (owner, key, MISSING), {})
    if found is MISSING:
        found = default[0] if default else None
        tracer.store_dict_item(owner, key, found)
    return found


@call_rules(
    dict.clear, dict.popitem, collections.OrderedDict.clear, collections.OrderedDict.popitem
)
def dict_clear(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    if tracer.tracker(args[0]) is None:
        return (
            tracer.unsupported("a dict subclass is cleared")
            if type(args[0]).__flags__ & 512 == 0
            else args[0].clear()
        )
    return tracer.unsupported(
        "a dict from outside is cleared", "assign its keys one by one, or make the change outside"
    )


@call_rules(list.__iadd__, list.extend)
def list_extend(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    tracer.mutable(args[0]).extend(tracer.items(args[1]))
    return None


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


@call_rules(bool)
def builtin_bool(tracer: Calls, args: Args, kwargs: Kwargs) -> bool:
    return tracer.truth(args[0]) if args else False


@call_rules(str)
def builtin_str(tracer: Calls, args: Args, kwargs: Kwargs) -> str:
    return tracer.convert(1, args[0]) if len(args) == 1 and not kwargs else str(*args, **kwargs)


@call_rules(repr)
def builtin_repr(tracer: Calls, args: Args, kwargs: Kwargs) -> str:
    return tracer.convert(2, args[0])


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
        return tracer.torch_call(
            torch.round, (args[0],), {"decimals": args[1]} if len(args) > 1 else {}
        )
    return round(*map(tracer.operand, args), **kwargs)


@call_rules(divmod)
def builtin_divmod(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return tracer.binary("//", *args), tracer.binary("%", *args)


@call_rules(pow)
def builtin_pow(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return tracer.binary("**", *args) if len(args) == 2 else pow(*args)


def operator_rule(symbol: str) -> CallRule:
    def rule(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
        compares = symbol in ("<", "<=", "==", "!=", ">", ">=")
        return tracer.compare(symbol, *args) if compares else tracer.binary(symbol, *args)

    return rule


for _function, _symbol in OPERATOR_SYMBOLS.items():
    call_rules(_function)(operator_rule(_symbol))


def unary_rule(symbol: str) -> CallRule:
    return lambda tracer, args, kwargs: tracer.unary(symbol, args[0])


for _symbol, _unary in UNARY.items():
    call_rules(_unary)(unary_rule(_symbol))

call_rules(operator.getitem)(lambda tracer, args, kwargs: tracer.subscript(*args))
call_rules(operator.setitem)(lambda tracer, args, kwargs: tracer.store_subscript(*args))
call_rules(operator.delitem)(lambda tracer, args, kwargs: tracer.delete_subscript(*args))
call_rules(operator.contains)(lambda tracer, args, kwargs: tracer.contains(*args))
call_rules(operator.truth)(lambda tracer, args, kwargs: tracer.truth(args[0]))
call_rules(operator.not_)(lambda tracer, args, kwargs: not tracer.truth(args[0]))
call_rules(operator.is_)(lambda tracer, args, kwargs: tracer.same(*args))
call_rules(operator.is_not)(lambda tracer, args, kwargs: not tracer.same(*args))
