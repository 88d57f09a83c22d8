"""A cheap answer to "did anything that the guards look at change?".

Guards on what a cache entry holds (a module's attributes, globals, classes) are paths through dictionaries.
Once they have been checked, `Facts` notes each step of each path by pointer: this dict maps this key to that
object, this object is of that class. While all facts hold, all those guards hold. A C extension compares them
in a few microseconds for a thousand guards; without a C compiler the same is done with C-level iterators of
Python.

A fact that fails is no failed guard: the guards themselves are then evaluated, and new facts noted.
The real compiler walks its guard tree on every call: torch/csrc/dynamo/guards.cpp.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from minicompile.dynamo import native
from minicompile.dynamo.guards import closure_cell
from minicompile.dynamo.outside import MODULE_TABLES
from minicompile.dynamo.result import Guard, Source
from minicompile.dynamo.torch_rules import HOOKS
from minicompile.dynamo.variables import lookup, plain_dict


class Snapshot(Protocol):
    def unchanged(self) -> bool: ...


class NotCoveredError(Exception):
    """A step that facts can't describe: its guard must be evaluated on every call."""


IMMUTABLE_PARTS = (
    types.MethodType,
    types.CodeType,
    property,
    classmethod,
    staticmethod,
    functools.partial,
    functools.cached_property,
)
"""Objects whose C-level attributes never change."""

HEAP_TYPE = 1 << 9
ABSENT = ...
"""Stands for "no such key" in facts."""


class Facts:
    """Pointer facts under collection, and the objects that paths lead to."""

    def __init__(self, held: dict[Source, Any], volatile: Collection[int] = ()) -> None:
        self.held = held
        self.volatile = volatile
        """Dicts (by id) that change between calls: only what was read of them counts."""
        self.recorded: dict[int, tuple[dict[Any, Any], tuple[Any, ...]]] = {}
        self.objects: dict[Source, Any] = {}
        self.gets: dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]] = {}
        self.wholes: dict[int, dict[Any, Any]] = {}
        self.kinds: dict[int, Any] = {}
        self.namespaces: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.functions: dict[int, types.FunctionType] = {}
        self.cells: dict[int, types.CellType] = {}
        self.lists: dict[int, list[Any]] = {}
        self.classes: dict[int, type] = {}
        self.parts: dict[tuple[int, str], tuple[Any, Any, Any]] = {}
        self.lookups: set[tuple[type, str]] = set()

    # -- steps

    def item(self, container: Any, key: Any) -> Any:
        """`container[key]`; ABSENT if a dict has no such key."""
        if isinstance(container, dict):
            found = dict.get(container, key, ABSENT)
            self.gets[id(container), key] = (container, key, found)
            return found
        if type(container) is list:
            self.lists[id(container)] = container
            return container[key]
        if isinstance(container, tuple):
            return tuple.__getitem__(container, key)
        raise NotCoveredError

    def namespace(self, value: Any) -> dict[str, Any]:
        found = plain_dict(value)
        if found is None or isinstance(value, type):
            raise NotCoveredError
        self.namespaces[id(value)] = (value, found)
        return found

    def resolve(self, source: Source) -> Any:
        """The object at a source, noting every step. Raises NotCoveredError."""
        if source not in self.objects:
            self.objects[source] = self.step(source)
        return self.objects[source]

    def step(self, source: Source) -> Any:
        if source in self.held:
            return self.held[source]
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
                table = next(table for table, kind in MODULE_TABLES.items() if kind == source.kind)
                return self.item(self.item(namespace, table), key)
            case "class_attribute":
                return self.class_attribute(base, key)
            case "cell":
                self.function(base)
                cell = closure_cell(base, key)
                self.cells[id(cell)] = cell
                return cell.cell_contents
            case "default":
                return self.function(base).__defaults__[key]  # type: ignore[index]
            case "keyword_default":
                return self.item(self.function(base).__kwdefaults__, key)
            case "referent":
                return base()  # a dead one fails where the object itself is looked for
            case "slot" if isinstance(base, IMMUTABLE_PARTS):
                return getattr(base, key)
            case "slot" if isinstance(base, types.FunctionType) and key == "__code__":
                return self.function(base).__code__
            case "slot":
                return self.part(base, key)
        raise NotCoveredError

    def kind(self, value: Any) -> None:
        """The value's class; only instances of classes made by Python code can change it."""
        if type(value).__flags__ & HEAP_TYPE:
            self.kinds[id(value)] = value

    def part(self, value: Any, name: str) -> Any:
        """A value in `__slots__`."""
        definition = lookup(type(value), name)
        if type(definition) is not types.MemberDescriptorType or isinstance(value, type):
            raise NotCoveredError
        self.kind(value)
        found = definition.__get__(value, type(value))
        self.parts[id(value), name] = (definition, value, found)
        return found

    def function(self, value: Any) -> types.FunctionType:
        if not isinstance(value, types.FunctionType):
            raise NotCoveredError
        self.functions[id(value)] = value
        return value

    def class_attribute(self, cls: Any, name: str) -> Any:
        if not isinstance(cls, type):
            raise NotCoveredError
        self.classes[id(cls)] = cls
        self.lookups.add((cls, name))
        try:
            return lookup(cls, name)
        except KeyError:
            return ABSENT

    # -- guards

    def cover(self, guard: Guard) -> None:
        """Note what makes a guard hold. Raises NotCoveredError."""
        values = [self.resolve(source) for source in guard.sources]
        value = values[0]
        match guard.kind:
            case "identity" | "same" | "distinct":
                pass
            case "equals" if not isinstance(value, set):
                pass
            case "type":
                self.kind(value)
            case "length" | "keys" if isinstance(value, dict):
                self.wholes[id(value)] = value
            case "length" if type(value) is list:
                self.lists[id(value)] = value
            case "length" if isinstance(value, tuple):
                pass
            case "absent" if isinstance(value, dict):
                self.item(value, guard.expected)
            case "class_absent":
                self.class_attribute(value, guard.expected)
            case "code" | "defaults":
                self.function(value)
            case "hooks":
                namespace = self.namespace(value)
                self.item(namespace, "_compiled_call_impl")
                for name in HOOKS:
                    hooks = self.item(namespace, name)
                    self.wholes[id(hooks)] = hooks
            case _:
                raise NotCoveredError

    # -- the two evaluators

    def native_snapshot(self, extension: Any) -> Snapshot:
        """Facts for the C extension: dicts with many reads are compared as a whole."""
        reads: dict[int, int] = {}
        for index, _ in self.gets:
            reads[index] = reads.get(index, 0) + 1
        wholes = dict(self.wholes)
        for container, _, _ in self.gets.values():
            if len(container) <= 16 * reads[id(container)] and id(container) not in self.volatile:
                wholes[id(container)] = container
        gets = tuple(get for (index, _), get in self.gets.items() if index not in wholes)
        self.recorded = {
            index: (d, tuple(itertools.chain.from_iterable(dict.items(d))))
            for index, d in wholes.items()
        }
        found: Snapshot = extension.Snapshot(
            gets=gets,
            parts=tuple(self.parts.values()),
            kinds=tuple((value, type(value)) for value in self.kinds.values()),
            namespaces=tuple(self.namespaces.values()),
            functions=tuple(map(function_facts, self.functions.values())),
            cells=tuple((cell, contents_of(cell)) for cell in self.cells.values()),
            lists=tuple((items, tuple(items)) for items in self.lists.values()),
            wholes=tuple(self.recorded.values()),
            classes=tuple((cls, extension.class_version(cls)) for cls in self.classes.values()),
        )
        return found

    def changed(self) -> set[int]:
        """The recorded dicts that are no longer as they were."""
        return {
            index
            for index, (container, flat) in self.recorded.items()
            if len(container) * 2 != len(flat)
            or not all(
                map(operator.is_, itertools.chain.from_iterable(dict.items(container)), flat)
            )
        }

    def python_snapshot(self) -> Snapshot:
        return PythonSnapshot(self)


