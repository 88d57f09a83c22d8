"""What a program says about its own functions: `mc.disable` and `mc.allow_in_graph`.

The real compiler: torch/compiler/__init__.py, torch/_dynamo/decorators.py.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, cast

import torch

from minicompile.dynamo.calls import DISABLED, Calls, call_rules
from minicompile.dynamo.interpreter import Args, Kwargs
from minicompile.dynamo.module import CompiledModule, DisabledModule, wrap
from minicompile.errors import OptionError, Unsupported


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


def original_of(target: Any) -> Any:
    """What was compiled, if the target is a compiled function or module."""
    if isinstance(target, CompiledModule):
        return target._orig_mod
    if isinstance(target, types.FunctionType):
        return target.__dict__.get("_minicompile_original", target)
    return target


def allow_in_graph(target: Any) -> Any:
    """Put calls of a function (or of each in a list) into graphs as they are, without looking inside.

    It must be pure: tensors in and out as arguments and results, no tensors from elsewhere, nothing else
    read that changes. It runs on fake tensors while capturing; backends that trace see what it does.
    Raises OptionError for anything but Python functions.
    """
    if isinstance(target, list | tuple):
        return [allow_in_graph(function) for function in target]
    if not isinstance(target, types.FunctionType):
        kind = type(target).__name__
        raise OptionError(f"allow_in_graph takes Python functions, not a {kind}")
    call_rules(target)(functools.partial(opaque_call, target))
    return target


def opaque_call(function: Callable[..., Any], tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    """One node of the graph."""
    owner = tracer.tracker(function)
    if owner is not None:
        tracer.guard("identity", owner.source, function, "allowed in the graph")
    recorder, name = tracer.recorder, function.__qualname__
    arguments = tuple(tracer.deep(arg) for arg in args)
    keywords = {key: tracer.deep(arg) for key, arg in kwargs.items()}
    recorder.mode.allow_non_fake_inputs = False  # gradients could not reach tensors that it hides
    try:
        return recorder.record("call_function", cast(Any, function), arguments, keywords)
    except Unsupported as error:
        what = f"{name}, allowed in the graph: {error.reason}"
        tracer.unsupported("allowed-function", what)
    finally:
        recorder.mode.allow_non_fake_inputs = True
