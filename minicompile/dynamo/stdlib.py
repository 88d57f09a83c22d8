"""Rules for functions of the standard library that can't be interpreted, or are better not.

The real compiler: torch/_dynamo/polyfills/, torch/_dynamo/variables/user_defined.py.
"""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import functools
import inspect
import itertools
import logging
import sys
import types
import typing
from typing import Any

from minicompile.dynamo.builtins import means, refuse
from minicompile.dynamo.calls import Calls
from minicompile.dynamo.result import Source
from minicompile.dynamo.variables import (
    MISSING,
    is_constant,
)

means(functools.cached_property)(lambda tracer, function: functools.cached_property(function))
means(itertools.chain)(
    lambda tracer, *parts: itertools.chain(*[tracer.lazily(part) for part in parts])
)
means(itertools.chain.from_iterable)(
    lambda tracer, parts: (item for part in tracer.lazily(parts) for item in tracer.lazily(part))
)
means(typing.cast)(lambda tracer, kind, value: value)
# The fields of a dataclass are fixed when the class is made.
means(dataclasses.fields)(lambda tracer, owner: dataclasses.fields(owner))


@means(sys.exc_info)
def exc_info(tracer: Calls) -> Any:
    error = tracer.frame.handling() if tracer.frame is not None else None
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


@means(logging.getLogger)
def get_logger(tracer: Calls, name: Any = None) -> Any:
    """The logger of a name is always the same object."""
    if not is_constant(name):
        tracer.unsupported("a logger is looked up by something other than a constant")
    return tracer.hold(logging.getLogger(name), "logger").value


@means(inspect.signature)
def signature(tracer: Calls, function: Any) -> Any:
    """A function's signature: what it shows is fixed by the code object, which is guarded."""
    inner = function.__func__ if isinstance(function, types.MethodType) else function
    if not isinstance(inner, types.FunctionType | type):
        tracer.unsupported(f"inspect.signature of a {type(function).__name__}")
    found = inspect.signature(function)
    for parameter in found.parameters.values():
        if parameter.default is not parameter.empty and not is_constant(parameter.default):
            tracer.unsupported("inspect.signature of a function with a mutable default")
    return found


refuse("a deep copy is made", "copy it outside", copy.deepcopy)


@means(contextvars.ContextVar.get)
def context_get(tracer: Calls, variable: Any, *default: Any) -> Any:
    owner = tracer.tracker(variable)
    if owner is None:
        return variable.get(*default)
    found = variable.get(MISSING)
    if found is MISSING:
        tracer.unsupported("a ContextVar without a value is read")
    return tracer.wrap(found, Source("context", None, owner.source))


refuse("a ContextVar is set", "", contextvars.ContextVar.set, contextvars.ContextVar.reset)
