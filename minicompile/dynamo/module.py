"""`CompiledModule`: an nn.Module that is compiled when called, and in everything else is the original.

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


class CompiledModule(torch.nn.Module):
    """Mixin of every wrapper class. `_orig_mod` is the original module."""

    __slots__ = ("_minicompile", "_orig_mod", "_recompile")

    _orig_mod: torch.nn.Module
    _minicompile: Dispatcher
    _recompile: Callable[[torch.nn.Module], torch.nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original, dispatcher = self._orig_mod, self._minicompile
        for entry in dispatcher.entries:
            found = entry.call(original, args, kwargs)
            if found is not MISS:
                return found
        return dispatcher.miss(original, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._recompile, (self._orig_mod,)

    def __repr__(self) -> str:
        return f"compiled {self._orig_mod!r}"


@functools.cache
def wrapper_class(cls: Any) -> type[CompiledModule]:
    """`CompiledModule` for modules of a class; `isinstance(wrapper, cls)` holds."""
    name, metaclass = f"Compiled{cls.__qualname__}", type(cls)
    body = {"__slots__": (), "__module__": cls.__module__, "__qualname__": name}
    made: type[CompiledModule] = metaclass(f"Compiled{cls.__name__}", (CompiledModule, cls), body)
    return made


def wrap_module(
    original: torch.nn.Module,
    dispatcher: Dispatcher,
    recompile: Callable[[torch.nn.Module], torch.nn.Module],
) -> torch.nn.Module:
    """A wrapper that shares the original's state."""
    cls: Any = type(original)
    wrapper = object.__new__(wrapper_class(cls))
    object.__setattr__(wrapper, "__dict__", original.__dict__)
    object.__setattr__(wrapper, "_orig_mod", original)
    object.__setattr__(wrapper, "_minicompile", dispatcher)
    object.__setattr__(wrapper, "_recompile", recompile)
    return wrapper


@call_rules(CompiledModule.__call__)
def compiled_module_call(tracer: Calls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A compiled module called while capturing: the original becomes part of this graph."""
    return tracer.call(tracer.load_attr(args[0], "_orig_mod"), args[1:], kwargs)
