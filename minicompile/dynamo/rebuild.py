"""Generated Python that rebuilds the frame's result, and its writes to the outside, from the graph's outputs.

Inside objects are rebuilt piece by piece: tensors are graph outputs, outside objects come from their sources,
constants are constants. One object used twice is rebuilt once, and cycles close, as in the frame.
The real compiler: torch/_dynamo/codegen.py (PyCodegen), side_effects.py.
"""

from __future__ import annotations

import collections
import functools
import operator
import types
from typing import Any

import torch
from torch import fx

from minicompile.dynamo.guards import SourceCode
from minicompile.dynamo.interpreter import Frame, TracedGenerator
from minicompile.dynamo.outside import unchanged
from minicompile.dynamo.result import Source, describe
from minicompile.dynamo.tracer import Tracer
from minicompile.dynamo.variables import (
    DELETED,
    IDENTITY_TYPES,
    OBJECT_NEW,
    VariableTracker,
    is_constant,
    plain_dict,
)

LITERALS = (int, str, bool, type(None))
STORES = {
    "new": object.__new__,
    "set_attribute": object.__setattr__,
    "dict_new": dict.__new__,
    "list_new": list.__new__,
    "tuple_new": tuple.__new__,
    "OrderedDict": collections.OrderedDict,
    "ordered_new": collections.OrderedDict.__new__,
    "ordered_set": collections.OrderedDict.__setitem__,
    "dict_set": dict.__setitem__,
    "list_extend": list.extend,
    "deque": collections.deque,
    "partial": functools.partial,
    "method": types.MethodType,
    "function": types.FunctionType,
    "cell": types.CellType,
}


