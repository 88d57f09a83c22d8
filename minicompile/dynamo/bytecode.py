"""Decodes the bytecode of CPython 3.11, 3.12 and 3.13 into one set of instructions.

    Bytecode    := instructions, in order; jump targets and exception handlers are indices into them
    Instruction := opname, arg, value, target, unit

`units(code)` takes the instructions apart where they do two things and puts together those that act as one:
superinstructions are split, PRECALL and KW_NAMES stay with their CALL, RETURN_CONST is a load and a return.
`decode(code)` makes one normalised instruction of each unit: forward and backward jumps are one opname, a
method load pushes `NULL, bound method`, FOR_ITER jumps past its END_FOR. What a normalised opname does is the
same on every version; `opcodes.py` has one handler for each.

Imports neither torch nor anything that does. The real compiler: torch/_dynamo/bytecode_transformation.py.
"""

from __future__ import annotations

import dis
import functools
import inspect
import opcode
import re
from dataclasses import dataclass
from types import CodeType
from typing import Any

from minicompile.dynamo.assembler import JUMPS, VERSION, Handler, Op, disassemble
from minicompile.ops.origin import SourceLine

LOOP_TAIL = ("END_FOR", "POP_TOP")[: VERSION[1] - 11]
"""What FOR_ITER wants at its target, and leaps over when it is exhausted."""


@dataclass(slots=True, eq=False)
class Instruction:
    """One normalised instruction.

    `arg` is its number (0 if none), `value` what the number means (a name, a constant, an operator, keyword
    names), `target` the index it may jump to, `unit` and `offset` where it came from in `units(code)` and in
    `co_code`, `handler` the exception table's entry.
    """

    opname: str
    arg: int = 0
    value: Any = None
    target: int = -1
    unit: int = 0
    offset: int = 0
    line: int = 0
    handler: Handler[int] | None = None

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


@dataclass(slots=True, eq=False)
class Bytecode:
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


def decode(code: CodeType) -> Bytecode:
    """The normalised program of a code object; equal ones of a file share it."""
    return _decoded(code, code.co_filename)  # code objects of different files may be equal


@functools.lru_cache(maxsize=2048)
def _decoded(code: CodeType, file: str) -> Bytecode:
    return normalised(code)


def slot_names(code: CodeType) -> tuple[str, ...]:
    """Names of the fast-local slots. A name that is both a parameter and a cell has one slot."""
    cells = tuple(name for name in code.co_cellvars if name not in code.co_varnames)
    return code.co_varnames + cells + code.co_freevars


def parameters(code: CodeType) -> tuple[int, int, int, int]:
    """Parameters fill the first slots. Where each kind ends and the next begins: those given by position,
    those given by name only, `*args`, `**kwargs`."""
    named = code.co_argcount + code.co_kwonlyargcount
    starred = named + bool(code.co_flags & inspect.CO_VARARGS)
    total = starred + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_argcount, named, starred, total


def is_generator(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_GENERATOR)


ASYNCHRONOUS = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_ASYNC_GENERATOR


def is_coroutine(code: CodeType) -> bool:
    """Coroutines and asynchronous generators."""
    return bool(code.co_flags & ASYNCHRONOUS)


# -- units

_PAIR = re.compile("((?:LOAD|STORE)_FAST)_((?:LOAD|STORE)_FAST)")
SLOT_OPS = {dis.opname[number] for number in (*dis.haslocal, *dis.hasfree)}


def units(code: CodeType) -> list[list[Op]]:
    """The instructions of `code`, those that do two things split, those that act together joined."""
    out: list[list[Op]] = []
    empty = len(code.co_consts)
    for op in (part for whole in disassemble(code) for part in split(whole, empty)):
        before = out[-1][-1].opname if out else ""
        if before in ("KW_NAMES", "PRECALL") or op.opname == "CALL_KW":  # it follows its names
            out[-1].append(op)
        else:
            out.append([op])
    return out


def split(op: Op, empty: int) -> list[Op]:
    """One thing at a time. The first part is the op itself, so that jumps still find it; parts stay whole.

    Formatting always gets a specification; `empty` is the number of the constant "".
    """
    arg = op.arg
    if pair := _PAIR.fullmatch(op.opname):
        return become(op, (pair[1], arg >> 4), (pair[2], arg & 15))
    if op.opname == "RETURN_CONST":
        return become(op, ("LOAD_CONST", arg), ("RETURN_VALUE", 0))
    if op.opname == "LOAD_GLOBAL" and arg & 1:
        load, null = ("LOAD_GLOBAL", arg - 1), ("PUSH_NULL", 0)
        return become(op, null, load) if VERSION < (3, 13) else become(op, load, null)
    if op.opname == "COMPARE_OP" and VERSION >= (3, 13) and arg & 16:
        return become(op, ("COMPARE_OP", arg - 16), ("TO_BOOL", 0))
    if op.opname == "FORMAT_SIMPLE":
        return become(op, ("LOAD_CONST", empty), ("FORMAT_WITH_SPEC", 0))
    if op.opname == "FORMAT_VALUE" and not arg & 4:
        return become(op, ("LOAD_CONST", empty), ("FORMAT_VALUE", arg | 4))
    return [op]