def function_facts(function: types.FunctionType) -> tuple[Any, ...]:
    return function, function.__code__, function.__defaults__, function.__kwdefaults__


def contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


class PythonSnapshot:
    """The same facts with C-level iterators: each line is one pass without interpreted code per fact."""

    def __init__(self, facts: Facts) -> None:
        gets = list(facts.gets.values())
        for whole in facts.wholes.values():
            gets += [(whole, key, value) for key, value in whole.items()]
        for cls, name in facts.lookups:
            for owner in cls.__mro__:
                namespace: Any = owner.__dict__
                gets.append((namespace, name, namespace.get(name, ABSENT)))
                if name in namespace:
                    break
        self.getters = [
            functools.partial(dict.get, d) if isinstance(d, dict) else d.get for d, _, _ in gets
        ]
        self.keys = [key for _, key, _ in gets]
        self.values = [value for _, _, value in gets]
        self.wholes = list(facts.wholes.values())
        self.lengths = list(map(len, self.wholes))
        self.objects = list(facts.kinds.values())
        self.classes = list(map(type, self.objects))
        self.owners = [owner for owner, _ in facts.namespaces.values()]
        self.namespaces = [namespace for _, namespace in facts.namespaces.values()]
        self.functions = list(facts.functions.values())
        self.function_parts = [
            part for function in self.functions for part in function_facts(function)[1:]
        ]
        self.slots = [
            functools.partial(definition.__get__, value)
            for definition, value, _ in facts.parts.values()
        ]
        self.slot_values = [found for _, _, found in facts.parts.values()]
        self.cells = list(facts.cells.values())
        self.contents = list(map(contents_of, self.cells))
        self.lists = list(facts.lists.values())
        self.items = [tuple(items) for items in self.lists]

    def unchanged(self) -> bool:
        same = operator.is_
        return (
            all(map(same, map(type, self.objects), self.classes))
            and all(map(same, map(plain_dict, self.owners), self.namespaces))
            and all(
                map(
                    same,
                    map(operator.call, self.getters, self.keys, itertools.repeat(ABSENT)),
                    self.values,
                )
            )
            and all(map(operator.eq, map(len, self.wholes), self.lengths))
            and all(
                map(
                    same,
                    itertools.chain.from_iterable(map(FUNCTION_PARTS, self.functions)),
                    self.function_parts,
                )
            )
            and all(map(same, map(operator.call, self.slots), self.slot_values))
            and all(map(same, map(contents_of, self.cells), self.contents))
            and all(
                len(a) == len(b) and all(map(same, a, b))
                for a, b in zip(self.lists, self.items, strict=True)
            )
        )


FUNCTION_PARTS: Callable[[Any], Iterable[Any]] = operator.attrgetter(
    "__code__", "__defaults__", "__kwdefaults__"
)


def take_snapshot(facts: Facts, use_native: bool = True) -> Snapshot:
    """Facts as something that can be asked."""
    extension = native.load("snapshot") if use_native else None
    return facts.native_snapshot(extension) if extension is not None else facts.python_snapshot()
