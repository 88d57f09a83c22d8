"""`capture_frame`: run a frame through the world and keep everything that is needed to run it again.

    trace          interprets the frame, or its first instructions    -> Traced
    finished       adds what may not change (check_memory, guard_aliases), builds the graph and the lines
                   that rebuild the result                            -> CapturedFrame
    capture_frame  the two of them; where they are refused, again for shorter parts of the frame

The real compiler: torch/_dynamo/convert_frame.py.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from minicompile import compat
from minicompile.compat import settings
from minicompile.compat.inference import mark_inference, version, without_inference_mode
from minicompile.compat.settings import Modes, restored_modes
from minicompile.dynamo.breaks import FrameCut, GoOn, Resume, resume_after
from minicompile.dynamo.guards import SourceCode, apart, guard_rules, types_from
from minicompile.dynamo.interpreter import TracedGenerator
from minicompile.dynamo.modes import Change, GraphRaised, changed, raised, random_states
from minicompile.dynamo.reasons import graph_break, refusal
from minicompile.dynamo.rebuild import Rebuild
from minicompile.dynamo.recorder import GraphRecorder
from minicompile.dynamo.result import SHAPE_KINDS, Capture, GraphInput
from minicompile.dynamo.sizes import Dynamic, free_dims, shape_guards
from minicompile.dynamo.variables import (
    CONTAINERS,
    MODULE_TABLES,
    UserError,
    VariableTracker,
)
from minicompile.dynamo.world import World, call_rules, is_users
from minicompile.errors import Unsupported
from minicompile.ops import plugins
from minicompile.ops.origin import SourceLine
from minicompile.shapes.env import no_asker


@dataclass(frozen=True)
class Request:
    """How a frame is to be captured."""

    name: str
    dynamic: Dynamic
    plugins: tuple[str, ...]
    """Names of the plug-ins whose rules may be used."""
    resume: Resume | None = None
    """Makes what goes on after a graph break; None where the frame must be captured as a whole."""
    resumed: bool = False
    """Is the function itself what goes on after a graph break?"""
    compiling: bool = True
    """What `torch.compiler.is_compiling()` gives, unless the frame can only be captured in part."""
    fixed_modules: Collection[str] = ()
    """Arguments that stay the same modules."""


@dataclass
class CapturedFrame:
    """A Capture, and the code that runs it again."""

    capture: Capture
    code: SourceCode
    """The names that generated code uses, among them the guard on all inputs together (`tensors_hold`);
    `code.held`: objects that the cache entry holds."""
    lines: list[str]
    """Read outside objects, run `graph(inputs)`, rebuild the result, replay writes, return."""
    runs_rest: bool = False
    """Whether the lines give what remains to be done, to whom that is no result."""
    asked_compiling: bool = False
    """Whether the frame, as far as it was captured, asks `torch.compiler.is_compiling()`."""


@dataclass
class Traced:
    """What one run of a frame through the world found."""

    returned: Any
    """What the frame returns; the values of `rest` if the frame is cut."""
    rest: Callable[..., Any] | None
    """Runs what follows the cut."""
    change: Change | None
    """How it leaves grad mode and autocast."""


def capture_frame(
    function: types.FunctionType, values: dict[str, Any], request: Request
) -> CapturedFrame:
    """Capture one call of a Python function; with `request.resume` as far as that is possible.

    `values`: its parameters by name (`*args` a tuple, `**kwargs` a dict). Nothing outside is changed.
    Raises Unsupported with the reason and the user's line.
    """
    asked, compiling, dynamic = False, request.compiling, request.dynamic
    rules = plugins.rules(call_rules, request.plugins)
    if torch.is_inference_mode_enabled() and torch.is_grad_enabled():
        raise refusal("inference-mode", "grad mode is enabled in inference mode")

    def capture(place: int | None = None) -> CapturedFrame:
        """All of the frame, or its first `place` instructions."""
        nonlocal asked
        facts = settings.global_facts()
        recorder = GraphRecorder(dynamic if dynamic.anything(values) else None)
        world = World(recorder, function, rules, place, compiling, request.fixed_modules)
        world.guard("global_state", (), facts, "settings that torch functions read")
        try:
            with without_inference_mode():
                traced = trace(world, values, request.resume)
                captured = finished(world, traced, values, request)
            captured.asked_compiling = world.asked_compiling
            return captured
        except Unsupported as error:
            raise error.with_traceback(None) from error.__cause__
        finally:
            asked |= world.asked_compiling
            for raised_here in world.frames.exceptions:  # frames in their tracebacks: cycles again
                if world.tracker(raised_here) is None:
                    raised_here.__traceback__ = None
            # it is part of cycles, and what it knows of this call would live until they are collected
            world.__dict__.clear()

    try:
        try:
            return capture()
        except Unsupported:
            if not (asked and compiling):
                raise
            # a branch for compilers must not outlive a break, or be why there is one
            compiling = False
            return capture()
    except Unsupported as error:
        if request.resume is None:
            raise
        waiting = list(error.places)
        for _ in range(MAX_PLACES):
            if not waiting:
                break
            try:
                captured = capture(waiting.pop(0))
            except Unsupported as again:
                waiting = [*again.places, *waiting]
                continue
            # the traceback leads to everything that the capture has met
            error.__traceback__ = error.__cause__ = error.__context__ = None
            captured.capture.stopped_by = graph_break(error, "instruction")
            return captured
        raise


MAX_PLACES = 6
"""How many places to cut a frame are tried before it runs in eager."""


def trace(world: World, values: dict[str, Any], resume: Resume | None) -> Traced:
    """Run a frame through the world, as far as that shall go."""
    world.frames.definition = definition_of(values.get("self"))
    before, rest = Modes.now(), None
    with restored_modes(), deep_stack(), compat.silent_log():
        try:
            returned = world.run_root(values)
        except FrameCut:
            assert resume is not None and world.frames.frame_at_cut is not None
            go_on = resume_after(world.frames.frame_at_cut, resume, world.fix_cells)
            rest, returned = go_on.function, go_on.values
        except Exception as error:
            if world.frames.abort is not None or isinstance(error, Unsupported):
                found: Any = world.frames.abort or error
                found.places = world.frames.places or ()
                raise found from None
            text = str(error).partition("\n")[0]
            reason = f"the frame raises {type(error).__name__}: {text}"
            places, at = [world.frames.raised_after], world.raised_at
            raise refusal("exception", reason, at, kind=UserError, places=places) from error
        change = changed(before)
    return Traced(returned, rest, change)


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
    sys.setrecursionlimit(max(before, 20 * World.max_depth))
    gc.disable()  # a capture makes many objects that stay: collecting among them costs more than the capture
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
        if collecting:
            gc.enable()


def finished(
    world: World, traced: Traced, parameters: Iterable[str], request: Request
) -> CapturedFrame:
    recorder, sizes = world.recorder, world.recorder.sizes
    check_memory(world)
    check_left(world)
    guard_aliases(world)
    fakes = pristine_fakes(world)
    for tracker, fake in fakes.items():
        if tracker.real.is_inference():
            mark_inference(fake)
    env = sizes.env if sizes is not None and sizes.env.symbols else None
    guards = world.outside.guards.values()
    identical = {g.sources[0]: g.expected for g in guards if g.kind == "identity"}
    arguments = {source: value for source, value in identical.items() if source.kind == "local"}
    # what lies below an argument that must be one particular object is reached without it
    code = SourceCode({**world.outside.held, **arguments}, types_from(guards))
    inputs = sorted(recorder.inputs, key=lambda tracker: code.holds(tracker.source))
    recorder.inputs = {tracker: recorder.inputs[tracker] for tracker in inputs}
    rebuild = Rebuild(world, code.part("o"))
    result = rebuild.expression(traced.returned)
    stores = rebuild.side_effects()
    graph = recorder.build(rebuild.outputs, "graph")
    if env is not None:
        env.asker = no_asker
    world.frames.log.names = [node.name for node in recorder.calls]
    given = [
        GraphInput(node.name, t.source, fakes[t], weakref.ref(t.real))
        for t, node in recorder.inputs.items()
    ]
    symbols = env.symbols if env is not None else {}
    for symbol, node in recorder.numbers.items():
        given.append(GraphInput(node.name, symbols[symbol], node.meta["val"]))
    capture = Capture(
        name=request.name,
        graph=graph,
        inputs=given,
        guards=[*sorted(guards, key=lambda g: g.kind in SHAPE_KINDS), *shape_guards(env)],
        bytecode=world.frames.log,
        result="; ".join([*rebuild.lines, result]),
        side_effects=tuple(rebuild.effects),
        inlined=tuple(world.frames.inlined),
        grad_enabled=torch.is_grad_enabled(),
        shape_env=env,
    )
    kept = [f"{name} = inputs[{position}]" for position, name in rebuild.kept_inputs.items()]
    free = {i: dims for i, tracker in enumerate(inputs) if (dims := free_dims(fakes[tracker]))}
    call = graph_call(recorder, code)
    if recorder.calls:
        acts = bool(stores) or any(step.handler for _, step, *_ in world.frames.log.steps)
        call = or_in_eager(call, recorder, code, parameters, acts)
    end = [f"result = {result}", *stores, *rebuild.positions]
    if traced.change is not None:
        code.names["change_modes"] = traced.change
        end.append("change_modes()")
    code.names.update(rest=traced.rest, go_on=GoOn)
    with torch.inference_mode() if recorder.inference else contextlib.nullcontext():
        code.names["tensors_hold"] = compat.tensor_guards(
            [tracker.real for tracker in inputs], free, different="different" in guard_rules
        )
    if recorder.calls:
        end.append("if hooks is not None and hooks.ended: raise hooks.ended")
    end.append("return result" if traced.rest is None else "return go_on(rest, result)")
    return CapturedFrame(
        capture,
        code,
        lines=[*rebuild.code.lines, *kept, *call, *rebuild.lines, *end],
        runs_rest=traced.rest is not None and not request.resumed,
    )


def graph_call(recorder: GraphRecorder, code: SourceCode) -> list[str]:
    """Return the lines that run the graph in the modes of the frame."""
    call = ["out = graph(inputs)"]
    if recorder.changes_state:  # leaves grad mode and autocast as they were, even if it raises
        code.names["restored_modes"] = restored_modes
        call = ["with restored_modes():", "    out = graph(inputs)"]
    return call


def or_in_eager(
    call: list[str],
    recorder: GraphRecorder,
    code: SourceCode,
    parameters: Iterable[str],
    acts: bool,
) -> list[str]:
    """Run the graph; if it raises, run the frame in eager, outside of our handler: that raises in the right
    place, under its handlers. If somebody's own backend raised, only a frame that `acts`: that changes
    something outside before, or may handle the exception; if a hook on saved tensors raised, none, for it has
    been called.

    Nothing of the frame has happened by then, since writes are replayed afterwards. But the graph itself may
    have drawn random numbers, which are given back, or changed its inputs: then its exception is the call's.
    """
    written = [f"inputs[{i}]" for i, one in enumerate(recorder.inputs) if one in recorder.mutated]
    versions, random = "".join(f"version({one}), " for one in written), recorder.mode.random

    code.names.update(
        random_states=random_states,
        raised=functools.partial(raised, acts),
        GraphRaised=GraphRaised,
        WatchedHooks=compat.WatchedHooks,
        top_hooks=compat.top_saved_tensors_hooks,
        version=version,
    )
    noted = ", written, versions" * bool(written) + ", states=states" * random
    return [
        *[f"written, versions = ({', '.join(written)},), ({versions})"] * bool(written),
        *["states = random_states()"] * random,
        "hooks = WatchedHooks() if top_hooks(True) else None",
        "try:",
        *(f"    {line}" for line in call),
        "except Exception as error:",
        f"    out = raised(error{noted})",
        "finally:",
        "    if hooks is not None: hooks.leave()",
        "if type(out) is GraphRaised:",
        f"    return graph_raised()(out, ({''.join(f'L_{name}, ' for name in parameters)}))",
    ]


def check_memory(world: World) -> None:
    """Inputs that the graph changes must share memory with no other, now and at later calls."""
    inputs = world.recorder.inputs
    mutated = world.recorder.mutated
    if len(inputs) > 1:
        sources = tuple(tracker.source for tracker in inputs)
        world.guard("different", sources, None, "each is an input of its own")
    if not mutated:
        return
    ordered = sorted(inputs, key=lambda tracker: tracker not in mutated)
    sources = tuple(tracker.source for tracker in ordered)
    if not apart(len(mutated), *(tracker.real for tracker in ordered)):
        line = world.recorder.written[compat.storage_id(mutated[0].value)]
        raise refusal("shared-memory", "several inputs share memory that is written to", line)
    world.guard("memory", sources, len(mutated), "changed by the graph")


def pristine_fakes(world: World) -> dict[VariableTracker, Any]:
    """The inputs' fakes as they were before the graph ran, which may have changed their shapes or gradient
    history. Guards are about these."""
    inputs, sizes = world.recorder.inputs, world.recorder.sizes
    fakes = {tracker: tracker.value for tracker in inputs}
    if not world.recorder.mutated:
        return fakes
    remade = compat.fakes_again(world.recorder.mode)
    for tracker, fake in fakes.items():
        if sizes is not None and free_dims(fake):
            fakes[tracker] = sizes.like(tracker.real, fake.shape, fake.stride())
        else:
            fakes[tracker] = remade(tracker.real)
    by_id = {id(tracker.value): fake for tracker, fake in fakes.items()}
    for key, guard in world.outside.guards.items():
        if guard.kind == "tensor":
            world.outside.guards[key] = replace(guard, expected=by_id[id(guard.expected)])
    return fakes


def check_left(world: World) -> None:
    """Refuse a frame that leaves a generator half way inside a try or with block, which would be closed when
    it is dropped."""
    for made, steps in world.writes.natives:
        if isinstance(made, TracedGenerator) and made.inside_try and is_users(made.frame):
            what = f"the generator {made.__name__} is left inside a try or with block"
            raise refusal("generator-or-coroutine", what, places=[steps])


def guard_aliases(world: World) -> None:
    """What the frame changes must stay a different object from others of its type that it looked at."""
    for written in world.writes.written:
        kind = family(world, written)
        others = [
            tracker.source
            for tracker in world.outside.trackers.values()
            if tracker is not written and kind is not None and family(world, tracker) is kind
        ]
        if others:
            sources = tuple(dict.fromkeys((written.source, *others)))
            world.guard("distinct", sources, None, "one of them is changed")
    modules = [t for t in world.outside.trackers.values() if isinstance(t.value, torch.nn.Module)]
    if not all(world.is_guarded_by_identity(t.value, t.source) for t in modules):
        places = tuple(dict.fromkeys(t.source for t in modules))
        if len(places) > 1:
            world.guard("distinct", places, None, "each is a module of its own")


def family(world: World, tracker: VariableTracker) -> type | None:
    """Outside objects of one family could become one object; None for those whose identity is guarded."""
    owner, value = tracker.source, tracker.value
    if owner.base is not None and (owner.kind == "namespace" or owner.key in MODULE_TABLES):
        owner = owner.base  # the object, or the module, that the dict belongs to
    if owner.kind == "held" or ("identity", owner, None) in world.outside.guards:
        return None
    return type(value) if isinstance(value, (*CONTAINERS, types.CellType)) else None
