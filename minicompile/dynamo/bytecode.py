"""One instruction stream for CPython 3.11, 3.12 and 3.13: the only file that knows how they differ.

    Program     := instructions, in order; jump targets and exception handlers are indices into them
    Instruction := opname, arg, value, target, position

`decode(code)` normalises: superinstructions are split, PRECALL and KW_NAMES are folded into CALL, forward and
backward jumps are one opname, a method load pushes `NULL, bound method`, FOR_ITER jumps past its END_FOR,
RETURN_CONST is a load and a return. What a normalised opname does is the same on every version; `opcodes.py`
has one handler for each.

Imports neither torch nor anything that does. The real compiler: torch/_dynamo/bytecode_transformation.py.
"""

from __future__ import annotations

import dis
import inspect
import re
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from minicompile.ops.origin import SourceLine

VERSION = sys.version_info[:2]
LOOP_TAIL = max(VERSION[1] - 11, 0)
"""Instructions after a loop that only its exhaustion would run: none, END_FOR, END_FOR and POP_TOP."""


@dataclass(slots=True, eq=False)
class Instruction:
    """One normalised instruction.

    `arg` is its number (0 if none), `value` what the number means (a name, a constant, an operator, keyword
    names), `target` the index it may jump to, `offset` where it came from in `co_code`, `handler` the
    exception table's entry.
    """

    opname: str
    arg: int = 0
    value: Any = None
    target: int = -1
    offset: int = 0
    line: int = 0
    handler: ExceptionEntry | None = None

    @property
    def argument(self) -> str:
        """The argument as a reader wants it."""
        if self.target >= 0:
            return f"to {self.target}"
        if self.value is None:
            return str(self.arg) if self.arg else ""
        if isinstance(self.value, CodeType):
            return f"<code {self.value.co_name}>"
        return repr(self.value) if self.opname == "LOAD_CONST" else str(self.value)

    def __str__(self) -> str:
        return f"{self.opname} {self.argument}".rstrip()


@dataclass(frozen=True, slots=True)
class ExceptionEntry:
    """When an instruction raises: cut the stack to `depth`, push the index if `lasti`, go to `target`."""

    target: int
    depth: int
    lasti: bool


@dataclass(slots=True, eq=False)
class Program:
    """A code object's normalised instructions and the names of its fast-local slots."""

    code: CodeType
    instructions: list[Instruction]
    slots: tuple[str, ...]
    """Locals, then cells, then free variables, as CPython lays them out."""
    source_lines: dict[int, SourceLine]

    def line_of(self, instruction: Instruction) -> SourceLine:
        number = instruction.line
        found = self.source_lines.get(number)
        if found is None:
            found = SourceLine(self.code.co_filename, number, self.code.co_qualname)
            self.source_lines[number] = found
        return found

    def __str__(self) -> str:
        width = len(str(len(self.instructions)))
        return "\n".join(f"{i:>{width}} {ins}" for i, ins in enumerate(self.instructions))


_programs: WeakKeyDictionary[CodeType, Program] = WeakKeyDictionary()


def decode(code: CodeType) -> Program:
    """The normalised program of a code object; equal code objects share it."""
    found = _programs.get(code)
    # Code objects compare by value: equal functions of different files must not share source lines.
    if found is None or found.code.co_filename != code.co_filename:
        found = _Decoder(code).program()
        _programs[code] = found
    return found


def slot_names(code: CodeType) -> tuple[str, ...]:
    """Names of the fast-local slots. A name that is both a parameter and a cell has one slot."""
    cells = tuple(name for name in code.co_cellvars if name not in code.co_varnames)
    return code.co_varnames + cells + code.co_freevars


class Parameters(NamedTuple):
    """Parameters fill the first slots. Each kind ends where the next begins: those given by position, those
    given by name only, `*args`, `**kwargs`."""

    positional: int
    named: int
    starred: int
    total: int


def parameters(code: CodeType) -> Parameters:
    """The slots of a code object's parameters."""
    named = code.co_argcount + code.co_kwonlyargcount
    starred = named + bool(code.co_flags & inspect.CO_VARARGS)
    total = starred + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return Parameters(code.co_argcount, named, starred, total)


def is_generator(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_GENERATOR)


ASYNCHRONOUS = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_coroutine(code: CodeType) -> bool:
    """Coroutines and asynchronous generators."""
    return bool(code.co_flags & ASYNCHRONOUS)


INTRINSICS: dict[tuple[str, int], str] = {
    ("CALL_INTRINSIC_1", 3): "STOPITERATION_ERROR",
    ("CALL_INTRINSIC_1", 5): "UNARY_POSITIVE",
    ("CALL_INTRINSIC_1", 6): "LIST_TO_TUPLE",
}
"""The intrinsics that the other versions spell as opcodes of their own, or that generators need."""

