"""The roofline: what a schedule's kernels could reach, given a device's bandwidth and arithmetic.

A kernel that does few operations for each byte waits for memory: it reaches intensity x bandwidth. One that
does many reaches the peak. Between them stands the ridge (Williams, Waterman, Patterson: "Roofline", 2009).
"""

from __future__ import annotations

import functools
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils.flop_counter import flop_registry

from minicompile import compat
from minicompile.codegen.merge import merge
from minicompile.errors import OptionError
from minicompile.lowering.ir import Buffer, ExternKernel, Layout, View
from minicompile.ops.device import memory_bandwidth
from minicompile.ops.display import Shown, aligned, bytes_text, method
from minicompile.ops.origin import Origins
from minicompile.pipeline_result import Trace
from minicompile.scheduling.cost import Cost, Places, cost_at, cost_of
from minicompile.scheduling.nodes import ExternKernelSchedulerNode, FusedSchedulerNode, Schedule
from minicompile.shapes.expr import size_hint
from minicompile.shapes.strided import Footprint, Hints

F32 = torch.float32
CORES = 128
"""fp32 units of a multiprocessor; some older GPUs have 64."""
COPIED = 32 * 2**20
"""Bytes of the copy that is timed: more than caches hold."""
SIDE = 512
"""Rows and columns of the matrices whose product is timed."""


