"""Generated Python that rebuilds the frame's result, and its writes to the outside, from the graph's outputs.

Inside objects are rebuilt piece by piece: tensors are graph outputs, outside objects come from their sources,
constants are constants. One object used twice is rebuilt once, and cycles close, as in the frame.
The real compiler: torch/_dynamo/codegen.py (PyCodegen), side_effects.py.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import operator
import types
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import fx

from minicompile.dynamo.breaks import StandIn
from minicompile.dynamo.guards import SourceCode
from minicompile.dynamo.interpreter import C_METHODS, DELETED, Frame, Lazy, TracedGenerator
from minicompile.dynamo.outside import item_source
from minicompile.dynamo.reasons import refusal
from minicompile.dynamo.result import Source, describe
from minicompile.dynamo.variables import (
    HEAP_TYPE,
    IDENTITY_TYPES,
    VariableTracker,
    has_symbols,
    is_constant,
    is_struct,
    plain_dict,
    raw_base,
    raw_items,
)
from minicompile.dynamo.world import World
from minicompile.shapes.symnode import SYMBOLIC

_NO_ITEMS: dict[Any, Any] = {}
DICT_ITERATORS: dict[type, str] = {
    type(iter(_NO_ITEMS)): "dict.keys",
    type(iter(_NO_ITEMS.values())): "dict.values",
    type(iter(_NO_ITEMS.items())): "dict.items",
}
_ITERABLES: tuple[Any, ...] = ([], (), "", range(0))
ITERATORS = (*DICT_ITERATORS, *(type(iter(empty)) for empty in _ITERABLES), enumerate, zip)
"""Iterators of native code that can be made again where they stand."""


def advanced(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """The iterator after `count` items."""
    collections.deque(itertools.islice(iterator, count), maxlen=0)
    return iterator


LITERALS = (int, str, bool, type(None))
EMPTY = {list: "[]", dict: "{}", collections.OrderedDict: "OrderedDict()"}


class Rebuild:
    """Collects the graph's outputs and the lines that put them together.

    `code` collects the lines that run before the graph: reads of outside objects.
    """

    def __init__(self, world: World, code: SourceCode) -> None:
        self.world, self.code = world, code
        code.names.update(types=types, torch=torch, StandIn=StandIn, advanced=advanced)
        code.names.update(OrderedDict=collections.OrderedDict, defaultdict=collections.defaultdict)
        self.outputs: dict[fx.Node, int] = {}
        self.lines: list[str] = []
        self.positions: list[str] = []
        """Lines that put iterators where they stood: after the writes, which may lengthen their lists."""
        self.made: dict[int, str] = {}
        self.kept_inputs: dict[int, str] = {}
        """Inputs that the result contains, by position."""
        self.effects: list[str] = []

    # -- values

    def expression(self, value: Any) -> str:
        if type(value) in LITERALS:
            return repr(value)
        if type(value) is Lazy:  # an argument that the frame has not read: no guard is about it
            return self.code.expression(value.source)
        recorder, tracker = self.world.recorder, self.world.tracker(value)
        if tracker in recorder.inputs:
            position = list(recorder.inputs).index(tracker)
            return self.kept_inputs.setdefault(position, f"kept{position}")
        if isinstance(value, SYMBOLIC):
            assert recorder.sizes is not None
            return self.code.expression(recorder.sizes.source_of(value))
        if isinstance(value, torch.Tensor):
            return f"out[{self.outputs.setdefault(recorder.lift(value), len(self.outputs))}]"
        if tracker is not None:
            return self.outside(tracker)
        if is_constant(value) and not has_symbols(value):
            return self.code.constant(value)
        if id(value) in self.made:
            return self.made[id(value)]
        if (owner := self.world.outside.namespaces.get(id(value))) is not None:
            return f"{self.expression(owner)}.__dict__"
        if isinstance(value, IDENTITY_TYPES) and not isinstance(value, torch.nn.Module):
            return self.code.constant(value)
        return self.inside(value)

    def refuse(self, value: Any) -> NoReturn:
        """Raises Unsupported; the capture could end before the instruction that made the value."""
        kind = type(value).__name__
        what = f"the frame returns or stores a {kind} that it made"
        places = [steps for made, steps in self.world.writes.natives if made is value]
        raise refusal("returned-object", what, places=places)

    def outside(self, tracker: VariableTracker) -> str:
        return self.code.expression(tracker.source)

    def assign(self, value: Any, text: str) -> str:
        """A new variable for an inside object, known from here on (so that cycles close)."""
        if id(value) in self.made:  # made meanwhile, by a part that leads back to it
            return self.made[id(value)]
        name = self.made[id(value)] = f"v{len(self.made)}"
        self.lines.append(f"{name} = {text}")
        return name

    def inside(self, value: Any) -> str:
        cls = type(value)
        if cls is tuple or cls is torch.Size:
            items = self.sequence(value)
            return items if cls is tuple else f"torch.Size({items})"
        if cls is types.MethodType and isinstance(value.__func__, C_METHODS):  # eager's is builtin
            method, owner = self.code.constant(value.__func__), self.expression(value.__self__)
            # without the class 3.11 crashes on methods that C code binds to it
            return f"{method}.__get__({owner}, {self.code.constant(type(value.__self__))})"
        if cls is types.MethodType:
            return f"types.MethodType{self.sequence((value.__func__, value.__self__))}"
        if cls is set or cls is frozenset:
            return self.assign(value, f"{cls.__name__}({self.sequence(sorted(value, key=repr))})")
        if cls is StandIn:
            values = self.sequence(value.values)
            return self.assign(value, f"StandIn({self.code.constant(value.function)}, {values})")
        if cls is types.FunctionType:
            return self.made_function(value)
        if cls in ITERATORS:
            return self.iterator(value)
        if cls is types.CellType:
            name = self.assign(value, "types.CellType()")
            with contextlib.suppress(ValueError):  # empty
                contents = self.expression(self.world.realize(value.cell_contents))
                self.lines.append(f"{name}.cell_contents = {contents}")
            return name
        if is_struct(cls):
            return self.assign(value, f"{self.code.constant(cls)}({self.sequence(value)})")
        if isinstance(value, tuple):
            return self.assign(
                value, f"tuple.__new__({self.expression(cls)}, {self.sequence(raw_items(value))})"
            )
        return self.made_object(value)

    def sequence(self, items: Iterable[Any]) -> str:
        """The items as a tuple, which are also the arguments of a call."""
        return f"({''.join(f'{self.expression(item)}, ' for item in items)})"

    def made_function(self, value: types.FunctionType) -> str:
        cells = self.sequence(value.__closure__ or ())
        code, namespace = self.code.constant(value.__code__), self.code.constant(value.__globals__)
        name = self.assign(
            value, f"types.FunctionType({code}, {namespace}, {value.__name__!r}, None, {cells})"
        )
        self.fill_in(name, value, "__defaults__", "__kwdefaults__", "__dict__")
        self.lines.append(f"{name}.__qualname__ = {value.__qualname__!r}")
        return name

    def fill_in(self, name: str, value: Any, *parts: str) -> None:
        for part in parts:
            if getattr(value, part):
                self.lines.append(f"{name}.{part} = {self.expression(getattr(value, part))}")

    def iterator(self, value: Any) -> str:
        """An iterator that native code made, where it stands."""
        if type(value) in DICT_ITERATORS:
            return self.dict_iterator(value)
        maker, given, *state = value.__reduce__()
        text = "".join(f"{self.iterated(part)}, " for part in given)
        name = self.assign(value, f"{self.code.constant(maker)}({text})")
        if state and state[0] is not None:
            self.positions.append(f"{name}.__setstate__({self.expression(state[0])})")
        return name

    def dict_iterator(self, value: Any) -> str:
        """A dict's iterator, which tells only how many items are left."""
        owner = next(
            (held for held in gc.get_referents(value) if isinstance(held, dict)), _NO_ITEMS
        )
        left = operator.length_hint(value)
        with contextlib.suppress(StopIteration):
            try:
                _ = left or next(value)  # 0 at the end, and where the dict has changed its size
            except RuntimeError:
                self.refuse(value)
        view = f"{DICT_ITERATORS[type(value)]}({self.iterated(owner)})"
        return self.assign(value, f"advanced(iter({view}), {len(owner) - left})")

    def iterated(self, value: Any) -> str:
        """What an iterator runs over: an outside container if it is the inside copy of one."""
        trackers = self.world.outside.trackers.values()
        copied = (tracker for tracker in trackers if tracker.contents is value is not None)
        tracker = next(copied, None)
        if tracker is not None and tracker.writes:  # it changes its size after the iterator is made
            self.refuse(value)
        return self.expression(value) if tracker is None else self.outside(tracker)

    def made_object(self, value: Any) -> str:
        """A container, or an instance of a Python class: made without running its code, then filled in."""
        cls: Any = type(value)
        defaults = isinstance(value, collections.defaultdict)
        base = collections.defaultdict if defaults else raw_base(value) or object
        if (
            isinstance(value, TracedGenerator | Frame)
            or hasattr(cls, "__next__")
            or not all(made_by_python(owner) for owner in cls.__mro__ if owner not in base.__mro__)
        ):
            self.refuse(value)
        try:
            base.__new__(cls)
        except TypeError:  # a class written in C
            self.refuse(value)
        start = self.sequence(raw_items(value)) if base is frozenset else ""
        empty = f"{base.__name__}.__new__({self.expression(cls)}, {start})"
        name = self.assign(value, EMPTY.get(cls) or empty)
        if base in (list, set) and (items := raw_items(value)):
            self.lines.append(f"{base.__name__}.__init__({name}, {self.sequence(items)})")
        elif isinstance(value, dict):
            for key, item in raw_items(value):
                pair = self.expression(key), self.expression(item)
                plain = f"{name}[{pair[0]}] = {pair[1]}"
                stored = f"{base.__name__}.__setitem__({name}, {pair[0]}, {pair[1]})"
                self.lines.append(plain if cls is base else stored)
        for key, item in list((plain_dict(value) or {}).items()):
            text = self.expression(self.world.realize(item))
            self.lines.append(f"{name}.__dict__[{key!r}] = {text}")
        for key, reader in (item for owner in cls.__mro__ for item in vars(owner).items()):
            if isinstance(reader, types.MemberDescriptorType) and hasattr(value, key):
                stored = object.__getattribute__(value, key)
                self.lines.append(self.set_attribute(name, key, stored))
        return name

    def set_attribute(self, target: str, key: str, value: Any) -> str:
        return f"object.__setattr__({target}, {key!r}, {self.expression(value)})"

    # -- writes

    def side_effects(self) -> list[str]:
        """Lines that replay what the frame wrote outside; values first, then the stores."""
        stores: list[str] = []
        for tracker in self.world.writes.written:
            if isinstance(tracker.value, list):
                stores += self.rewrite(tracker)
            for key, value in tracker.writes.items():
                stores += self.store_item(tracker, key, value)
            for name, value in tracker.slots.items():
                stores.append(self.store_slot(tracker, name, value))
        return stores

    def rewrite(self, tracker: VariableTracker) -> list[str]:
        """Lines that give a list the items that its inside copy ended with; what is new, if it has none."""
        if tracker.contents is None:
            self.effects.append(f"{tracker.source} gets more items")
            return [f"list.extend({self.outside(tracker)}, {self.sequence(tracker.appended)})"]
        known, now = self.world.outside.trackers, raw_items(tracker.contents)
        before = [
            known[id(item)].value if id(item) in known else item
            for item in raw_items(tracker.value)
        ]
        if len(before) == len(now) and all(map(operator.is_, before, now)):
            return []  # 1 and True are equal, yet not the same
        self.effects.append(f"{tracker.source} is rewritten")
        target = self.outside(tracker)
        return [f"list.__setitem__({target}, slice(None), {self.sequence(now)})"]

    def store_item(self, tracker: VariableTracker, key: Any, value: Any) -> list[str]:
        """Lines that write a key of a dict, by the built-in method."""
        if self.world.is_as_before(tracker, key, value):
            return []
        self.effects.append(f"{item_source(tracker, key)} = {describe(value)}")
        base = raw_base(tracker.value)
        target, place = self.outside(tracker), self.expression(key)
        if value is DELETED:
            return [f"{base.__name__}.__delitem__({target}, {place})"]
        item = self.expression(value)
        store = f"{base.__name__}.__setitem__({target}, {place}, {item})"
        if type(tracker.value) is base:
            store = f"{target}[{place}] = {item}"
        return [store]

    def store_slot(self, tracker: VariableTracker, name: str, value: Any) -> str:
        cell = isinstance(tracker.value, types.CellType)
        source = tracker.source if cell else Source("slot", name, tracker.source)
        self.effects.append(f"{source} = {describe(value)}")
        return self.set_attribute(self.outside(tracker), name, value)


def made_by_python(cls: type) -> bool:
    """Whether `object.__new__` can make instances as far as this class is concerned (not its bases)."""
    new = cls.__dict__.get("__new__")
    return bool(cls.__flags__ & HEAP_TYPE) and (new is None or isinstance(new, staticmethod))
