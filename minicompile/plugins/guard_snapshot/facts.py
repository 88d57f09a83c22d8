"""A cheap answer to "did anything that the guards look at change?".

Guards on what a cache entry holds (a module's attributes, globals, classes) are paths through dictionaries.
Once they have been checked, `Facts` notes each step of each path by pointer: this dict maps this key to that
object, this object is of that class. While all facts hold, all those guards hold. A C extension compares them
in a few microseconds for a thousand guards; without a C compiler the guards are evaluated on every call.

The real compiler walks its guard tree on every call: torch/csrc/dynamo/guards.cpp.
"""

from __future__ import annotations

import collections
import functools
import types
from pathlib import Path
from types import ModuleType
from typing import Any

from minicompile.dynamo.guards import closure_cell
from minicompile.dynamo.result import Guard, Source
from minicompile.dynamo.variables import HEAP_TYPE, HOOKS, MODULE_TABLES, find, lookup, plain_dict
from minicompile.ops.build import load_extension

EXTENSION = Path(__file__).with_name("snapshot.c")


def extension() -> ModuleType | None:
    """Return the C part; None without a C compiler."""
    return load_extension(EXTENSION)


class NotCoveredError(Exception):
    """A step that facts can't describe: its guard must be evaluated on every call."""


IMMUTABLE_PARTS = (
    *(types.MethodType, types.CodeType, property, classmethod, staticmethod),
    *(functools.partial, functools.cached_property),
)
"""Objects whose C-level attributes never change."""
CODE, DEFAULTS = types.FunctionType.__code__, types.FunctionType.__defaults__
KEYWORD_DEFAULTS, CONTENTS = types.FunctionType.__kwdefaults__, types.CellType.cell_contents
"""C-level readers of functions and closure cells."""
TABLES = {kind: table for table, kind in MODULE_TABLES.items()}
ABSENT = ...
"""Stands for "no such key" in facts."""


class Facts:
    """Pointer facts under collection, and the objects that paths lead to."""

    def __init__(self, held: dict[Source, Any]) -> None:
        self.held = held
        self.objects: dict[Source, Any] = {}
        self.gets: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        """(dict, the keys that were looked up with their values)"""
        self.enumerated: dict[int, dict[Any, Any]] = {}
        """Dicts whose keys count, in order."""
        self.parts: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
        """(reader, object, what it reads): a descriptor, `type`, or None for the `__dict__`."""
        self.lists: dict[int, list[Any]] = {}
        self.classes: dict[int, type] = {}
        self.calls: dict[int, tuple[Any, Any]] = {}
        """C functions without arguments, and the bool or None that they gave."""

    # -- steps

    def item(self, container: Any, key: Any) -> Any:
        """`container[key]`; ABSENT if a dict has no such key."""
        if isinstance(container, dict):
            _, known = self.gets.setdefault(id(container), (container, {}))
            known[key] = dict.get(container, key, ABSENT)
            return known[key]
        if type(container) is list:
            self.lists[id(container)] = container
            return container[key]
        if isinstance(container, tuple):
            return tuple.__getitem__(container, key)
        raise NotCoveredError

    def part(self, reader: Any, value: Any) -> Any:
        found = reader.__get__(value, type(value))
        self.parts[id(reader), id(value)] = (reader, value, found)
        return found

    def kind(self, value: Any) -> None:
        """The value's class; only instances of classes made by Python code can change it."""
        if type(value).__flags__ & HEAP_TYPE:
            self.parts[id(type), id(value)] = (type, value, type(value))

    def namespace(self, value: Any) -> dict[str, Any]:
        found = plain_dict(value)
        if found is None or isinstance(value, type):
            raise NotCoveredError
        self.parts[id(None), id(value)] = (None, value, found)
        return found

    def class_attribute(self, cls: Any, name: str) -> Any:
        if not isinstance(cls, type):
            raise NotCoveredError
        self.classes[id(cls)] = cls
        return lookup(cls, name)

    def slot(self, value: Any, name: str) -> Any:
        """An attribute stored by C code, or in `__slots__`."""
        if isinstance(value, IMMUTABLE_PARTS):
            return getattr(value, name)
        reader = find(type(value), name)
        known = isinstance(reader, types.MemberDescriptorType) or reader is CODE
        if not known or isinstance(value, type):
            raise NotCoveredError
        self.kind(value)
        return self.part(reader, value)

    def resolve(self, source: Source) -> Any:
        """The object at a source, noting every step. Raises NotCoveredError."""
        if source in self.held:
            return self.held[source]
        if source not in self.objects:
            self.objects[source] = self.step(source)
        return self.objects[source]

    def step(self, source: Source) -> Any:
        if source.base is None:
            raise NotCoveredError
        base, key = self.resolve(source.base), source.key
        match source.kind:
            case "global" | "item":
                return self.item(base, key)
            case "attribute":
                return self.item(self.namespace(base), key)
            case "namespace":
                return self.namespace(base)
            case "parameter" | "buffer" | "submodule":
                namespace = self.namespace(base)
                self.item(namespace, key)
                return self.item(self.item(namespace, TABLES[source.kind]), key)
            case "class_attribute":
                return self.class_attribute(base, key)
            case "closure":
                self.part(CODE, base)
                return closure_cell(base, key)  # a function keeps its own
            case "contents":
                return self.part(CONTENTS, base)
            case "default":
                return self.part(DEFAULTS, base)[key]
            case "keyword_default":
                return self.item(self.part(KEYWORD_DEFAULTS, base), key)
            case "referent":
                raise NotCoveredError  # facts would keep alive what is only referred to weakly
            case "slot":
                return self.slot(base, key)
            case "setting" if key == () and type(found := base()) in (bool, type(None)):
                self.calls[id(base)] = base, found
                return found
        raise NotCoveredError

    # -- guards

    def cover(self, guard: Guard) -> None:
        """Note what makes a guard hold. Raises NotCoveredError."""
        value, *_ = [self.resolve(source) for source in guard.sources]
        match guard.kind:
            case "identity" | "same" | "distinct" | "globals":
                pass  # a function keeps its globals
            case "equals" if not isinstance(value, set):
                pass
            case "length" if isinstance(value, tuple):
                pass
            case "type":
                self.kind(value)
            case "keys" if isinstance(value, collections.OrderedDict):
                raise NotCoveredError  # its order is not that of the dict inside
            case "length" | "keys" if isinstance(value, dict):
                self.enumerated[id(value)] = value
            case "length" if type(value) is list:
                self.lists[id(value)] = value
            case "absent" if isinstance(value, dict):
                self.item(value, guard.expected)
            case "class":
                self.classes[id(value)] = value
            case "code":
                self.part(CODE, value)
            case "defaults":
                self.part(DEFAULTS, value)
            case "hooks":
                namespace = self.namespace(value)
                self.item(namespace, "_compiled_call_impl")
                for name in HOOKS:
                    hooks = self.item(namespace, name)
                    self.enumerated[id(hooks)] = hooks
            case _:
                raise NotCoveredError

    def snapshot(self) -> Any:
        """An object whose `unchanged()` says whether all facts still hold; None without a C compiler."""
        compiled = extension()
        if compiled is None:
            return None
        return compiled.Snapshot(
            tuple((d, tuple(known), tuple(known.values())) for d, known in self.gets.values()),
            tuple((d, tuple(dict.keys(d))) for d in self.enumerated.values()),
            tuple(self.parts.values()),
            tuple((items, tuple(items)) for items in self.lists.values()),
            tuple((cls, compiled.class_version(cls)) for cls in self.classes.values()),
            tuple(self.calls.values()),
        )
