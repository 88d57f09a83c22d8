"""The world outside of the frame: how its objects are read (with guards) and written (replayed at the end).

Everything that existed before the call is reached through `wrap(value, source)`, which guards what the value
is and remembers where it lives. Dictionaries are the one primitive: instance attributes, globals, nn.Module
tables and plain dicts are all read by `dict_get` and written by `dict_set`, so two routes to the same place
agree. Nothing outside is changed while capturing; `written` lists what to replay after the graph ran.

The real compiler: torch/_dynamo/variables/builder.py, guards.py, side_effects.py.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from minicompile import compat
from minicompile.dynamo.interpreter import DELETED, UNBOUND, Frame, Interpreter, Lazy
from minicompile.dynamo.reasons import refusal
from minicompile.dynamo.recorder import Recorder
from minicompile.dynamo.result import Guard, Source, computed
from minicompile.dynamo.variables import (
    FACTORY,
    HEAP_TYPE,
    IDENTITY_TYPES,
    MISSING,
    MODULE_TABLES,
    OBJECT_HASH,
    VariableTracker,
    builtin_base,
    class_facts,
    copied,
    flags_of,
    has_symbols,
    is_constant,
    is_fixed,
    keys_of,
    parts_of,
    plain_dict,
    raw_base,
    raw_items,
    refilled,
    same_constant,
)
from minicompile.errors import Unsupported
from minicompile.ops.origin import SourceLine
from minicompile.shapes.symnode import hint

ABSENT = "looked up and not found"


class Outside(Interpreter):
    """Reads and writes of objects that existed before the call."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.trackers: dict[int, VariableTracker] = {}
        """Outside objects by id; a tensor's tracker is found by the id of the real tensor and of its fake."""
        self.guards: dict[tuple[Any, ...], Guard] = {}
        self.held: dict[Source, Any] = {}
        """Objects that guards and the result refer to directly."""
        self.written: list[VariableTracker] = []
        self.called_later = ""
        """The function being captured that something else will call: it may change nothing outside."""
        self.read_again = False
        """Is a backward being captured? It reads later, when numbers may be others: they stay plain, and the
        check before it runs looks at them."""
        self.abort: Unsupported | None = None
        """The refusal that ends this capture, even if native code in between swallowed the exception."""
        self.own_globals: dict[str, Any] | None = None
        self.namespaces: dict[int, Any] = {}
        """Inside objects by the id of their `__dict__`, where that was read as an object."""
        self.fixed_modules: set[str] = set()
        """Arguments whose modules are guarded by identity; other modules are guarded by their structure."""
        self.natives: list[tuple[Any, int]] = []
        """Generators, classes and what native code made, each with the number of instructions executed
        before the captured frame's instruction that made it."""

    # -- giving up

    def unsupported(self, id: str, what: str, hint: str = "") -> NoReturn:
        self.abort = refusal(id, what, self.user_line(), hint)
        raise self.abort

    def unsupported_kind(self, id: str, what: str, value: Any) -> NoReturn:
        """`what` has {} where the class of the value is named."""
        self.unsupported(id, what.format(type(value).__name__))

    def user_line(self) -> SourceLine | None:
        """The innermost line of the user's code, or of a library other than torch and Python's."""
        if self.frame is None:
            return None
        return next((f for f in self.frame.outwards if is_users(f)), self.frame).line

    def root_frame(self) -> Frame:
        """The captured frame."""
        assert self.frame is not None
        *_, root = self.frame.outwards
        return root

    def note_native(self, value: Any) -> None:
        plain = value is None or isinstance(value, bool | int | str | torch.Tensor)
        if not plain and self.tracker(value) is None:
            self.natives.append((value, self.root_frame().steps))

    # -- guards

    def guard(
        self, kind: str, about: Source | tuple[Source, ...], expected: Any, reason: str
    ) -> None:
        """Rely on a fact about a value, or on a relation between several. The same fact is guarded once."""
        index = (kind, about, expected if kind == "absent" else None)
        if index not in self.guards:
            sources = about if isinstance(about, tuple) else (about,)
            self.guards[index] = Guard(sources, kind, expected, reason, self.user_line())

    # -- sources

    def tracker(self, value: Any) -> VariableTracker | None:
        """The tracker of an outside object, None for constants and for what the frame made."""
        found = self.trackers.get(id(value))
        return found if found is not None and found.value is value else None

    def hold(self, value: Any, label: str) -> VariableTracker:
        """An object reached without a path that could change: a class, a module's globals."""
        found = self.trackers.get(id(value))
        if found is None:
            source, number = Source("held", label), 1
            while source in self.held:
                number += 1
                source = Source("held", f"{label}#{number}")
            self.held[source] = value
            found = self.trackers[id(value)] = VariableTracker(value, source)
            self.guard_class(type(value))
        return found

    def class_tracker(self, cls: type) -> VariableTracker:
        return self.hold(cls, cls.__qualname__)

    def namespace_tracker(self, owner: VariableTracker) -> VariableTracker | None:
        """The tracker of an object's `__dict__`."""
        namespace = plain_dict(owner.value)
        if namespace is None:
            return None
        found = self.trackers.get(id(namespace))
        if found is None:
            found = VariableTracker(namespace, Source("namespace", None, owner.source))
            self.trackers[id(namespace)] = found
        return found

    def globals_tracker(self, namespace: dict[str, Any]) -> VariableTracker:
        if namespace is self.own_globals:
            return self.hold(namespace, "globals")
        return self.hold(namespace, str(namespace.get("__name__", "globals")))

    @staticmethod
    def item_source(container: VariableTracker, key: Any) -> Source:
        source = container.source
        if source.kind == "namespace":
            return Source("attribute", key, source.base)
        if source.kind == "held" and type(container.value) is dict:
            return Source("global", key, source)
        if source.kind == "attribute" and source.key in MODULE_TABLES and type(key) is str:
            return Source(MODULE_TABLES[source.key], key, source.base)
        return Source("item", key, source)

    # -- reading

    def wrap(self, value: Any, source: Source, reason: str = "read") -> Any:
        """The compile-time object for an outside value: itself, or a fake for a tensor. Guards what it is."""
        if is_constant(value):
            number = self.symbolic(value, source)
            if number is not None:
                return number
            self.guard("equals", source, value, reason)
            return value
        known = self.trackers.get(id(value))
        if known is not None:
            self.guard_known(known, value, source, reason)
            return known.value
        if isinstance(value, torch.Tensor):
            return self.wrap_tensor(value, source)
        self.trackers[id(value)] = VariableTracker(value, source)
        self.guard_new(value, source, reason)
        return value

    def below(self, owner: Any, kind: str, key: Any, found: Any) -> Any:
        """What was found in an object: wrapped if that is from outside."""
        tracker = self.tracker(owner)
        return found if tracker is None else self.wrap(found, Source(kind, key, tracker.source))

    def symbolic(self, value: Any, source: Source) -> Any:
        """An int, a float, or a tuple with some, as symbols if they are wanted; else None."""
        sizes = self.recorder.sizes
        if sizes is None or self.read_again:
            return None
        if type(value) not in (tuple, torch.Size):
            return sizes.number(value, source)
        parts = [Source("item", index, source) for index in range(len(value))]
        if not any(map(sizes.wants, value, parts)):
            return None
        self.guard("type", source, type(value), "some of its items are symbolic")
        self.guard("length", source, len(value), "some of its items are symbolic")
        return type(value)(map(self.wrap, value, parts))

    def computed(self, form: str, *numbers: Any, function: Callable[..., Any]) -> Any:
        """What a function of numbers gives, computed by Python before the graph runs: symbolic if possible.

        `form`: how it reads. What makes Python raise becomes a guard.
        """
        sizes = self.recorder.sizes
        assert sizes is not None
        try:
            value = function(*map(hint, numbers))
        except (ArithmeticError, ValueError, TypeError):
            return function(*map(self.pinned, numbers))
        called = None if form.startswith(("(", "-")) else function
        source = computed(form, map(sizes.source_of, numbers), called)
        made = sizes.numbers.get(source)
        if made is None:
            made = sizes.symbol(value, source, "computed from others")
        if made is None:
            self.guard("equals", source, value, "the frame depends on it")
            return value
        return made

    def pinned(self, value: Any) -> Any:
        """A value in which symbolic numbers have become plain ones, with guards."""
        cls = type(value)
        if cls is torch.SymInt or cls is torch.SymFloat:
            return int(value) if cls is torch.SymInt else float(value)
        if (cls is tuple or cls is torch.Size or cls is slice) and has_symbols(value):
            parts = map(self.pinned, parts_of(value) if cls is slice else value)
            return slice(*parts) if cls is slice else cls(parts)
        return value

    def guard_class(self, cls: type) -> None:
        """Rely on what a class defines, and on what it doesn't."""
        if not flags_of(cls) & HEAP_TYPE:
            return  # classes in C can't change
        source = self.class_tracker(cls).source
        if ("class", source, None) not in self.guards:
            self.guard("class", source, class_facts(cls), "attributes are looked up there")

    def guard_new(self, value: Any, source: Source, reason: str) -> None:
        self.guard_class(type(value))
        if isinstance(value, type):
            self.guard_class(value)
        function = isinstance(value, types.FunctionType)
        fixed = function and is_fixed(value.__module__ or "")
        if identical := fixed or self.is_guarded_by_identity(value, source):
            self.guard("identity", source, value, reason)
        if not identical or isinstance(
            value, torch.nn.Module
        ):  # parametrizations exchange its class
            self.guard("type", source, type(value), reason)
        if function and not fixed:
            self.guard("code", source, value.__code__, reason)
            self.guard("globals", source, value.__globals__, reason)

    def is_guarded_by_identity(self, value: Any, source: Source) -> bool:
        """Whether an object is replaced as a whole. Modules in arguments may give way to others like them."""
        if isinstance(value, torch.nn.Module):
            start = source.root
            return start.kind != "local" or start.key in self.fixed_modules
        return isinstance(value, IDENTITY_TYPES)

    def guard_known(self, known: VariableTracker, value: Any, source: Source, reason: str) -> None:
        if source == known.source:
            return
        held = known.source.kind == "held"
        if held or self.is_guarded_by_identity(value, known.source):
            self.guard("identity", source, value, reason)
        else:
            self.guard("same", (source, known.source), None, "the same object under two names")

    def wrap_tensor(self, value: torch.Tensor, source: Source) -> Any:
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            self.unsupported_kind("tensor-kind", "the tensor subclass {}", value)
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            self.unsupported("tensor-kind", f"a tensor of layout {value.layout}")
        if not compat.has_storage(value):
            self.unsupported("tensor-kind", "a tensor that outlived its torch.func transform")
        if compat.has_forgotten_history(value):
            what = "a view that was made before its base required grad"
            self.unsupported("tensor-kind", what, "make the view after that change")
        if value.is_conj() or value.is_neg():
            what = "a tensor with a lazy conjugate or negative"
            self.unsupported("tensor-kind", what, "call resolve_conj() or resolve_neg()")
        sizes = self.recorder.sizes
        try:
            fake = None if sizes is None else sizes.fake(value, source)
            if fake is None:
                fake = self.recorder.mode.from_tensor(value, static_shapes=True)
        except (AssertionError, RuntimeError):  # its base was changed after or before no_grad mode
            self.unsupported("tensor-kind", "a view that autograd refuses to use", "clone it")
        tracker = self.recorder.input(value, fake, source)
        self.trackers[id(value)] = self.trackers[id(fake)] = tracker
        self.guard("tensor", source, fake, "becomes an input of the graph")
        return fake

    def guard_offset(self, tensor: Any) -> None:
        """Rely on where the inputs that may own a tensor's memory start in theirs."""
        for given in self.recorder.inputs if isinstance(tensor, torch.Tensor) else ():
            if compat.storage_id(given.value) == compat.storage_id(tensor):
                start = computed("{0}.storage_offset()", (given.source,))
                offset = given.value.storage_offset()
                self.guard("equals", start, offset, "as_strided counts from there")

    def realize(self, value: Any) -> Any:
        """An argument at its first use."""
        return self.wrap(value.value, value.source) if isinstance(value, Lazy) else value

    # -- dictionaries

    def dict_get(self, container: VariableTracker, key: Any, reason: str = ABSENT) -> Any:
        """An outside dict's item, MISSING if it has none."""
        self.check_key(key)
        if key in container.writes:
            found = container.writes[key]
            return MISSING if found is DELETED else found
        return self.dict_before(container, key, reason)

    def dict_before(self, container: VariableTracker, key: Any, reason: str = ABSENT) -> Any:
        """The item that it had before the frame, MISSING if none, with a guard."""
        if dict.__contains__(container.value, key):
            found = dict.__getitem__(container.value, key)
            return self.wrap(found, self.item_source(container, key))
        self.guard("absent", container.source, key, reason)
        return MISSING

    def dict_set(self, container: VariableTracker, key: Any, value: Any) -> None:
        self.check_key(key)
        self.mark_written(container)
        if container.writes.get(key) is DELETED:
            what = f"{container.source}: a key is deleted, then set"
            self.unsupported("outside-change", what)
        container.writes[key] = value
        if container.contents is not None:
            raw_base(container.value).__setitem__(container.contents, key, value)

    def is_as_before(self, container: VariableTracker, key: Any, value: Any) -> bool:
        """Whether a written key ends as it began; then it is guarded that it begins so."""
        before, source = dict.get(container.value, key, MISSING), self.item_source(container, key)
        if is_constant(before) and is_constant(value) and same_constant(value, before):
            self.guard("equals", source, before, "written, as it was")
        elif before is not value:
            return False
        else:
            self.wrap(before, source)
        return True

    def dict_delete(self, container: VariableTracker, key: Any) -> None:
        """Raises KeyError if there is no such key."""
        if self.dict_get(container, key) is MISSING:
            raise KeyError(key)
        self.mark_written(container)
        if container.contents is not None:
            raw_base(container.value).__delitem__(container.contents, key)
        container.writes.pop(key, None)
        if self.dict_before(container, key) is not MISSING:
            container.writes[key] = DELETED

    def dict_keys(self, container: VariableTracker) -> list[Any]:
        """All keys in order, guarded."""
        keys = keys_of(container.value)
        for key in keys:
            self.check_key(key)
        self.guard("keys", container.source, keys, "its keys are enumerated")
        order = dict.fromkeys((*keys, *container.writes))  # written keys keep their place
        return [key for key in order if container.writes.get(key) is not DELETED]

    def check_key(self, key: Any) -> None:
        """Only keys whose hash and equality are the built-in ones may be looked up natively."""
        cls = type(key)
        tracker = self.tracker(key) if isinstance(key, torch.nn.Module) else None
        if tracker is not None:
            self.guard("identity", tracker.source, key, "hashed")
        if isinstance(key, torch.Tensor):
            self.unsupported("tensor-as-index", "a tensor is a key of a dict or set from outside")
        builtin = is_constant(key) or cls.__hash__ is OBJECT_HASH or is_fixed(cls)
        if not builtin and not isinstance(key, IDENTITY_TYPES):
            what = f"a {cls.__name__} with its own __hash__ is used as a key"
            self.unsupported("own-equality", what)

    def mark_written(self, tracker: VariableTracker) -> None:
        if self.called_later:
            self.unsupported("outside-change", f"{self.called_later} changes {tracker.source}")
        if tracker not in self.written:
            self.written.append(tracker)

    # -- whole containers

    def imported(self, value: Any) -> Any:
        """An inside copy of an outside container, one level deep, items wrapped; other values unchanged."""
        inside = self.inside(value)
        return inside if inside is value else copied(inside)

    def inside(self, value: Any) -> Any:
        """The inside copy that stands for an outside container, and follows what the frame does to it."""
        tracker = self.tracker(value)
        if tracker is None or isinstance(value, torch.Tensor):
            return value
        if tracker.contents is None:
            tracker.contents = self.imported_contents(value, tracker)
        return value if tracker.contents is None else tracker.contents

    def imported_contents(self, value: Any, tracker: VariableTracker) -> Any:
        """None if it is no container."""
        base: Any = builtin_base(value)
        items: list[Any]
        if base is None:
            return None
        if base is dict:
            items = [(key, self.dict_get(tracker, key)) for key in self.dict_keys(tracker)]
            if isinstance(value, collections.defaultdict):
                self.below(value, "slot", "default_factory", FACTORY.__get__(value))
        elif base in (set, frozenset):
            items = raw_items(value)
            for member in items:
                self.check_key(member)
            self.guard("members", tracker.source, tuple(items), "its members are read")
            if items != raw_items(copied(value)):  # the order depends on how the set came about
                what = f"{tracker.source}, a set, loses its order in a copy"
                self.unsupported("outside-object", what)
            return copied(value)
        else:
            size = base.__len__(value)
            self.guard("length", tracker.source, size, "its items are read")
            items = [self.below(value, "item", i, base.__getitem__(value, i)) for i in range(size)]
            items += tracker.appended
        try:
            return refilled(value, items)
        except TypeError:
            what = "a {}, which C code defines, is read as a whole"
            return self.unsupported_kind("outside-object", what, value)

    def mutable(self, value: Any) -> Any:
        """What a built-in method changes in place of a container: itself if the frame made it, else the
        inside copy of a list."""
        tracker = self.tracker(value)
        if tracker is None:
            return value
        if builtin_base(value) is not list:
            what = f"{tracker.source} (a {type(value).__name__}) is changed"
            self.unsupported("outside-change", what)
        self.mark_written(tracker)
        return self.inside(value)

    def extend(self, target: Any, items: list[Any]) -> None:
        """Put items at the end of a list."""
        tracker = self.tracker(target)
        if tracker is None or tracker.contents is not None:
            list.extend(self.mutable(target), items)
        else:
            self.mark_written(tracker)
            tracker.appended += items

    # -- names

    def load_global(self, frame: Frame, name: str) -> Any:
        tracker = self.globals_tracker(frame.function.__globals__)
        found = self.dict_get(tracker, name, "not found, so the builtin is meant")
        if found is MISSING:
            found = self.dict_get(self.hold(frame.builtins, "builtins"), name)
        if found is MISSING:
            raise NameError(f"name {name!r} is not defined")
        return found

    def store_global(self, frame: Frame, name: str, value: Any) -> None:
        self.dict_set(self.globals_tracker(frame.function.__globals__), name, value)

    def load_cell(self, cell: types.CellType) -> Any:
        tracker = self.tracker(cell)
        if tracker is None:
            return self.realize(cell.cell_contents)
        if "cell_contents" in tracker.slots:
            return tracker.slots["cell_contents"]
        try:
            contents = cell.cell_contents
        except ValueError:
            self.unsupported("no-value-yet", f"{tracker.source.key} has no value yet")
        return self.wrap(contents, Source("contents", None, tracker.source))

    def store_cell(self, cell: types.CellType, value: Any) -> None:
        tracker = self.tracker(cell)
        if tracker is None:
            super().store_cell(cell, value)
        elif value is DELETED:
            self.unsupported("outside-change", f"the variable {tracker.source.key} is deleted")
        else:
            self.mark_written(tracker)
            tracker.slots["cell_contents"] = value

    def closure(self, function: types.FunctionType) -> tuple[types.CellType, ...]:
        cells = function.__closure__ or ()
        owner = self.tracker(function)
        if owner is not None:
            for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
                tracker = VariableTracker(cell, Source("closure", name, owner.source))
                known = self.trackers.setdefault(id(cell), tracker)
                if known is not tracker and known.source != tracker.source:
                    sources = tracker.source, known.source
                    self.guard("same", sources, None, "two functions share a variable")
        return cells

    def default(self, function: types.FunctionType, index: int) -> Any:
        values = function.__defaults__ or ()
        if (owner := self.tracker(function)) is not None:
            self.guard("defaults", owner.source, len(values), "a default is used")
        return self.below(function, "default", index, values[index])

    def keyword_default(self, function: types.FunctionType, name: str) -> Any:
        values = function.__kwdefaults__ or {}
        if name not in values:
            return UNBOUND
        return self.below(function, "keyword_default", name, values[name])

    def same(self, left: Any, right: Any) -> bool:
        """`is`, with a guard when the answer could change with the inputs."""
        if left is not right and {type(left), type(right)} <= {int, torch.SymInt}:
            left, right = self.pinned(left), self.pinned(right)  # Python shares small ints
        ours, theirs = self.tracker(left), self.tracker(right)
        kinds = (type, types.ModuleType, types.BuiltinFunctionType, torch.Tensor)
        fixed = isinstance(left, kinds) or isinstance(right, kinds)
        if ours is not None and theirs is not None and ours is not theirs and not fixed:
            self.guard("distinct", (ours.source, theirs.source), None, "compared with `is`")
        return left is right


def is_users(frame: Frame) -> bool:
    """Whether a frame runs code of the user's, or of a library other than torch and Python's."""
    return not is_fixed(frame.function.__globals__.get("__name__") or "")
