"""`Tracer`: the interpreter that captures. It joins the pieces and keeps the log of executed instructions.

    Interpreter -> Outside (guards, writes) -> Attributes -> Containers -> Calls -> Tracer

The real compiler: torch/_dynamo/symbolic_convert.py (InstructionTranslator).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, overload

from minicompile.dynamo import builtins as _builtins
from minicompile.dynamo import opcodes as _opcodes
from minicompile.dynamo import opcodes_control as _control
from minicompile.dynamo import stdlib as _stdlib
from minicompile.dynamo import torch_rules as _torch_rules
from minicompile.dynamo.bytecode import Instruction, Program, decode
from minicompile.dynamo.calls import Calls
from minicompile.dynamo.interpreter import UNBOUND, Frame, Lazy
from minicompile.dynamo.recorder import Recorder
from minicompile.dynamo.result import Guard, InstructionRecord, Source
from minicompile.dynamo.variables import is_fixed
from minicompile.ops.origin import SourceLine

RULES = (_builtins, _stdlib, _opcodes, _control, _torch_rules)
"""Modules whose import registers the built-in rules."""


class InstructionLog(Sequence[InstructionRecord]):
    """Every executed instruction, made readable when somebody looks."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.steps: list[tuple[Program, Instruction, int, int, int]] = []
        self.names: list[str] = []

    def __len__(self) -> int:
        return len(self.steps)

    def freeze(self) -> None:
        """The names of the graph's calls, once it is complete."""
        self.names = [node.name for node in self.recorder.calls]

    def record(self, index: int) -> InstructionRecord:
        program, ins, depth, height, count = self.steps[index]
        before = self.steps[index - 1][4] if index else 0
        line, nodes = program.line_of(ins), tuple(self.names[before:count])
        return InstructionRecord(ins.offset, ins.opname, ins.argument, line, depth, height, nodes)

    @overload
    def __getitem__(self, index: int) -> InstructionRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[InstructionRecord]: ...

    def __getitem__(self, index: int | slice) -> InstructionRecord | Sequence[InstructionRecord]:
        positions = range(len(self.steps))[index]
        return (
            self.record(positions)
            if isinstance(positions, int)
            else [self.record(i) for i in positions]
        )

    def __iter__(self) -> Iterator[InstructionRecord]:
        return map(self.record, range(len(self.steps)))


class Tracer(Calls):
    """Captures one frame."""

    def __init__(self, recorder: Recorder, function: types.FunctionType) -> None:
        super().__init__(recorder)
        self.root = function
        self.own_globals = function.__globals__
        self.inlined: dict[str, None] = {}
        self.log = InstructionLog(recorder)
        self.definition: SourceLine | None = None
        """Stands for the user's line while none of the user's code is running."""
        self.fixed_files: set[str] = set()
        """Files of torch and of the standard library that were run."""
        self.stacks: dict[tuple[int, ...], tuple[SourceLine, ...]] = {}
        recorder.stack = self.provenance
        self.hold(function, function.__qualname__)

    def run_root(self, values: dict[str, Any]) -> Any:
        """Interpret the frame with these arguments; each is read, and guarded, at its first use."""
        program = self.program(self.root.__code__)
        lazy = {name: Lazy(value, Source("local", name)) for name, value in values.items()}
        fast: list[Any] = [lazy.get(name) for name in program.slots]
        missing = len(values)
        fast[missing:] = [UNBOUND] * (len(fast) - missing)
        return Frame(self, self.root, fast).run()

    def program(self, code: types.CodeType) -> Program:
        found = self.programs.get(id(code))
        if found is None:
            found = self.programs[id(code)] = decode(code)
        assert isinstance(found, Program)
        return found

    def call_function(
        self, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if is_fixed(function.__globals__.get("__name__") or ""):
            self.fixed_files.add(function.__code__.co_filename)
        return super().call_function(function, args, kwargs)

    def step(self, frame: Frame, instruction: Instruction) -> None:
        self.log.steps.append(
            (frame.program, instruction, frame.depth, len(frame.stack), len(self.recorder.calls))
        )

    # -- where we are

    def provenance(self) -> tuple[tuple[SourceLine, ...], str]:
        """The user's lines from the outermost frame to the innermost, and the module that is running."""
        frame, lines, every = self.frame, [], []
        path = frame.module_path if frame is not None else ""
        while frame is not None:
            every.append(frame.line)
            if not is_fixed(frame.function.__globals__.get("__name__") or ""):
                lines.append(frame.line)
            frame = frame.parent
        if not lines and self.definition is not None:
            return (self.definition,), path
        return tuple(reversed(lines or every)), path

    @property
    def last_line(self) -> SourceLine | None:
        """The user's line of the last executed instruction."""
        for program, instruction, *_ in reversed(self.log.steps):
            if program.code.co_filename not in self.fixed_files:
                return program.line_of(instruction)
        return None

    def relate_state(self, facts: dict[str, Any]) -> None:
        """Rely on the process-wide settings being as they are."""
        self.guards["global_state",] = Guard(
            (), "global_state", facts, "settings that torch functions read"
        )

    # -- imports

    def import_name(self, frame: Frame, name: str, fromlist: Any, level: int) -> Any:
        namespace = frame.function.__globals__
        full = name
        if level:
            package = namespace.get("__package__") or namespace["__name__"].rpartition(".")[0]
            parts = package.split(".")
            full = ".".join(parts[: len(parts) - level + 1] + ([name] if name else []))
        if full not in sys.modules:
            self.unsupported(
                f"the module {full} is imported for the first time",
                "import it at the top of the file",
            )
        module = __import__(name, namespace, None, fromlist, level)
        self.hold(module, module.__name__)
        return module
