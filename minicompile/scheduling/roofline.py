"""The roofline: what a schedule's kernels could reach, given a device's bandwidth and arithmetic.

A kernel that does few operations for each byte waits for memory: it reaches intensity x bandwidth. One that
does many reaches the peak. Between them stands the ridge (Williams, Waterman, Patterson: "Roofline", 2009).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minicompile.ops.device import DeviceSpec
from minicompile.ops.display import Shown, aligned, bytes_text
from minicompile.ops.origin import Origins
from minicompile.scheduling.cost import Cost, costs_of
from minicompile.scheduling.nodes import FusedSchedulerNode, Schedule

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


def roofline_points(
    schedule: Schedule, names: Iterable[str], spec: DeviceSpec
) -> list[RooflinePoint]:
    """One for each scheduled node; `names` are those of its kernels, in order."""
    kernels, points = iter(names), []
    for node, cost in zip(schedule.nodes, costs_of(schedule), strict=True):
        name = next(kernels) if isinstance(node, FusedSchedulerNode) else str(node.kernel.op)
        points.append(RooflinePoint(name, cost, cost.seconds(spec), node.origins))
    return points
