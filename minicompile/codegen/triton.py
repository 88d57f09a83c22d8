"""The Triton printer: a `KernelPlan` becomes the text of one `@triton.jit` function.

    @triton.jit
    def triton_fused_softmax_0(in_ptr0, out_ptr0, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
        xnumel = 512                                            the parallel loops, flattened
        xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
        xmask = xindex < xnumel
        rindex = tl.arange(0, RBLOCK)[None, :]                  persistent: the whole row at once
        tmp0 = tl.load(in_ptr0 + (xindex*1024 + rindex), xmask, other=0.0)
        ...

A pointwise kernel works on blocks [XBLOCK], or, where it reads along another loop than it writes, on squares
[YBLOCK, XBLOCK]; one with reductions on tiles [XBLOCK, RBLOCK]. A value has the axes its operands and index
mention: [XBLOCK, 1] for one value a row, [1, RBLOCK] for one that all rows share. A looped reduction sweeps
the row once per phase and keeps an accumulator tile in each sweep. A scan works on tiles; swept in a loop, it
starts each one from the last element of the tile before.

Rows of a length that no wide load divides begin anywhere in memory. Their tiles then begin before them,
where a wide load does: `rplace` counts from there, and the lanes before and behind the row are masked. Both
ends are stored apart.

A line holds one operation; constants stand in the line that uses them, so that changing a constant changes
that line alone. The real compiler: torch/_inductor/codegen/{simd,triton}.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import sympy
import torch

from minicompile.codegen.phases import (
    along_rows,
    cone,
    is_share,
    middle,
    only_narrowed,
    rough_exponentials,
    twins,
)
from minicompile.codegen.plan import KernelModule, KernelPlan, KernelSource, Phase, power_of_two
from minicompile.codegen.printing import LinePrinter
from minicompile.codegen.triton_ops import (
    TRITON_DTYPES,
    TritonIndex,
    convert,
    literal,
    pointwise_text,
    prelude,
    typed_constant,
)
from minicompile.errors import Unsupported
from minicompile.ops.handler import Index
from minicompile.ops.origin import Origins, union
from minicompile.ops.registry import Registry
from minicompile.ops.table import POSITIONS, reduction_identity
from minicompile.scheduling.body import Value
from minicompile.shapes.expr import (
    ZERO,
    Size,
    coefficient_of,
    contiguous_strides,
    is_nonnegative,
    loop_symbol,
    product,
    same,
)

Axes = frozenset[str]
"""Which of the tile's axes, "y", "x" and "r", a value varies along."""

ATOMIC_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64}
)

ACCUMULATED = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "any": "{0} | {1}",
    "all": "{0} & {1}",
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


def kernel_module(plans: Sequence[KernelPlan]) -> KernelModule:
    """Each kernel stands for itself: Triton compiles them one by one."""
    kernels = [print_triton(plan) for plan in plans]
    return KernelModule("triton", "\n\n".join(k.prelude + k.text for k in kernels), kernels)


def print_triton(plan: KernelPlan) -> KernelSource:
    """The kernel's source. Raises Unsupported for what Triton or this printer can't express."""
    if plan.launches:
        raise Unsupported(f"{plan.name} is split: its launches have texts")
    printer = kernel_template.get(plan.reduction, TilePrinter)(plan)
    printer.kernel()
    found = printer.source("triton", prelude)
    for rival in plan.rivals:
        found.rivals[rival.name] = [
            print_triton(step) if isinstance(step, KernelPlan) else step for step in rival.steps
        ]
    return found


kernel_template: Registry[Callable[[Any], LinePrinter]] = Registry(
    "kernel_template",
    "a plan's kind of reduction -> what prints the kernel; tiles of rows if not listed",
)
kernel_template.modules.append("minicompile.codegen.triton_product")


def loads_first(values: Sequence[Value]) -> list[Value]:
    """The same values; what loads need comes before what uses them, so that more than one is on its way."""
    stored = {v.buffer for v in values if v.op == "store"}
    loads = [v for v in values if v.op == "load" and v.buffer not in stored]
    early = cone(loads, values, ())
    return sorted(values, key=lambda v: v not in early)


