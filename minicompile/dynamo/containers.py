"""Subscripts, iteration, membership, truth and operators over tensors, outside and inside objects.

A tensor operand makes a graph node; an outside container is read through an inside copy of it (which guards
what was read); classes that define the operation in Python have it interpreted; everything else is Python's
own.
"""

from __future__ import annotations

import collections
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch

from minicompile.dynamo.attributes import Attributes
from minicompile.dynamo.interpreter import BINARY, COMPARE, CONVERSIONS, UNARY, TracedGenerator
from minicompile.dynamo.result import Source
from minicompile.dynamo.variables import (
    IDENTITY_TYPES,
    MISSING,
    OBJECT_EQ,
    builtin_base,
    is_constant,
    lookup,
)

NO_OPERANDS = (list, tuple, str, dict)
"""Never operands of a tensor operator."""
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

REFLECTED = {"<": ">", "<=": ">=", "==": "==", "!=": "!=", ">": "<", ">=": "<="}
METHOD_OF = {
    "+": "add",
    "&": "and",
    "//": "floordiv",
    "<<": "lshift",
    "@": "matmul",
    "*": "mul",
    "%": "mod",
    "|": "or",
    "**": "pow",
    ">>": "rshift",
    "-": "sub",
    "/": "truediv",
    "^": "xor",
    "<": "lt",
    "<=": "le",
    "==": "eq",
    "!=": "ne",
    ">": "gt",
    ">=": "ge",
}


def python_method(value: Any, name: str) -> types.FunctionType | None:
    """The method that a value's class defines in Python."""
    if isinstance(value, torch.Tensor):
        return None
    try:
        found = lookup(type(value), name)
    except KeyError:
        return None
    return found if isinstance(found, types.FunctionType) else None