def become(op: Op, *parts: tuple[str, int]) -> list[Op]:
    op.opname, op.arg = parts[0]
    return [op, *(Op(*part, None, op.handler, op.line, op.offset) for part in parts[1:])]


# -- normalised instructions

_SKIPPED = ("NOP", "RESUME", "END_FOR")
_RENAMED = {
    "LOAD_FAST_CHECK": "LOAD_FAST",
    "LOAD_CLOSURE": "LOAD_FAST",
    "CALL_KW": "CALL",
    "FORMAT_WITH_SPEC": "FORMAT_VALUE",
}
_INTRINSICS = {3: "STOPITERATION_ERROR", 5: "UNARY_POSITIVE", 6: "LIST_TO_TUPLE"}
"""Those of CALL_INTRINSIC_1 that other versions spell as opcodes of their own, or that generators need."""
_DIRECTION = re.compile("_FORWARD|_BACKWARD|_NO_INTERRUPT")
"""What tells jumps apart that mean the same."""
_FLAGS = {"LOAD_GLOBAL": 1, "LOAD_ATTR": int(VERSION >= (3, 12)), "LOAD_SUPER_ATTR": 2}
"""Bits of the argument below the number of a name."""
_COMPARISON_FLAGS = {11: 0, 12: 4}.get(VERSION[1], 5)
_OPERATORS: Any = getattr(opcode, "_nb_ops", ())


def normalised(code: CodeType) -> Bytecode:
    """One instruction for each unit that does something."""
    out: list[Instruction] = []
    every = units(code)
    index_at: dict[Op, int] = {}
    unit_at: dict[Op, int] = {}
    for number, unit in enumerate(every):
        index_at[unit[0]], unit_at[unit[0]] = len(out), number
        if unit[0].opname not in _SKIPPED:
            out.append(one_instruction(code, number, unit))
    for instruction in out:
        op = every[instruction.unit][-1]
        if op.target is not None:
            target = op.target
            if op.opname == "FOR_ITER":
                target = every[unit_at[target] + len(LOOP_TAIL)][0]
            instruction.target = index_at[target]
        if (handler := op.handler) is not None:
            place = index_at[handler.target]
            instruction.handler = Handler(place, handler.depth, handler.lasti)
    return Bytecode(code, out, slot_names(code), {})


def one_instruction(code: CodeType, number: int, unit: list[Op]) -> Instruction:
    """A unit as an instruction that means the same on every version, without target and handler."""
    op = unit[-1]
    opname, arg, kind = op.opname, op.arg, dis.opmap[op.opname]
    name, value = _RENAMED.get(opname, opname), None
    if opname in ("LOAD_CONST", "RETURN_CONST"):
        value = (*code.co_consts, "")[arg]
    elif opname in SLOT_OPS:
        value = slot_names(code)[arg]
    elif kind in dis.hasname:
        value = code.co_names[arg >> _FLAGS.get(opname, 0)]
    elif name == "CALL":
        value = code.co_consts[unit[0].arg] if len(unit) > 1 + (VERSION < (3, 12)) else None
    elif opname == "COMPARE_OP":
        value = dis.cmp_op[arg >> _COMPARISON_FLAGS]
    elif opname == "BINARY_OP":
        value = _OPERATORS[arg][1]
    elif opname == "CALL_INTRINSIC_1":
        name = _INTRINSICS.get(arg, name)
    if opname == "LOAD_ATTR" and _FLAGS[opname] and arg & 1:
        name = "LOAD_METHOD"
    elif opname == "LOAD_SUPER_ATTR" and arg & 1:
        name = "LOAD_SUPER_METHOD"
    elif opname == "FORMAT_VALUE":
        arg &= 3
    elif opname == "SEND":  # 3.11 drops the receiver itself; later versions do it in END_SEND
        arg = int(VERSION < (3, 12))
    elif kind in JUMPS:
        name = _DIRECTION.sub("", opname)
    line = op.line or code.co_firstlineno
    return Instruction(name, arg, value, -1, number, op.offset, line)
