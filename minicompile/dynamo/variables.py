"""What capture knows about the Python objects it meets.

The interpreter's stack holds real Python objects; only tensors are replaced by fakes. An object is one of

    constant  immutable and known by value (ints, strings, dtypes, tuples of them): guarded where it is read
    inside    made while capturing: real, and freely mutable, because nobody else has seen it
    outside   existed before the call: has a VariableTracker with the Source it was reached by
    tensor    a fake, which belongs to a node of the graph; an outside one has a VariableTracker too

Below stand the questions that capture and guards ask about objects and classes, answered without running code
of theirs, and the tables of which objects are known how.

The real compiler wraps every value instead: torch/_dynamo/variables/base.py.
"""

from __future__ import annotations

import collections
import enum
import functools
import operator
import re
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from minicompile.dynamo.interpreter import Marker
from minicompile.dynamo.result import Source
from minicompile.errors import Unsupported
from minicompile.shapes.symnode import SYMBOLIC

OBJECT_HASH: Any = object.__hash__
OBJECT_EQ: Any = object.__eq__
OBJECT_NEW: Any = object.__new__
"""What a class has when it defines none of its own."""

READERS = (types.GetSetDescriptorType, types.MemberDescriptorType)
"""Attributes that C code reads."""

MODULE_TABLES = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}
"""Where an nn.Module keeps what, and the kind of source of what is found there."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where an nn.Module keeps its hooks."""

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
    """Keys of a dict that the frame wrote, the latest new one last; DELETED where it removed them."""
    slots: dict[str, Any] = field(default_factory=dict)
    """Slots of an object, and the contents of a cell, that the frame wrote."""
    appended: list[Any] = field(default_factory=list)
    """What the frame put at the end of a list that it has not read: what else is there doesn't matter."""
    contents: Any = None
    """An inside copy that stands for a container as a whole, kept up to date with what the frame does."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NUMPY_SCALARS = words("bool bool_ int8 int16 int32 int64 uint8 float16 float32 float64")

ATOMS: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range),
    *(torch.finfo, torch.iinfo, torch.nn.attention.SDPBackend, re.Pattern),
)
"""Exact types that are constants."""
ATOM_IDS = frozenset(map(id, ATOMS))
"""Looking a class up by itself would ask its metaclass for `__hash__` and `__eq__`."""


def is_numpy_scalar(value: object) -> bool:
    cls = type(value)
    return cls.__module__ == "numpy" and cls.__name__ in _NUMPY_SCALARS


def is_constant(value: object) -> bool:
    """Immutable and known by value, all the way down."""
    cls = type(value)
    if id(cls) in ATOM_IDS:
        return True
    if cls is tuple or cls is frozenset:
        return all(map(is_constant, value))  # type: ignore[call-overload]
    if cls is slice:
        return all(map(is_constant, parts_of(value)))  # type: ignore[arg-type]
    return is_numpy_scalar(value) or isinstance(value, SYMBOLIC)


def has_symbols(value: Any) -> bool:
    """Whether a constant contains a symbolic number."""
    if isinstance(value, tuple | frozenset):
        return any(map(has_symbols, value))
    if isinstance(value, slice):
        return has_symbols(parts_of(value))
    return isinstance(value, SYMBOLIC)


def same_constant(found: Any, expected: Any) -> bool:
    """Equal in type and value, NaN equal to itself, 0.0 different from -0.0; never runs user code."""
    cls = type(expected)
    if found is expected:
        return True
    if type(found) is not cls:
        return False
    if cls is float or cls is complex:
        return repr(found) == repr(expected)
    if cls in (tuple, frozenset):
        return same_items(tuple(found), tuple(expected))
    if cls is slice or cls is range:
        return same_items(parts_of(found), parts_of(expected))
    return bool(found == expected)


def parts_of(value: slice | range) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def same_items(found: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    """The same objects, or the same constants, in the same order."""
    return len(found) == len(expected) and all(map(same_constant, found, expected))


IDENTITY_TYPES: tuple[type, ...] = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodWrapperType,
    property,
    staticmethod,
    classmethod,
    types.GenericAlias,
    types.UnionType,
    enum.Enum,
    torch.nn.Module,
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller),
)
"""Instances of these (and subclasses) are guarded by identity: replaced as a whole, if at all."""

CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, frozenset)


def builtin_base(value: object) -> type | None:
    """The built-in container that a value is, or inherits from."""
    cls = type(value)  # isinstance would ask the value's `__class__`, which can be a property
    for base in CONTAINERS:
        if issubclass(cls, base):
            return base
    return None


def raw_base(value: object) -> Any:
    """The built-in container whose own methods read and write a value, whatever its class defines."""
    ordered = issubclass(type(value), collections.OrderedDict)
    return collections.OrderedDict if ordered else builtin_base(value)


def raw_items(value: Any) -> list[Any]:
    """What a container holds, pairs if it is a dict, without running code of its class."""
    base = raw_base(value)
    return list(base.items(value) if isinstance(value, dict) else base.__iter__(value))


def refilled(value: Any, items: Iterable[Any]) -> Any:
    """A container of a value's class with other items, made without running code of the class.

    Raises TypeError for some classes that C code defines.
    """
    cls, base = type(value), raw_base(value)
    if base is tuple:
        return cls(items) if is_struct(cls) else tuple.__new__(cls, items)
    if base is frozenset:
        return frozenset.__new__(cls, items)
    factories = isinstance(value, collections.defaultdict)
    made = (collections.defaultdict if factories else base).__new__(cls)
    if factories:
        FACTORY.__set__(made, FACTORY.__get__(value))
    if isinstance(value, dict):
        for key, item in items:
            base.__setitem__(made, key, item)
    else:
        base.__init__(made, items)
    return made


def copied(value: Any) -> Any:
    """A shallow copy of a container, made in the same way; a set's copy mostly keeps its order."""
    return refilled(value, value if isinstance(value, set | frozenset) else raw_items(value))