class Containers(Attributes):
    """Operations of the expression language other than calls."""

    def torch_call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a torch call; `calls.py` says how."""
        raise NotImplementedError

    # -- copies for native code

    def deep(self, value: Any) -> Any:
        """A value for native code to read: outside containers become inside copies, all the way down."""
        if isinstance(value, torch.Tensor) or is_constant(value):
            return value
        base = builtin_base(value)
        if base is None:
            return value
        inside = self.imported(value)
        if base is list or base is tuple:
            items = [self.deep(item) for item in inside]
            if all(map(operator.is_, items, inside)):
                return inside
            return items if base is list else tuple.__new__(type(inside), items)
        if base is dict:
            pairs = {key: self.deep(item) for key, item in dict.items(inside)}
            return inside if all(pairs[key] is item for key, item in dict.items(inside)) else pairs
        return inside

    def has_tensor(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return True
        if isinstance(value, list | tuple | set):
            return any(map(self.has_tensor, value))
        return isinstance(value, dict) and any(map(self.has_tensor, dict.values(value)))

    # -- subscripts

    def subscript(self, value: Any, key: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.torch_call(operator.getitem, (value, self.deep(key)), {})
        if isinstance(key, torch.Tensor) and not isinstance(value, dict):
            self.unsupported(
                "a tensor indexes a Python container",
                "index a tensor with it, or compute the index outside",
            )
        method = python_method(value, "__getitem__")
        if method is not None:
            return self.call(self.special(value, "__getitem__"), (key,), {})
        base = builtin_base(value)
        tracker = self.tracker(value)
        if base is dict:
            return self.dict_item(value, key)
        if tracker is None:
            return value[key]
        if base in (list, tuple):
            return self.sequence_item(value, key)
        if isinstance(value, collections.deque):
            return self.imported(value)[key]
        if isinstance(value, type):
            return self.special_class_item(value, key)
        return self.unsupported(f"a {type(value).__name__} from outside is subscripted")

    def special_class_item(self, cls: type, key: Any) -> Any:
        if isinstance(cls, type(types.SimpleNamespace)) or hasattr(cls, "__class_getitem__"):
            return cls[key]  # type: ignore[index]
        return self.unsupported(f"the class {cls.__name__} is subscripted")

    def sequence_item(self, value: Any, key: Any) -> Any:
        tracker = self.tracker(value)
        assert tracker is not None
        if tracker.contents is not None:
            return tracker.contents[key]
        base = list if isinstance(value, list) else tuple
        size = base.__len__(value)
        if isinstance(key, slice):
            return self.imported(value)[key]
        self.guard("length", tracker.source, size, "an item is read by position")
        index = operator.index(key)
        index += size if index < 0 else 0
        if not 0 <= index < size:
            raise IndexError(f"{base.__name__} index out of range")
        return self.wrap(base.__getitem__(value, index), Source("item", index, tracker.source))

    def dict_item(self, value: Any, key: Any) -> Any:
        """`dict.__getitem__`, with `__missing__` and default factories."""
        tracker = self.tracker(value)
        found = (
            self.dict_get(tracker, key) if tracker is not None else dict.get(value, key, MISSING)
        )
        if found is not MISSING:
            return found
        missing = python_method(value, "__missing__")
        if missing is not None:
            return self.call(self.special(value, "__missing__"), (key,), {})
        if isinstance(value, collections.defaultdict) and value.default_factory is not None:
            if tracker is not None:
                self.unsupported("a defaultdict from outside makes a new item")
            made = self.call(value.default_factory, (), {})
            dict.__setitem__(value, key, made)
            return made
        if isinstance(value, collections.Counter):
            return 0
        raise KeyError(key)

    def store_subscript(self, value: Any, key: Any, new: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.torch_call(operator.setitem, (value, self.deep(key), self.deep(new)), {})
        elif python_method(value, "__setitem__") is not None:
            self.call(self.special(value, "__setitem__"), (key, new), {})
        elif isinstance(value, dict):
            self.store_dict_item(value, key, new)
        elif isinstance(value, list):
            self.mutable(value)[key] = self.items(new) if isinstance(key, slice) else new
        elif self.tracker(value) is None:
            value[key] = new
        else:
            self.unsupported(f"an item of a {type(value).__name__} from outside is set")

    def store_dict_item(self, value: dict[Any, Any], key: Any, new: Any) -> None:
        tracker = self.tracker(value)
        if tracker is not None:
            self.dict_set(tracker, key, new)
        elif isinstance(value, collections.OrderedDict):
            collections.OrderedDict.__setitem__(value, key, new)
        else:
            dict.__setitem__(value, key, new)

    def delete_subscript(self, value: Any, key: Any) -> None:
        if python_method(value, "__delitem__") is not None:
            self.call(self.special(value, "__delitem__"), (key,), {})
            return
        tracker = self.tracker(value)
        if isinstance(value, list):
            del self.mutable(value)[key]
        elif tracker is None:
            del value[key]
        elif isinstance(value, dict):
            self.dict_delete(tracker, key)
        else:
            self.unsupported(f"an item of a {type(value).__name__} is deleted")

    # -- iteration

    def iterate(self, value: Any) -> Iterator[Any]:
        if isinstance(value, torch.Tensor):
            if value.ndim == 0:
                raise TypeError("iteration over a 0-d tensor")
            return iter(self.torch_call(torch.Tensor.unbind, (value,), {}))
        if isinstance(value, TracedGenerator):
            return value
        if isinstance(value, type):
            return iter(self.native_members(value))
        if python_method(value, "__iter__") is not None:
            return self.call(self.special(value, "__iter__"), (), {})  # type: ignore[no-any-return]
        if self.tracker(value) is not None:
            if builtin_base(value) is None and not isinstance(value, collections.deque):
                self.unsupported(f"iteration over a {type(value).__name__} from outside")
            return iter(self.imported(value))
        if python_method(value, "__getitem__") is not None:
            return self.by_position(value)
        if isinstance(value, dict):
            return dict.__iter__(value)
        return iter(value)

    def native_members(self, cls: type) -> list[Any]:
        """Members of an Enum class, in order."""
        import enum

        if not isinstance(cls, enum.EnumType):
            self.unsupported(f"iteration over the class {cls.__name__}")
        return [self.class_attribute(cls, name) for name in cls._member_names_]  # type: ignore[attr-defined]

    def by_position(self, value: Any) -> Iterator[Any]:
        """The old protocol: `value[0]`, `value[1]`, ... until IndexError."""
        index = 0
        while True:
            try:
                item = self.subscript(value, index)
            except IndexError:
                return
            yield item
            index += 1

    def advance(self, iterator: Any) -> Any:
        if self.tracker(iterator) is not None:
            self.unsupported("an iterator made outside is advanced", "pass a list instead")
        if (
            not isinstance(iterator, TracedGenerator)
            and python_method(iterator, "__next__") is not None
        ):
            return self.call(self.special(iterator, "__next__"), (), {})
        return next(iterator)

    def items(self, value: Any) -> list[Any]:
        if type(value) in (list, tuple) and self.tracker(value) is None:
            return list(value)
        iterator, found = self.iterate(value), []
        while True:
            try:
                found.append(self.advance(iterator))
            except StopIteration:
                return found

    def mapping(self, value: Any) -> dict[Any, Any]:
        if type(value) is dict:
            return dict(self.imported(value))
        keys = self.items(self.call(self.load_attr(value, "keys"), (), {}))
        return {key: self.subscript(value, key) for key in keys}

    def native(self) -> Any:
        """A context for native code that may meet tensors: torch calls made inside are recorded."""
        raise NotImplementedError

    # -- membership and truth

    def contains(self, container: Any, item: Any) -> bool:
        if python_method(container, "__contains__") is not None:
            return self.truth(self.call(self.special(container, "__contains__"), (item,), {}))
        tracker = self.tracker(container)
        if isinstance(container, torch.Tensor):
            self.unsupported("`in` on a tensor needs its data")
        if isinstance(container, dict):
            if tracker is None:
                return dict.__contains__(container, item)
            return self.dict_get(tracker, item) is not MISSING
        if python_method(container, "__iter__") is not None or isinstance(
            container, TracedGenerator
        ):
            return self.member(self.items(container), item)
        if tracker is None:
            if type(container) in (list, tuple):
                return self.member(container, item)
            return item in container
        if isinstance(container, list | tuple | set | frozenset | collections.deque):
            inside = self.imported(container)
            return self.member(inside, item) if isinstance(inside, list | tuple) else item in inside
        if isinstance(container, type):
            return item in self.native_members(container)
        return bool(self.unsupported(f"`in` on a {type(container).__name__} from outside"))

    def member(self, items: list[Any] | tuple[Any, ...], item: Any) -> bool:
        return any(other is item or self.truth(self.compare("==", other, item)) for other in items)

    def length(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.ndim == 0:
                raise TypeError("len() of a 0-d tensor")
            return value.shape[0]
        if python_method(value, "__len__") is not None:
            return self.call(self.special(value, "__len__"), (), {})
        tracker = self.tracker(value)
        if tracker is None:
            return len(value)
        if tracker.contents is not None:
            return len(tracker.contents)
        base = builtin_base(value)
        if tracker.writes:
            return len(self.dict_keys(tracker))
        if base is None and not isinstance(value, collections.deque):
            return self.unsupported(f"len() of a {type(value).__name__} from outside")
        plain = base is None or base is types.MappingProxyType
        size = len(value) if plain else base.__len__(value)  # type: ignore[union-attr]
        self.guard("length", tracker.source, size, "its length is read")
        return size

    def truth(self, value: Any) -> bool:
        if value is True or value is False or value is None:
            return bool(value)
        if isinstance(value, torch.Tensor):
            self.unsupported(
                "Python branches on a tensor's data",
                "use torch.where, or move the branch outside of the compiled function",
            )
        if is_constant(value) or isinstance(value, type | types.FunctionType | types.ModuleType):
            return bool(value)
        if python_method(value, "__bool__") is not None:
            return bool(self.call(self.special(value, "__bool__"), (), {}))
        if builtin_base(value) is not None or python_method(value, "__len__") is not None:
            return bool(self.length(value))
        if self.tracker(value) is not None and (
            hasattr(type(value), "__bool__") or hasattr(type(value), "__len__")
        ):
            if isinstance(value, collections.deque):
                return bool(self.length(value))
            self.unsupported(f"the truth of a {type(value).__name__} from outside")
        return bool(value)

    # -- operators

    def binary(self, symbol: str, left: Any, right: Any) -> Any:
        tensors = isinstance(left, torch.Tensor), isinstance(right, torch.Tensor)
        if (
            any(tensors)
            and not isinstance(left, NO_OPERANDS)
            and not isinstance(right, NO_OPERANDS)
        ):
            function = BINARY[symbol if tensors[0] else symbol.removesuffix("=")]
            return self.torch_call(function, (left, right), {})
        if isinstance(left, SYMBOLIC) or isinstance(right, SYMBOLIC):
            return BINARY[symbol](left, right)
        if type(left) in (int, float, str) and type(right) in (int, float, str) and symbol != "%":
            return BINARY[symbol](left, right)
        plain = symbol.removesuffix("=")
        if symbol != plain:
            if python_method(left, f"__i{METHOD_OF[plain]}__") is not None:
                found = self.call(self.special(left, f"__i{METHOD_OF[plain]}__"), (right,), {})
                if found is not NotImplemented:
                    return found
            elif isinstance(left, list | set) and self.tracker(left) is not None:
                target = self.mutable(left)
                BINARY[symbol](
                    target, self.items(right) if isinstance(left, list) else self.imported(right)
                )
                return left
            elif isinstance(left, list) and symbol == "+=":
                left.extend(self.items(right))
                return left
        found = self.python_operator(
            f"__{METHOD_OF[plain]}__", f"__r{METHOD_OF[plain]}__", left, right
        )
        if found is not NotImplemented:
            return found
        if plain == "%" and isinstance(left, str):
            self.check_text(right)
        return BINARY[symbol](self.operand(left), self.operand(right))

    def operand(self, value: Any) -> Any:
        """A value for a native operator: no outside object may take part in it unread."""
        inside = self.imported(value)
        if (
            inside is value
            and self.tracker(value) is not None
            and not isinstance(value, (*IDENTITY_TYPES, torch.Tensor))
        ):
            self.unsupported(f"an operator on a {type(value).__name__} from outside")
        return inside

    def python_operator(self, name: str, reflected: str, left: Any, right: Any) -> Any:
        """The operator as a class defines it in Python; NotImplemented if none does."""
        first, second = python_method(left, name), python_method(right, reflected)
        if second is not None and type(right) is not type(left) and isinstance(right, type(left)):
            found = self.call(self.special(right, reflected), (left,), {})
            if found is not NotImplemented:
                return found
        if first is not None:
            found = self.call(self.special(left, name), (right,), {})
            if found is not NotImplemented:
                return found
        if second is not None and type(right) is not type(left):
            return self.call(self.special(right, reflected), (left,), {})
        return NotImplemented

    def compare(self, symbol: str, left: Any, right: Any) -> Any:
        if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
            return self.torch_call(COMPARE[symbol], (left, right), {})
        if is_constant(left) and is_constant(right):
            return COMPARE[symbol](left, right)
        name, reflected = f"__{METHOD_OF[symbol]}__", f"__{METHOD_OF[REFLECTED[symbol]]}__"
        found = self.python_operator(name, reflected, left, right)
        if found is not NotImplemented:
            return found
        if symbol == "!=" and (
            python_method(left, "__eq__") is not None or python_method(right, "__eq__") is not None
        ):
            return not self.truth(self.compare("==", left, right))
        if (
            symbol in ("==", "!=")
            and isinstance(left, list | tuple)
            and isinstance(right, list | tuple)
        ):
            return self.equal_sequences(left, right) == (symbol == "==")
        for value in (left, right):
            if (
                self.tracker(value) is not None
                and type(value).__eq__ is OBJECT_EQ
                and symbol in ("==", "!=")
            ):
                return self.same(left, right) == (symbol == "==")
        return COMPARE[symbol](self.operand(self.deep(left)), self.operand(self.deep(right)))

    def equal_sequences(self, left: Any, right: Any) -> bool:
        if isinstance(left, list) != isinstance(right, list):
            return False
        ours, theirs = self.items(left), self.items(right)
        return len(ours) == len(theirs) and all(
            a is b or self.truth(self.compare("==", a, b))
            for a, b in zip(ours, theirs, strict=True)
        )

    def unary(self, symbol: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.torch_call(UNARY[symbol], (value,), {})
        if isinstance(value, SYMBOLIC):
            return UNARY[symbol](value)
        name = {"-": "__neg__", "+": "__pos__", "~": "__invert__"}[symbol]
        if python_method(value, name) is not None:
            return self.call(self.special(value, name), (), {})
        return UNARY[symbol](self.operand(value))

    # -- text

    def check_text(self, value: Any) -> None:
        """Only what prints the same at compile time and at run time may be turned into text."""
        if isinstance(value, torch.Tensor):
            self.unsupported(
                "a tensor is turned into text", "print outside of the compiled function"
            )
        if is_constant(value) or isinstance(value, type | types.ModuleType | BaseException):
            return
        if isinstance(value, list | tuple | set | frozenset):
            for item in self.imported(value):
                self.check_text(item)
        elif isinstance(value, dict):
            for item in self.imported(value).values():
                self.check_text(item)
        else:
            self.unsupported(f"a {type(value).__name__} is turned into text")

    def convert(self, kind: int, value: Any) -> str:
        name = "__str__" if kind == 1 else "__repr__"
        for method in (name, "__repr__"):
            if python_method(value, method) is not None and not isinstance(value, type):
                found: str = self.call(self.special(value, method), (), {})
                return found if kind != 3 else found.encode("ascii", "backslashreplace").decode()
        self.check_text(value)
        if isinstance(value, SYMBOLIC):
            value = int(value)
        return CONVERSIONS[kind](self.deep(value))

    def format(self, value: Any, spec: str) -> str:
        if python_method(value, "__format__") is not None:
            return str(self.call(self.special(value, "__format__"), (spec,), {}))
        if not spec and python_method(value, "__str__") is not None:
            return self.convert(1, value)
        self.check_text(value)
        if isinstance(value, SYMBOLIC):
            value = int(value)
        return format(self.deep(value), spec)
