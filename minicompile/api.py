"""The public functions, and the named backends.

The real compiler: torch/__init__.py (torch.compile), torch/_dynamo/__init__.py.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from minicompile import compat
from minicompile.dynamo.dispatch import (
    Backend,
    Dispatcher,
    all_dispatchers,
    plain_backend,
)
from minicompile.dynamo.module import allow_in_graph, behind, disable, is_disabled, original_of
from minicompile.dynamo.result import Capture
from minicompile.dynamo.sizes import mark_dynamic
from minicompile.errors import BackendError, OptionError, RejectedKernel, Unsupported, unknown
from minicompile.ops.registry import Registry
from minicompile.options import Options, environment, make_options
from minicompile.pipeline_result import Trace

__all__ = [
    "allow_in_graph", "backends", "compile", "disable", "fresh_cache", "mark_dynamic", "reset",
    "trace",
]  # fmt: skip

BackendMaker = Callable[[Options], Backend]

backends: Registry[BackendMaker] = Registry(
    "backend", "name -> function from options to what compiles a Capture"
)


option_check: Registry[Callable[[Options], object]] = Registry(
    "option_check", "name -> function that raises OptionError for options that a tool can't use"
)


def check(options: Options) -> None:
    for rule in option_check.values():
        rule(options)


@backends("eager")
def eager_backend(options: Options) -> Backend:
    """The captured graph, run by torch."""
    return plain_backend


@backends("aot_eager")
def aot_eager_backend(options: Options) -> Backend:
    """Forward and backward graphs of ATen operators, run by torch."""
    from minicompile import pipeline

    return lambda capture: pipeline.aot_eager(capture, options)


@backends("inductor")
def inductor_backend(options: Options) -> Backend:
    """All the way to generated kernels."""
    from minicompile import pipeline

    return lambda capture: pipeline.compile_capture(capture, options)


def callable_backend(function: Callable[[Any, list[Any]], Callable[..., Any]]) -> Backend:
    """A user's `(gm, example_inputs) -> callable` as a backend."""

    def compile_with(capture: Capture) -> Callable[[list[Any]], Any]:
        run = function(capture.graph.gm, capture.fakes)
        return lambda inputs: run(*inputs)

    return compile_with


def find_backend(backend: Any, options: Options) -> Backend:
    if callable(backend):
        return callable_backend(backend)
    maker = backends.get(backend) if isinstance(backend, str) else None
    if maker is None:
        raise unknown("backend", backend, [*sorted(backends), "or a callable"])
    return maker(options)


def compile(
    target: Any = None,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
) -> Any:
    """Compile a function or an nn.Module when it is called; also a decorator, with or without arguments.

    fullgraph  raise `Unsupported` where the frame would run in eager
    dynamic    None: sizes and numbers that differ between two calls become symbolic, and those given to
               `mark_dynamic`; True: all that can, from the first call; False: none
    backend    "inductor", "aot_eager", "eager", or `(gm, example_inputs) -> callable`
    mode       a preset of options; `options` are fields of `Options`

    Raises OptionError for arguments that do not exist.
    """
    compat.warn_if_untested()
    chosen = make_options(mode, options)
    check(chosen)
    if dynamic not in (True, False, None):
        raise OptionError(f"dynamic must be one of True, False, None, not {dynamic!r}")
    make = functools.partial(
        Dispatcher,
        backend=find_backend(backend, chosen),
        options=chosen,
        fullgraph=fullgraph,
        dynamic=dynamic,
    )
    again = functools.partial(
        compile, fullgraph=fullgraph, dynamic=dynamic, backend=backend, options=chosen
    )
    if target is None:
        return again
    if is_disabled(target):
        return target
    if isinstance(target, type) or not callable(target):
        kind = type(target).__name__
        raise OptionError(f"can't compile a {kind}: give a function or an nn.Module")
    return behind(target, make, again)


def dispatcher_of(target: Any) -> Dispatcher | None:
    """The Dispatcher behind a compiled function or module, None if it is neither."""
    inner = target.__func__ if isinstance(target, types.MethodType) else target
    found = getattr(inner, "_minicompile", None)
    return found if isinstance(found, Dispatcher) else None


def settings_of(target: Any) -> tuple[Options, bool | None]:
    """Options and `dynamic` of what was compiled; the defaults for another target."""
    found = dispatcher_of(target)
    return (make_options(), None) if found is None else (found.options, found.dynamic)


def trace(target: Any, *args: Any, **kwargs: Any) -> Trace:
    """What every stage makes of one call of a function or module. The call itself is not run.

    Without a C++ compiler one warning says so, and the text of the kernels is there all the same.
    Pass what `mc.compile` returned to trace with its options. Raises Unsupported where `mc.compile` would
    run the frame in eager, also because this torch or this Python lacks what a stage needs.
    """
    from minicompile import pipeline

    options, dynamic = settings_of(target)
    check(options)

    def compile_and_stop(capture: Capture) -> Any:
        traced, missing = Trace.watching(capture), None
        try:
            pipeline.compile_capture(capture, options)
        except RejectedKernel:
            raise
        except BackendError as error:
            if len(traced.graphs) <= (traced.aot is not None and traced.aot.backward is not None):
                raise
            missing = f"the kernels of this trace are text that can't run here: {error}"
        raise _Traced(traced, missing)

    plain = original_of(target)
    make = functools.partial(
        Dispatcher, backend=compile_and_stop, options=options, fullgraph=True, dynamic=dynamic
    )
    try:
        behind(plain, make, compile)(*args, **kwargs)
    except _Traced as stop:
        made: Trace = stop.args[0]
        if missing := stop.args[1]:
            _tell_once(missing)
        return made
    raise Unsupported(f"{plain!r} was not captured: it never reached the compiler")


@functools.cache
def _tell_once(what: str) -> None:
    warnings.warn(what, stacklevel=3)


class _Traced(BaseException):
    """Carries a finished trace out of a call that need not run, past handlers of errors."""


def reset() -> None:
    """Forget every compiled version and all counts, of all compiled functions, and the memory they kept."""
    from minicompile.runtime.load import allocator

    for dispatcher in all_dispatchers():
        dispatcher.clear()
    for keeper in allocator.values():
        keeper.clear()


@contextlib.contextmanager
def fresh_cache() -> Iterator[None]:
    """Inside the block everything is compiled anew, into a folder that is deleted after it.

    Compiled versions made before are forgotten (`reset`), those made inside stay usable. What runs in other
    threads is affected too. The real compiler: torch/_inductor/utils.py (fresh_cache).
    """
    with (
        tempfile.TemporaryDirectory(prefix="minicompile_", ignore_cleanup_errors=True) as folder,
        environment(MINICOMPILE_FRESH_CACHE_DIR=folder, TRITON_CACHE_DIR=f"{folder}/triton"),
    ):
        reset()
        yield
