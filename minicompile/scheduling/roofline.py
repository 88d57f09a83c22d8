"""The roofline: what a schedule's kernels could reach, given a device's bandwidth and arithmetic.

A kernel that does few operations for each byte waits for memory: it reaches intensity x bandwidth. One that
does many reaches the peak. Between them stands the ridge (Williams, Waterman, Patterson: "Roofline", 2009).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minicompile.ops.device import DeviceSpec
from minicompile.ops.display import Shown, bytes_text
from minicompile.ops.origin import Origins
from minicompile.scheduling.cost import Cost, cost_of
from minicompile.scheduling.nodes import FusedSchedulerNode, Schedule

COLUMNS = (
    "kernel or call",
    "bytes",
    "operations",
    "operations per byte",
    "reaches",
    "time",
    "share",
    "limit",
)


@dataclass(frozen=True)
class RooflinePoint:
    """One kernel or extern call, and what it costs at least on `spec`."""

    name: str
    cost: Cost
    spec: DeviceSpec
    origins: Origins

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.cost.flops / max(self.cost.bytes, 1)

    @property
    def seconds(self) -> float:
        return self.cost.seconds(self.spec)

    def row(self, total: float) -> list[str]:
        """The cells of COLUMNS; `total` is the time of all."""
        reached = self.cost.flops / self.seconds if self.seconds else 0.0
        return [
            self.name,
            bytes_text(self.cost.bytes),
            f"{self.cost.flops:,}",
            f"{self.intensity:,.2f}",
            f"{reached / 1e9:,.2f} GFLOP/s",
            f"{self.seconds * 1e6:,.1f} us",
            f"{self.seconds / total if total else 0:.1%}",
            "memory" if self.intensity < self.spec.ridge else "arithmetic",
        ]


@dataclass(eq=False)
class Roofline(Shown):
    """All kernels and extern calls of one or more graphs under the roof of one device."""

    title: str
    spec: DeviceSpec
    points: list[RooflinePoint]

    @property
    def seconds(self) -> float:
        return sum(point.seconds for point in self.points)

    @property
    def time(self) -> str:
        return f"{self.seconds * 1e6:,.1f} us"

    @property
    def rows(self) -> list[list[str]]:
        return [point.row(self.seconds) for point in self.points]

    def __str__(self) -> str:
        rows = [list(COLUMNS), *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        lines = [f"# roofline of {self.title}", f"{self.spec}"]
        for name, *cells in rows:
            numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            lines.append("  ".join([name.ljust(widths[0]), *numbers]))
        return "\n".join([*lines, f"together at least {self.time}"])


def roofline_points(
    schedule: Schedule, names: Iterable[str], spec: DeviceSpec
) -> list[RooflinePoint]:
    """One for each scheduled node; `names` are those of its kernels, in order."""
    kernels = iter(names)
    return [
        RooflinePoint(
            next(kernels) if isinstance(node, FusedSchedulerNode) else str(node.kernel.op),
            cost_of(node, schedule.graph, schedule.memory),
            spec,
            node.origins,
        )
        for node in schedule.nodes
    ]
