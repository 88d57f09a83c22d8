"""Rules for functions that can't be interpreted, or are better not: of the standard library, and those of
torch that are no plain graph nodes (modules, global state, questions about compiling).

The real compiler: torch/_dynamo/polyfills/, torch/_dynamo/variables/ (user_defined, torch, ctx_manager).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import types
from typing import Any

import torch
from torch.autograd.profiler import record_function

from minicompile import compat
from minicompile.compat import settings
from minicompile.dynamo.builtins import means
from minicompile.dynamo.calls import FIXED_TYPES
from minicompile.dynamo.result import Source
from minicompile.dynamo.variables import (
    HOOKS,
    OBJECT_NEW,
    is_constant,
    plain_dict,
    words,
)
from minicompile.dynamo.world import World, call_rules

means(itertools.chain)(
    lambda world, *parts: itertools.chain(*[world.lazily(part) for part in parts])
)
means(itertools.starmap)(
    lambda world, function, rows: (
        world.call(function, tuple(world.items(row)), {}) for row in world.lazily(rows)
    )
)
means(itertools.chain.from_iterable)(
    lambda world, parts: (item for part in world.lazily(parts) for item in world.lazily(part))
)
# The fields of a dataclass are fixed when the class is made.
means(dataclasses.fields)(lambda world, owner: dataclasses.fields(owner))


@means(inspect.signature)
def signature(world: World, function: Any) -> Any:
    """A function's signature: its code and its defaults, which are guarded, decide what it shows."""
    inner = function.__func__ if isinstance(function, types.MethodType) else function
    if not isinstance(inner, types.FunctionType) or hasattr(inner, "__wrapped__"):
        world.unsupported_kind("unusual-arguments", "inspect.signature of a {}", function)
    defaults = [world.default(inner, index) for index in range(len(inner.__defaults__ or ()))]
    defaults += [world.keyword_default(inner, name) for name in inner.__kwdefaults__ or ()]
    if not all(map(is_constant, defaults)):
        what = "inspect.signature of a function with a mutable default"
        world.unsupported("unusual-arguments", what)
    return inspect.signature(function)


@means(copy.deepcopy)
def deep_copy(world: World, value: Any, memo: Any = None) -> Any:
    """A copy of plain data: containers, and objects that only have a `__dict__`."""
    cls, copies = type(value), {} if memo is None else memo
    if is_constant(value) or isinstance(value, FIXED_TYPES):
        return value
    if id(value) in copies:
        return copies[id(value)]
    if cls is dict:
        items = world.inside(value).items()
        made: Any = {key: deep_copy(world, item, copies) for key, item in items}
    elif cls in (list, tuple, set):
        made = cls([deep_copy(world, item, copies) for item in world.inside(value)])
    elif is_plain(value):
        made = copies[id(value)] = object.__new__(cls)
        namespace = world.inside(world.generic_attribute(value, "__dict__"))
        made.__dict__.update(deep_copy(world, namespace, copies))
    else:
        world.unsupported("copy", f"a {cls.__name__} is copied")
    copies[id(value)] = made
    return made


COPY_HOOKS = words("__deepcopy__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __getnewargs__")


def is_plain(value: Any) -> bool:
    """Whether copying the `__dict__` is all that `copy.deepcopy` would do."""
    cls = type(value)
    defined = any(COPY_HOOKS & owner.__dict__.keys() for owner in cls.__mro__[:-1])
    return plain_dict(value) is not None and not defined and cls.__new__ is OBJECT_NEW


# -- torch: modules


@means(compat.module_call)
def module_call(world: World, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """`module(...)`: straight to `forward` if there are no hooks, else nn.Module's own code."""
    frame = world.frame
    assert frame is not None
    before = frame.module_path
    frame.module_path = module_path(world, module)
    try:
        hooked = any(compat.GLOBAL_HOOK_TABLES)
        if not hooked:
            for table in compat.GLOBAL_HOOK_TABLES:
                tracker = world.hold(table, "hooks of every module")
                world.guard("length", tracker.source, 0, "hooks that apply to every module")
            hooked = has_hooks(world, module)
        function = compat.module_call_impl if hooked else world.load_attr(module, "forward")
        if frame.called is module:  # so that a break inside can cut this frame at the call
            frame.called = function
        if hooked:
            return world.call_function(function, (module, *args), kwargs)
        return world.call(function, args, kwargs)
    finally:
        frame.module_path = before


def has_hooks(world: World, module: torch.nn.Module) -> bool:
    namespace = module.__dict__
    hooked = any(namespace.get(name) for name in HOOKS)
    owner = world.tracker(module)
    if owner is not None and not hooked:
        world.guard("hooks", owner.source, False, "called without hooks")
    return hooked


def module_path(world: World, module: torch.nn.Module) -> str:
    """`transformer.h.0.attn`: the submodule's path from the module that was compiled."""
    owner = world.tracker(module)
    if owner is None:
        return type(module).__name__
    parts: list[str] = []
    source: Source | None = owner.source
    while source is not None:
        if source.key not in (None, "self", "globals"):
            parts.append(str(source.key))
        source = source.base
    return ".".join(reversed(parts))


# -- torch: global state


@means(*settings.STATE_SETTERS, named=True)
def set_state(world: World, setter: Any, *args: Any, **kwargs: Any) -> Any:
    """Sets the state now, and again when the graph runs."""
    if setter is settings.set_grad_enabled and world.recorder.inference and args[0]:
        world.unsupported("inference-mode", "grad mode is enabled in inference mode")
    found = setter(*args, **kwargs)
    world.recorder.statement(setter, (*args, *kwargs.values()))
    return found


means(*settings.STATE_READERS, named=True)(
    lambda world, reader, *args, **kwargs: reader(*map(world.deep, args), **kwargs)
)


@means(*settings.SETTING_READERS, named=True)
def read_setting(world: World, reader: Any, *args: Any) -> Any:
    """Reads a setting that is no part of the guarded global state: the answer gets a guard of its own."""
    source = Source("setting", args, world.hold(reader, f"torch.{reader.__name__}").source)
    return world.wrap(reader(*args), source, "a setting of torch")


class Unrecorded(contextlib.ContextDecorator):
    """Stands for `record_function(name)` in a frame: a fused kernel lies in no range of a profile."""

    def __enter__(self) -> Unrecorded:
        return self

    def __exit__(self, *error: object) -> None: ...


means(record_function)(lambda world, name, args=None: Unrecorded())
means(contextlib.ContextDecorator._recreate_cm)(  # type: ignore[attr-defined]
    lambda world, manager: Unrecorded() if type(manager) is record_function else manager
)


@call_rules(torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling)
def is_compiling(world: World, args: Any, kwargs: Any) -> bool:
    """True in a frame that is captured as a whole: Python code that goes on after a break is told False."""
    world.asked_compiling = True
    return world.compiling


means(torch.is_inference_mode_enabled)(lambda world: world.recorder.inference)
call_rules(
    *(torch.jit.is_tracing, torch.jit.is_scripting, torch.compiler.is_exporting),  # type: ignore[attr-defined]
    torch.overrides.has_torch_function,
)(lambda world, args, kwargs: False)
call_rules(torch.is_tensor, torch.overrides.is_tensor_like)(
    lambda world, args, kwargs: isinstance(args[0], torch.Tensor)
)
