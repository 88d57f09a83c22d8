"""`capture_frame`: run a frame through the tracer and keep everything that is needed to run it again.

The real compiler: torch/_dynamo/convert_frame.py.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from minicompile import compat
from minicompile.dynamo.guards import SourceCode, types_from
from minicompile.dynamo.outside import MODULE_TABLES
from minicompile.dynamo.rebuild import Rebuild
from minicompile.dynamo.recorder import Recorder
from minicompile.dynamo.result import Capture, Guard, Source
from minicompile.dynamo.sizes import Sizes, any_marked
from minicompile.dynamo.tracer import Tracer
from minicompile.dynamo.variables import CONTAINERS, IDENTITY_TYPES, UserError, VariableTracker
from minicompile.errors import Unsupported
from minicompile.ops.origin import SourceLine


@dataclass
class CapturedFrame:
    """A Capture, and the code that runs it again: fetch inputs, rebuild the result, replay writes."""

    capture: Capture
    code: SourceCode
    before: list[str]
    kept_inputs: dict[int, str]
    lines: list[str]
    result: str
    effects: list[str]
    reals: list[torch.Tensor]
    """The inputs of the call that was captured, in placeholder order."""
    changes_state: bool


def capture_frame(
    function: types.FunctionType,
    values: dict[str, Any],
    dynamic: bool | None = None,
    name: str | None = None,
) -> CapturedFrame:
    """Capture one call of a Python function.

    `values`: its parameters by name (`*args` a tuple, `**kwargs` a dict). Nothing outside is changed.
    Raises Unsupported with the reason and the user's line.
    """
    if compat.active_modes():
        raise Unsupported("a torch function mode or dispatch mode is active")
    recorder = Recorder(
        symbolic=bool(dynamic) or (dynamic is None and any_marked(list(values.values())))
    )
    if recorder.symbolic:
        from minicompile.shapes.env import ShapeEnv

        recorder.sizes = Sizes(ShapeEnv(), recorder.mode, bool(dynamic))
    tracer = Tracer(recorder, function)
    tracer.definition = definition_of(values.get("self"))
    facts = compat.global_facts()
    tracer.relate_state(facts)
    with restored_state(), deep_stack(), compat.quiet_fakes():
        try:
            returned = tracer.run_root(values)
        except Unsupported as error:
            raise tracer.abort or error from None
        except Exception as error:
            if tracer.abort is not None:
                raise tracer.abort from None
            text = str(error).partition("\n")[0]
            raise UserError(
                f"the frame raises {type(error).__name__}: {text}", tracer.last_line
            ) from error
        if compat.global_facts() != facts:
            raise Unsupported("the frame leaves grad mode or autocast changed")
    return finish(tracer, returned, name or function.__qualname__)


def definition_of(module: Any) -> SourceLine | None:
    """Where a module's forward begins."""
    forward = getattr(type(module), "forward", None)
    if not isinstance(module, torch.nn.Module) or not isinstance(forward, types.FunctionType):
        return None
    code = inspect.unwrap(forward).__code__
    return SourceLine(code.co_filename, code.co_firstlineno, code.co_qualname)


@contextlib.contextmanager
def deep_stack() -> Iterator[None]:
    """Room on the stack (an interpreted call takes several real ones), and no garbage collection."""
    before, collecting = sys.getrecursionlimit(), gc.isenabled()
    sys.setrecursionlimit(max(before, 20 * Tracer.max_depth))
    gc.disable()  # a capture makes many objects that stay: collecting among them costs more than the capture
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
        if collecting:
            gc.enable()


@contextlib.contextmanager
def restored_state() -> Iterator[None]:
    """Grad mode and autocast as before, whatever the captured frame set."""
    grad = torch.is_grad_enabled()
    devices = ("cpu", "cuda")
    cast = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in devices
    ]
    cache = torch.is_autocast_cache_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        for device, enabled, dtype in cast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)


