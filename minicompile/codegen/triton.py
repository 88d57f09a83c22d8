"""The Triton printer: a `TritonPlan` becomes the text of one `@triton.jit` function.

    @triton.jit
    def triton_fused_softmax_0(in_ptr0, out_ptr0, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
        xnumel = 512                                            the parallel loops, flattened
        xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
        xmask = xindex < xnumel
        rindex = tl.arange(0, RBLOCK)[None, :]                  persistent: the whole row at once
        tmp0 = tl.load(in_ptr0 + (xindex*1024 + rindex), xmask, other=0.0)
        ...

Which elements a tile has and where they lie in memory is told in `triton_tiles.py`. A looped reduction sweeps
the row once per phase and keeps an accumulator tile in each sweep. A scan works on tiles; swept in a loop, it
starts each one from the last element of the tile before.

A line holds one operation; constants stand in the line that uses them, so that changing a constant changes
that line alone. The real compiler: torch/_inductor/codegen/{simd,triton}.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from minicompile.codegen.helpers import triton_prelude
from minicompile.codegen.phases import middle
from minicompile.codegen.plan import KernelModule, KernelSource, Phase, TritonPlan
from minicompile.codegen.printing import SIGNS, printer_of
from minicompile.codegen.triton_axes import Axes
from minicompile.codegen.triton_ops import QUICK, TRITON_DTYPES, convert, literal, pointwise_text
from minicompile.codegen.triton_tiles import AddressPrinter
from minicompile.ops.table import POSITIONS, reduction_identity
from minicompile.scheduling.body import Value

ACCUMULATED = {
    **{kind: f"{{0}} {sign} {{1}}" for kind, sign in SIGNS.items()},
    "max": "max_combine({0}, {1})",
    "min": "min_combine({0}, {1})",
}
"""An accumulator tile and one more tile."""

REDUCED = {
    "sum": "tl.sum({0}, 1)[:, None]",
    "any": "tl.max(({0}).to(tl.int32), 1)[:, None] != 0",
    "all": "tl.min(({0}).to(tl.int32), 1)[:, None] != 0",
    "prod": "tl.reduce({0}, 1, prod_combine)[:, None]",
    "max": "tl.reduce({0}, 1, max_combine)[:, None]",
    "min": "tl.reduce({0}, 1, min_combine)[:, None]",
    "argmax": "tl.reduce(({0}, {1}), 1, argmax_combine)[1][:, None].to(tl.int64)",
    "argmin": "tl.reduce(({0}, {1}), 1, argmin_combine)[1][:, None].to(tl.int64)",
}
"""One value a row, from a tile and the positions of its elements."""

TILE = "[XBLOCK, RBLOCK]"


def kernel_module(plans: Sequence[TritonPlan]) -> KernelModule:
    """Each kernel stands for itself: Triton compiles them one by one."""
    kernels = [print_triton(plan) for plan in plans]
    return KernelModule("triton", "\n\n".join(k.prelude + k.text for k in kernels), kernels)


def print_triton(plan: TritonPlan) -> KernelSource:
    """The kernel's source. Raises Unsupported for what Triton or this printer can't express."""
    printer: TilePrinter = printer_of(plan, PRINTERS)
    printer.kernel()
    return printer.source("triton", triton_prelude)


class TilePrinter(AddressPrinter):
    """Prints what a program computes: phases, values, reductions, scans."""

    # Structure ---------------------------------------------------------------------------------------

    def kernel(self) -> None:
        """All lines of the function."""
        plan = self.plan
        parameters = [a.name for a in plan.arguments] + [str(s) for s in plan.sizes]
        parameters += [f"{block}: tl.constexpr" for block in self.blocks.values()]
        self.line("@triton.jit")
        with self.block(f"def {plan.name}({', '.join(parameters)}):"):
            self.program()

    def program(self) -> None:
        """What a program does."""
        self._indices()
        self._phases()

    def _phases(self) -> None:
        for phase in self.plan.phases:
            if phase.level == "loop" and self.plan.reduction not in ("none", "persistent"):
                self._loop(phase)
            else:
                for value in phase.values:
                    self.value(value, phase.level)

    def _loop(self, phase: Phase) -> None:
        """One sweep over the row: accumulators before, their reduction to one value after."""
        reductions = [v for v in phase.values if v.op == "reduction"]
        for reduction in reductions:
            self._accumulator(reduction)
        for scan in (v for v in phase.values if v.op == "scan"):
            self._full(scan, "[XBLOCK, 1]")
        self.wait(phase)
        with self.block(f"for roffset in range(0, {self.row_end}, RBLOCK):"):
            if self.plan.varying:
                self.line("tl.assume(roffset >= 0)")
            self._row_index("roffset + ")
            for value in phase.values:
                if value.op == "reduction":
                    self._accumulate(value)
                else:
                    self.value(value, "loop")
        for value in reductions:
            name = f"_{self.names[value]}"
            reduced = name if self._riding(value) else self._reduce(value, name, f"{name}_at")
            self.line(f"{self.names[value]} = {reduced}", value.origins)

    def wait(self, step: Value | Phase) -> None:
        """Let the program's threads wait for each other, if they must before this."""
        if step in self.plan.barriers:
            self.line("tl.debug_barrier()")

    # Values ------------------------------------------------------------------------------------------

    def value(self, value: Value, level: str) -> None:
        """The lines of one value."""
        self.wait(value)
        if value.op == "store":
            self._store(value, level)
        elif value.op == "indirect":
            self.indirect(value)
        elif value.op == "scan":
            self._scan(value)
        else:
            self.declare(value, self._expression(value))

    def _expression(self, value: Value) -> str:
        dtype = TRITON_DTYPES[value.dtype]
        match value.op:
            case "load":
                return self._load(value)
            case "index_expr":
                return f"({self._index(value)}).to({dtype})"
            case "to_dtype":
                source = value.inputs[0]
                return convert(self.ref(source), source.dtype, value.dtype)
            case "reduction" if value in self.plan.riders:
                own, total = (self.names[v] for v in (self.plan.riders[value], value))
                apart = f"libdevice.exp({own} - {self.ref(middle(value))})"
                return f"tl.sum(_{total}, 1)[:, None] * {apart}"
            case "reduction":
                return self._persistent(value)
            case _ if value in self.plan.forms:
                return QUICK[self.plan.forms[value]].format(*map(self.ref, value.inputs))
        return pointwise_text(value, self.ref)

    def _load(self, value: Value) -> str:
        axes = self.axes[value]
        pointer = self._pointer(value, axes)
        mask, more = self.load_mask(value), self.cache_hint(value)
        if not mask:
            return f"tl.load({pointer}{more})"
        other = "0.0" if value.dtype.is_floating_point else "0"
        return f"tl.load({pointer}, {mask}, other={other}{more})"

    def load_mask(self, value: Value) -> str:
        """The condition that a lane of a load has an element."""
        return self._masks(self.axes[value], value.mask)

    def cache_hint(self, value: Value) -> str:
        """A further argument of a load or store: how long the cache is to keep its elements."""
        return ""

    def _store(self, value: Value, level: str) -> None:
        every = level == "loop" or not self.plan.reduction_ranges
        axes: Axes = frozenset(self.blocks if every else {"x"})
        pointer = self._pointer(value, axes)
        mask = self._masks(axes, value.mask)
        text = self.ref(value.inputs[0])
        if value.kind != "store":
            self.line(f'tl.atomic_add({pointer}, {text}, {mask}, sem="relaxed")', value.origins)
            return
        self.store_lanes(value, f"{pointer}, {text}", mask)

    def store_lanes(self, value: Value, place: str, mask: str) -> None:
        """Print a store; `place`: the lanes' addresses, and what goes there."""
        self.line(f"tl.store({place}, {mask}{self.cache_hint(value)})", value.origins)

    def check_index(self, value: Value, name: str, size: str) -> None:
        mask = self._masks(self.axes[value], value.mask)
        inside = f"({name} >= 0) & ({name} < {size})"
        message = f"index out of bounds: 0 <= {name} < {size}"
        check = f'tl.device_assert({inside}, "{message}"{f", {mask}" if mask else ""})'
        self.line(check, value.origins)

    # Reductions --------------------------------------------------------------------------------------

    def _persistent(self, value: Value) -> str:
        """Reduce a whole row, held in one tile."""
        text = self._tile(value.inputs[0])
        if not self.full_row:
            text = f"tl.where(rmask, {text}, {self._identity(value)})"
        return self._reduce(value, text, f"tl.broadcast_to(rindex, {TILE})")

    def _tile(self, value: Value) -> str:
        """A value as a whole tile."""
        text = self.ref(value)
        whole = self.axes[value] == {"x", "r"}
        return text if whole else f"tl.broadcast_to({text}, {TILE})"

    def _accumulator(self, value: Value) -> None:
        name, riding = f"_{self.names[value]}", self._riding(value)
        self._full(value, "[XBLOCK, 1]" if riding else TILE)
        if value.kind in POSITIONS:
            self.line(f"{name}_at = tl.broadcast_to({self.first_places()}, {TILE})", value.origins)
        for rider in riding:
            self._full(rider, TILE)

    def first_places(self) -> str:
        """The first position in the row that each lane has."""
        return f"{self._lanes('r')}{self.cast}"

    def _full(self, value: Value, shape: str) -> None:
        """Print the start of an accumulator: the identity of its reduction."""
        start = f"{self._identity(value)}, {TRITON_DTYPES[value.inputs[0].dtype]}"
        self.line(f"_{self.names[value]} = tl.full({shape}, {start})", value.origins)

    def _riding(self, beside: Value) -> list[Value]:
        """Sums of exp(v - m) that are taken in the loop of a maximum."""
        return [rider for rider, other in self.plan.riders.items() if other is beside]

    def _accumulate(self, value: Value) -> None:
        """Take this tile into the accumulator: lane by lane, but a maximum with riders for the whole row."""
        name, source = f"_{self.names[value]}", self.ref(value.inputs[0])
        if value.kind in POSITIONS:  # positions grow: the one that is there wins ties
            text = f"rmask & {value.kind}_moves({name}, {source})"
            self.line(f"{name}_up = {text}", value.origins)
            self.line(f"{name} = tl.where({name}_up, {source}, {name})", value.origins)
            self.line(f"{name}_at = tl.where({name}_up, rindex, {name}_at)", value.origins)
            return
        riding = self._riding(value)
        if not riding:
            combined = ACCUMULATED[value.kind].format(name, source)
            self.line(f"{name} = tl.where(rmask, {combined}, {name})", value.origins)
            return
        tile = f"tl.where(rmask, {self._tile(value.inputs[0])}, {self._identity(value)})"
        self.line(f"{name}_tile = {tile}", value.origins)
        most = self._reduce(value, f"{name}_tile", "")
        self.line(f"{name}_new = max_combine({name}, {most})", value.origins)
        for rider in riding:
            total = f"_{self.names[rider]}"
            text = f"sum_exp_combine({total}, {name}, {name}_new, {name}_tile)"
            self.line(f"{total} = {text}", rider.origins)
        self.line(f"{name} = {name}_new", value.origins)

    def _reduce(self, value: Value, tile: str, position: str) -> str:
        """One value per row from a tile."""
        text = REDUCED[value.kind].format(tile, position)
        if value.kind == "sum" and value.dtype.itemsize < 4:  # tl.sum widens small integers
            text += f".to({TRITON_DTYPES[value.dtype]})"
        return text

    def _identity(self, value: Value) -> str:
        return literal(reduction_identity(value.kind, value.inputs[0].dtype))  # type: ignore[arg-type]

    # Scans -------------------------------------------------------------------------------------------

    def _scan(self, value: Value) -> None:
        """A scan of the tile; in a loop it goes on from the last element of the tile before."""
        name, combine = self.names[value], f"scan_{value.kind}"
        text = f"{name} = tl.associative_scan({self._tile(value.inputs[0])}, 1, {combine})"
        whole = self.plan.reduction == "persistent"
        zero = whole and value.kind == "sum" and value.dtype.is_floating_point  # 0 + -0.0 is 0
        self.line(text + " + 0.0" * zero, value.origins)
        if whole:
            return
        self.line(f"{name} = {combine}(_{name}, {name})", value.origins)
        places = f"tl.broadcast_to({self.position}, {TILE})"
        last = f"tl.reduce(({name}, {places}), 1, latest_combine)[0][:, None]"
        self.line(f"_{name} = {last}", value.origins)


PRINTERS = dict.fromkeys(("none", "persistent", "looped"), TilePrinter)
"""What prints kernels without a template, by the kind of reduction."""
