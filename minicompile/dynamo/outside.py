"""The world outside of the frame: how its objects are read (with guards) and written (replayed at the end).

Everything that existed before the call is reached through `wrap(value, source)`, which guards what the value
is and remembers where it lives. Dictionaries are the one primitive: instance attributes, globals, nn.Module
tables and plain dicts are all read by `dict_get` and written by `dict_set`, so two routes to the same place
agree. Nothing outside is changed while capturing; `written` lists what to replay after the graph ran.

The real compiler: torch/_dynamo/variables/builder.py, guards.py, side_effects.py.
"""

from __future__ import annotations

import collections
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from minicompile import compat
from minicompile.dynamo.interpreter import DELETED, Frame, Lazy, set_cell
from minicompile.dynamo.result import Source
from minicompile.dynamo.result import computed as computed_source
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
from minicompile.dynamo.world import World, operation
from minicompile.shapes.symnode import hint

ABSENT = "looked up and not found"


# -- sources


@operation
def hold(world: World, value: Any, label: str) -> VariableTracker:
    """An object reached without a path that could change: a class, a module's globals."""
    found = world.outside.trackers.get(id(value))
    if found is None:
        source, number = Source("held", label), 1
        while source in world.outside.held:
            number += 1
            source = Source("held", f"{label}#{number}")
        world.outside.held[source] = value
        found = world.outside.trackers[id(value)] = VariableTracker(value, source)
        guard_class(world, type(value))
    return found


@operation
def class_tracker(world: World, cls: type) -> VariableTracker:
    return world.hold(cls, cls.__qualname__)


@operation
def namespace(world: World, value: Any) -> dict[str, Any] | None:
    """An object's `__dict__`, which is from outside if the object is; None if it has none."""
    found, owner, trackers = plain_dict(value), world.tracker(value), world.outside.trackers
    if found is not None and owner is not None and id(found) not in trackers:
        trackers[id(found)] = VariableTracker(found, Source("namespace", None, owner.source))
    return found


def globals_of(world: World, frame: Frame) -> dict[str, Any]:
    namespace = frame.function.__globals__
    name = "globals" if namespace is world.outside.own_globals else namespace.get("__name__")
    world.hold(namespace, str(name or "globals"))
    return namespace


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


@operation
def wrap(world: World, value: Any, source: Source, reason: str = "read") -> Any:
    """The compile-time object for an outside value: itself, or a fake for a tensor. Guards what it is."""
    if is_constant(value):
        number = world.symbolic(value, source)
        if number is not None:
            return number
        world.guard("equals", source, value, reason)
        return value
    known = world.outside.trackers.get(id(value))
    if known is not None:
        guard_known(world, known, value, source, reason)
        return known.value
    if isinstance(value, torch.Tensor):
        return wrap_tensor(world, value, source)
    world.outside.trackers[id(value)] = VariableTracker(value, source)
    guard_new(world, value, source, reason)
    return value


@operation
def below(world: World, owner: Any, kind: str, key: Any, found: Any) -> Any:
    """What was found in an object: wrapped if that is from outside."""
    tracker = world.tracker(owner)
    return found if tracker is None else world.wrap(found, Source(kind, key, tracker.source))


@operation
def symbolic(world: World, value: Any, source: Source) -> Any:
    """An int or a float as a symbol if it is wanted; else None."""
    sizes = world.recorder.sizes
    return None if sizes is None or world.outside.read_again else sizes.number(value, source)


@operation
def computed(world: World, form: str, *numbers: Any, function: Callable[..., Any]) -> Any:
    """What a function of numbers gives, computed by Python before the graph runs: symbolic if possible.

    `form`: how it reads. What makes Python raise becomes a guard.
    """
    sizes = world.recorder.sizes
    assert sizes is not None
    try:
        value = function(*map(hint, numbers))
    except (ArithmeticError, ValueError, TypeError):
        return function(*map(world.pinned, numbers))
    called = None if form.startswith(("(", "-")) else function
    source = computed_source(form, map(sizes.source_of, numbers), called)
    made = sizes.numbers.get(source)
    if made is None:
        made = sizes.symbol(value, source, "computed from others")
    if made is None:
        world.guard("equals", source, value, "the frame depends on it")
        return value
    return made


@operation
def pinned(world: World, value: Any) -> Any:
    """A value in which symbolic numbers have become plain ones, with guards."""
    cls = type(value)
    if cls is torch.SymInt or cls is torch.SymFloat:
        return int(value) if cls is torch.SymInt else float(value)
    if (cls is tuple or cls is torch.Size or cls is slice) and has_symbols(value):
        parts = map(world.pinned, parts_of(value) if cls is slice else value)
        return slice(*parts) if cls is slice else cls(parts)
    return value


