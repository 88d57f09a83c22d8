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
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

from minicompile.ops.origin import SourceLine

VERSION = sys.version_info[:2]


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
        return (
            str(self.value)
            if isinstance(self.value, str) and self.opname != "LOAD_CONST"
            else repr(self.value)
        )

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
    own = code.co_varnames + tuple(
        name for name in code.co_cellvars if name not in code.co_varnames
    )
    return own + code.co_freevars


def is_generator(code: CodeType) -> bool:
    return bool(code.co_flags & 0x20)


def is_coroutine(code: CodeType) -> bool:
    """Coroutines and asynchronous generators."""
    return bool(code.co_flags & (0x80 | 0x100 | 0x200))


BINARY_SYMBOLS: tuple[str, ...] = (
    *("+", "&", "//", "<<", "@", "*", "%", "|", "**", ">>", "-", "/", "^"),
    *("+=", "&=", "//=", "<<=", "@=", "*=", "%=", "|=", "**=", ">>=", "-=", "/=", "^="),
)
"""BINARY_OP's operators by argument; the same on all three versions."""

COMPARISONS = ("<", "<=", "==", "!=", ">", ">=")

INTRINSICS: dict[tuple[str, int], str] = {
    ("CALL_INTRINSIC_1", 3): "STOPITERATION_ERROR",
    ("CALL_INTRINSIC_1", 5): "UNARY_POSITIVE",
    ("CALL_INTRINSIC_1", 6): "LIST_TO_TUPLE",
}
"""The intrinsics that the other versions spell as opcodes of their own, or that generators need."""

_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL", "KW_NAMES", "END_FOR"})
_SPLIT = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"),
    "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
}
_SLOT_OPS = frozenset(
    {
        *(
            "LOAD_FAST",
            "LOAD_FAST_CHECK",
            "LOAD_FAST_AND_CLEAR",
            "STORE_FAST",
            "DELETE_FAST",
            "MAKE_CELL",
            "LOAD_CLOSURE",
        ),
        *(
            "LOAD_DEREF",
            "STORE_DEREF",
            "DELETE_DEREF",
            "LOAD_CLASSDEREF",
            "LOAD_FROM_DICT_OR_DEREF",
        ),
    }
)
_NAME_OPS = frozenset(
    {
        *(
            "LOAD_NAME",
            "STORE_NAME",
            "DELETE_NAME",
            "STORE_ATTR",
            "DELETE_ATTR",
            "STORE_GLOBAL",
            "DELETE_GLOBAL",
        ),
        *("IMPORT_NAME", "IMPORT_FROM", "LOAD_METHOD", "LOAD_FROM_DICT_OR_GLOBALS"),
    }
)
_RENAMED = {
    "LOAD_FAST_CHECK": "LOAD_FAST",
    "LOAD_FROM_DICT_OR_DEREF": "LOAD_CLASSDEREF",
    "JUMP_FORWARD": "JUMP",
    "JUMP_BACKWARD": "JUMP",
    "JUMP_BACKWARD_NO_INTERRUPT": "JUMP",
    "POP_JUMP_FORWARD_IF_TRUE": "POP_JUMP_IF_TRUE",
    "POP_JUMP_FORWARD_IF_FALSE": "POP_JUMP_IF_FALSE",
    "POP_JUMP_FORWARD_IF_NONE": "POP_JUMP_IF_NONE",
    "POP_JUMP_FORWARD_IF_NOT_NONE": "POP_JUMP_IF_NOT_NONE",
    "POP_JUMP_BACKWARD_IF_TRUE": "POP_JUMP_IF_TRUE",
    "POP_JUMP_BACKWARD_IF_FALSE": "POP_JUMP_IF_FALSE",
    "POP_JUMP_BACKWARD_IF_NONE": "POP_JUMP_IF_NONE",
    "POP_JUMP_BACKWARD_IF_NOT_NONE": "POP_JUMP_IF_NOT_NONE",
}
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)


