"""`Tracer` of bytecode: the interpreter that captures, put together from the classes of this folder.

    Interpreter -> Outside (guards, writes) -> Attributes -> Containers -> Calls -> Tracer

The real compiler: torch/_dynamo/symbolic_convert.py (InstructionTranslator).
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from minicompile.dynamo import (  # noqa: F401
    autograd_functions,
    builtins,
    inference,
    library,
    mapped_functions,
    opcodes,
)
from minicompile.dynamo.breaks import Cut, places
from minicompile.dynamo.bytecode import Instruction, Program, decode
from minicompile.dynamo.calls import CallRule, Calls
from minicompile.dynamo.interpreter import UNBOUND, Frame, Lazy
from minicompile.dynamo.outside import is_users
from minicompile.dynamo.recorder import Recorder
from minicompile.dynamo.result import InstructionRecord, Source
from minicompile.errors import Unsupported
from minicompile.ops.display import Shown
from minicompile.ops.origin import SourceLine


class InstructionLog(Sequence[InstructionRecord], Shown):
    """Every executed instruction, made readable when somebody looks."""

    def __init__(self) -> None:
        self.steps: list[tuple[Program, Instruction, int, int, int]] = []
        """Instructions with call depth, stack height and the number of graph calls after it."""
        self.names: list[str] = []
        """Names of the graph's calls, once it is complete."""

    def __len__(self) -> int:
        return len(self.steps)

    def __str__(self) -> str:
        return "\n".join(f"{'  ' * r.depth}{r.offset:>4} {r}" for r in self)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        index = range(len(self))[index]
        program, ins, depth, height, count = self.steps[index]
        before = self.steps[index - 1][4] if index else 0
        line, nodes = program.line_of(ins), tuple(self.names[before:count])
        return InstructionRecord(ins.offset, ins.opname, ins.argument, line, depth, height, nodes)


class Tracer(Calls):
    """Captures one frame."""

    def __init__(
        self, recorder: Recorder, function: types.FunctionType, rules: Mapping[Any, CallRule]
    ) -> None:
        super().__init__(recorder)
        self.rules = rules
        self.root = function
        self.programs: dict[int, Program] = {}
        self.own_globals = function.__globals__
        self.inlined: dict[str, None] = {}
        self.log = InstructionLog()
        self.definition: SourceLine | None = None
        """Stands for the user's line while none of the user's code is running."""
        self.cut: int | None = None
        """The number of executed instructions after which to stop."""
        self.frame_at_cut: Frame | None = None
        self.exceptions: list[BaseException] = []
        """What was raised in the frame."""
        self.raised_after = 0
        """Instructions executed before the captured frame's one that raised last."""
        self.places: list[int] | None = None
        """Where the frames could be cut that ran when the capture was given up."""
        recorder.stack, recorder.places = self.provenance, self.places_now
        if recorder.sizes is not None:
            recorder.sizes.guard, recorder.sizes.env.asker = self.guard, self.asks
        own = self.hold(function, function.__qualname__)
        self.guard("code", own.source, function.__code__, "the compiled function")

    def run_root(self, values: dict[str, Any]) -> Any:
        """Interpret the frame with these arguments; each is read, and guarded, at its first use."""
        program = self.program(self.root.__code__)
        lazy = {name: Lazy(value, Source("local", name)) for name, value in values.items()}
        fast = [lazy.get(name, UNBOUND) for name in program.slots]
        return Frame(self, self.root, fast).run()

    def program(self, code: types.CodeType) -> Program:
        found = self.programs.get(id(code))
        if found is None:
            found = self.programs[id(code)] = decode(code)
        return found

    def asks(self) -> tuple[str, SourceLine | None]:
        """Who needs a fact about sizes right now, and the user's line."""
        running = self.recorder.running
        return f"{running} needs it" if running else "the frame depends on it", self.user_line()

    def step(self, frame: Frame, instruction: Instruction) -> None:
        steps = self.log.steps
        steps.append(
            (frame.program, instruction, frame.depth, len(frame.stack), len(self.recorder.calls))
        )
        frame.steps = len(steps)
        if frame.steps == self.cut:
            self.frame_at_cut = frame
            raise Cut

    def catches(self, error: BaseException) -> bool:
        if isinstance(error, Cut):
            return False
        self.exceptions.append(error)
        if isinstance(error, Unsupported):
            self.abort = self.abort or error
            if self.places is None and self.frame is not None:
                self.places = [*error.places] or self.places_now()
        elif error is not self.raised and self.frame is not None:
            root = self.root_frame()
            self.raised_after = root.before_raise if root.handled is not None else root.steps
        if self.abort is not None:
            raise self.abort
        return super().catches(error)

    def comes_and_goes(self, function: types.FunctionType) -> bool:
        """Whether each call may bring a function of its own, with cells of its own."""
        owner = self.tracker(function)
        if owner is None:
            return True
        source = owner.source.root
        return source not in self.held and ("identity", source, None) not in self.guards

    def fix_cells(self, function: types.FunctionType) -> None:
        """Code that goes on in a frame of this function holds its cells: they must stay the same."""
        for cell in self.closure(function):
            if (known := self.tracker(cell)) is not None:
                self.guard("identity", known.source, cell, "a frame that is cut uses the variable")

    # -- where we are

    def places_now(self) -> list[int]:
        """Where the running frames could be cut."""
        assert self.frame is not None
        return places(self.frame, self.log.steps, self.comes_and_goes, is_users)

    def provenance(self) -> tuple[tuple[SourceLine, ...], str]:
        """The user's lines from the outermost frame to the innermost, and the module that is running."""
        frames = [] if self.frame is None else [*self.frame.outwards][::-1]
        path = frames[-1].module_path if frames else ""
        users = [frame for frame in frames if is_users(frame)]
        if not users and self.definition is not None:
            return (self.definition,), path
        return tuple(frame.line for frame in users or frames), path

    # -- imports

    def import_name(self, frame: Frame, name: str, fromlist: Any, level: int) -> Any:
        namespace, full = frame.function.__globals__, name
        if level:
            package = namespace.get("__package__") or namespace["__name__"].rpartition(".")[0]
            full = importlib.util.resolve_name("." * level + name, package)
        if full not in sys.modules:
            what = f"the module {full} is imported for the first time"
            self.unsupported("first-import", what)
        module = __import__(name, namespace, None, fromlist, level)
        loaded = self.hold(sys.modules, "sys.modules")
        for imported in {full, module.__name__}:
            self.dict_get(loaded, imported)
        self.hold(module, module.__name__)
        return module