def guard_class(world: World, cls: type) -> None:
    """Rely on what a class defines, and on what it doesn't."""
    if not flags_of(cls) & HEAP_TYPE:
        return  # classes in C can't change
    source = world.class_tracker(cls).source
    if ("class", source, None) not in world.outside.guards:
        world.guard("class", source, class_facts(cls), "attributes are looked up there")


def guard_new(world: World, value: Any, source: Source, reason: str) -> None:
    guard_class(world, type(value))
    if isinstance(value, type):
        guard_class(world, value)
    function = isinstance(value, types.FunctionType)
    fixed = function and is_fixed(value.__module__ or "")
    if identical := fixed or world.is_guarded_by_identity(value, source):
        world.guard("identity", source, value, reason)
    if not identical or isinstance(value, torch.nn.Module):  # parametrizations exchange its class
        world.guard("type", source, type(value), reason)
    if function and not fixed:
        world.guard("code", source, value.__code__, reason)
        world.guard("globals", source, value.__globals__, reason)


@operation
def is_guarded_by_identity(world: World, value: Any, source: Source) -> bool:
    """Whether an object is replaced as a whole. Modules in arguments may give way to others like them."""
    if isinstance(value, torch.nn.Module):
        start = source.root
        return start.kind != "local" or start.key in world.outside.fixed_modules
    return isinstance(value, IDENTITY_TYPES)


def guard_known(
    world: World, known: VariableTracker, value: Any, source: Source, reason: str
) -> None:
    if source == known.source:
        return
    held = known.source.kind == "held"
    if held or world.is_guarded_by_identity(value, known.source):
        world.guard("identity", source, value, reason)
    else:
        world.guard("same", (source, known.source), None, "the same object under two names")


def wrap_tensor(world: World, value: torch.Tensor, source: Source) -> Any:
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        world.unsupported_kind("tensor-kind", "the tensor subclass {}", value)
    if value.is_quantized or value.is_nested or not compat.has_storage(value):
        what = "a tensor that is sparse, quantized or nested, or that outlived its torch.func transform"
        world.unsupported("tensor-kind", what)
    base = compat.autograd_base(value)
    if base is not value and value.is_leaf and base.requires_grad:
        what = "a view whose base requires grad, made without that"
        world.unsupported("tensor-kind", what, "make the view after that change")
    if value.is_conj() or value.is_neg():
        what = "a tensor with a lazy conjugate or negative"
        world.unsupported("tensor-kind", what, "call resolve_conj() or resolve_neg()")
    sizes = world.recorder.sizes
    try:
        fake = None if sizes is None else sizes.fake(value, source)
        if fake is None:
            fake = world.recorder.mode.from_tensor(value, static_shapes=True)
    except (AssertionError, RuntimeError):  # its base was changed after or before no_grad mode
        world.unsupported("tensor-kind", "a view that autograd refuses to use", "clone it")
    tracker = world.recorder.input(value, fake, source)
    world.outside.trackers[id(value)] = world.outside.trackers[id(fake)] = tracker
    world.guard("tensor", source, fake, "becomes an input of the graph")
    return fake


@operation
def guard_offset(world: World, tensor: Any) -> None:
    """Rely on where the inputs that may own a tensor's memory start in theirs."""
    for given in world.recorder.inputs if isinstance(tensor, torch.Tensor) else ():
        if compat.storage_id(given.value) == compat.storage_id(tensor):
            start = computed_source("{0}.storage_offset()", (given.source,))
            offset = given.value.storage_offset()
            world.guard("equals", start, offset, "as_strided counts from there")


@operation
def realize(world: World, value: Any) -> Any:
    """An argument at its first use."""
    return world.wrap(value.value, value.source) if isinstance(value, Lazy) else value


# -- dictionaries


@operation
def dict_get(world: World, owner: dict[Any, Any], key: Any, reason: str = ABSENT) -> Any:
    """A dict's item, MISSING if it has none."""
    container, key = world.tracker(owner), world.pinned(key)
    if container is None:
        return world.realize(dict.get(owner, key, MISSING))
    world.check_key(key)
    if key in container.writes:
        found = container.writes[key]
        return MISSING if found is DELETED else found
    return dict_before(world, container, key, reason)


def dict_before(world: World, container: VariableTracker, key: Any, reason: str = ABSENT) -> Any:
    """The item that it had before the frame, MISSING if none, with a guard."""
    if dict.__contains__(container.value, key):
        found = dict.__getitem__(container.value, key)
        return world.wrap(found, item_source(container, key))
    world.guard("absent", container.source, key, reason)
    return MISSING


