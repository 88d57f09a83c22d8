"""Verifiers: whether the loop graph, loop bodies and the schedule keep the promises of their grammars.

With `options={"verify": True}` the rooms call them between stages, as tests do.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy

from minicompile.errors import VerifyError
from minicompile.lowering.ir import (
    ComputedBuffer,
    ExternKernel,
    FormulaOps,
    LoopGraph,
    Scan,
    Scatter,
    evaluate_loops,
    same_size,
    written_by,
)
from minicompile.ops.display import method
from minicompile.ops.dtypes import LOOP_DTYPES
from minicompile.ops.table import POINTWISE, result_dtype
from minicompile.scheduling.body import LoopBody, Value
from minicompile.scheduling.in_place import refusal
from minicompile.scheduling.nodes import FusedSchedulerNode, Schedule
from minicompile.shapes.expr import is_float


@method(LoopGraph, "verify")
def verify_loops(graph: LoopGraph) -> None:
    """Raise VerifyError where the graph breaks the grammar: names, order, ranges, dtypes."""
    known = {buffer.name for buffer in graph.given}
    spent: set[str] = set()

    def read(names: Iterable[str], by: str) -> None:
        for name in names:
            if name not in known:
                raise VerifyError(f"{by} reads {name}, which nothing has written")
            if name in spent:
                raise VerifyError(f"{by} reads {name}, whose memory a scatter has taken over")

    for operation in graph.operations:
        if isinstance(operation, ExternKernel):
            read(operation.reads, operation.name)
        else:
            read(checked_reads(operation), operation.name)
            if isinstance(operation.loops, Scatter):
                spent.add(operation.loops.target)
        for buffer in written_by(operation):
            if buffer.name in known:
                raise VerifyError(f"{buffer.name} is written twice")
            known.add(buffer.name)
    read(graph.returned, "the output")


def checked_reads(buffer: ComputedBuffer) -> list[str]:
    """Check an operation by itself. Gives the buffers it reads."""
    loops, layout, ops = buffer.loops, buffer.layout, FormulaOps()
    if isinstance(loops, Scan) and not 0 <= loops.dim < len(loops.ranges):
        raise VerifyError(f"{buffer.name}: scans dimension {loops.dim} of {loops.ranges}")
    _, where = evaluate_loops(loops, ops)
    if isinstance(loops, Scatter):
        if len(where) != len(layout.size):
            raise VerifyError(f"{buffer.name}: not one index per dimension of its target")
        return [*ops.loaded, loops.target]
    if not same_size(loops.ranges, layout.size):
        raise VerifyError(f"{buffer.name}: ranges {loops.ranges} are not its size {layout.size}")
    return ops.loaded


def verify_body(body: LoopBody) -> None:
    """Raise VerifyError where a body breaks its grammar."""

    def require(holds: bool, problem: str) -> None:
        if not holds:
            raise VerifyError(f"{body.name}: {problem}")

    seen: set[Value] = set()
    symbols: set[sympy.Symbol] = set(body.all_ranges)
    for value in body.values:
        op, dtype = value.op, value.dtype
        require(dtype in LOOP_DTYPES, f"{op} gives {dtype}, which loops can't hold")
        for operand in value.operands:
            require(operand in seen, f"{op} uses {operand.op} before it is computed")
        if value.symbol is not None:
            symbols.add(value.symbol)
        if value.index is not None:
            unknown = value.index.free_symbols - symbols
            strange = [s for s in unknown if not (s.is_positive or is_float(s))]
            require(not strange, f"index {value.index} uses unknown {strange}")
        if op in POINTWISE:
            expected = result_dtype(op, tuple(v.dtype for v in value.inputs))
            require(expected is dtype, f"{op} must give {expected}, not {dtype}")
        seen.add(value)
    require(bool(body.stores), "stores nothing")


@method(Schedule, "verify")
def verify_schedule(result: Schedule) -> None:
    """Raise VerifyError where a schedule breaks its promises: bodies, order, memory."""
    graph, memory = result.graph, result.memory
    present = {buffer.name for buffer in graph.given}
    for step, node in enumerate(result.nodes):
        if isinstance(node, FusedSchedulerNode):
            for body in node.bodies:
                verify_body(body)
            for new, old in memory.in_place(step).items():
                if (why := refusal(node, old, new)) is not None:
                    raise VerifyError(f"{node.name} can't write {new} in place of {old}: {why}")
        for dependency in node.reads:
            if dependency.buffer not in present:
                raise VerifyError(f"{node.name} reads {dependency.buffer}, which isn't in memory")
        present.difference_update(a.reuses for a in memory.allocate[step] if a.reuses is not None)
        present.update(d.buffer for d in node.writes if d.buffer not in memory.internal)
    for buffer in graph.returned:
        if buffer not in present:
            raise VerifyError(f"output {buffer} is not in memory at the end")
