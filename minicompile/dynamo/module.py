"""`CompiledModule`: an nn.Module that is compiled when called, and in everything else is the original.
`DisabledModule`: one that captured code calls as it is.

The wrapper's class derives from the original's class, and the two share one `__dict__`: parameters, buffers,
submodules, `training`, hooks and every attribute are the same, with the same names in `state_dict()`.
The real compiler keeps the original as a submodule: torch/_dynamo/eval_frame.py (OptimizedModule).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from minicompile.dynamo.calls import Calls, call_rules
from minicompile.dynamo.dispatch import Dispatcher
from minicompile.dynamo.entry import MISS


def call_module(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The frame that is captured: the module's call, hooks and all."""
    return self(*args, **kwargs)


class WrappedModule(torch.nn.Module):
    """Mixin of every wrapper class. `_orig_mod` is the original module, `_again` wraps a copy of it."""

    __slots__ = ("_again", "_orig_mod")

    _orig_mod: torch.nn.Module
    _again: Callable[[torch.nn.Module], torch.nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._again, (self._orig_mod,)


class CompiledModule(WrappedModule):
    """Goes through a dispatcher when called."""

    __slots__ = ("_minicompile",)

    _minicompile: Dispatcher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original, dispatcher = self._orig_mod, self._minicompile
        for entry in dispatcher.entries:
            found = entry.call(original, args, kwargs)
            if found is not MISS:
                return found
        return dispatcher.miss(original, args, kwargs)

    def __repr__(self) -> str:
        return f"compiled {self._orig_mod!r}"


class DisabledModule(WrappedModule):
    """Is never part of a graph."""

    __slots__ = ("_reason",)

    _reason: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    def __repr__(self) -> str:
        return f"disabled {self._orig_mod!r}"


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


@call_rules(CompiledModule.__call__)
def compiled_module_call(tracer: Calls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A compiled module called while capturing: the original becomes part of this graph."""
    return tracer.call(tracer.load_attr(args[0], "_orig_mod"), args[1:], kwargs)


@call_rules(DisabledModule.__call__)
def disabled_module_call(tracer: Calls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tracer.disabled(type(args[0]._orig_mod).__qualname__, args[0]._reason)
