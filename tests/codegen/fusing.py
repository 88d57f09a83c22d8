"""Fused nodes built by hand: what the scheduler would hand to code generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

import minicompile.extension  # noqa: F401  plug-ins register their rules outside of any test's scope
from minicompile.codegen.generate import make_plan
from minicompile.codegen.plan import KernelPlan
from minicompile.lowering.ir import (
    Buffer,
    ComputedBuffer,
    InputBuffer,
    Layout,
    LoopGraph,
    Pointwise,
    Reduction,
    Scan,
    Scatter,
    loop_ranges,
)
from minicompile.ops.origin import Origin, SourceLine
from minicompile.options import Options
from minicompile.scheduling.body import record
from minicompile.scheduling.nodes import FusedSchedulerNode, MemoryPlan, Schedule, SchedulerNode
from minicompile.shapes.expr import contiguous_strides, loop_symbol, same, simplify_index

CPU, F32 = torch.device("cpu"), torch.float32
Size = Sequence[Any]
Loop = Callable[..., Any]
"""What is computed at an index, by operations."""


def origin(name: str, line: int = 1) -> Origin:
    return Origin(f"{name}_node", f"torch.{name}", (SourceLine("user.py", line, "forward"),))


class Program:
    """A small loop graph and one kernel over all its operations."""

    def __init__(self, hints: dict[sympy.Symbol, int] | None = None) -> None:
        self.buffers: list[Buffer] = []
        self.hints = hints or {}
        self.lines = 0

    def input(self, name: str, size: Size, dtype: torch.dtype = F32, **kw: Any) -> str:
        layout = Layout.contiguous(CPU, dtype, tuple(size))
        if "stride" in kw:
            layout = Layout(CPU, dtype, tuple(size), tuple(kw["stride"]))
        self.buffers.append(InputBuffer(name, layout))
        return name

    def pointwise(
        self,
        name: str,
        size: Size,
        fn: Loop,
        dtype: torch.dtype = F32,
    ) -> str:
        return self._computed(name, size, dtype, Pointwise(tuple(size), fn))

    def reduce(
        self,
        name: str,
        size: Size,
        over: Size,
        kind: str,
        fn: Loop,
        dtype: torch.dtype = F32,
    ) -> str:
        loops = Reduction(tuple(size), tuple(over), kind, fn)  # type: ignore[arg-type]
        return self._computed(name, size, dtype, loops)

    def scan(
        self,
        name: str,
        size: Size,
        dim: int,
        kind: str,
        fn: Loop,
        dtype: torch.dtype = F32,
    ) -> str:
        loops = Scan(tuple(size), dim, kind, fn)  # type: ignore[arg-type]
        return self._computed(name, size, dtype, loops)

    def scatter(
        self,
        name: str,
        size: Size,
        ranges: Size,
        target: str,
        where: Loop,
        fn: Loop,
        mode: str = "atomic_add",
        dtype: torch.dtype = F32,
    ) -> str:
        loops = Scatter(tuple(ranges), target, where, fn, mode)  # type: ignore[arg-type]
        return self._computed(name, size, dtype, loops)

    def _computed(self, name: str, size: Size, dtype: torch.dtype, loops: Any) -> str:
        self.lines += 1
        layout = Layout.contiguous(CPU, dtype, tuple(size))
        origins = frozenset({origin(name, self.lines)})
        self.buffers.append(ComputedBuffer(name, layout, origins, loops))
        return name

    def at(self, *index: Any, size: Size) -> sympy.Expr:
        strides = contiguous_strides(tuple(size))
        return sympy.Add(*[i * s for i, s in zip(index, strides, strict=True)])

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {b.name: b.layout.dtype for b in self.buffers}

    def schedule(self, internal: Sequence[str] = ()) -> Schedule:
        computed = [b for b in self.buffers if isinstance(b, ComputedBuffer)]
        inputs = [b for b in self.buffers if isinstance(b, InputBuffer)]
        graph = LoopGraph("graph", inputs, [], computed, [], self.hints)  # type: ignore[arg-type]
        aliases = {b.name: b.loops.target for b in computed if isinstance(b.loops, Scatter)}
        memory = MemoryPlan(internal=frozenset(internal), aliases=aliases)
        return Schedule(graph, [], [], [], memory)

    def fused(self) -> FusedSchedulerNode:
        """All computed buffers over common variables: x over the reductions' ranges, then r.

        The dimension of a scan must be the last one to share a kernel with others.
        """
        computed = [b for b in self.buffers if isinstance(b, ComputedBuffer)]
        reductions = [b for b in computed if isinstance(b.loops, Reduction | Scan)]
        first = loop_ranges((reductions or computed)[0].loops)
        ranges, reduction_ranges = (
            {loop_symbol(f"{prefix}{i}"): s for i, s in enumerate(group.values())}
            for prefix, group in zip("xr", first, strict=True)
        )
        nodes, bodies, levels = [], [], []
        for buffer in computed:
            body = record(buffer, self.dtypes)
            whole = [*ranges, *reduction_ranges]
            level = (
                "row" if len(body.ranges) == len(ranges) and not body.reduction_ranges else "elem"
            )
            if not reduction_ranges:
                level = "elem"
            old = list(body.all_ranges)
            new = list(ranges) if level == "row" else whole
            sizes = {**ranges, **reduction_ranges}
            assert len(old) == len(new), (buffer.name, old, new)
            assert all(same(body.all_ranges[o], sizes[n]) for o, n in zip(old, new, strict=True))
            mapping = dict(zip(old, new, strict=True))

            def moved(index: sympy.Expr, mapping: Any = mapping, sizes: Any = sizes) -> sympy.Expr:
                return simplify_index(index.xreplace(mapping), sizes)

            bodies.append(body.reindexed(moved, ranges, reduction_ranges))
            levels.append(level)
            nodes.append(SchedulerNode(buffer, body, (), ()))
        return FusedSchedulerNode(nodes, bodies, levels, ranges, reduction_ranges)

    def plan(
        self,
        internal: Sequence[str] = (),
        language: Any = "cpp",
        options: Options | None = None,
        position: int = 0,
    ) -> KernelPlan:
        schedule = self.schedule(internal)
        return make_plan(self.fused(), schedule, language, options or Options(), position)


def softmax(rows: Any, columns: Any, dtype: torch.dtype = F32, **kw: Any) -> Program:
    p = Program(**kw)
    size = (rows, columns)
    x = p.input("x", size, dtype)

    def load(ops: Any, i: Any, r: Any) -> Any:
        return ops.to_dtype(ops.load(x, p.at(*i, *r, size=size)), F32)

    p.reduce("amax", (rows,), (columns,), "max", load)

    def shifted(ops: Any, i: Any, r: Any) -> Any:
        return ops.exp(ops.sub(load(ops, i, r), ops.load("amax", i[0])))

    p.reduce("total", (rows,), (columns,), "sum", shifted)

    def out(ops: Any, i: Any) -> Any:
        value = ops.truediv(shifted(ops, i[:1], i[1:]), ops.load("total", i[0]))
        return ops.to_dtype(value, dtype)

    p.pointwise("softmax", size, out, dtype)
    return p