@operation
def dict_set(world: World, owner: dict[Any, Any], key: Any, value: Any) -> None:
    container, key = world.tracker(owner), world.pinned(key)
    if container is None:
        raw_base(owner).__setitem__(owner, key, value)
        return
    world.check_key(key)
    world.mark_written(container)
    if container.writes.get(key) is DELETED:
        what = f"{container.source}: a key is deleted, then set"
        world.unsupported("outside-change", what)
    container.writes[key] = value
    if container.contents is not None:
        raw_base(container.value).__setitem__(container.contents, key, value)


@operation
def is_as_before(world: World, container: VariableTracker, key: Any, value: Any) -> bool:
    """Whether a written key ends as it began; then it is guarded that it begins so."""
    before, source = dict.get(container.value, key, MISSING), item_source(container, key)
    if is_constant(before) and is_constant(value) and same_constant(value, before):
        world.guard("equals", source, before, "written, as it was")
    elif before is not value:
        return False
    else:
        world.wrap(before, source)
    return True


@operation
def dict_delete(world: World, owner: dict[Any, Any], key: Any) -> None:
    """Raises KeyError if there is no such key."""
    container, key = world.tracker(owner), world.pinned(key)
    if world.dict_get(owner, key) is MISSING:
        raise KeyError(key)
    if container is None:
        raw_base(owner).__delitem__(owner, key)
        return
    world.mark_written(container)
    if container.contents is not None:
        raw_base(container.value).__delitem__(container.contents, key)
    container.writes.pop(key, None)
    if dict_before(world, container, key) is not MISSING:
        container.writes[key] = DELETED


@operation
def dict_keys(world: World, container: VariableTracker) -> list[Any]:
    """All keys in order, guarded."""
    keys = keys_of(container.value)
    for key in keys:
        world.check_key(key)
    world.guard("keys", container.source, keys, "its keys are enumerated")
    order = dict.fromkeys((*keys, *container.writes))  # written keys keep their place
    return [key for key in order if container.writes.get(key) is not DELETED]


@operation
def check_key(world: World, key: Any) -> None:
    """Only keys whose hash and equality are the built-in ones may be looked up natively."""
    cls = type(key)
    tracker = world.tracker(key) if isinstance(key, torch.nn.Module) else None
    if tracker is not None:
        world.guard("identity", tracker.source, key, "hashed")
    if isinstance(key, torch.Tensor):
        world.unsupported("tensor-as-index", "a tensor is a key of a dict or set from outside")
    builtin = is_constant(key) or cls.__hash__ is OBJECT_HASH or is_fixed(cls)
    if not builtin and not isinstance(key, IDENTITY_TYPES):
        what = f"a {cls.__name__} with its own __hash__ is used as a key"
        world.unsupported("own-equality", what)


@operation
def mark_written(world: World, tracker: VariableTracker) -> None:
    if world.writes.called_later:
        world.unsupported("outside-change", f"{world.writes.called_later} changes {tracker.source}")
    if tracker not in world.writes.written:
        world.writes.written.append(tracker)


# -- whole containers


@operation
def imported(world: World, value: Any) -> Any:
    """An inside copy of an outside container, one level deep, items wrapped; other values unchanged."""
    inside = world.inside(value)
    return inside if inside is value else copied(inside)


@operation
def inside(world: World, value: Any) -> Any:
    """The inside copy that stands for an outside container, and follows what the frame does to it."""
    tracker = world.tracker(value)
    if tracker is None or isinstance(value, torch.Tensor):
        return value
    if tracker.contents is None:
        tracker.contents = imported_contents(world, value, tracker)
    return value if tracker.contents is None else tracker.contents


def imported_contents(world: World, value: Any, tracker: VariableTracker) -> Any:
    """None if it is no container."""
    base: Any = builtin_base(value)
    items: list[Any]
    if base is None:
        return None
    if base is dict:
        items = [(key, world.dict_get(value, key)) for key in world.dict_keys(tracker)]
        if isinstance(value, collections.defaultdict):
            world.below(value, "slot", "default_factory", FACTORY.__get__(value))
    elif base in (set, frozenset):
        items = raw_items(value)
        for member in items:
            world.check_key(member)
        world.guard("keys", tracker.source, tuple(items), "its members are read")
        if items != raw_items(copied(value)):  # the order depends on how the set came about
            what = f"{tracker.source}, a set, loses its order in a copy"
            world.unsupported("outside-object", what)
        return copied(value)
    else:
        size = base.__len__(value)
        world.guard("length", tracker.source, size, "its items are read")
        items = [world.below(value, "item", i, base.__getitem__(value, i)) for i in range(size)]
        items += tracker.appended
    return refilled(value, items)


