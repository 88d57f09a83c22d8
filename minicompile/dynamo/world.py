"""`World`: what is known while one frame is captured, and what Python's operations mean there.

    frames     what was executed, where to stop, what was raised
    outside    objects from before the call: where each lives (sources), what is relied on (guards)
    writes     what the frame did to them, which is replayed after the graph
    recorder   the graph under construction

A meaning is a function `(world, ...)` in the registry `operations`: outside.py, attributes.py, containers.py,
expressions.py and calls.py hold them. `world.truth(value)` calls the one that is registered as `truth`.
The real compiler: torch/_dynamo/symbolic_convert.py (InstructionTranslator).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import torch

from minicompile.dynamo.breaks import FrameCut, places
from minicompile.dynamo.bytecode import Bytecode, Instruction, decode
from minicompile.dynamo.interpreter import UNBOUND, Args, Frame, Interpreter, Kwargs, Lazy
from minicompile.dynamo.reasons import refusal
from minicompile.dynamo.recorder import GraphRecorder
from minicompile.dynamo.result import Guard, InstructionRecord, Source
from minicompile.dynamo.variables import VariableTracker, is_fixed_name
from minicompile.errors import Unsupported
from minicompile.ops.display import Shown
from minicompile.ops.origin import SourceLine
from minicompile.ops.registry import Registry

operations: Registry[Callable[..., Any]] = Registry(
    "operation", "name -> what a Python operation means during capture"
)
operations.modules += [
    f"minicompile.dynamo.{name}"
    for name in ("outside", "attributes", "containers", "expressions", "calls")
]
Meaning = TypeVar("Meaning", bound=Callable[..., Any])

CallRule = Callable[["World", Args, Kwargs], Any]
"""Gives a call's result at compile time."""
call_rules: Registry[CallRule] = Registry(
    "call", "Python callable -> what calling it means during capture"
)
"""A function of a module that is imported late stands in it by module and name."""
call_rules.modules += [f"minicompile.dynamo.{name}" for name in ("builtins", "library")]


def operation(meaning: Meaning) -> Meaning:
    """Register a function of the world under its own name."""
    operations(meaning.__name__)(meaning)
    return meaning


class InstructionLog(Sequence[InstructionRecord], Shown):
    """Every executed instruction, made readable when somebody looks."""

    def __init__(self) -> None:
        self.steps: list[tuple[Bytecode, Instruction, int, int, int]] = []
        """Instructions with call depth, stack height and the number of graph calls after it."""
        self.names: list[str] = []
        """Names of the graph's calls, once it is complete."""

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        return "\n".join(f"{'  ' * r.depth}{r.offset:>4} {r}" for r in self)

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        program, ins, depth, height, count = self.steps[index]
        before = self.steps[index - 1][4] if index else 0
        line, nodes = program.line_of(ins), tuple(self.names[before:count])
        return InstructionRecord(ins.offset, ins.opname, ins.argument, line, depth, height, nodes)


@dataclass
class Frames:
    """What was executed so far, where to stop, and what was raised."""

    cut: int | None
    """The number of executed instructions after which to stop."""
    log: InstructionLog = field(default_factory=InstructionLog)
    programs: dict[int, Bytecode] = field(default_factory=dict)
    """Decoded code by the id of the code object."""
    inlined: dict[str, None] = field(default_factory=dict)
    """Names of the functions that were called."""
    definition: SourceLine | None = None
    """Stands for the user's line while none of the user's code is running."""
    frame_at_cut: Frame | None = None
    exceptions: list[BaseException] = field(default_factory=list)
    """What was raised in the frame."""
    raised_after: int = 0
    """Instructions executed before the captured frame's one that raised last."""
    abort: Unsupported | None = None
    """The refusal that ends this capture, even if native code in between swallowed the exception."""
    places: list[int] | None = None
    """Where the frames could be cut that ran when the capture was given up."""


@dataclass
class Outside:
    """Objects that existed before the call, and what is relied on about them."""

    own_globals: dict[str, Any]
    fixed_modules: Collection[str]
    """Arguments whose modules are guarded by identity; other modules are guarded by their structure."""
    trackers: dict[int, VariableTracker] = field(default_factory=dict)
    """Outside objects by id; a tensor's tracker is found by the id of the real tensor and of its fake."""
    guards: dict[tuple[Any, ...], Guard] = field(default_factory=dict)
    held: dict[Source, Any] = field(default_factory=dict)
    """Objects that guards and the result refer to directly."""
    namespaces: dict[int, Any] = field(default_factory=dict)
    """Inside objects by the id of their `__dict__`, where that was read as an object."""
    read_again: bool = False
    """Is a backward being captured? It reads later, when numbers may be others: they stay plain, and the
    check before it runs looks at them."""


@dataclass
class Writes:
    """What the frame did that is replayed after the graph, or that limits where it can be cut."""

    written: list[VariableTracker] = field(default_factory=list)
    called_later: str = ""
    """The function being captured that something else will call: it may change nothing outside."""
    natives: list[tuple[Any, int]] = field(default_factory=list)
    """Generators, exceptions, classes and what native code made, each with the number of instructions
    executed before the captured frame's instruction that made it."""