def finish(tracer: Tracer, returned: Any, name: str) -> CapturedFrame:
    recorder = tracer.recorder
    check_memory(tracer)
    if tracer.written:
        guard_aliases(tracer)
    sizes = recorder.sizes
    guards = (*tracer.guards.values(), *(sizes.guards() if sizes is not None else ()))
    code = SourceCode(tracer.held, types_from(guards))
    held = held_sources(guards)
    rebuild = Rebuild(tracer, code)
    result = rebuild.expression(returned)
    effects = rebuild.side_effects()
    before_order = [graph_input.source for graph_input in recorder.inputs]
    graph = recorder.build(
        rebuild.outputs, "graph", lambda graph_input: not is_held(graph_input.source, held)
    )
    order = [before_order.index(graph_input.source) for graph_input in recorder.inputs]
    kept = {order.index(position): variable for position, variable in rebuild.kept_inputs.items()}
    tracer.log.freeze()
    capture = Capture(
        name=name,
        graph=graph,
        inputs=recorder.inputs,
        guards=guards,
        bytecode=tracer.log,
        result="; ".join([*rebuild.lines, result]),
        side_effects=tuple(rebuild.effects),
        inlined=tuple(tracer.inlined),
        grad_enabled=torch.is_grad_enabled(),
        shape_env=sizes.env if sizes is not None and sizes.first else None,
    )
    reals = [tracker.real for tracker in recorder.input_trackers if tracker.real is not None]
    return CapturedFrame(
        capture,
        code,
        rebuild.before,
        kept,
        rebuild.lines,
        result,
        effects,
        reals,
        recorder.changes_state,
    )


def held_sources(guards: tuple[Guard, ...]) -> set[Source]:
    """Arguments guarded to be one particular object: what lies below them is reached without them."""
    return {
        guard.sources[0] for guard in guards if guard.kind == "identity" and guard.sources[0].kind == "local"
    }  # fmt: skip


def is_held(source: Source, identical: set[Source]) -> bool:
    """Whether a path starts at an object that the cache entry holds."""
    step: Source | None = source
    while step is not None:
        if step.kind == "held" or step in identical:
            return True
        step = step.base
    return False


def check_memory(tracer: Tracer) -> None:
    """Inputs that the graph changes must share memory with no other input, now and later."""
    inputs, mutated = tracer.recorder.inputs, tracer.recorder.mutated_inputs()
    reals = [tracker.real for tracker in tracer.recorder.input_trackers]
    for number in mutated:
        real = reals[number]
        if real is None:
            continue
        others = [i for i, other in enumerate(reals) if other is not None and i != number]
        own = compat.storage_id(real)
        shared = [i for i in others if compat.storage_id(reals[i]) == own]  # type: ignore[arg-type]
        if shared:
            raise Unsupported(
                f"{inputs[number].source} is changed and shares memory with {inputs[shared[0]].source}",
                hint="clone one of them",
            )
        if others:
            sources = (inputs[number].source, *(inputs[i].source for i in others))
            tracer.relate("no_overlap", sources, "changed by the graph")


def guard_aliases(tracer: Tracer) -> None:
    """What the frame changes must stay a different object from others of its type that it looked at."""
    for written in tracer.written:
        kind = family(tracer, written)
        others = [
            tracker.source for tracker in tracer.trackers.values()
            if tracker is not written and kind is not None and family(tracer, tracker) is kind
        ]  # fmt: skip
        if others:
            tracer.relate(
                "distinct",
                tuple(dict.fromkeys((written.source, *others))),
                "one of them is changed",
            )


def family(tracer: Tracer, tracker: VariableTracker) -> type | None:
    """Outside objects of one family could become one object; None for those whose identity is guarded."""
    source, value = tracker.source, tracker.value
    if source.kind == "held" or tracker.real is not None or isinstance(value, IDENTITY_TYPES):
        return None
    if source.kind == "namespace":
        owner = next(
            (other for other in tracer.trackers.values() if other.source is source.base), None
        )
        return (
            None if owner is None or isinstance(owner.value, IDENTITY_TYPES) else type(owner.value)
        )
    if source.kind == "attribute" and source.key in MODULE_TABLES:
        return None
    return type(value) if isinstance(value, CONTAINERS) else None