@dataclass(frozen=True)
class DeviceSpec:
    """Peak memory bandwidth, peak fp32 arithmetic, and where the two numbers are from."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    source: str = "given"

    @property
    def ridge(self) -> float:
        """Operations for each byte from which on arithmetic is the limit."""
        return self.flops_per_second / self.bytes_per_second

    def __str__(self) -> str:
        gigabytes, gigaflops = self.bytes_per_second / 1e9, self.flops_per_second / 1e9
        return f"{self.name}: {gigabytes:,.1f} GB/s, {gigaflops:,.1f} GFLOP/s ({self.source})"


@functools.cache
def device_spec(device: torch.device) -> DeviceSpec:
    """The speed of a device. Raises OptionError for other kinds than CPU and CUDA."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        flops = 2e3 * CORES * found.multi_processor_count * found.clock_rate
        return DeviceSpec(found.name, memory_bandwidth(found), flops, "its properties")
    if device.type != "cpu":
        raise OptionError(f"no speeds known for {device.type} devices")
    with compat.no_dispatch_modes():
        source, target = (torch.full((COPIED // 4,), 1.0, dtype=F32, device=device) for _ in "ab")
        square = source[: SIDE * SIDE].view(SIDE, SIDE)
        copying = min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=3))
        multiplying = min(timeit.repeat(lambda: square @ square, number=1, repeat=3))
    name, how = (
        f"CPU, {torch.get_num_threads()} threads",
        "measured: a copy and a matrix product",
    )
    return DeviceSpec(name, 2 * COPIED / copying, 2 * SIDE**3 / multiplying, how)


def seconds_of(cost: Cost, spec: DeviceSpec) -> float:
    """The larger of the times that the traffic and the arithmetic need at least."""
    return max(cost.bytes / spec.bytes_per_second, cost.flops / spec.flops_per_second)


COLUMNS = (
    "kernel or call", "bytes", "operations", "operations per byte", "reaches", "time", "share", "limit",
)  # fmt: skip


@dataclass(frozen=True)
class RooflinePoint:
    """One kernel or extern call, its cost, and the seconds that it takes at least."""

    name: str
    cost: Cost
    seconds: float
    origins: Origins


@dataclass(eq=False)
class Roofline(Shown):
    """All kernels and extern calls of one or more graphs under the roof of one device."""

    title: str
    spec: DeviceSpec
    points: list[RooflinePoint]

    @property
    def seconds(self) -> float:
        return sum(point.seconds for point in self.points)

    def row(self, point: RooflinePoint) -> list[str]:
        """The cells of COLUMNS."""
        cost, seconds = point.cost, point.seconds or 1.0  # of nothing, in no time
        return [
            point.name,
            bytes_text(cost.bytes),
            f"{cost.flops:,}",
            f"{cost.intensity:,.2f}",
            f"{cost.flops / seconds / 1e9:,.2f} GFLOP/s",
            f"{point.seconds * 1e6:,.1f} us",
            f"{point.seconds / (self.seconds or 1.0):.1%}",
            "memory" if cost.intensity < self.spec.ridge else "arithmetic",
        ]

    def __str__(self) -> str:
        title = f"# roofline of {self.title}: at least {self.seconds * 1e6:,.1f} us"
        rows = aligned([COLUMNS, *map(self.row, self.points)])
        return "\n".join([title, str(self.spec), *rows])


def costs_of(schedule: Schedule) -> list[Cost]:
    """Return what each node of a schedule moves and computes, in running order."""
    internal, dtypes = schedule.memory.internal, schedule.dtypes
    return [
        cost_of(*merge(node, internal, dtypes), schedule)
        if isinstance(node, FusedSchedulerNode)
        else cost_of_call(node, schedule)
        for node in schedule.nodes
    ]


def cost_of_call(node: ExternKernelSchedulerNode, schedule: Schedule) -> Cost:
    """Return what a library's operator moves, and computes by torch's public formula, if it has one."""

    def touched(layout: Layout) -> Footprint:
        pairs = zip(layout.stride, layout.size, strict=True)
        return sympy.sympify(layout.offset), tuple((s, n) for s, n in pairs if s != 0)

    read: Places = {}
    for view in node.kernel.views():
        read.setdefault(view.buffer, set()).add(touched(view.layout))
    outputs = filter(None, node.kernel.outputs)
    written = {output.name: {touched(output.layout)} for output in outputs}
    flops = library_flops(node.kernel, schedule.graph.size_hints)
    return cost_at(flops, read, written, schedule)


def library_flops(kernel: ExternKernel, hints: Hints) -> int:
    """By torch's formula for the operator; 0 where it has none."""
    name = str(kernel.op.overloadpacket).rpartition(".")[2].removesuffix("_for_cpu")
    packet = getattr(torch.ops.aten, name, None)
    formula: Callable[..., int] | None = flop_registry.get(packet)
    if formula is None:
        return 0

    def shape(argument: Any) -> Any:
        if isinstance(argument, View | Buffer):
            return [size_hint(size, hints) for size in argument.layout.size]
        return argument

    given = kernel.args, kernel.kwargs, list(kernel.outputs)
    args, kwargs, outputs = compat.tree_map(shape, given)
    return formula(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else outputs)


@method(Trace, "roofline")
def roofline(trace: Trace, spec: DeviceSpec | None = None) -> Roofline:
    """Return what each kernel moves and computes, and its least time on `spec` (default: this device)."""
    points, hints = list[RooflinePoint](), dict[Any, int]()
    for name, compiled in trace.graphs.items():
        buffer = next(iter(compiled.loops.buffers.values()), None)
        spec = spec or device_spec(buffer.layout.device if buffer else torch.device("cpu"))
        hints |= compiled.loops.size_hints
        plans = iter(compiled.plans)
        for node, cost in zip(compiled.schedule.nodes, costs_of(compiled.schedule), strict=True):
            if isinstance(node, FusedSchedulerNode):
                title = f"{name} {next(plans).name}".removeprefix("forward ")
            else:
                title = str(node.kernel.op)
            points.append(RooflinePoint(title, cost, seconds_of(cost, spec), node.origins))
    if spec is None:
        raise OptionError(f"the trace of {trace.name} stops before there are kernels")
    at = f" at {', '.join(f'{s} = {v}' for s, v in hints.items())}" if hints else ""
    return Roofline(trace.name + at, spec, points)