class TilePrinter(LinePrinter):
    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        self.blocks = {axis: f"{axis.upper()}BLOCK" for axis in plan.axes}
        self.wide = plan.index_dtype is torch.int64
        width = "tl.int64" if self.wide else f"{plan.integers[0]}.dtype" if plan.index_reach else ""
        self.cast = f".to({width})" * bool(width)
        """What makes an index as wide as it must be: as wide as a launch passes sizes."""
        self.position = "rindex" if self.wide else "rindex.to(tl.int64)"
        self.given = {expr: name for name, expr in plan.derived.items()}
        self.sizes = TritonIndex({}, given=self.given)
        self.axes: dict[Value, Axes] = {}
        for value in plan.body.values:
            across = (self.axes[operand] for operand in value.operands)
            varies = self._index_axes(value).union(*across)
            own = {"reduction": {*plan.axes} - {"r"}, "scan": {"x", "r"}}.get(value.op)
            self.axes[value] = frozenset(own) if own else varies
        self.length = plan.length
        whole = bool(self.length == power_of_two(plan.row_length))
        self.full_row = plan.reduction == "persistent" and whole
        """No lane is left over."""
        looped = plan.reduction == "looped"
        self.rough = rough_exponentials(plan.body, plan.loop)
        """What the GPU's own exponential is good enough for."""
        self.anywhere = looped and plan.granule > 1
        """Rows begin anywhere, or may."""
        self.granule = "WIDE" if plan.granule_varies else str(plan.granule)
        alike = twins(plan.body) if looped else {}
        self.twins = {v: twin for v, twin in alike.items() if v not in plan.riders.values()}
        written = {v.buffer for v in plan.body.stores} | {*plan.in_place.values()}
        self.ahead = [v for v in plan.body.loads if plan.loads_ahead and self._early(v, written)]
        self.unsynced: set[str] = set()
        """Buffers stored since the last barrier."""
        self.later: set[Value] = set()
        """Values that loops after this one compute, too."""
        self.stored_before: set[str] = set()
        """Buffers stored by loops before this one."""

    # Structure ---------------------------------------------------------------------------------------

    def kernel(self) -> None:
        """All lines of the function."""
        plan = self.plan
        if plan.folds and plan.reduction != "persistent":
            raise Unsupported(f"{plan.name}: only whole rows can be added to sums of columns")
        parameters = [a.name for a in plan.arguments] + [str(s) for s in plan.sizes]
        parameters += [str(s) for s in plan.derived]
        parameters += [f"{block}: tl.constexpr" for block in self.blocks.values()]
        parameters += ["WHOLE: tl.constexpr"] * plan.varying
        parameters += ["WIDE: tl.constexpr"] * plan.granule_varies
        self.line("@triton.jit")
        with self.block(f"def {plan.name}({', '.join(parameters)}):"):
            self.program()

    def program(self) -> None:
        """What a program does."""
        self._indices()
        if self.plan.folds:
            self._over_rows()
        else:
            self._phases()

    def _phases(self) -> None:
        for phase in self.plan.phases:
            if phase.level == "loop" and self.plan.reduction == "looped":
                self._loop(phase)
            else:
                for value in (v for v in phase.values if v not in self.ahead):
                    self.value(value, phase.level)

    def _over_rows(self) -> None:
        """Some of the rows, one tile after the other; each is added to the sums of its columns."""
        plan, folds = self.plan, {v: f"_fold{i}" for i, v in enumerate(self.plan.folds)}
        for value, name in folds.items():
            zeros = f"tl.full([1, RBLOCK], 0.0, {TRITON_DTYPES[value.dtype]})"
            self.line(f"{name} = {zeros}", value.origins)
        self.line(f"share = (xnumel + {plan.parts - 1}) // {plan.parts}")
        self.line("xend = tl.minimum((p + 1) * share, xnumel)")
        if self.ahead:
            self._load_ahead("p * share")
        with self.block("for xoffset in range(p * share, xend, XBLOCK):"):
            for value in self.ahead:
                self.line(
                    f"{self.names[value]} = _{self.names[value]}", value.origins, scaffold=True
                )
            if self.ahead:
                self._load_ahead("xoffset + XBLOCK")
            self._rows_from("xoffset")
            self._phases()
        for value, name in folds.items():
            pointer = f"{self.arguments[value.buffer].name} + ({self._index(value)})"
            mask = self._masks(frozenset("r")) or "None"
            self.line(f"tl.store({pointer}, {name}, {mask})", value.origins)

    def _rows_from(self, start: str) -> None:
        """The rows of a tile, of those between which a program sums."""
        self.line(f"xindex = {start} + {self._lanes('x')}")
        self.line("xmask = xindex < xend")
        self._digits(self.plan.ranges, "xindex")

    def _early(self, value: Value, written: Collection[str]) -> bool:
        """The load of rows needs nothing that the program computes."""
        plain = value.mask is None and not value.indirect and value.buffer not in written
        return plain and self.axes[value] == {"x", "r"}

    def _load_ahead(self, start: str) -> None:
        """Rows that are computed with in the next round: they arrive while this one computes."""
        self._rows_from(start)
        for value in self.ahead:
            self.line(f"_{self.names[value]} = {self._load(value)}", value.origins)

    def _indices(self) -> None:
        """Which elements the program computes."""
        plan = self.plan
        program = f"tl.program_id(0){self.cast}"
        parallel = {axis: loops for axis, loops in plan.axes.items() if axis != "r"}
        for axis, loops in parallel.items():
            self.line(f"{axis}numel = {self.sizes(product(loops.values()))}")
        places = dict.fromkeys(parallel, program)
        if "y" in parallel:
            self.line("xblocks = (xnumel + XBLOCK - 1) // XBLOCK")
            places = {"y": f"({program} // xblocks)", "x": f"({program} % xblocks)"}
        if plan.folds:
            self.line(f"p = {program}")
            parallel = {}
        for axis, loops in parallel.items():
            block = self.blocks[axis]
            self.line(f"{axis}index = {places[axis]} * {block} + {self._lanes(axis)}")
            self.line(f"{axis}mask = {axis}index < {axis}numel")
            self._digits(loops, f"{axis}index")
        if not plan.reduction_ranges:
            return
        self.line(f"rnumel = {self.sizes(self.length)}")
        if plan.varying and is_nonnegative(self.length - 1):
            self.line("tl.assume(rnumel > 0)")
        if self.anywhere:
            wide = self.granule
            self.line(f"xstart = xindex * rnumel // {wide} * {wide}")
            self.line("xshift = xindex * rnumel - xstart")
            self.line(f"rlimit = (xshift + rnumel + {self._below_granule()}) // {wide} * {wide}")
        if plan.reduction == "persistent":
            self._row_index("")

    def _below_granule(self) -> str:
        return f"({self.granule} - 1)" if self.plan.granule_varies else str(self.plan.granule - 1)

    def _lanes(self, axis: str) -> str:
        """0, 1, ... along an axis."""
        lanes = f"tl.arange(0, {self.blocks[axis]})"
        if len(self.blocks) == 1:
            return lanes
        return lanes + ("[:, None]" if axis == next(iter(self.blocks)) else "[None, :]")

    def _row_index(self, start: str) -> None:
        """Which r the tile holds."""
        place = "rplace" if self.anywhere else "rindex"
        self.line(f"{place} = {start}{self._lanes('r')}{self.cast}")
        if self.anywhere:
            self.line("rindex = rplace - xshift")
            if self.plan.varying:
                self.line("rmask = (rindex >= 0) & (rindex < rnumel) | WHOLE")
            else:
                width = 64 if self.wide else 32  # as one of them, a number below 0 is no small one
                self.line(f"rmask = rindex.to(tl.uint{width}) < rnumel")
        elif not self.full_row:
            tile = self.plan.tiles.get("r", 1)
            even = start and isinstance(self.length, int) and self.length % tile == 0 and tile > 1
            even = even or self.plan.reduction == "product"
            # known when compiling: then no lane is masked
            whole = " | WHOLE" if self.plan.varying else " | (rnumel % RBLOCK == 0)" * bool(even)
            self.line(f"rmask = (rindex < rnumel){whole}" if whole else "rmask = rindex < rnumel")
        self._digits(self.plan.reduction_ranges, "rindex")

    def _flat(self, index: Index) -> Index:
        """An index by an axis's own flattened index, where it walks that axis's loops in one stride."""
        for axis, loops in self.plan.axes.items():
            strides = contiguous_strides(list(loops.values()))
            steps = [coefficient_of(index, var) for var in loops]
            pairs = zip(steps, strides, strict=True)
            last = steps[-1] if len(loops) > 1 else None
            if last and all(a is not None and same(a, last * b) for a, b in pairs):
                rest = index.xreplace(dict.fromkeys(loops, ZERO))
                index = rest + last * loop_symbol(f"{axis}index")
        return index

    def _digits(self, ranges: dict[sympy.Symbol, Size], linear: str) -> None:
        """Each loop variable that an index mentions, as a digit of the flattened index."""
        values = [v for v in self.plan.body.values if v.index is not None]
        placed = [(self._flat(v.index).free_symbols, v.origins) for v in values]
        below: Size = 1
        digits: list[tuple[str, Origins]] = []
        for position, (var, size) in reversed(list(enumerate(ranges.items()))):
            if users := [origins for symbols, origins in placed if var in symbols]:
                text = linear
                if below != 1:
                    text = f"{text} // {self.sizes.within(below)}"
                if position != 0:
                    text = f"{f'({text})' if below != 1 else text} % {self.sizes.within(size)}"
                digits.append((f"{var} = {text}", union(users)))
            below = below * size
        for line, origins in reversed(digits):
            self.line(line, origins, scaffold=True)

    def _loop(self, phase: Phase) -> None:
        """One sweep over the row: accumulators before, their reduction to one value after."""
        reductions = [v for v in phase.values if v.op == "reduction"]
        place = self.plan.phases.index(phase)
        self.later = {v for after in self.plan.phases[place + 1 :] for v in after.values}
        for reduction in reductions:
            self._accumulator(reduction)
        for scan in (v for v in phase.values if v.op == "scan"):
            for name, start in self._carried(scan).items():
                self.line(f"{name} = {start}", scan.origins)
        self._synchronise(v.buffer for v in phase.values if v.op == "load")
        more = f" + {self._below_granule()}" if self.anywhere else ""
        with self.block(f"for roffset in range(0, rnumel{more}, RBLOCK):"):
            if self.plan.varying:
                self.line("tl.assume(roffset >= 0)")
            self._row_index("roffset + ")
            for value in loads_first(phase.values):
                if value.op == "reduction":
                    self._accumulate(value)
                else:
                    self.value(value, "loop")
        self.stored_before |= {v.buffer for v in phase.values if v.op == "store"}
        for value in reductions:
            name = f"_{self.names[value]}"
            reduced = name if self._riding(value) else self._reduce(value, name, f"{name}_at")
            self.line(f"{self.names[value]} = {reduced}", value.origins)

    def _synchronise(self, loaded: Iterable[str]) -> None:
        """Make what the program's other threads have stored in these buffers visible."""
        if not self.unsynced.isdisjoint(loaded):
            self.line("tl.debug_barrier()")
            self.unsynced.clear()

    # Values ------------------------------------------------------------------------------------------

    def value(self, value: Value, level: str) -> None:
        """The lines of one value."""
        if value.kind == "fold":
            tile = f"tl.where(xmask, {self._tile(value.inputs[0])}, 0.0)"
            name = f"_fold{self.plan.folds.index(value)}"
            self.line(f"{name} += tl.sum({tile}, 0)[None, :]", value.origins)
        elif value.op == "store":
            if value.buffer in self.plan.in_place:  # other warps may still have to load an element
                self.line("tl.debug_barrier()", value.origins, scaffold=True)
            self._store(value, level)
        elif value.op == "indirect":
            self._indirect(value)
        elif value.op == "scan":
            self._scan(value)
        else:
            if value.check and self.plan.device.type == "cpu":  # on a GPU eager doesn't look either
                divisor = value.inputs[1]
                mask = self._masks(self.axes[divisor], None)
                check = f'tl.device_assert({self.ref(divisor)} != 0, "division by zero", {mask})'
                self.line(check, value.origins)
            self.line(f"{self.names[value]} = {self._expression(value)}", value.origins)

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
            case "bitcast":
                return f"{self.ref(value.inputs[0])}.to({dtype}, bitcast=True)"
            case "reduction" if value in self.plan.riders:
                own, total = (self.names[v] for v in (self.plan.riders[value], value))
                apart = f"libdevice.exp({own} - {self.ref(middle(value))})"
                return f"tl.sum(_{total}, 1)[:, None] * {apart}"
            case "reduction":
                return self._persistent(value)
            case "truediv" if is_share(value, self.plan.loop):
                term, total = map(self.ref, value.inputs)
                if only_narrowed(value, self.plan.body):
                    return f"{term} * tl.div_rn(1.0, {total})"
                return f"share_of({term}, {total})"
            case "exp" if value in self.rough:
                return f"tl.exp({self.ref(value.inputs[0])})"
        return pointwise_text(value, self.ref)

    def ref(self, value: Value) -> str:
        """A value's name, or a constant of its dtype."""
        if value.op == "constant":
            return typed_constant(value.constant, value.dtype)
        return self.names[value]

    def _index_axes(self, value: Value) -> Axes:
        """Axes of the loop variables and loaded indices in a value's index."""
        if value.index is None:
            return frozenset()
        loops = self.plan.axes.items()
        found = {a for a, r in loops if not value.index.free_symbols.isdisjoint(r)}
        return frozenset(found).union(*(self.axes[indirect] for indirect in value.indirect))

    def _shape(self, axes: Axes) -> str:
        """A block over all axes, of which these are more than 1."""
        return f"[{', '.join(b if a in axes else '1' for a, b in self.blocks.items())}]"

    def _masks(self, axes: Axes, extra: Value | None = None) -> str:
        """The condition that a lane stands for an element; "" where all do."""
        full = {"r"} if self.full_row else set()
        parts = [f"{axis}mask" for axis in self.blocks if axis in axes - full]
        if extra is not None:
            parts.append(self.ref(extra))
        return " & ".join(parts)

    def _pointer(self, value: Value, axes: Axes) -> str:
        """The addresses of a load or store, as a block over `axes`."""
        assert value.index is not None
        index = self._index(value)
        if self.anywhere and along_rows(value, self.plan.body):
            index = "xstart + rplace"
        elif self._index_axes(value) != axes:
            index = f"tl.full({self._shape(axes)}, 0, tl.int32) + {index}"
        return f"{self.arguments[value.buffer].name} + ({index})"

    def _load(self, value: Value) -> str:
        self._check_order(value)
        axes = self.axes[value]
        pointer = self._pointer(value, axes)
        mask, more = self._masks(axes, value.mask), self._eviction(value)
        if self.anywhere and along_rows(value, self.plan.body):
            # lanes that differ from rmask's hold what nobody uses
            inside = "((rplace < rlimit) | WHOLE)" if self.plan.varying else "(rplace < rlimit)"
            mask = f"xmask & {inside}"
        if not mask:
            return f"tl.load({pointer}{more})"
        other = "0.0" if value.dtype.is_floating_point else "0"
        return f"tl.load({pointer}, {mask}, other={other}{more})"

    def _eviction(self, value: Value) -> str:
        """Rows that a later loop reads again are the last to leave the cache."""
        if not self.plan.rows_cached or self.axes[value] != {"x", "r"}:
            return ""
        return f', eviction_policy="evict_{"last" if value in self.later else "first"}"'

    def _check_order(self, value: Value) -> None:
        """A load sees what came before it in the body and nothing that came after."""
        buffer = value.buffer
        stores = [v for v in self.plan.body.stores if v.buffer == buffer]
        if buffer in self.stored_before and any(self.order[s] > self.order[value] for s in stores):
            raise Unsupported(
                f"{self.plan.name} would read {buffer} again after it has been overwritten",
                hint="a persistent reduction reads each row once",
            )
        self._synchronise([buffer])

    def _store(self, value: Value, level: str) -> None:
        every = level == "loop" or not self.plan.reduction_ranges
        axes: Axes = frozenset(self.blocks if every else {"x"})
        pointer = self._pointer(value, axes)
        mask = self._masks(axes, value.mask)
        self.unsynced.add(value.buffer)
        text = self.ref(value.inputs[0])
        if value.kind != "store":
            if value.dtype not in ATOMIC_DTYPES:
                raise Unsupported(f"no atomic addition of {value.dtype} in Triton")
            self.line(f'tl.atomic_add({pointer}, {text}, {mask}, sem="relaxed")', value.origins)
            return
        if not self.anywhere or not along_rows(value, self.plan.body):
            more = self._eviction(value) if every else ""
            self.line(f"tl.store({pointer}, {text}, {mask}{more})", value.origins)
            return
        wide = self.granule
        first, last = (
            f"(xshift + {n}) // {wide} * {wide}" for n in (self._below_granule(), "rnumel")
        )
        inner = f"(rplace >= {first}) & (rplace < {last})" + " | WHOLE" * self.plan.varying
        self.line(f"whole = {inner}", value.origins, scaffold=True)
        self.line(f"tl.store({pointer}, {text}, xmask & whole)", value.origins)
        ends = f"(roffset == 0) | (roffset + RBLOCK + {wide} > rnumel)"
        if self.plan.granule_varies:
            ends = f"{wide} > 1 and ({ends})"
        with self.block(f"if {ends}:"):
            self.line(f"tl.store({pointer}, {text}, {mask} & ~whole)", value.origins)

    def _indirect(self, value: Value) -> None:
        """A loaded index: negative ones count from the end, others out of range are errors."""
        name, source = self.names[value], self.ref(value.inputs[0])
        size = self.sizes(value.size)
        if value.wrap_negative:
            source = f"tl.where({source} < 0, {source} + {size}, {source})"
        self.line(f"{name} = {source}", value.origins)
        if not value.check:
            return
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
        dtype = TRITON_DTYPES[value.inputs[0].dtype]
        if value in self.twins:
            return
        shape = "[XBLOCK, 1]" if riding else TILE
        self.line(f"{name} = tl.full({shape}, {self._identity(value)}, {dtype})", value.origins)
        if value.kind in POSITIONS:
            first = f"{self._lanes('r')}{self.cast}"
            if self.anywhere:
                first = f"tl.where({first} < xshift, RBLOCK, 0) + {first} - xshift"
            self.line(f"{name}_at = tl.broadcast_to({first}, {TILE})", value.origins)
        for rider in riding:
            self.line(f"_{self.names[rider]} = tl.full({TILE}, 0.0, {dtype})", rider.origins)

    def _riding(self, beside: Value) -> list[Value]:
        """Sums of exp(v - m) that are taken in the loop of a maximum."""
        return [rider for rider, other in self.plan.riders.items() if other is beside]

    def _accumulate(self, value: Value) -> None:
        """Take this tile into the accumulator: lane by lane, but a maximum with riders for the whole row."""
        name, source = f"_{self.names[value]}", self.ref(value.inputs[0])
        if value in self.twins:
            return
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
        if (twin := self.twins.get(value)) is not None:
            name = f"_{self.names[twin]}"
            return f"tl.reduce(({name}, {name}_at), 1, {twin.kind}_combine)[0][:, None]"
        text = REDUCED[value.kind].format(tile, position)
        if value.kind == "sum" and value.dtype.itemsize < 4:  # tl.sum widens small integers
            text += f".to({TRITON_DTYPES[value.dtype]})"
        return text

    def _identity(self, value: Value) -> str:
        return literal(reduction_identity(value.kind, value.inputs[0].dtype))  # type: ignore[arg-type]

    # Scans -------------------------------------------------------------------------------------------

    def _carried(self, value: Value) -> dict[str, str]:
        """Name and start of what a looped scan carries from tile to tile; positions come last."""
        name, dtype = f"_{self.names[value]}", TRITON_DTYPES[value.inputs[0].dtype]
        start = f"tl.full([XBLOCK, 1], {self._identity(value)}, {dtype})"
        if value.kind not in POSITIONS:
            return {name: start}
        return {f"{name}_best": start, name: "tl.full([XBLOCK, 1], 0, tl.int64)"}

    def _scan(self, value: Value) -> None:
        """A scan of the tile, and in a loop what it takes over from the tile before."""
        combine, carried = f"scan_{value.kind}", self._carried(value)
        places = f"tl.broadcast_to({self.position}, {TILE})"
        names = [name.removeprefix("_") for name in carried]
        found, source = ", ".join(names), self._tile(value.inputs[0])
        if len(names) > 1:
            source = f"({source}, {places})"
        text = f"{found} = tl.associative_scan({source}, 1, {combine})"
        if self.plan.reduction == "persistent":
            zero = value.kind == "sum" and value.dtype.is_floating_point  # 0 + -0.0 is 0
            self.line(text + " + 0.0" * zero, value.origins)
            return
        self.line(text, value.origins)
        self.line(f"{found} = {combine}({', '.join(carried)}, {found})", value.origins)
        for name in names:
            last = f"tl.reduce(({name}, {places}), 1, latest_combine)[0][:, None]"
            self.line(f"_{name} = {last}", value.origins)

    # Indices -----------------------------------------------------------------------------------------

    def _index(self, value: Value) -> str:
        """A value's index."""
        assert value.index is not None
        loaded = {v.symbol: self.names[v] for v in value.indirect}
        ranges = self.plan.body.all_ranges
        flat = {loop_symbol(f"{a}index"): product(r.values()) for a, r in self.plan.axes.items()}
        names = TritonIndex({**ranges, **flat}, lambda s: loaded.get(s, str(s)), self.given)
        return names(self._flat(value.index))