FACTORY: Any = collections.defaultdict.__dict__["default_factory"]
"""Reads and sets the attribute, whatever a subclass of defaultdict defines."""


def is_struct(cls: type) -> bool:
    """Whether C code defines a class of tuples (torch.return_types): calling it makes an instance."""
    return find(cls, "n_sequence_fields") is not MISSING


def library_of(module: str | None) -> str:
    """The top-level package of a module's name."""
    return (module or "").partition(".")[0]


def is_fixed(owner: types.ModuleType | type | str) -> bool:
    """Whether functions and classes found there are taken as fixed: torch's and the standard library's."""
    if isinstance(owner, types.ModuleType):
        owner = owner.__name__
    return is_fixed_name(owner if isinstance(owner, str) else owner.__module__)


FIXED = ("torch", "triton", "minicompile", "builtins")


@functools.lru_cache(maxsize=8192)
def is_fixed_name(module: str) -> bool:
    root = library_of(module)
    if module.startswith("minicompile.lessons."):
        return False  # the lesson model is user code like any other
    return root in FIXED or (root in sys.stdlib_module_names and root != "__main__")


mro_of: Any = type.__dict__["__mro__"].__get__
own_attributes: Any = type.__dict__["__dict__"].__get__
flags_of: Any = type.__dict__["__flags__"].__get__
"""Facts of a class, whatever its metaclass makes of `__mro__`, `__dict__` and `__flags__`."""


def find(cls: type, name: str) -> Any:
    """What the class or its bases define under a name, without running descriptors; else MISSING."""
    owner = owner_of(cls, name)
    return MISSING if owner is None else own_attributes(owner)[name]


def lookup(cls: type, name: str) -> Any:
    """`find`, but raises TypeError if nothing is defined."""
    return own_attributes(owner_of(cls, name))[name]


def owner_of(cls: type, name: str) -> type | None:
    """The class of the MRO that defines a name."""
    for owner in mro_of(cls):
        if name in own_attributes(owner):
            return owner
    return None


def class_facts(cls: type) -> tuple[tuple[Any, ...], ...]:
    """What finding attributes in a class depends on: its MRO, the names in each class of it with the kinds
    of their values, and what the special ones are. Each fact is an object, to be compared by identity."""
    return tuple((owner, *own_facts(owner)) for owner in mro_of(cls))


def own_facts(cls: type) -> list[Any]:
    """Names and what they are; nothing for classes in C, which can't change."""
    facts: list[Any] = []
    if flags_of(cls) & HEAP_TYPE:
        for name, item in own_attributes(cls).items():
            if name not in NOT_LOOKED_UP:
                facts += name, item if name.startswith("__") else type(item)
    return facts


NOT_LOOKED_UP = words("__annotations__ __doc__ __module__ __abstractmethods__ __slotnames__")
"""What Python itself writes into classes, and nothing depends on unless it is read."""


def keys_of(value: dict[Any, Any]) -> tuple[Any, ...]:
    """A dict's keys in order, without running code of its class."""
    return tuple(raw_base(value).keys(value))


def plain_dict(value: object) -> dict[str, Any] | None:
    """The object's `__dict__`, without running user code; None if it has none."""
    reader = find(type(value), "__dict__")
    found = reader.__get__(value) if type(reader) in READERS else None
    return found if isinstance(found, dict) else None