_SKIPPED = ("CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL", "END_FOR")
_PAIRS = ("LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST")
_RENAMED = {
    "LOAD_FAST_CHECK": "LOAD_FAST",
    "LOAD_CLOSURE": "LOAD_FAST",
    "LOAD_FROM_DICT_OR_DEREF": "LOAD_CLASSDEREF",
}
_DIRECTION = re.compile("_FORWARD|_BACKWARD|_NO_INTERRUPT")
"""What tells jumps apart that mean the same."""
_JUMPS = frozenset(dis.hasjrel + dis.hasjabs)
_NAMED = frozenset(dis.hasname + dis.haslocal + dis.hasfree + dis.hasconst + dis.hascompare)
"""Opcodes whose `argval` in `dis` is what they mean: a name, a constant, a comparison."""


class _Decoder:
    """Decodes one code object: first the instructions, then jump targets and handlers as indices."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.out: list[Instruction] = []
        self.jumps: list[tuple[Instruction, int]] = []
        self.keywords: tuple[str, ...] | None = None

    def program(self) -> Program:
        raw = dis.Bytecode(self.code)
        offsets = [ins.offset for ins in raw]
        index_at: dict[int, int] = {}
        for ins in raw:
            index_at[ins.offset] = len(self.out)
            if ins.opname not in _SKIPPED:
                self.normalise(ins)
        for instruction, offset in self.jumps:
            if instruction.opname == "FOR_ITER":
                # Past END_FOR (3.12), past END_FOR and POP_TOP (3.13).
                offset = offsets[offsets.index(offset) + LOOP_TAIL]
            instruction.target = index_at[offset]
        for start, end, target, depth, lasti in raw.exception_entries:  # type: ignore[attr-defined]
            entry = ExceptionEntry(index_at[target], depth, lasti)
            for instruction in self.out:
                if start <= instruction.offset < end:
                    instruction.handler = entry
        return Program(self.code, self.out, slot_names(self.code), {})

    def emit(self, ins: dis.Instruction, opname: str, arg: int = 0, value: Any = None) -> None:
        line = ins.positions.lineno if ins.positions is not None else None
        made = Instruction(opname, arg, value, -1, ins.offset, line or self.code.co_firstlineno)
        self.out.append(made)

    def normalise(self, ins: dis.Instruction) -> None:
        opname, arg = ins.opname, ins.arg or 0
        special = getattr(self, "op_" + opname.lower(), None)
        if special is not None:
            special(ins, arg)
        elif opname in _PAIRS:
            first, second = re.findall("[A-Z]+_FAST", opname)
            self.emit(ins, first, arg >> 4, ins.argval[0])
            self.emit(ins, second, arg & 15, ins.argval[1])
        elif ins.opcode in _JUMPS:
            self.emit(ins, _DIRECTION.sub("", opname))
            self.jumps.append((self.out[-1], ins.argval))
        elif (opname, arg) in INTRINSICS:
            self.emit(ins, INTRINSICS[opname, arg])
        else:
            value = ins.argval if ins.opcode in _NAMED else None
            self.emit(ins, _RENAMED.get(opname, opname), arg, value)

    # -- opcodes whose form depends on the version

    def op_return_const(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "LOAD_CONST", arg, ins.argval)
        self.emit(ins, "RETURN_VALUE")

    def op_load_global(self, ins: dis.Instruction, arg: int) -> None:
        if arg & 1 and VERSION < (3, 13):
            self.emit(ins, "PUSH_NULL")
        self.emit(ins, "LOAD_GLOBAL", arg >> 1, ins.argval)
        if arg & 1 and VERSION >= (3, 13):
            self.emit(ins, "PUSH_NULL")

    def op_load_attr(self, ins: dis.Instruction, arg: int) -> None:
        method = VERSION >= (3, 12) and arg & 1
        self.emit(ins, "LOAD_METHOD" if method else "LOAD_ATTR", arg, ins.argval)

    def op_load_super_attr(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "LOAD_SUPER_METHOD" if arg & 1 else "LOAD_SUPER_ATTR", arg >> 2, ins.argval)

    def op_send(self, ins: dis.Instruction, arg: int) -> None:
        """3.11 drops the receiver itself; later versions do it in END_SEND."""
        self.emit(ins, "SEND", int(VERSION < (3, 12)))
        self.jumps.append((self.out[-1], ins.argval))

    def op_kw_names(self, ins: dis.Instruction, arg: int) -> None:
        self.keywords = self.code.co_consts[arg]

    def op_call(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "CALL", arg, self.keywords)
        self.keywords = None

    def op_call_kw(self, ins: dis.Instruction, arg: int) -> None:
        names = self.out.pop()
        assert names.opname == "LOAD_CONST", names
        self.emit(ins, "CALL", arg, names.value)

    def op_compare_op(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "COMPARE_OP", dis.cmp_op.index(ins.argval), ins.argval)
        if VERSION >= (3, 13) and arg & 16:
            self.emit(ins, "TO_BOOL")

    def op_binary_op(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "BINARY_OP", arg, ins.argrepr)

    def op_format_value(self, ins: dis.Instruction, arg: int) -> None:
        if not arg & 4:
            self.emit(ins, "LOAD_CONST", 0, "")
        self.emit(ins, "FORMAT_VALUE", arg & 3)

    def op_format_simple(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "LOAD_CONST", 0, "")
        self.emit(ins, "FORMAT_VALUE")

    def op_format_with_spec(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "FORMAT_VALUE")