@operation
def mutable(world: World, value: Any) -> Any:
    """What a built-in method changes in place of a container: itself if the frame made it, else the
    inside copy of a list."""
    tracker = world.tracker(value)
    if tracker is None:
        return value
    if builtin_base(value) is not list:
        what = f"{tracker.source} (a {type(value).__name__}) is changed"
        world.unsupported("outside-change", what)
    world.mark_written(tracker)
    return world.inside(value)


@operation
def extend(world: World, target: Any, items: list[Any]) -> None:
    """Put items at the end of a list."""
    tracker = world.tracker(target)
    if tracker is None or tracker.contents is not None:
        list.extend(world.mutable(target), items)
    else:
        world.mark_written(tracker)
        tracker.appended += items


# -- names


@operation
def load_global(world: World, frame: Frame, name: str) -> Any:
    namespace = globals_of(world, frame)
    found = world.dict_get(namespace, name, "not found, so the builtin is meant")
    if found is MISSING:
        world.hold(frame.builtins, "builtins")
        found = world.dict_get(frame.builtins, name)
    if found is MISSING:
        raise NameError(f"name {name!r} is not defined")
    return found


@operation
def store_global(world: World, frame: Frame, name: str, value: Any) -> None:
    world.dict_set(globals_of(world, frame), name, value)


@operation
def load_cell(world: World, cell: types.CellType) -> Any:
    tracker = world.tracker(cell)
    if tracker is None:
        return world.realize(cell.cell_contents)
    if "cell_contents" in tracker.slots:
        return tracker.slots["cell_contents"]
    try:
        contents = cell.cell_contents
    except ValueError:
        world.unsupported("no-value-yet", f"{tracker.source.key} has no value yet")
    return world.wrap(contents, Source("contents", None, tracker.source))


@operation
def store_cell(world: World, cell: types.CellType, value: Any) -> None:
    tracker = world.tracker(cell)
    if tracker is None:
        set_cell(cell, value)
    elif value is DELETED:
        world.unsupported("outside-change", f"the variable {tracker.source.key} is deleted")
    else:
        world.mark_written(tracker)
        tracker.slots["cell_contents"] = value


@operation
def closure(world: World, function: types.FunctionType) -> tuple[types.CellType, ...]:
    cells = function.__closure__ or ()
    owner = world.tracker(function)
    if owner is not None:
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            tracker = VariableTracker(cell, Source("closure", name, owner.source))
            known = world.outside.trackers.setdefault(id(cell), tracker)
            if known is not tracker and known.source != tracker.source:
                sources = tracker.source, known.source
                world.guard("same", sources, None, "two functions share a variable")
    return cells


@operation
def default(world: World, function: types.FunctionType, index: int) -> Any:
    values = function.__defaults__ or ()
    if (owner := world.tracker(function)) is not None:
        world.guard("defaults", owner.source, len(values), "a default is used")
    return world.below(function, "default", index, values[index])


@operation
def keyword_default(world: World, function: types.FunctionType, name: str) -> Any:
    return world.below(function, "keyword_default", name, (function.__kwdefaults__ or {})[name])


@operation
def same(world: World, left: Any, right: Any) -> bool:
    """`is`, with a guard when the answer could change with the inputs."""
    if left is not right and {type(left), type(right)} <= {int, torch.SymInt}:
        left, right = world.pinned(left), world.pinned(right)  # Python shares small ints
    ours, theirs = world.tracker(left), world.tracker(right)
    kinds = (type, types.ModuleType, types.BuiltinFunctionType, torch.Tensor)
    fixed = isinstance(left, kinds) or isinstance(right, kinds)
    if ours is not None and theirs is not None and ours is not theirs and not fixed:
        world.guard("distinct", (ours.source, theirs.source), None, "compared with `is`")
    return left is right


# -- imports


@operation
def import_name(world: World, frame: Frame, name: str, fromlist: Any, level: int) -> Any:
    namespace, full = frame.function.__globals__, name
    if level:
        full = importlib.util.resolve_name("." * level + name, namespace["__package__"])
    if full not in sys.modules:
        what = f"the module {full} is imported for the first time"
        world.unsupported("first-import", what)
    module = __import__(name, namespace, None, fromlist, level)
    world.hold(sys.modules, "sys.modules")
    for imported in {full, module.__name__}:
        world.dict_get(sys.modules, imported)
    world.hold(module, module.__name__)
    return module