class _Decoder:
    """Decodes one code object: first the instructions, then jump targets and handlers as indices."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.slots = slot_names(code)
        self.out: list[Instruction] = []
        self.index_at: dict[int, int] = {}
        self.jumps: list[tuple[Instruction, int]] = []
        self.keywords: tuple[str, ...] = ()

    def program(self) -> Program:
        raw = list(dis.get_instructions(self.code))
        offsets = [ins.offset for ins in raw]
        for position, ins in enumerate(raw):
            self.index_at[ins.offset] = len(self.out)
            if ins.opname not in _SKIPPED:
                self.normalise(raw, position)
            elif ins.opname == "KW_NAMES":
                self.keywords = self.code.co_consts[ins.arg or 0]
        for instruction, offset in self.jumps:
            instruction.target = self.index_at[offset]
        self.attach_handlers(offsets)
        return Program(self.code, self.out, self.slots, {})

    def emit(
        self, ins: dis.Instruction, opname: str, arg: int = 0, value: Any = None
    ) -> Instruction:
        line = ins.positions.lineno if ins.positions is not None else None
        made = Instruction(opname, arg, value, -1, ins.offset, line or self.code.co_firstlineno)
        self.out.append(made)
        return made

    def normalise(self, raw: list[dis.Instruction], position: int) -> None:
        ins = raw[position]
        opname, arg = ins.opname, ins.arg or 0
        special = getattr(self, "op_" + opname.lower(), None)
        if special is not None:
            special(ins, arg)
        elif opname in _SPLIT:
            first, second = _SPLIT[opname]
            self.slot_op(ins, first, arg >> 4)
            self.slot_op(ins, second, arg & 15)
        elif opname in _SLOT_OPS:
            self.slot_op(ins, opname, arg)
        elif opname in _NAME_OPS:
            self.emit(ins, opname, arg, self.code.co_names[arg])
        elif ins.opcode in _JUMPS:
            offset = ins.argval
            if opname == "FOR_ITER":
                offset = self.after_loop(raw, offset)
            if opname == "SEND":  # 3.11 drops the receiver itself; later versions do it in END_SEND
                arg = int(VERSION < (3, 12))
            self.jumps.append(
                (
                    self.emit(ins, _RENAMED.get(opname, opname), arg if opname == "SEND" else 0),
                    offset,
                )
            )
        elif (opname, arg) in INTRINSICS:
            self.emit(ins, INTRINSICS[opname, arg])
        else:
            self.emit(ins, _RENAMED.get(opname, opname), arg)

    def slot_op(self, ins: dis.Instruction, opname: str, arg: int) -> None:
        name = self.slots[arg]
        # 3.13 has no LOAD_CLOSURE: loading a slot that holds a cell is LOAD_FAST. The handler is the same.
        self.emit(ins, _RENAMED.get(opname, opname), arg, name)

    @staticmethod
    def after_loop(raw: list[dis.Instruction], offset: int) -> int:
        """Where an exhausted loop goes on: past END_FOR (3.12), past END_FOR and POP_TOP (3.13)."""
        if VERSION < (3, 12):
            return offset
        at = next(i for i, ins in enumerate(raw) if ins.offset == offset)
        assert raw[at].opname == "END_FOR", raw[at]
        return raw[at + (1 if VERSION < (3, 13) else 2)].offset

    # -- opcodes whose form depends on the version

    def op_load_const(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "LOAD_CONST", arg, self.code.co_consts[arg])

    def op_return_const(self, ins: dis.Instruction, arg: int) -> None:
        self.op_load_const(ins, arg)
        self.emit(ins, "RETURN_VALUE")

    def op_load_global(self, ins: dis.Instruction, arg: int) -> None:
        if arg & 1 and VERSION < (3, 13):
            self.emit(ins, "PUSH_NULL")
        self.emit(ins, "LOAD_GLOBAL", arg >> 1, self.code.co_names[arg >> 1])
        if arg & 1 and VERSION >= (3, 13):
            self.emit(ins, "PUSH_NULL")

    def op_load_attr(self, ins: dis.Instruction, arg: int) -> None:
        if VERSION < (3, 12):
            self.emit(ins, "LOAD_ATTR", arg, self.code.co_names[arg])
        else:
            self.emit(
                ins,
                "LOAD_METHOD" if arg & 1 else "LOAD_ATTR",
                arg >> 1,
                self.code.co_names[arg >> 1],
            )

    def op_load_super_attr(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(
            ins,
            "LOAD_SUPER_METHOD" if arg & 1 else "LOAD_SUPER_ATTR",
            arg >> 2,
            self.code.co_names[arg >> 2],
        )

    def op_call(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "CALL", arg, self.keywords or None)
        self.keywords = ()

    def op_call_kw(self, ins: dis.Instruction, arg: int) -> None:
        names = self.out.pop()
        assert names.opname == "LOAD_CONST", names
        self.emit(ins, "CALL", arg, names.value)

    def op_compare_op(self, ins: dis.Instruction, arg: int) -> None:
        index = arg if VERSION < (3, 12) else arg >> 4 if VERSION < (3, 13) else arg >> 5
        self.emit(ins, "COMPARE_OP", index, COMPARISONS[index])
        if VERSION >= (3, 13) and arg & 16:
            self.emit(ins, "TO_BOOL")

    def op_binary_op(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "BINARY_OP", arg, BINARY_SYMBOLS[arg])

    def op_format_value(self, ins: dis.Instruction, arg: int) -> None:
        conversion, with_spec = arg & 3, bool(arg & 4)
        if conversion:
            if with_spec:
                self.emit(ins, "SWAP", 2)
            self.emit(ins, "CONVERT_VALUE", conversion)
            if with_spec:
                self.emit(ins, "SWAP", 2)
        self.emit(ins, "FORMAT_VALUE", int(with_spec))

    def op_format_simple(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "FORMAT_VALUE", 0)

    def op_format_with_spec(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "FORMAT_VALUE", 1)

    def op_make_function(self, ins: dis.Instruction, arg: int) -> None:
        self.emit(ins, "MAKE_FUNCTION", arg)

    # -- exception table

    def attach_handlers(self, offsets: list[int]) -> None:
        bounds = [offset for offset in offsets if offset in self.index_at]
        ends = dict(zip(bounds, [*bounds[1:], len(self.code.co_code)], strict=True))
        indices = dict(self.index_at)
        for start, end, target, depth, lasti in exception_table(self.code):
            entry = ExceptionEntry(indices[target], depth, lasti)
            covered = [i for i in self.out if start <= i.offset < end and i.offset in ends]
            for instruction in covered:
                instruction.handler = entry


def exception_table(code: CodeType) -> Iterator[tuple[int, int, int, int, bool]]:
    """(start, end, target) byte offsets, stack depth and lasti flag of each entry of `co_exceptiontable`."""
    data = iter(code.co_exceptiontable)

    def number(first: int) -> int:
        value = first & 63
        while first & 64:
            first = next(data)
            value = (value << 6) | (first & 63)
        return value

    for first in data:
        start = number(first & 127) * 2
        length = number(next(data)) * 2
        target = number(next(data)) * 2
        depth_lasti = number(next(data))
        yield start, start + length, target, depth_lasti >> 1, bool(depth_lasti & 1)
