"""A code object as a list of instructions that can be changed, and back.

    Op      := opname, arg | target, handler, line
    Handler := target, depth, lasti

`assemble(code, disassemble(code))` gives the same bytecode and exception table bit for bit, and the same
lines; columns are left out. Jumps and handlers refer to `Op` objects, so instructions can be
inserted anywhere: offsets, EXTENDED_ARG prefixes, inline caches and both tables are worked out again. An op
without `handler` lies outside every try-block.

Unlike `bytecode.decode`, nothing is normalised: these are the running version's own instructions. Imports
neither torch nor anything that does. In CPython: Python/assemble.c (3.11: compile.c), Objects/locations.md,
Objects/exception_handling_notes.txt. The real compiler: torch/_dynamo/bytecode_transformation.py.
"""

from __future__ import annotations

import dis
import itertools
import opcode
import sys
from dataclasses import dataclass
from types import CodeType
from typing import Any, Generic, TypeVar

VERSION = sys.version_info[:2]
"""Under one newer than tested this module can be imported, and nothing is captured (compat/versions.py)."""

Place = TypeVar("Place")


@dataclass(slots=True, eq=False)
class Op:
    """One instruction. A jump has a `target` and no `arg`; `offset` is where it came from in `co_code`."""

    opname: str
    arg: int = 0
    target: Op | None = None
    handler: Handler[Op] | None = None
    line: int | None = None
    """None where the compiler said nothing."""
    offset: int = -1
    prefixes: int = 0
    """EXTENDED_ARGs that it has at least: the compiler leaves one where a jump got shorter later."""


@dataclass(slots=True, eq=False)
class Handler(Generic[Place]):
    """Where an exception goes: the stack is cut to `depth`, the raising offset pushed if `lasti`."""

    target: Place
    depth: int
    lasti: bool


JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
exception_entries: Any = getattr(dis, "_parse_exception_table", None)
_CACHES: Any = getattr(opcode, "_inline_cache_entries", {})


def cache_units(opname: str) -> int:
    """Code units of inline cache after an instruction. 3.13 lists them by name, earlier ones by number."""
    return int(_CACHES.get(opname, 0) if VERSION >= (3, 13) else _CACHES[dis.opmap[opname]])


# -- from a code object


def disassemble(code: CodeType) -> list[Op]:
    """The instructions of `code`, without EXTENDED_ARG and CACHE."""
    data, lines = code.co_code, [line for line, *_ in code.co_positions()]
    ops: list[Op] = []
    at: dict[int, Op] = {}
    jumps: list[tuple[Op, int]] = []
    start = offset = arg = 0
    while offset < len(data):
        opname, arg = dis.opname[data[offset]], arg << 8 | data[offset + 1]
        after = offset + 2 + 2 * cache_units(opname)
        if opname != "EXTENDED_ARG":
            op = Op(opname, arg, None, None, lines[start // 2], offset, (offset - start) // 2)
            ops.append(op)
            at.update(dict.fromkeys(range(start, offset + 1, 2), op))
            if data[offset] in JUMPS:
                jumps.append((op, after + (-2 if "BACKWARD" in opname else 2) * arg))
                op.arg = 0
            start, arg = after, 0
        offset = after
    for op, target in jumps:
        op.target = at[target]
    attach_handlers(ops, at, code)
    return ops


def attach_handlers(ops: list[Op], at: dict[int, Op], code: CodeType) -> None:
    """One Handler object for each entry of the table, on every op that the entry covers."""
    position = 0
    for entry in exception_entries(code):
        handler = Handler(at[entry.target], entry.depth, entry.lasti)
        while position < len(ops) and ops[position].offset < entry.end:
            if ops[position].offset >= entry.start:
                ops[position].handler = handler
            position += 1


# -- to a code object


def assemble(code: CodeType, ops: list[Op], **fields: Any) -> CodeType:
    """`code` with other instructions; `fields` are handed to `CodeType.replace`."""
    args, ends = place(ops)
    starts = [0, *ends[:-1]]
    data = bytearray()
    for op, arg, start, end in zip(ops, args, starts, ends):
        caches = cache_units(op.opname)
        for shift in range(8 * (end - start - 1 - caches), 0, -8):
            data += bytes((dis.opmap["EXTENDED_ARG"], arg >> shift & 255))
        data += bytes((dis.opmap[op.opname], arg & 255, *[0] * (2 * caches)))
    first = fields.get("co_firstlineno", code.co_firstlineno)
    return code.replace(
        co_code=bytes(data),
        co_exceptiontable=exception_table(ops, starts, ends),
        co_linetable=line_table(ops, ends, first),
        **fields,
    )


def place(ops: list[Op]) -> tuple[list[int], list[int]]:
    """The argument of each op and where it ends, in code units.

    A far jump needs EXTENDED_ARG prefixes, which move other targets: repeat until nothing grows.
    """
    prefixes = [op.prefixes for op in ops]
    while True:
        starts, ends, end = {}, [], 0
        for op, count in zip(ops, prefixes):
            starts[op] = end
            end += count + 1 + cache_units(op.opname)
            ends.append(end)
        args = []
        for op, end in zip(ops, ends):
            jump = 0 if op.target is None else starts[op.target] - end
            args.append(op.arg - jump if "BACKWARD" in op.opname else op.arg + jump)
            if args[-1] < 0:
                raise ValueError(f"{op.opname} jumps the wrong way")
        needed = [max(n, (arg.bit_length() - 1) // 8) for n, arg in zip(prefixes, args)]
        if needed == prefixes:
            return args, ends
        prefixes = needed


def exception_table(ops: list[Op], starts: list[int], ends: list[int]) -> bytes:
    """Neighbouring ops with one Handler object make one entry."""
    where, after = dict(zip(ops, starts)), dict(zip(ops, ends))
    table = bytearray()
    for handler, group in itertools.groupby(ops, lambda op: op.handler):
        covered = list(group)
        if handler is not None:
            start = where[covered[0]]
            length = after[covered[-1]] - start
            numbers = (start, length, where[handler.target], handler.depth << 1 | handler.lasti)
            encoded = b"".join(varint(number, high_first=True) for number in numbers)
            table += bytes([encoded[0] | 128]) + encoded[1:]  # bit 7: an entry begins
    return bytes(table)


def line_table(ops: list[Op], ends: list[int], line: int) -> bytes:
    """`co_linetable`: runs of at most eight code units, each with a line (kind 13) or without (15).

    A line is the difference from the one before.
    """
    table = bytearray()
    begin = 0
    for op, end in zip(ops, ends):
        while begin < end:
            units = min(8, end - begin)
            begin += units
            kind = 15 if op.line is None else 13
            table.append(128 | kind << 3 | units - 1)
            if op.line is not None:
                step, line = op.line - line, op.line
                table += varint(-step << 1 | 1 if step < 0 else step << 1)
    return bytes(table)


def varint(number: int, high_first: bool = False) -> bytes:
    """Six bits a byte; bit 6 says that more follow. The exception table has the high bits first."""
    digits = [number & 63]
    while number := number >> 6:
        digits.append(number & 63)
    if high_first:
        digits.reverse()
    return bytes((*(digit | 64 for digit in digits[:-1]), digits[-1]))
