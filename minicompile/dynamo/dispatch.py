"""What `mc.compile` returns: per call, the first cache entry whose guards hold; else capture; else eager.

    Dispatcher          entries, breaks and counters of one compiled function
    compiled_function   a function with the original's signature in front of a Dispatcher
    CompiledModule      (module.py) the same in front of an nn.Module

The real compiler: torch/_dynamo/eval_frame.py, convert_frame.py, cache_size.py.
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minicompile.dynamo.bytecode import is_coroutine, is_generator
from minicompile.dynamo.capture import capture_frame
from minicompile.dynamo.entry import MISS, BoxedGraph, Entry
from minicompile.dynamo.guards import generate
from minicompile.dynamo.result import Capture, Explanation, GraphBreak, GuardFailure
from minicompile.dynamo.variables import UserError, is_constant
from minicompile.errors import BackendError, Unsupported
from minicompile.options import Options

Backend = Callable[[Capture], BoxedGraph]
"""Compiles a capture."""

ALL: weakref.WeakSet[Dispatcher] = weakref.WeakSet()
"""Every dispatcher, for `mc.reset()`."""

_thread = threading.local()
_lock = threading.RLock()
"""Held while capturing: FakeTensorMode and grad mode belong to the thread, but interned state does not."""


class Missing:
    """Stands for an argument that the caller left out, in generated signatures."""

    def __repr__(self) -> str:
        return "..."


MISSING_ARGUMENT = Missing()


def plain_backend(capture: Capture) -> BoxedGraph:
    """Runs the captured graph as it is: backend "eager"."""
    run = capture.graph.gm.forward

    def call(inputs: list[Any]) -> Sequence[Any]:
        outputs: Sequence[Any] = run(*inputs)
        return outputs

    return call


class Dispatcher:
    """The cache of one compiled function."""

    def __init__(
        self,
        function: types.FunctionType,
        backend: Backend,
        options: Options,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        name: str | None = None,
    ) -> None:
        self.function, self.backend, self.options = function, backend, options
        self.fullgraph, self.dynamic = fullgraph, dynamic
        self.name = name or function.__qualname__
        code = function.__code__
        self.parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.varargs = code.co_varnames[len(self.parameters)] if code.co_flags & 4 else None
        keywords_at = len(self.parameters) + bool(self.varargs)
        self.keywords = code.co_varnames[keywords_at] if code.co_flags & 8 else None
        self.names = (*self.parameters, *filter(None, (self.varargs, self.keywords)))
        self.entries: list[Entry] = []
        self.clear()
        ALL.add(self)

    def clear(self) -> None:
        """Forget every compiled version and all counts."""
        self.entries.clear()
        self.refused: set[Any] = set()
        """Fingerprints of calls whose capture was refused."""
        self.breaks: dict[GraphBreak, None] = {}
        self.failures: list[GuardFailure] = []
        self.eager_calls = 0
        self.limit_reached = False
        self.broken = False
        """No backend on this machine: everything runs in eager."""

    # -- calls

    def miss(self, *arguments: Any) -> Any:
        """A call that no entry answered: capture it, or run it in eager."""
        if getattr(_thread, "capturing", False) or self.broken:
            return self.eager(arguments)
        with _lock:
            for entry in list(self.entries):
                found = entry.call(*arguments)
                if found is not MISS:
                    return found
            entry_made = self.compile(arguments)
        if entry_made is not None:
            found = entry_made.call(*arguments)
            if found is not MISS:
                return found
            self.disown(entry_made, arguments)
        self.eager_calls += 1
        return self.eager(arguments)

    def eager(self, arguments: tuple[Any, ...]) -> Any:
        """Call the original function."""
        code = self.function.__code__
        values = list(arguments)
        keywords = values.pop() if self.keywords else {}
        rest = values.pop() if self.varargs else ()
        only = dict(
            zip(self.parameters[code.co_argcount :], values[code.co_argcount :], strict=True)
        )
        return self.function(*values[: code.co_argcount], *rest, **only, **keywords)

    def compile(self, arguments: tuple[Any, ...]) -> Entry | None:
        """A new entry for these arguments; None if the call must run in eager. Raises under `fullgraph`."""
        if self.limit_reached and not self.fullgraph:
            return None
        key = fingerprint(arguments)
        if key in self.refused and not self.fullgraph:
            return None
        values = dict(zip(self.names, arguments, strict=True))
        found = [entry.failure(values) for entry in self.entries]
        self.failures += [failure for failure in found if failure is not None]
        del self.failures[:-MAX_FAILURES]
        if len(self.entries) >= self.options.recompile_limit or len(self.refused) >= MAX_REFUSED:
            self.reach_limit()
            return None
        try:
            check_kind(self.function)
            _thread.capturing = True
            try:
                captured = capture_frame(self.function, values, self.dynamic, self.name)
            finally:
                _thread.capturing = False
            compiled = self.backend(captured.capture)
        except UserError as error:
            if self.fullgraph:
                self.eager(arguments)  # raises what the user should see
            self.refuse(key, error)
            return None
        except Unsupported as error:
            self.refuse(key, error)
            return None
        except BackendError as error:
            if self.fullgraph:
                raise
            self.broken = True
            self.breaks[GraphBreak(str(error), None, "", "frame")] = None
            warnings.warn(f"minicompile runs {self.name} in eager: {error}", stacklevel=4)
            return None
        entry = Entry(captured, compiled, self.names)
        self.entries.append(entry)
        return entry

    def refuse(self, key: Any, error: Unsupported) -> None:
        if self.fullgraph:
            raise error
        self.refused.add(key)
        self.breaks[GraphBreak(error.reason, error.where, error.hint)] = None

    def reach_limit(self) -> None:
        reason = f"compiled {len(self.entries)} times already (options.recompile_limit)"
        if self.fullgraph:
            raise Unsupported(reason, hint="look at mc.explain for what keeps changing")
        if not self.limit_reached:
            self.limit_reached = True
            last = f"; last reason: {self.failures[-1]}" if self.failures else ""
            self.breaks[
                GraphBreak(reason, None, "make what changes a tensor, or raise the limit")
            ] = None
            warnings.warn(
                f"minicompile runs {self.name} in eager from here on: {reason}{last}", stacklevel=5
            )

    def disown(self, entry: Entry, arguments: tuple[Any, ...]) -> None:
        """An entry whose guards do not even hold for the call it was made for: never use it."""
        failure = entry.failure(dict(zip(self.names, arguments, strict=True)))
        self.entries.remove(entry)
        reason = f"the guards changed while capturing: {failure}"
        self.refuse(fingerprint(arguments), Unsupported(reason))

    # -- what happened

    def explanation(self) -> Explanation:
        return Explanation(
            name=self.name,
            captures=tuple(entry.capture for entry in self.entries),
            breaks=tuple(self.breaks),
            eager_calls=self.eager_calls,
            compiled_calls=sum(entry.hits for entry in self.entries),
            failures=tuple(self.failures),
            limit_reached=self.limit_reached,
        )


MAX_FAILURES = 64
MAX_REFUSED = 64


def check_kind(function: types.FunctionType) -> None:
    code = function.__code__
    if is_coroutine(code):
        raise Unsupported(
            "an asynchronous function is compiled directly", hint="compile the functions it calls"
        )
    if is_generator(code):
        raise Unsupported(
            "a generator function is compiled directly", hint="compile the functions it calls"
        )


def fingerprint(value: Any, depth: int = 0) -> Any:
    """What two calls must share for a refusal of one to stand for the other; hashable."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, tuple(value.shape), value.device, value.requires_grad
    if is_constant(value) and not isinstance(value, slice | torch.SymInt):
        return type(value), repr(value) if isinstance(value, float | complex) else value
    if isinstance(value, list | tuple) and depth < 4:
        return type(value), tuple(fingerprint(item, depth + 1) for item in value)
    if type(value) is dict and depth < 4:
        return tuple((str(key), fingerprint(item, depth + 1)) for key, item in value.items())
    if isinstance(value, torch.nn.Module):
        return type(value), id(value), value.training, torch.is_grad_enabled()
    return type(value)


