"""What `mc.compile` returns: per call, the first cache entry whose guards hold; else capture; else eager.

    Dispatcher          entries, breaks and counters of one compiled function
    compiled_function   a function with the original's signature in front of a Dispatcher
    CompiledModule      (module.py) the same in front of an nn.Module

The real compiler: torch/_dynamo/eval_frame.py, convert_frame.py, cache_size.py.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import threading
import time
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minicompile import compat
from minicompile.compat import settings
from minicompile.compat.inference import without_inference_mode
from minicompile.compat.settings import restored_modes
from minicompile.dynamo.arguments import fingerprint, is_large, signature_of
from minicompile.dynamo.breaks import Resume
from minicompile.dynamo.bytecode import is_coroutine, is_generator
from minicompile.dynamo.capture import CapturedFrame, Request, capture_frame, deep_stack
from minicompile.dynamo.entry import MISS, BoxedGraph, Entry
from minicompile.dynamo.guards import generate, quick_checks
from minicompile.dynamo.interpreter import Marker
from minicompile.dynamo.modes import GraphRaised
from minicompile.dynamo.reasons import REASONS, graph_break, refusal
from minicompile.dynamo.result import (
    Capture,
    GraphBreak,
    GuardFailure,
    Miss,
    Source,
    failure_lines,
)
from minicompile.dynamo.sizes import Dynamic, shape_guards
from minicompile.dynamo.variables import UserError
from minicompile.errors import (
    BackendError,
    OptionError,
    RejectedKernel,
    Unsupported,
)
from minicompile.ops.display import Registered
from minicompile.ops.events import Compilation, Failure, Watch
from minicompile.ops.gates import allowed
from minicompile.ops.origin import Origin, SourceLine
from minicompile.ops.plugins import rules
from minicompile.ops.registry import Registry
from minicompile.options import Options

Backend = Callable[[Capture], BoxedGraph]
"""Compiles a capture."""


frame_watchers: Registry[Callable[[Dispatcher], Any]] = Registry(
    "frame_watcher", "name -> sees what eager code of a compiled function calls"
)
"""What a rule makes of a dispatcher has `watched(function)`, which gives the function as it is, but sees what
that calls and may run something compiled instead; and `dispatchers`: those of functions that it captures."""

_all: weakref.WeakSet[Dispatcher] = weakref.WeakSet()
_all_lock = threading.Lock()
"""Held while `_all` is read or written."""
_frames = itertools.count()
"""Numbers for functions, in the order in which they were first compiled."""

LEFT_OUT = Marker("__mc_left_out")
"""Stands for an argument that the caller left out, in generated signatures."""

_thread = threading.local()
_lock = threading.RLock()
"""Held while capturing: FakeTensorMode and grad mode belong to the thread, but interned state does not."""


def plain_backend(capture: Capture) -> BoxedGraph:
    """Runs the captured graph as it is: backend "eager"."""
    run = capture.graph.function
    return lambda inputs: run(*inputs)


def capture_alone(
    function: types.FunctionType, values: dict[str, Any], dynamic: Dynamic, name: str
) -> CapturedFrame:
    """One call of a function, captured as a whole and kept in no cache. Raises Unsupported."""
    # the call may come from deep down, and under hooks that must not see our fakes
    with _lock, deep_stack(), compat.without_saved_tensor_hooks():
        return captured(function, values, Request(name, dynamic, Options().plugins))


def captured(
    function: types.FunctionType, values: dict[str, Any], request: Request
) -> CapturedFrame:
    """Call `capture_frame` while the lock is held. Raises Unsupported where no frame can be captured."""
    compat.check_capture()
    if active := settings.active_modes():
        raise refusal("function-mode", f"{' and '.join(active)} is active")
    code = function.__code__
    if is_coroutine(code) or is_generator(code):
        kind = "an asynchronous" if is_coroutine(code) else "a generator"
        raise refusal("generator-or-coroutine", f"{kind} function is compiled directly")
    _thread.capturing = True
    try:
        return capture_frame(function, values, request)
    finally:
        _thread.capturing = False


class Dispatcher:
    """The cache of one compiled function."""

    explanation = Registered()
    """What became of the calls: what `mc.explain` gives."""

    def __init__(
        self,
        function: types.FunctionType,
        backend: Backend,
        options: Options,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        name: str | None = None,
        above: Dispatcher | None = None,
        before: Dispatcher | None = None,
        one_module: bool = False,
    ) -> None:
        """`above`: the compiled function that this one is part of. `before`: what was cut, if `function` is a
        resume function. `one_module`: its first argument is always the same module."""
        self.function, self.backend, self.options = function, backend, options
        self.fullgraph, self.dynamic, self.one_module = fullgraph, dynamic, one_module
        self.name = name or function.__qualname__
        self.signature = signature_of(function)
        self.entries: list[Entry] = []
        self.above = None if above is None else weakref.ref(above)
        self.is_resumed = before is not None
        self.cut = None if before is None else weakref.ref(before)
        """The dispatcher that was cut, which has this one; where it is dropped, memory is freed at once."""
        self.clear()
        with _all_lock:
            _all.add(self)

    def clear(self) -> None:
        """Forget every compiled version and all counts."""
        self.entries.clear()
        self.resumed: dict[Any, Callable[..., Any]] = {}
        """Compiled functions that go on after graph breaks, by bytecode and state."""
        self.own_watchers: list[Any] | None = None
        self.refused: set[Any] = set()
        """Fingerprints of calls whose capture was refused."""

        self.compiling = True
        """What `torch.compiler.is_compiling()` gives; False once it gave that to a frame that is cut."""
        self.breaks: dict[GraphBreak, None] = {}
        self.last_refusal: GraphBreak | None = None
        self.misses: list[Miss] = []
        self.varied: dict[Source, str] = {}
        """Sizes and numbers that differed between calls: they become symbolic, unless `dynamic=False`."""
        self.varied_modules: set[str] = set()
        """Arguments whose identity differed between calls: modules are guarded by structure there."""
        self.recompiles = 0
        self.eager_calls = 0
        self.frame: int | None = None
        self.attempts = itertools.count()
        self.stopped = self.limit_reached = False
        """Stopped: everything new runs in eager."""

    # -- calls

    @property
    def before(self) -> Dispatcher | None:
        """What was cut, if this is what goes on after it."""
        return None if self.cut is None else self.cut()

    @property
    def entrance(self) -> Callable[..., Any]:
        """What callers call; a new function each time, which holds the dispatcher."""
        return compiled_function(self)

    def miss(self, *arguments: Any) -> Any:
        """A call that no entry answered: capture it, or run it in eager."""
        found = self.answer(arguments)
        if found is not MISS:
            return found
        self.eager_calls += 1
        return self.eager(arguments)

    def answer(self, arguments: tuple[Any, ...], wait: bool = True) -> Any:
        """What a cache entry gives, one made meanwhile or one made now; MISS: run the frame in eager.

        `wait`: for another thread that captures. User code never runs while the lock is held.
        """
        if self.stopped:
            return MISS
        tried = 0
        while True:
            for entry in self.entries[tried:]:  # other threads may have made one
                tried += 1
                found = entry.call(*arguments)
                if found is not MISS:
                    return found
            if getattr(_thread, "capturing", False):
                return MISS
            if not _lock.acquire(wait):
                return MISS
            try:
                if len(self.entries) > tried:
                    continue
                with deep_stack(), compat.without_saved_tensor_hooks():
                    if self.compile(arguments) is None:
                        return MISS
            finally:
                _lock.release()

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function run as it is, while what it calls may be captured."""
        root = self if self.above is None else self.above()
        for watcher in root.watchers if root is not None else ():
            function = watcher.watched(function)
        return function

    @property
    def watchers(self) -> list[Any]:
        """What sees functions that eager code calls, for all parts of this compiled function."""
        if self.own_watchers is None:
            makers = {} if self.fullgraph else rules(frame_watchers, self.options.plugins)
            self.own_watchers = [make(self) for make in makers.values()]
        return self.own_watchers

    @property
    def is_inner(self) -> bool:
        """Does the compiled function go on when this one returns, which it calls?"""
        root = self.before or self
        uncut, *_ = self.function.__dict__.get("_minicompile_uncut", (self.function,))
        return root.above is not None or uncut.__code__ is not root.function.__code__

    def values(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """A call's arguments by name."""
        return dict(zip(self.signature.parameters, arguments, strict=True))

    def eager(self, arguments: tuple[Any, ...]) -> Any:
        """Call the original function."""
        call = inspect.BoundArguments(self.signature, OrderedDict(self.values(arguments)))
        return self.watched(self.function)(*call.args, **call.kwargs)

    def graph_raised(self, raised: GraphRaised, arguments: tuple[Any, ...]) -> Any:
        """The frame in eager: the exception comes up in the user's line, under the frame's handlers."""
        self.eager_calls += 1
        kind, text = raised
        reason = f"a graph raised {kind}: calls that raise run the frame again in eager"
        self.breaks[graph_break(refusal("exception", reason))] = None
        try:
            return self.eager(arguments)
        except Exception as error:
            if type(error).__name__ == kind and text != str(error):
                error.add_note(f"In the graph: {text}")
            raise

    def compile(self, arguments: tuple[Any, ...]) -> Entry | None:
        """A new entry for these arguments; None if the call must run in eager. Raises under `fullgraph`."""
        # a function mode would see the fingerprint's reads
        key = tuple(settings.active_modes()) or fingerprint(arguments)
        if not self.fullgraph and (self.stopped or key in self.refused):
            return None
        code = self.function.__code__
        line = SourceLine(code.co_filename, code.co_firstlineno, self.name)
        origins = frozenset({Origin(self.name, "", (line,))})
        shown = (lambda: "runs in eager"), (lambda: "captured and compiled"), (lambda: origins)
        if not allowed("capture", self.name, *shown):
            return None
        values = self.values(arguments)
        failures = self.failures(values)
        if self.frame is None:
            self.frame = next(_frames)
        watch = Watch(Compilation(self.frame, next(self.attempts), self.name, self.options))
        entry, known, answered = None, dict(self.breaks), self.answered()
        try:
            watch.tell("start", failures)
            entry = self.made(arguments, values, key, failures, watch)
        finally:
            cut = entry.capture.stopped_by if entry is not None else None
            for found in self.breaks:
                if found not in known or found == cut:
                    watch.tell("break", found)
            watch.tell("done", None if entry is None else entry.capture)
        version, why = (0, self.last_refusal) if entry is None else (len(self.entries), None)
        *before, now = [set[Source](), *(symbolic_sources(made.capture) for made in self.entries)]
        names = tuple(sorted(source.name for source in now.difference(*before) if version))
        seconds = time.perf_counter() - watch.began
        self.misses.append(Miss(answered, tuple(failures), version, names, why, seconds))
        return entry

    def made(
        self,
        arguments: tuple[Any, ...],
        values: dict[str, Any],
        key: Any,
        failures: Sequence[GuardFailure],
        watch: Watch,
    ) -> Entry | None:
        """The entry that `compile` gives."""
        if len(self.entries) >= self.options.recompile_limit or len(self.refused) >= MAX_REFUSED:
            self.limit_reached = True
            limit = f"compiled {len(self.entries)} times already (options.recompile_limit)"
            self.stop(refusal("recompile-limit", limit), failures=failures)
            return None
        try:
            root, resumed = self.before or self, self.is_resumed
            resume = None if self.fullgraph else Resume(weakref.ref(root))
            selected, dynamic = self.options.plugins, Dynamic(self.dynamic, self.varied)
            how = resume, resumed, root.compiling, self.fixed_modules(values)
            frame = captured(self.function, values, Request(self.name, dynamic, selected, *how))
            capture = frame.capture
            cut = capture.stopped_by is not None
            if cut and frame.asked_compiling:
                root.compiling = False
            capture.watch, capture.continues = watch, cut or self.is_inner
            watch.tell("capture", capture)
            known = len(shape_guards(capture.shape_env))
            # a graph may switch modes, also while it is traced
            with without_inference_mode(), restored_modes():
                compiled = self.backend(capture)
            # what the rooms after capture assumed
            capture.guards.extend(shape_guards(capture.shape_env)[known:])
        except Unsupported as error:
            if self.fullgraph and isinstance(error, UserError):
                self.eager(arguments)  # raises what the user should see
            self.refuse(key, error)
            return None
        except OptionError:
            raise
        except Exception as error:
            failure = Failure(error)
            if not isinstance(error, BackendError) or isinstance(error, RejectedKernel):
                watch.tell("error", failure)
            if self.fullgraph:
                failure.annotate()
                raise
            if isinstance(error, BackendError):  # this machine lacks something
                self.stop(refusal(error.reason, "\n".join([str(error), *failure.advice])))
            else:
                warnings.warn(failure.told(f"; {self.name} runs in eager"), stacklevel=6)
                self.refuse(key, refusal("internal-error", failure.told()))
            return None
        if capture.stopped_by is not None:
            self.breaks[capture.stopped_by] = None
        checks, raised = rules(quick_checks, selected), self.graph_raised
        entry = Entry(frame, compiled, tuple(values), weakref.WeakMethod(raised), checks)
        self.entries.append(entry)
        return entry

    def fixed_modules(self, values: dict[str, Any]) -> list[str]:
        """Arguments whose modules are guarded by identity, which is quick to check: the module that is
        compiled, a method's own, and large ones until another one comes in their place."""
        one = self.one_module and next(iter(values), None)
        return [
            name
            for name, value in values.items()
            if isinstance(value, torch.nn.Module)
            and (name == one or is_large(value))
            and name not in self.varied_modules
        ]

    def failures(self, values: dict[str, Any]) -> list[GuardFailure]:
        """Why no version fits a call: for each, the guard that failed."""
        self.recompiles += bool(self.entries)
        found: list[GuardFailure] = []
        for version, entry in enumerate(self.entries, 1):
            failure, varied = entry.misfit(values)
            self.varied |= varied
            if failure is not None:
                if failure.guard.kind == "identity" and failure.guard.sources[0].kind == "local":
                    self.varied_modules.add(failure.guard.sources[0].key)
                failure = dataclasses.replace(failure, version=version, recompile=self.recompiles)
                found.append(failure)
        return found

    def refuse(self, key: Any, error: Unsupported) -> None:
        if error.id not in REASONS:  # from a room after capture
            error = refusal("later-stage", error.reason, error.where, error.hint)
        if self.fullgraph:
            raise error
        self.refused.add(key)
        self.note(error)

    def note(self, why: Unsupported) -> None:
        """Keep why no version was made."""
        self.last_refusal = graph_break(why)
        self.breaks[self.last_refusal] = None

    def stop(self, why: Unsupported, failures: Sequence[GuardFailure] = ()) -> None:
        """Compile nothing more, and say so once."""
        if self.fullgraph:
            raise why
        self.stopped = True
        self.note(why)
        lines = [f"minicompile runs {self.name} in eager from here on: {why}"]
        warnings.warn("\n".join([*lines, *failure_lines(failures)]), stacklevel=7)

    def another(
        self,
        function: types.FunctionType,
        name: str | None = None,
        before: Dispatcher | None = None,
        one_module: bool = False,
    ) -> Dispatcher:
        """A dispatcher for another function that belongs to the same compiled one."""
        options = self.backend, self.options, False, self.dynamic
        above = self if self.above is None else self.above()
        return Dispatcher(function, *options, name, above, before, one_module)

    # -- what happened

    def answered(self) -> dict[int, int]:
        """How many calls each version has answered, by its number; 0: how many ran in eager."""
        versions = enumerate(self.entries, 1)
        return {0: self.eager_calls, **{number: entry.hits for number, entry in versions}}

    @property
    def parts(self) -> list[Dispatcher]:
        """This one, what goes on after its breaks, and what watchers capture below it."""
        below = [resumed.__dict__["_minicompile"] for resumed in self.resumed.values()]
        below += [part for watcher in self.own_watchers or () for part in watcher.dispatchers]
        return [self, *(part for dispatcher in below for part in dispatcher.parts)]


def symbolic_sources(capture: Capture) -> set[Source]:
    return set() if capture.shape_env is None else set(capture.shape_env.symbols.values())


def all_dispatchers() -> list[Dispatcher]:
    """Every dispatcher that is alive, for `mc.reset()`."""
    with _all_lock:
        return list(_all)


MAX_REFUSED = 64


def compiled_function(dispatcher: Dispatcher) -> types.FunctionType:
    """A function with the original's signature that goes through the dispatcher.

    Defaults are read at the call, from the original, so that a changed default counts.
    """
    function, parameters = dispatcher.function, dispatcher.signature.parameters
    head: list[inspect.Parameter] = []
    fills: list[str] = []
    for number, (name, parameter) in enumerate(parameters.items()):
        if parameter.default is parameter.empty:
            head.append(parameter)
            continue
        head.append(parameter.replace(default=LEFT_OUT))
        place = f"__defaults__[{number - function.__code__.co_argcount}]"
        if parameter.kind is parameter.KEYWORD_ONLY:
            place = f"__kwdefaults__[{name!r}]"
        fills += [f"if {name} is {LEFT_OUT}:", f"    {name} = __mc_original.{place}"]
    given = ", ".join(parameters)
    lines = [
        *fills,
        "for __mc_entry in __mc_entries:",
        f"    __mc_result = __mc_entry.call({given})",
        "    if __mc_result is not __mc_miss:",
        "        return __mc_result",
        f"return __mc_dispatcher.miss({given})",
    ]
    names = {
        "__mc_left_out": LEFT_OUT,
        "__mc_original": function,
        "__mc_entries": dispatcher.entries,
        "__mc_miss": MISS,
        "__mc_dispatcher": dispatcher,
    }
    made = generate(f"compiled{inspect.Signature(head)}", lines, names)
    functools.update_wrapper(made, function)
    made._minicompile = dispatcher
    assert isinstance(made, types.FunctionType)
    return made