class Rebuild:
    """Collects the graph's outputs and the lines that put them together."""

    def __init__(self, tracer: Tracer, code: SourceCode) -> None:
        self.tracer, self.code = tracer, code
        code.names.update(STORES)
        self.outputs: list[fx.Node] = []
        self.index: dict[fx.Node, int] = {}
        self.before: list[str] = []
        """Lines that run before the graph: reads of outside objects."""
        self.lines: list[str] = []
        self.made: dict[int, str] = {}
        self.kept_inputs: dict[int, str] = {}
        """Inputs that the result contains, by position."""
        self.effects: list[str] = []

    def fresh(self, prefix: str = "v") -> str:
        return f"{prefix}{len(self.made) + len(self.lines) + len(self.before)}_"

    # -- values

    def expression(self, value: Any) -> str:
        if type(value) in LITERALS:
            return repr(value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.output(self.tracer.recorder.lift(value))
        tracker = self.tracer.tracker(value)
        if tracker is not None:
            return self.outside(tracker)
        if is_constant(value):
            return self.code.constant(value)
        if id(value) in self.made:
            return self.made[id(value)]
        if isinstance(value, IDENTITY_TYPES) and not isinstance(value, torch.nn.Module):
            if isinstance(value, type) and self.tracer.is_made(value):
                self.refuse(value)
            return self.code.constant(value)
        return self.inside(value)

    def refuse(self, value: Any) -> None:
        self.tracer.unsupported(
            f"the frame returns or stores a {type(value).__name__} that it made"
        )

    def tensor(self, value: torch.Tensor) -> str:
        tracker = self.tracer.tracker(value)
        if tracker is not None and tracker in self.tracer.recorder.input_trackers:
            position = self.tracer.recorder.input_trackers.index(tracker)
            return self.kept_inputs.setdefault(position, f"kept{position}")
        return self.output(self.tracer.recorder.lift(value))

    def output(self, node: Any) -> str:
        if node not in self.index:
            self.index[node] = len(self.outputs)
            self.outputs.append(node)
        return f"out[{self.index[node]}]"

    def outside(self, tracker: VariableTracker) -> str:
        key = id(tracker)
        if key not in self.made:
            name = self.fresh("o")
            self.before.append(f"{name} = {self.code.expression(tracker.source)}")
            if isinstance(tracker.value, types.CellType):
                self.before[-1] = f"{name} = {self.cell_object(tracker)}"
            self.made[key] = name
        return self.made[key]

    def cell_object(self, tracker: VariableTracker) -> str:
        """The closure cell itself, not its contents."""
        assert tracker.source.base is not None
        return self.code.call("closure_cell", tracker.source.base, tracker.source.key)

    def assign(self, value: Any, text: str) -> str:
        """A new variable for an inside object, known from here on (so that cycles close)."""
        name = self.fresh()
        self.lines.append(f"{name} = {text}")
        self.made[id(value)] = name
        return name

    def inside(self, value: Any) -> str:
        cls = type(value)
        if cls is list:
            name = self.assign(value, "[]")
            if value:
                self.lines.append(f"{name}.extend([{self.sequence(value)}])")
            return name
        if cls is tuple or cls is torch.Size:
            return f"({self.sequence(value)})"
        if cls is set or cls is frozenset:
            items = sorted(value, key=repr)
            return self.assign(value, f"{cls.__name__}([{self.sequence(items)}])")
        if cls is dict or cls is collections.OrderedDict:
            name = self.assign(value, "{}" if cls is dict else "OrderedDict()")
            self.lines.extend(
                f"{name}[{self.expression(k)}] = {self.expression(v)}"
                for k, v in list(value.items())
            )
            return name
        if cls is slice:
            parts = map(self.expression, (value.start, value.stop, value.step))
            return f"slice({', '.join(parts)})"
        if cls is collections.deque:
            return self.assign(value, f"deque([{self.sequence(list(value))}], {value.maxlen!r})")
        if cls is functools.partial:
            given = ", ".join([self.expression(value.func), *map(self.expression, value.args)])
            keywords = "".join(f", {k}={self.expression(v)}" for k, v in value.keywords.items())
            return self.assign(value, f"partial({given}{keywords})")
        if cls is types.MethodType:
            return f"method({self.expression(value.__func__)}, {self.expression(value.__self__)})"
        if cls is types.FunctionType:
            return self.made_function(value)
        if cls is types.CellType:
            name = self.assign(value, "cell()")
            self.lines.append(
                f"{name}.cell_contents = {self.expression(self.tracer.realize(value.cell_contents))}"
            )
            return name
        if hasattr(cls, "n_sequence_fields"):  # torch.return_types
            return self.assign(value, f"{self.code.constant(cls)}(({self.sequence(value)}))")
        if isinstance(value, tuple):
            return self.assign(
                value, f"tuple_new({self.expression(cls)}, ({self.sequence(value)}))"
            )
        return self.made_object(value)

    def sequence(self, items: Any) -> str:
        return "".join(f"{self.expression(item)}, " for item in items)

    def made_function(self, value: types.FunctionType) -> str:
        cells = self.fresh("cells")
        parts = [self.expression(cell) for cell in value.__closure__ or ()]
        self.lines.append(f"{cells} = ({''.join(f'{part}, ' for part in parts)}) or None")
        code, namespace = self.code.constant(value.__code__), self.code.constant(value.__globals__)
        name = self.assign(
            value, f"function({code}, {namespace}, {value.__name__!r}, None, {cells})"
        )
        for part in ("__defaults__", "__kwdefaults__", "__dict__"):
            if getattr(value, part):
                self.lines.append(f"{name}.{part} = {self.expression(getattr(value, part))}")
        self.lines.append(f"{name}.__qualname__ = {value.__qualname__!r}")
        return name

    def made_object(self, value: Any) -> str:
        """An instance of a Python class: made without running its code, then filled in."""
        cls = type(value)
        if isinstance(
            value, TracedGenerator | Frame | BaseException | types.GeneratorType
        ) or hasattr(cls, "__next__"):
            self.refuse(value)
        owner = self.expression(cls)
        if isinstance(value, collections.OrderedDict):
            name, store = self.assign(value, f"ordered_new({owner})"), "ordered_set"
        elif isinstance(value, dict):
            name, store = self.assign(value, f"dict_new({owner})"), "dict_set"
        elif isinstance(value, list):
            name, store = self.assign(value, f"list_new({owner})"), ""
            self.lines.append(f"list_extend({name}, [{self.sequence(list.__iter__(value))}])")
        elif cls.__new__ is OBJECT_NEW or isinstance(lookup_new(cls), staticmethod):
            if c_base(cls) is not object:
                self.refuse(value)
            name, store = self.assign(value, f"new({owner})"), ""
        else:
            self.refuse(value)
        if isinstance(value, collections.defaultdict):
            self.refuse(value)
        if store:
            for key, item in list(dict.items(value)):
                self.lines.append(
                    f"{store}({name}, {self.expression(key)}, {self.expression(item)})"
                )
        for key, item in list((plain_dict(value) or {}).items()):
            self.lines.append(
                f"{name}.__dict__[{key!r}] = {self.expression(self.tracer.realize(item))}"
            )
        for key in slot_names_of(cls):
            if hasattr(value, key):
                item = self.expression(object.__getattribute__(value, key))
                self.lines.append(f"set_attribute({name}, {key!r}, {item})")
        return name

    # -- writes

    def side_effects(self) -> list[str]:
        """Lines that replay what the frame wrote outside; values first, then the stores."""
        stores: list[str] = []
        for tracker in self.tracer.written:
            if tracker.contents is not None and not self.as_before(tracker):
                target = self.outside(tracker)
                contents = self.expression(tracker.contents)
                if isinstance(tracker.value, list):
                    stores.append(f"{target}[:] = {contents}")
                else:
                    stores.append(f"{target}.clear(); {target}.update({contents})")
                self.effects.append(f"{tracker.source} is rewritten")
            for key, value in tracker.writes.items():
                stores += self.store(tracker, key, value)
        return stores

    def as_before(self, tracker: VariableTracker) -> bool:
        """Whether a list or set that was changed ends as it began."""
        if isinstance(tracker.value, set):
            return bool(tracker.value == tracker.contents)
        known = self.tracer.trackers
        before = [known[id(item)].value if id(item) in known else item for item in tracker.value]
        return len(before) == len(tracker.contents) and all(
            map(operator.is_, before, tracker.contents)
        )

    def store(self, tracker: VariableTracker, key: Any, value: Any) -> list[str]:
        if isinstance(tracker.value, dict):
            if unchanged(tracker, key, value):
                return []
            place = f"{self.outside(tracker)}[{self.expression(key)}]"
            self.effects.append(f"{self.tracer.item_source(tracker, key)} = {describe(value)}")
            return [f"del {place}"] if value is DELETED else [f"{place} = {self.expression(value)}"]
        if isinstance(tracker.value, types.CellType):
            self.effects.append(f"{tracker.source} = {describe(value)}")
            return [f"{self.outside(tracker)}.cell_contents = {self.expression(value)}"]
        self.effects.append(f"{Source('slot', key, tracker.source)} = {describe(value)}")
        return [f"set_attribute({self.outside(tracker)}, {key!r}, {self.expression(value)})"]


def lookup_new(cls: type) -> Any:
    return next(owner.__dict__["__new__"] for owner in cls.__mro__ if "__new__" in owner.__dict__)


def c_base(cls: type) -> type:
    """The innermost base class that C code defines."""
    return next(base for base in cls.__mro__ if not base.__flags__ & (1 << 9))


def slot_names_of(cls: type) -> list[str]:
    return [
        name
        for owner in cls.__mro__
        for name, item in owner.__dict__.items()
        if isinstance(item, types.MemberDescriptorType)
    ]  # fmt: skip