def compiled_function(dispatcher: Dispatcher) -> types.FunctionType:
    """A function with the original's signature that goes through the dispatcher.

    Defaults are read at the call, from the original, so that a changed default counts.
    """
    function, code = dispatcher.function, dispatcher.function.__code__
    defaults, only = function.__defaults__ or (), function.__kwdefaults__ or {}
    head: list[str] = []
    fills: list[str] = []
    first_default = code.co_argcount - len(defaults)
    for number, name in enumerate(code.co_varnames[: code.co_argcount]):
        optional = number >= first_default
        head.append(f"{name}=__mc_missing" if optional else name)
        if optional:
            fills.append(
                f"    if {name} is __mc_missing:\n"
                f"        {name} = __mc_original.__defaults__[{number - code.co_argcount}]"
            )
        if number + 1 == code.co_posonlyargcount:
            head.append("/")
    if dispatcher.varargs:
        head.append(f"*{dispatcher.varargs}")
    elif code.co_kwonlyargcount:
        head.append("*")
    for name in code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]:
        head.append(f"{name}=__mc_missing" if name in only else name)
        if name in only:
            fills.append(
                f"    if {name} is __mc_missing: {name} = __mc_original.__kwdefaults__[{name!r}]"
            )
    if dispatcher.keywords:
        head.append(f"**{dispatcher.keywords}")
    given = ", ".join(dispatcher.names)
    text = "\n".join(
        [
            f"def compiled({', '.join(head)}):",
            *fills,
            "    for __mc_entry in __mc_entries:",
            f"        __mc_result = __mc_entry.call({given})",
            "        if __mc_result is not __mc_miss:",
            "            return __mc_result",
            f"    return __mc_dispatcher.miss({given})",
            "",
        ]
    )
    names = {
        "__mc_missing": MISSING_ARGUMENT,
        "__mc_original": function,
        "__mc_entries": dispatcher.entries,
        "__mc_miss": MISS,
        "__mc_dispatcher": dispatcher,
    }
    made = generate(text, names, "compiled")
    functools.update_wrapper(made, function)
    made._minicompile = dispatcher
    made._minicompile_original = function
    assert isinstance(made, types.FunctionType)
    return made
