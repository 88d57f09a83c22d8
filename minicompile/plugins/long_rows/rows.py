"""Triton kernels that sweep long rows.

Rows of a length that no wide load divides begin anywhere in memory. Their tiles then begin before them,
where a wide load does: `rplace` counts from there, and the lanes before and behind the row are masked. Both
ends are stored apart.
"""

from __future__ import annotations

from minicompile.codegen.plan import Phase, TritonPlan
from minicompile.codegen.printing import kernel_template
from minicompile.codegen.triton import TilePrinter
from minicompile.codegen.triton_axes import Axes
from minicompile.ops.device import gpu_of
from minicompile.plugins.long_rows.choose import LONG_ROWS, along_rows, granule, rows_to_cache
from minicompile.scheduling.body import Value


@kernel_template(LONG_ROWS)
class LongRowPrinter(TilePrinter):
    """Prints sweeps whose tiles begin where wide loads do."""

    def __init__(self, plan: TritonPlan) -> None:
        super().__init__(plan)
        self.granule = granule(plan)
        """At how many elements tiles begin; 1: with their rows."""
        self.cached = rows_to_cache(plan, gpu_of(plan.device)) > 0
        """Rows that are read again are kept in the cache until then."""
        self.later: set[Value] = set()
        """Values that loops after this one compute, too."""
        if self.granule > 1:
            self.row_end = f"rnumel + {self.granule - 1}"

    def shifted(self, value: Value) -> bool:
        """Does the access go through rows that begin anywhere?"""
        return self.granule > 1 and along_rows(value, self.plan.body)

    def _indices(self) -> None:
        super()._indices()
        if self.granule > 1:
            wide = self.granule
            self.line(f"xstart = xindex * rnumel // {wide} * {wide}")
            self.line("xshift = xindex * rnumel - xstart")
            self.line(f"rlimit = (xshift + rnumel + {wide - 1}) // {wide} * {wide}")

    def _row_index(self, start: str) -> None:
        if self.granule == 1:
            super()._row_index(start)
            return
        self.line(f"rplace = {start}{self._lanes('r')}{self.cast}")
        self.line("rindex = rplace - xshift")
        width = 64 if self.wide else 32  # as one of them, a number below 0 is no small one
        self.line(f"rmask = rindex.to(tl.uint{width}) < rnumel")
        self._digits(self.plan.reduction_ranges, "rindex")

    def first_places(self) -> str:
        first = super().first_places()
        if self.granule == 1:
            return first
        return f"tl.where({first} < xshift, RBLOCK, 0) + {first} - xshift"

    def _loop(self, phase: Phase) -> None:
        after = self.plan.phases[self.plan.phases.index(phase) + 1 :]
        self.later = {value for other in after for value in other.values}
        super()._loop(phase)

    def cache_hint(self, value: Value) -> str:
        """Rows that a later loop reads again are the last to leave the cache."""
        if not self.cached or self.axes[value] != {"x", "r"}:
            return ""
        return f', eviction_policy="evict_{"last" if value in self.later else "first"}"'

    def _pointer(self, value: Value, axes: Axes) -> str:
        if not self.shifted(value):
            return super()._pointer(value, axes)
        return f"{self.arguments[value.buffer].name} + (xstart + rplace)"

    def load_mask(self, value: Value) -> str:
        # lanes that differ from rmask's hold what nobody uses
        return "xmask & (rplace < rlimit)" if self.shifted(value) else super().load_mask(value)

    def store_lanes(self, value: Value, place: str, mask: str) -> None:
        if not self.shifted(value):
            super().store_lanes(value, place, mask)
            return
        wide = self.granule
        first, last = (f"(xshift + {n}) // {wide} * {wide}" for n in (wide - 1, "rnumel"))
        inner = f"(rplace >= {first}) & (rplace < {last})"
        self.line(f"whole = {inner}", value.origins, scaffold=True)
        self.line(f"tl.store({place}, xmask & whole)", value.origins)
        with self.block(f"if (roffset == 0) | (roffset + RBLOCK + {wide} > rnumel):"):
            self.line(f"tl.store({place}, {mask} & ~whole)", value.origins)