class World(Interpreter):
    """The capture of one frame."""

    def __init__(
        self,
        recorder: GraphRecorder,
        function: types.FunctionType,
        rules: Mapping[Any, CallRule],
        cut: int | None = None,
        compiling: bool = True,
        fixed_modules: Collection[str] = (),
    ) -> None:
        """`rules`: what calls mean; of the core, of the user, and of the plug-ins that are in use."""
        super().__init__()
        operations.load()
        self.recorder, self.root, self.rules = recorder, function, rules
        self.frames, self.writes = Frames(cut), Writes()
        self.outside = Outside(function.__globals__, fixed_modules)
        self.compiling, self.asked_compiling = compiling, False
        """The answer of `torch.compiler.is_compiling()` in this frame, and whether the frame has asked."""
        recorder.stack, recorder.places = self.provenance, self.places_now
        if recorder.sizes is not None:
            recorder.sizes.guard, recorder.sizes.env.asker = self.guard, self.asks
        own = self.hold(function, function.__qualname__)
        self.guard("code", own.source, function.__code__, "the compiled function")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The operation that is registered under a name."""
        meaning = self.__dict__[name] = types.MethodType(operations[name], self)
        return meaning

    # -- running frames

    def run_root(self, values: dict[str, Any]) -> Any:
        """Interpret the frame with these arguments; each is read, and guarded, at its first use."""
        program = self.program(self.root.__code__)
        lazy = {name: Lazy(value, Source("local", name)) for name, value in values.items()}
        fast = [lazy.get(name, UNBOUND) for name in program.slots]
        return Frame(self, self.root, fast).run()

    def program(self, code: types.CodeType) -> Bytecode:
        programs = self.frames.programs
        if id(code) not in programs:
            programs[id(code)] = decode(code)
        return programs[id(code)]

    def step(self, frame: Frame, instruction: Instruction) -> None:
        steps = self.frames.log.steps
        steps.append(
            (frame.program, instruction, frame.depth, len(frame.stack), len(self.recorder.calls))
        )
        frame.steps = len(steps)
        if frame.steps == self.frames.cut:
            self.frames.frame_at_cut = frame
            raise FrameCut

    def catches(self, error: BaseException) -> bool:
        if isinstance(error, FrameCut):
            return False
        frames = self.frames
        frames.exceptions.append(error)
        if isinstance(error, Unsupported):
            frames.abort = frames.abort or error
            if frames.places is None and self.frame is not None:
                frames.places = [*error.places] or self.places_now()
        elif error is not self.raised and self.frame is not None:
            root = self.root_frame()
            frames.raised_after = root.before_raise if root.handled is not None else root.steps
        if frames.abort is not None:
            raise frames.abort
        return super().catches(error)

    def unsupported(self, id: str, what: str, hint: str = "") -> NoReturn:
        self.frames.abort = refusal(id, what, self.user_line(), hint)
        raise self.frames.abort

    def unsupported_kind(self, id: str, what: str, value: Any) -> NoReturn:
        """`what` has {} where the class of the value is named."""
        self.unsupported(id, what.format(type(value).__name__))

    # -- where we are

    def root_frame(self) -> Frame:
        """The captured frame."""
        assert self.frame is not None
        *_, root = self.frame.outwards
        return root

    def user_line(self) -> SourceLine | None:
        """The innermost line of the user's code, or of a library other than torch and Python's."""
        if self.frame is None:
            return None
        return next((f for f in self.frame.outwards if is_users(f)), self.frame).line

    def asks(self) -> tuple[str, SourceLine | None]:
        """Who needs a fact about sizes right now, and the user's line."""
        running = self.recorder.running
        return f"{running} needs it" if running else "the frame depends on it", self.user_line()

    def provenance(self) -> tuple[tuple[SourceLine, ...], str]:
        """The user's lines from the outermost frame to the innermost, and the module that is running."""
        frames = [] if self.frame is None else [*self.frame.outwards][::-1]
        path = frames[-1].module_path if frames else ""
        users = [frame for frame in frames if is_users(frame)]
        if not users and self.frames.definition is not None:
            return (self.frames.definition,), path
        return tuple(frame.line for frame in users or frames), path

    # -- where the frame may be cut

    def places_now(self) -> list[int]:
        """Where the running frames could be cut."""
        assert self.frame is not None
        return places(self.frame, self.comes_and_goes, is_users)

    def comes_and_goes(self, function: types.FunctionType) -> bool:
        """Whether each call may bring a function of its own, with cells of its own."""
        owner = self.tracker(function)
        if owner is None:
            return True
        source = owner.source.root
        return source not in self.outside.held and (
            ("identity", source, None) not in self.outside.guards
        )

    def fix_cells(self, function: types.FunctionType) -> None:
        """Code that goes on in a frame of this function holds its cells: they must stay the same."""
        for cell in self.closure(function):
            if (tracker := self.tracker(cell)) is not None:
                what = "a frame that is cut uses the variable"
                self.guard("identity", tracker.source, cell, what)

    def note_native(self, value: Any) -> None:
        plain = value is None or isinstance(value, bool | int | str | torch.Tensor)
        if not plain and self.tracker(value) is None:
            self.writes.natives.append((value, self.root_frame().steps))

    # -- sources and guards

    def tracker(self, value: Any) -> VariableTracker | None:
        """The tracker of an outside object, None for constants and for what the frame made."""
        found = self.outside.trackers.get(id(value))
        return found if found is not None and found.value is value else None

    def guard(
        self, kind: str, about: Source | tuple[Source, ...], expected: Any, reason: str
    ) -> None:
        """Rely on a fact about a value, or on a relation between several. The same fact is guarded once."""
        index = (kind, about, expected if kind == "absent" else None)
        if index not in self.outside.guards:
            sources = about if isinstance(about, tuple) else (about,)
            made = Guard(sources, kind, expected, reason, self.user_line())
            self.outside.guards[index] = made


def is_users(frame: Frame) -> bool:
    """Whether a frame runs code of the user's, or of a library other than torch and Python's."""
    return not is_fixed_name(frame.function.__globals__.get("__name__") or "")
