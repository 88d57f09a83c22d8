"""Wrappers of modules and functions: `CompiledModule` is compiled when called, in all else the original;
`DisabledModule` and `disable` keep code out of graphs, `allow_in_graph` makes a call one node of them.
A wrapper's class derives from the original's class, and the two share one `__dict__`: parameters, hooks,
attributes are the same, with the same names in `state_dict()`. The real compiler keeps the original as a
submodule: torch/_dynamo/eval_frame.py (OptimizedModule), torch/_dynamo/decorators.py."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, cast

import torch

from minicompile.dynamo.calls import DISABLED
from minicompile.dynamo.dispatch import Dispatcher
from minicompile.dynamo.world import World, call_rules
from minicompile.errors import OptionError, Unsupported


def call_module(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The frame that is captured: the module's call, hooks and all."""
    return self(*args, **kwargs)


class WrappedModule(torch.nn.Module):
    """Mixin of every wrapper class. `_orig_mod` is the original module, `_again` wraps a copy of it."""

    __slots__ = ("_again", "_orig_mod")

    _orig_mod: torch.nn.Module
    _word: str
    _again: Callable[[torch.nn.Module], torch.nn.Module]

    def __repr__(self) -> str:
        return f"{self._word} {self._orig_mod!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._again, (self._orig_mod,)


class CompiledModule(WrappedModule):
    """Goes through a dispatcher when called."""

    __slots__ = ("_entrance", "_minicompile")

    _minicompile: Dispatcher
    _entrance: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._entrance(self._orig_mod, *args, **kwargs)

    _word = "compiled"


class DisabledModule(WrappedModule):
    """Is never part of a graph."""

    __slots__ = ("_reason",)

    _reason: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    _word = "disabled"


@functools.cache
def wrapper_class(kind: Any, cls: Any) -> type[WrappedModule]:
    """The wrapper class for modules of a class; `isinstance(wrapper, cls)` holds."""
    name = f"{kind.__name__.removesuffix('Module')}{cls.__qualname__}"
    body = {"__slots__": (), "__module__": cls.__module__, "__qualname__": name}
    made: type[WrappedModule] = type(cls)(name.rpartition(".")[2], (kind, cls), body)
    return made


def wrap(original: torch.nn.Module, kind: Any, **slots: Any) -> torch.nn.Module:
    """A wrapper that shares the original's state."""
    cls: Any = type(original)
    wrapper = object.__new__(wrapper_class(kind, cls))
    object.__setattr__(wrapper, "__dict__", original.__dict__)
    for name, value in {"_orig_mod": original, **slots}.items():
        object.__setattr__(wrapper, name, value)
    return wrapper


# a compiled module called while capturing: the original becomes part of this graph
call_rules(CompiledModule.__call__)(
    lambda world, args, kwargs: world.call(world.load_attr(args[0], "_orig_mod"), args[1:], kwargs)
)
call_rules(DisabledModule.__call__)(
    lambda world, args, kwargs: world.disabled(
        type(args[0]._orig_mod).__qualname__, args[0]._reason
    )
)


# -- what a program says about its own functions


def disable(target: Any = None, *, reason: str = "") -> Any:
    """Keep a function or an nn.Module, and all that it calls, out of graphs; also a decorator.

    Where a captured function calls it there is a graph break that gives `reason`.
    Raises OptionError for what can't be called.
    """
    again = functools.partial(disable, reason=reason)
    if target is None:
        return again
    if isinstance(target, type) or not callable(target):
        kind = "class" if isinstance(target, type) else type(target).__name__
        raise OptionError(f"can't disable a {kind}: give a function or an nn.Module")
    target = target._orig_mod if isinstance(target, DisabledModule) else original_of(target)
    if isinstance(target, torch.nn.Module):
        return wrap(target, DisabledModule, _reason=reason, _again=again)
    if isinstance(target, types.MethodType):
        return types.MethodType(disable(target.__func__, reason=reason), target.__self__)

    def disabled(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    functools.update_wrapper(disabled, target)
    setattr(disabled, DISABLED, reason)
    return disabled


def is_disabled(target: Any) -> bool:
    """Whether it is what `disable` gave."""
    function = target.__func__ if isinstance(target, types.MethodType) else target
    return isinstance(target, DisabledModule) or DISABLED in getattr(function, "__dict__", {})


def behind(target: Any, make: Callable[..., Dispatcher], again: Callable[..., Any]) -> Any:
    """The target behind the dispatcher that `make(function)` gives; `again` compiles copies of a module."""
    target = original_of(target)
    if isinstance(target, torch.nn.Module):
        frame = cast(types.FunctionType, call_module)
        made = make(frame, name=type(target).__qualname__, one_module=True)
        return wrap(
            target, CompiledModule, _minicompile=made, _entrance=made.entrance, _again=again
        )
    if isinstance(target, types.MethodType):
        return types.MethodType(behind(target.__func__, make, again), target.__self__)
    if not isinstance(target, types.FunctionType):
        target = calling(target)
    return make(target).entrance


def calling(target: Any) -> types.FunctionType:
    """A function that calls some other callable (a functools.partial, an object with `__call__`)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    call.__name__ = call.__qualname__ = getattr(target, "__name__", type(target).__name__)
    return cast(types.FunctionType, call)


def original_of(target: Any) -> Any:
    """What was compiled, if the target is a compiled function or module."""
    if isinstance(target, CompiledModule):
        return target._orig_mod
    if isinstance(target, types.FunctionType):
        # not an attribute: `functools.wraps` would copy it to functions that do something else
        return target.__globals__.get("__mc_original", target)
    return target


def allow_in_graph(target: Any) -> Any:
    """Put calls of a function into graphs as they are, without looking inside.

    It must be pure: tensors in and out as arguments and results, no tensors from elsewhere, nothing else
    read that changes. It runs on fake tensors while capturing; backends that trace see what it does.
    Raises OptionError for anything but Python functions.
    """
    if not isinstance(target, types.FunctionType):
        kind = type(target).__name__
        raise OptionError(f"allow_in_graph takes Python functions, not a {kind}")
    call_rules(target)(functools.partial(opaque_call, target))
    return target


def opaque_call(function: Callable[..., Any], world: World, args: Any, kwargs: Any) -> Any:
    """One node of the graph."""
    owner = world.tracker(function)
    if owner is not None:
        world.guard("identity", owner.source, function, "allowed in the graph")
    recorder, arguments = world.recorder, world.deep_arguments(args, kwargs)
    recorder.mode.allow_non_fake_inputs = False  # gradients could not reach tensors that it hides
    try:
        return recorder.record("call_function", cast(Any, function), *arguments)
    except Unsupported as error:
        what = f"{function.__qualname__}, allowed in the graph: {error.reason}"
        world.unsupported("allowed-function", what)
    finally:
        recorder.mode.allow_non_fake_inputs = True
