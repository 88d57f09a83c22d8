"""Subscripts, iteration, `in`, truth and operators on tensors, on objects that the frame was given (outside)
and that it made (inside).

A tensor operand makes a graph node; an outside container is read through an inside copy of it (which guards
what was read); classes that define the operation in Python have it interpreted; everything else is Python's
own.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar, cast

import torch

from minicompile.dynamo.attributes import Attributes
from minicompile.dynamo.interpreter import (
    BINARY,
    COMPARE,
    METHOD_OF,
    UNARY,
    Operation,
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


Method = TypeVar("Method", bound=Callable[..., Any])


def unless_defined(name: str) -> Callable[[Method], Method]:
    """The operation is the method `name` where a value's class defines it in Python."""

    def decorate(operation: Method) -> Method:
        @functools.wraps(operation)
        def run(self: Containers, value: Any, *args: Any) -> Any:
            if python_method(value, name) is None:
                return operation(self, value, *args)
            return self.call(self.special(value, name), args, {})

        return cast(Method, run)

    return decorate


class Containers(Attributes):
    """Operations of the expression language other than calls."""

    torch_call: Operation
    """Record a torch call; `calls.py` says how."""

    # -- copies for native code

    def deep(self, value: Any) -> Any:
        """A value for native code to read: outside containers become inside copies, all the way down."""
        if isinstance(value, torch.Tensor) or is_constant(value):
            return value
        if builtin_base(value) is None:
            return value
        inside = self.imported(value)
        if isinstance(inside, set | frozenset):
            return inside
        before = raw_items(inside)
        if isinstance(inside, dict):
            items = [(key, self.deep(item)) for key, item in before]
            same = all(ours[1] is theirs[1] for ours, theirs in zip(items, before, strict=True))
        else:
            items = list(map(self.deep, before))
            same = all(map(operator.is_, items, before))
        return inside if same else refilled(inside, items)

    def check_overrides(self, value: Any, names: Collection[str] = OVERRIDES) -> None:
        """C code runs methods of OrderedDict and defaultdict that a subclass defines in Python."""
        methods = (python_method(value, name) for name in names)
        # the text of named tuples and of Counter depends on their items alone
        pure = "collections" if "__repr__" in names else None
        if any(method is not None and method.__module__ != pure for method in methods):
            what = "C code would run methods that {} defines"
            self.unsupported_kind("outside-object", what, value)

    # -- subscripts

    @unless_defined("__getitem__")
    def subscript(self, value: Any, key: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.torch_call(operator.getitem, self.selected(value, self.deep(key)), {})
        if isinstance(value, dict):
            return self.dict_item(value, key)
        if not isinstance(key, int) and python_method(key, "__index__") is not None:
            key = self.call(self.special(key, "__index__"), (), {})
        if isinstance(key, torch.Tensor):
            self.unsupported("tensor-as-index", "a tensor indexes a Python container")
        if self.tracker(value) is None:
            if python_method(value, "__getitem__") is None:
                return value[key]
            return raw_base(value).__getitem__(value, key)  # that method asks for it
        if isinstance(value, list | tuple):
            return self.sequence_item(value, key)
        if isinstance(value, type):
            return value[key]  # type: ignore[index]
        return self.unsupported_kind("outside-object", "a {} from outside is subscripted", value)

    def selected(self, tensor: Any, key: Any) -> tuple[Any, Any]:
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
                tensor = self.torch_call(torch.Tensor.select, (tensor, dim, parts.pop(dim)), {})
        return tensor, tuple(parts) or ...

    def sequence_item(self, value: Any, key: Any) -> Any:
        tracker = self.tracker(value)
        assert tracker is not None
        base: Any = list if isinstance(value, list) else tuple
        if tracker.contents is not None or tracker.appended or isinstance(key, slice):
            return base.__getitem__(self.inside(value), key)
        size = base.__len__(value)
        self.guard("length", tracker.source, size, "an item is read by position")
        found = base.__getitem__(value, key)  # may raise IndexError
        return self.wrap(found, Source("item", range(size)[key], tracker.source))

    def dict_item(self, value: Any, key: Any) -> Any:
        """`dict.__getitem__`, with `__missing__` and default factories."""
        found = self.dict_find(value, key)
        if found is not MISSING:
            return found
        if python_method(value, "__missing__") is not None:
            return self.call(self.special(value, "__missing__"), (key,), {})
        if isinstance(value, collections.defaultdict):
            return self.default_item(value, key)
        raise KeyError(key)

    def default_item(self, value: collections.defaultdict[Any, Any], key: Any) -> Any:
        """Make and store a missing item as `defaultdict.__missing__` does."""
        factory = self.below(value, "slot", "default_factory", FACTORY.__get__(value))
        if factory is None:
            raise KeyError(key)
        made = self.call(factory, (), {})
        self.store_subscript(value, key, made)
        return made

    def dict_find(self, value: dict[Any, Any], key: Any) -> Any:
        """A dict's item, MISSING if it has none."""
        tracker, key = self.tracker(value), self.pinned(key)
        return dict.get(value, key, MISSING) if tracker is None else self.dict_get(tracker, key)

    @unless_defined("__setitem__")
    def store_subscript(self, value: Any, key: Any, new: Any) -> None:
        if isinstance(value, torch.Tensor):
            place = self.selected(value, self.deep(key))
            self.torch_call(operator.setitem, (*place, self.deep(new)), {})
        elif isinstance(value, dict):
            self.store_dict_item(value, key, new)
        elif isinstance(value, list):
            items = self.items(new) if isinstance(key, slice) else new
            list.__setitem__(self.mutable(value), key, items)
        elif self.tracker(value) is None:
            value[key] = new
        else:
            self.unsupported_kind("outside-change", "an item of a {} from outside is set", value)

    def store_dict_item(self, value: dict[Any, Any], key: Any, new: Any) -> None:
        tracker, key = self.tracker(value), self.pinned(key)
        if tracker is not None:
            self.dict_set(tracker, key, new)
        else:
            raw_base(value).__setitem__(value, key, new)

    @unless_defined("__delitem__")
    def delete_subscript(self, value: Any, key: Any) -> None:
        tracker, key = self.tracker(value), self.pinned(key)
        if isinstance(value, list):
            list.__delitem__(self.mutable(value), key)
        elif tracker is None:
            raw = isinstance(value, dict)
            raw_base(value).__delitem__(value, key) if raw else operator.delitem(value, key)
        elif isinstance(value, dict):
            self.dict_delete(tracker, key)
        else:
            self.unsupported_kind("outside-change", "an item of a {} is deleted", value)

    # -- iteration

    @unless_defined("__iter__")
    def iterate(self, value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            return iter(self.torch_call(torch.Tensor.unbind, (value,), {}))
        base = raw_base(value)
        if base is not None:
            iterator: Iterator[Any] = base.__iter__(self.inside(value))
            return iterator
        if python_method(value, "__getitem__") is not None:
            return self.by_position(value)
        if self.tracker(value) is not None:
            self.unsupported_kind("outside-object", "iteration over a {} from outside", value)
        return iter(value)

    def by_position(self, value: Any) -> Iterator[Any]:
        """Iterate as Python does where a class defines `__getitem__` alone."""
        with contextlib.suppress(IndexError):
            for index in itertools.count():
                yield self.subscript(value, index)

    @unless_defined("__next__")
    def advance(self, iterator: Any) -> Any:
        if self.tracker(iterator) is not None:
            self.unsupported("iterator-from-outside", "an iterator made outside is advanced")
        return next(iterator)

    def items(self, value: Any) -> list[Any]:
        if type(value) in (list, tuple) and self.tracker(value) is None:
            return list(value)
        return list(self.lazily(value))

    def lazily(self, value: Any) -> Iterator[Any]:
        """An iterator for native code whose steps the interpreter runs."""
        iterator = self.iterate(value)
        if self.tracker(iterator) is None and python_method(iterator, "__next__") is None:
            return iterator
        return self.steps(iterator)

    def steps(self, iterator: Any) -> Iterator[Any]:
        while True:
            try:
                item = self.advance(iterator)
            except StopIteration:
                return
            yield item

    def mapping(self, value: Any) -> dict[Any, Any]:
        if isinstance(value, dict) and find(type(value), "__iter__") is DICT_ITER:
            return dict(raw_items(self.inside(value)))  # as CPython: whatever else is overridden
        keys = self.items(self.call(self.load_attr(value, "keys"), (), {}))
        return {key: self.subscript(value, key) for key in keys}

    # -- membership and truth

    def contains(self, container: Any, item: Any) -> bool:
        if python_method(container, "__contains__") is not None:
            return self.truth(self.call(self.special(container, "__contains__"), (item,), {}))
        return self.holds(container, item)

    def holds(self, container: Any, item: Any) -> bool:
        """`in` as C code defines it."""
        if isinstance(container, torch.Tensor):
            self.unsupported("branch-on-tensor", "`in` on a tensor needs its data")
        if isinstance(container, dict):
            return self.dict_find(container, item) is not MISSING
        if isinstance(container, list | tuple):
            return any(self.equal(other, item) for other in raw_items(self.inside(container)))
        if isinstance(container, set | frozenset):
            if self.tracker(container) is not None:
                self.check_key(item)
            inside, base = self.inside(container), raw_base(container)
            return bool(base.__contains__(inside, self.pinned(item)))
        by_python = map(python_method, (container, container), ("__iter__", "__getitem__"))
        if isinstance(container, TracedGenerator) or any(by_python):
            return any(self.equal(other, item) for other in self.items(container))
        if self.tracker(container) is None:
            return item in container
        return self.unsupported_kind("outside-object", "`in` on a {} from outside", container)

    def equal(self, left: Any, right: Any) -> bool:
        """Whether a container takes two items for the same."""
        return left is right or self.truth(self.compare("==", left, right))

    @unless_defined("__len__")
    def length(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.ndim == 0:
                raise TypeError("len() of a 0-d tensor")
            return value.shape[0]
        tracker, base = self.tracker(value), raw_base(value)
        if tracker is None:
            return len(value) if base is None else base.__len__(value)
        if base is None:
            return self.unsupported_kind("outside-object", "len() of a {} from outside", value)
        if tracker.contents is not None or tracker.appended:
            return base.__len__(self.inside(value))
        if tracker.writes:
            return len(self.dict_keys(tracker))
        size = base.__len__(value)
        self.guard("length", tracker.source, size, "its length is read")
        return size

    def raises_if(self, truth: bool) -> bool:
        """Whether this truth of the condition of an `if` leads to a `raise`."""
        assert self.frame is not None
        program, jump, after = self.frame.program, self.frame.current, self.frame.pc
        if jump.opname == "TO_BOOL":
            jump, after = program.instructions[after], after + 1
        if jump.opname not in ("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE"):
            return False
        return program.raises(jump.target if jump.opname.endswith(str(truth).upper()) else after)

    def branch(self, condition: torch.Tensor) -> bool:
        """The way that is left where Python branches on a tensor's data and the other way raises.

        The graph raises if that other way is the right one, and then the frame runs in eager. A GPU's kernel
        can't raise such that the program may go on.
        """
        plain = condition.dtype is torch.bool and condition.dim() == 0
        if plain and condition.device.type == "cpu" and not self.recorder.open:
            for truth in (True, False):
                if self.raises_if(truth):
                    self.recorder.require(condition, not truth)
                    return not truth
        return self.unsupported("branch-on-tensor", "Python branches on a tensor's data")

    def truth(self, value: Any) -> bool:
        if value is True or value is False or value is None:
            return bool(value)
        if isinstance(value, torch.Tensor):
            return self.branch(value)
        if isinstance(value, torch.SymFloat):
            return bool(self.computed("bool({0})", value, function=bool))
        if is_constant(value) or isinstance(value, type | types.FunctionType | types.ModuleType):
            return bool(value)
        if python_method(value, "__bool__") is not None:
            return bool(self.call(self.special(value, "__bool__"), (), {}))
        if builtin_base(value) is not None or python_method(value, "__len__") is not None:
            return bool(self.length(value))
        cls = type(value)
        always_true = not hasattr(cls, "__bool__") and not hasattr(cls, "__len__")
        if self.tracker(value) is not None and not always_true:
            self.unsupported_kind("outside-object", "the truth of a {} from outside", value)
        return bool(value)

    # -- operators

    def binary(self, symbol: str, left: Any, right: Any) -> Any:
        if type(left) in (int, float, str) and type(right) in (int, float, str) and symbol != "%":
            return BINARY[symbol](left, right)
        plain = symbol.removesuffix("=")
        tensors = [isinstance(value, torch.Tensor) for value in (left, right)]
        if any(tensors) and not self.has_operators(right if tensors[0] else left):
            function = BINARY[symbol if tensors[0] else plain]
            return self.torch_call(function, (left, right), {})
        if isinstance(left, SYMBOLIC) or isinstance(right, SYMBOLIC):
            if isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
                return self.number_operator(plain, left, right)
            left, right = self.pinned(left), self.pinned(right)
        name = METHOD_OF[plain]
        if symbol != plain:
            if python_method(left, f"__i{name}__") is not None:
                found = self.call(self.special(left, f"__i{name}__"), (right,), {})
            else:
                found = self.in_place(symbol, left, right)
            if found is not NotImplemented:
                return found
        found = self.python_operator(f"__{name}__", f"__r{name}__", left, right)
        if found is not NotImplemented:
            return found
        if plain == "%" and isinstance(left, str):
            right = self.as_text(right)
        if any(tensors) and not isinstance(left if tensors[1] else right, NO_OPERANDS):
            return self.torch_call(BINARY[symbol], (left, right), {})
        return BINARY[symbol](self.operand(left), self.operand(right))

    @staticmethod
    def has_operators(value: Any) -> bool:
        """Whether an operand besides a tensor may have an operator of its own."""
        if isinstance(value, NO_OPERANDS):
            return True
        simple = isinstance(value, torch.Tensor) or is_constant(value)
        return not simple and find(type(value), "__torch_function__") is MISSING

    def in_place(self, symbol: str, left: Any, right: Any) -> Any:
        """`left += right` and its like, as C code defines them for containers that can change."""
        base, name = raw_base(left), f"__i{METHOD_OF[symbol.removesuffix('=')]}__"
        if (base not in (list, set) and not isinstance(left, dict)) or not hasattr(base, name):
            return NotImplemented
        if isinstance(left, dict):
            self.fill_dict(left, right)
        elif symbol == "+=":
            self.extend(left, self.items(right))
        else:
            found = getattr(base, name)(self.mutable(left), self.operand(right))
            return NotImplemented if found is NotImplemented else left
        return left

    def fill_dict(self, owner: Any, items: Any = (), /, **kwargs: Any) -> None:
        """`owner.update(...)`: OrderedDict calls `__setitem__`, dict does not."""
        store = self.store_subscript if raw_base(owner) is not dict else self.store_dict_item
        for key, value in self.pairs(items, **kwargs).items():
            store(owner, key, value)

    def pairs(self, items: Any = (), /, **kwargs: Any) -> dict[Any, Any]:
        """The items that `dict(...)` or `dict.update(...)` were given."""
        if hasattr(type(items), "keys"):
            return {**self.mapping(items), **kwargs}
        return dict(map(self.items, self.lazily(items)), **kwargs)  # type: ignore[arg-type]

    def number_operator(self, symbol: str, left: Any, right: Any) -> Any:
        """An operator one of whose operands is symbolic: algebra on ints, else Python's before the graph."""
        operands, function = (left, right), {**BINARY, **COMPARE}[symbol]
        if all(isinstance(value, int | torch.SymInt) for value in operands):
            if symbol in ("+", "-", "*") or symbol in COMPARE:
                return function(left, right)
            if symbol in ("//", "%") and right > 0:
                return function(left, right)
            if symbol == "**" and type(right) is int and 0 <= right <= LARGEST_POWER:
                return function(left, right)
        return self.computed(f"({{0}} {symbol} {{1}})", left, right, function=function)

    def operand(self, value: Any) -> Any:
        """A value for a native operator: no outside object may take part in it unread."""
        if isinstance(value, dict):
            self.check_overrides(value)
        inside = self.imported(value)
        fixed = isinstance(value, (*IDENTITY_TYPES, torch.Tensor))
        if inside is value and self.tracker(value) is not None and not fixed:
            self.unsupported_kind("outside-object", "an operator on a {} from outside", value)
        return inside

    def python_operator(self, name: str, reflected: str, left: Any, right: Any) -> Any:
        """The operator as a class defines it in Python; NotImplemented if none does."""
        order = [(left, name, right), (right, reflected, left)]
        if type(left) is type(right):
            order.pop()
        elif isinstance(right, type(left)) and python_method(right, reflected) is not None:
            order.reverse()
        for value, method, other in order:
            if python_method(value, method) is not None:
                found = self.call(self.special(value, method), (other,), {})
                if found is not NotImplemented:
                    return found
        return NotImplemented

    def compare(self, symbol: str, left: Any, right: Any) -> Any:
        if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
            return self.torch_call(COMPARE[symbol], (left, right), {})
        if isinstance(left, SYMBOLIC) or isinstance(right, SYMBOLIC):
            if isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
                return bool(self.number_operator(symbol, left, right))
            left, right = self.pinned(left), self.pinned(right)
        if is_constant(left) and is_constant(right):
            return COMPARE[symbol](left, right)
        name, reflected = f"__{METHOD_OF[symbol]}__", f"__{METHOD_OF[REFLECTED[symbol]]}__"
        found = self.python_operator(name, reflected, left, right)
        if found is not NotImplemented:
            return found
        base = builtin_base(left)
        if base in (list, tuple) and base is builtin_base(right):
            return self.compare_items(symbol, left, right)
        if symbol in ("==", "!="):
            if symbol == "!=" and (python_method(left, "__eq__") or python_method(right, "__eq__")):
                return not self.truth(self.compare("==", left, right))
            if isinstance(left, dict) and isinstance(right, dict):
                return self.alike(left, right) == (symbol == "==")
            for value in (left, right):
                if self.tracker(value) is not None and type(value).__eq__ is OBJECT_EQ:
                    return self.same(left, right) == (symbol == "==")
        return COMPARE[symbol](self.operand(self.deep(left)), self.operand(self.deep(right)))

    def compare_items(self, symbol: str, left: Any, right: Any) -> Any:
        """Compare two lists or two tuples, as C code defines it: by the first items that differ."""
        ours, theirs = raw_items(self.inside(left)), raw_items(self.inside(right))
        if symbol in ("==", "!=") and len(ours) != len(theirs):
            return symbol == "!="
        for mine, other in zip(ours, theirs):
            if not self.equal(mine, other):
                return symbol == "!=" or (symbol != "==" and self.compare(symbol, mine, other))
        return COMPARE[symbol](len(ours), len(theirs))

    def alike(self, left: Any, right: Any) -> bool:
        """Whether two dicts are equal, as C code defines it."""
        ours, theirs = raw_items(self.inside(left)), raw_items(self.inside(right))
        others = dict(theirs)
        ordered = raw_base(left) is raw_base(right) is collections.OrderedDict
        if ordered and list(dict(ours)) != list(others):
            return False
        return len(ours) == len(theirs) and all(
            key in others and self.equal(item, others[key]) for key, item in ours
        )

    def unary(self, symbol: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.torch_call(UNARY[symbol], (value,), {})
        if isinstance(value, torch.SymInt) and symbol != "~":
            return UNARY[symbol](value)
        if isinstance(value, SYMBOLIC):
            return self.computed(f"({symbol}{{0}})", value, function=UNARY[symbol])
        name = f"__{UNARY[symbol].__name__}__"
        if python_method(value, name) is not None:
            return self.call(self.special(value, name), (), {})
        return UNARY[symbol](self.operand(value))

    # -- text

    def convert(self, kind: int, value: Any) -> str:
        if kind == 3:
            self.unsupported("unusual-arguments", "text is written in ASCII (`!a`)")
        name = "__str__" if kind == 1 else "__repr__"
        shows_itself = find(type(value), name) is object.__str__  # which calls __repr__
        for method in (name, "__repr__") if shows_itself else (name,):
            if python_method(value, method) is not None and not isinstance(value, type):
                shown = self.call(self.special(value, method), (), {})
                if not isinstance(shown, str):
                    raise TypeError(f"{method} returned non-string (type {type(shown).__name__})")
                return shown
        return (str if kind == 1 else repr)(self.as_text(value))

    def format(self, value: Any, spec: str = "") -> str:
        if python_method(value, "__format__") is not None:
            return str(self.call(self.special(value, "__format__"), (spec,), {}))
        if not spec:
            return self.convert(1, value)
        return format(self.as_text(value), spec)

    def as_text(self, value: Any) -> Any:
        """A value to be turned into text, in which symbolic numbers have become plain ones. Refuses what may
        print otherwise at run time."""
        if isinstance(value, torch.Tensor):
            self.unsupported("tensor-as-text", "a tensor is turned into text")
        if isinstance(value, BaseException):
            if self.tracker(value) is not None:
                self.unsupported("object-as-text", "an exception from outside is turned into text")
            self.as_text(value.args)
            return value
        if is_constant(value) or isinstance(value, type | types.ModuleType):
            return self.pinned(value)
        if builtin_base(value) is None:
            self.unsupported_kind("object-as-text", "a {} is turned into text", value)
        self.check_overrides(value, ("__repr__", "__iter__", "items"))
        if isinstance(value, collections.defaultdict):
            self.as_text(FACTORY.__get__(value))
        inside = self.inside(value)
        items = [self.as_text(item) for item in raw_items(inside)]
        return inside if isinstance(inside, set | frozenset) else refilled(inside, items)
