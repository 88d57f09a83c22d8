"""What capture knows about the Python objects it meets.

The interpreter's stack holds real Python objects; only tensors are replaced by fakes. An object is one of

    constant  immutable and known by value (ints, strings, dtypes, tuples of them): guarded by value where it
    is read inside    made while capturing: real, and freely mutable, because nobody else has seen it outside
    existed before the call: has a VariableTracker with the Source it was reached by tensor    a fake, with a
    VariableTracker that names its graph node

The real compiler wraps every value instead: torch/_dynamo/variables/base.py.
"""

from __future__ import annotations

import collections
import enum
import functools
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch

from minicompile.dynamo.interpreter import Marker
from minicompile.dynamo.result import Source
from minicompile.errors import Unsupported

OBJECT_HASH: Any = object.__hash__
OBJECT_EQ: Any = object.__eq__
OBJECT_NEW: Any = object.__new__
"""What a class has when it defines none of its own."""

HEAP_TYPE = 1 << 9
"""Flag of classes that are not static C data: those that Python code made, mostly."""

MISSING = Marker("MISSING")
"""No such key."""


class UserError(Unsupported):
    """The user's own code, or a torch function it calls, raises: eager will too, with its own exception."""


@dataclass(slots=True, eq=False)
class VariableTracker:
    """An outside object: where it lives, and what the frame did to it."""

    value: Any
    source: Source
    real: Any = None
    """The tensor behind a fake input."""
    writes: dict[Any, Any] = field(default_factory=dict)
    """Keys of a dict (or names of slots) that the frame wrote; DELETED where it removed them."""
    contents: Any = None
    """An inside copy that stands for a container as a whole, kept up to date with what the frame does."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NUMPY_SCALARS = words("bool bool_ int8 int16 int32 int64 uint8 float16 float32 float64")

ATOMS: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range),
    *(torch.finfo, torch.iinfo),
)
"""Exact types that are constants."""


def is_numpy_scalar(value: object) -> bool:
    cls = type(value)
    return cls.__module__ == "numpy" and cls.__name__ in _NUMPY_SCALARS


def is_constant(value: object) -> bool:
    """Immutable and known by value, all the way down."""
    cls = type(value)
    if cls in ATOMS:
        return True
    if cls is tuple or cls is frozenset:
        return all(map(is_constant, value))  # type: ignore[call-overload]
    if cls is slice:
        return all(map(is_constant, parts_of(value)))  # type: ignore[arg-type]
    return is_numpy_scalar(value) or isinstance(
        value, torch.SymInt | torch.SymFloat | torch.SymBool
    )


def same_constant(found: Any, expected: Any) -> bool:
    """Equal in type and value, NaN equal to itself, 0.0 different from -0.0; never runs user code."""
    cls = type(expected)
    if found is expected:
        return True
    if type(found) is not cls:
        return False
    if cls is float:
        return str(found) == str(expected)
    if cls is complex:
        return same_constant(found.real, expected.real) and same_constant(found.imag, expected.imag)
    if cls is tuple:
        return len(found) == len(expected) and all(map(same_constant, found, expected))
    if cls is frozenset or cls is set:
        return all(map(is_constant, found)) and found == expected
    if cls is slice:
        return same_constant(parts_of(found), parts_of(expected))
    if cls in ATOMS or is_numpy_scalar(expected):
        return bool(found == expected)
    return False


def parts_of(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


IDENTITY_TYPES: tuple[type, ...] = (
    *(type, types.ModuleType, types.BuiltinFunctionType, types.CodeType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType),
    *(property, staticmethod, classmethod, types.GenericAlias, types.UnionType),
    *(enum.Enum, torch.nn.Module),
)
"""Instances of these (and subclasses) are guarded by identity: replaced as a whole, if at all."""

CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, frozenset)


def builtin_base(value: object) -> type | None:
    """The built-in container that a value is, or inherits from."""
    for base in (*CONTAINERS, collections.deque, types.MappingProxyType):
        if isinstance(value, base):
            return base
    return None


def library_of(module: str | None) -> str:
    """The top-level package of a module's name."""
    return (module or "").partition(".")[0]


def is_fixed(owner: types.ModuleType | type | str) -> bool:
    """Whether functions and classes found there are taken as fixed: torch's and the standard library's."""
    if isinstance(owner, types.ModuleType):
        owner = owner.__name__
    return is_fixed_name(owner if isinstance(owner, str) else owner.__module__)


FIXED = ("torch", "minicompile", "builtins")


@functools.lru_cache(maxsize=8192)
def is_fixed_name(module: str) -> bool:
    root = library_of(module)
    if module.startswith("minicompile.lessons."):
        return False  # the lesson model is user code like any other
    return root in FIXED or (root in sys.stdlib_module_names and root != "__main__")


def lookup(cls: type, name: str) -> Any:
    """What the class or its bases define under a name, without running descriptors. Raises KeyError."""
    for owner in cls.__mro__:
        namespace = owner.__dict__
        if name in namespace:
            return namespace[name]
    raise KeyError(name)


def find(cls: type, name: str) -> Any:
    """`lookup`, but MISSING if nothing is defined."""
    for owner in cls.__mro__:
        if name in owner.__dict__:
            return owner.__dict__[name]
    return MISSING


def owner_of(cls: type, name: str) -> type | None:
    """The class of the MRO that defines a name."""
    for owner in cls.__mro__:
        if name in owner.__dict__:
            return owner
    return None


def class_facts(cls: type) -> list[tuple[type, dict[str, Any]]]:
    """What finding attributes in a class depends on: its MRO, the names in each class of it with the kinds
    of their values, and what the special ones are."""
    return [(owner, {} if is_fixed(owner) else own_facts(owner)) for owner in cls.__mro__]


def own_facts(cls: type) -> dict[str, Any]:
    items = cls.__dict__.items()
    return {name: item if name.startswith("__") else type(item) for name, item in items}


def keys_of(value: dict[Any, Any]) -> tuple[Any, ...]:
    """A dict's keys in order, without running code of its class."""
    if isinstance(value, collections.OrderedDict):
        return tuple(collections.OrderedDict.keys(value))
    return tuple(dict.keys(value))


def plain_dict(value: object) -> dict[str, Any] | None:
    """The object's `__dict__`, without running user code; None if it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None
