"""The loop nests of C kernels: one inner loop in vectors, along x or along r, and what stands around it.

    pointwise   loops over x, the innermost in vectors
    squares     the same by squares of two x, so that loads that jump can be turned in the cache
    rows        for each x: loops over r in vectors, one per phase, scratch rows between them
    columns     for each tile of x: loops over r, inside them a loop over the tile in vectors

A reduction has one accumulator in a kernel of rows, and an array of them, one for each column of a tile, in
a kernel of columns; `accumulator` and `each_lane` are where the two differ. In both, threads can share
chunks of the outermost r: partial results are combined in the order of the chunks. A scan is accumulated
likewise, and is what has been accumulated so far: its loop along r is neither in vectors nor shared, so
dear values before and after it have loops of their own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import sympy
import torch

from minicompile.codegen.cpp_ops import CTYPES
from minicompile.codegen.cpp_values import ALIGNED, SIGNS, Loop, ValuePrinter
from minicompile.codegen.phases import cone, cost, is_update, owns, separates, transposed
from minicompile.codegen.plan import Cut, KernelPlan, Pieces, count, cut_inside, leaves
from minicompile.ops.table import POSITIONS
from minicompile.scheduling.body import LoopBody, Value, iterate_indices, varying
from minicompile.shapes.expr import Size, coefficient_of, product, size_hint

OUTER_ITERATIONS = 8
"""Outer loops with fewer iterations leave threads idle: then the inner loop is shared."""

LONG_ROW = 8192
"""Float sums over longer rows are summed in blocks, so that rounding errors don't pile up."""

BLOCK = 1024

COLUMN_BLOCK = 64
"""The same for columns, whose sums have one accumulator each: longer ones are summed in such blocks."""

STACK_BYTES = 128 * 1024
"""Scratch rows that have more bytes together lie on the heap."""

DEAR = 12
"""Operations on an element beside scans from which these have a loop of their own."""


class LoopPrinter(ValuePrinter):
    """Prints the loops of a plan and everything inside them."""

    def __init__(self, plan: KernelPlan) -> None:
        super().__init__(plan)
        columns = bool(plan.reduction_ranges) and plan.vector_axis == "x"
        self.tile = plan.tiles.get("x", 0) if columns else 0
        """Columns of a tile; 0 in kernels of rows."""
        self.lane = ""
        """The column at hand: its place in the tile."""
        self.split = "r" in plan.tiles
        """Threads share chunks of r."""
        self.divided: Sequence[Value] = ()
        """Reductions of columns whose chunks are still to be combined, by the loop that comes next."""
        self.started: set[Value] = set()
        """Scans whose accumulators are declared."""
        self.kept: set[Value] = set()
        """Values that have a place outside of the loops over a row."""
        self.x_loops = [Loop(var, size) for var, size in plan.ranges.items() if size != 1]
        r_loops = [Loop(var, size) for var, size in plan.reduction_ranges.items()]
        self.r_loops = [loop for loop in r_loops if loop.size != 1] or r_loops[:1]

    def body(self) -> None:
        """The loops that the plan asks for. Those of one iteration are no loops."""
        used = set().union(*(index.free_symbols for index in iterate_indices(self.plan.body)))
        for var, size in self.plan.body.all_ranges.items():
            if size == 1 and var in used:
                self.line(f"const int64_t {var} = 0;")
        if self.split:
            self._chunks()
        if not self.plan.reduction_ranges:
            if self.plan.tiles:
                self._squares(self.plan.body.values)
            else:
                self._pointwise(self.plan.pieces or self.plan.body)
        elif self.tile:
            self._columns()
        else:
            self._rows()

    # ---- what the shapes have in common

    def _parallel(self, nest: int = 1, simd: bool = False) -> str:
        """`parallel for`, or nothing where one thread does it all."""
        region, share = self._shared(nest)
        return (
            f"parallel for{' simd' if simd else ''}{region}{share}" if self._threads(nest) else ""
        )

    def _threads(self, nest: int) -> bool:
        """Do threads share a nest of loops? Scatters run in order: two iterations may change one element."""
        return self.plan.parallel and nest > 0 and not any(map(is_update, self.plan.body.stores))

    def _shared(self, nest: int) -> tuple[str, str]:
        """The clauses of `parallel`, and those of the `for` inside it."""
        plan, region, share = self.plan, "", f" collapse({nest})" if nest > 1 else ""
        if plan.parallel_above:
            sizes = [self.index.within(s) for s in plan.body.all_ranges.values() if s != 1]
            region = f" if(parallel: {'*'.join(sizes)} > {plan.parallel_above})"
        return region, share + " reduction(|:error)" * self.checks

    def _simd(self, values: Collection[Value], var: sympy.Symbol, riding: bool = False) -> str:
        """`simd` with its reductions, or nothing where iterations depend on each other.

        `riding`: the loop runs along r, and its reductions are accumulated across its iterations.
        """
        plan = self.plan
        updates = [v for v in values if v.op == "store" and is_update(v)]
        if plan.vector_width == 1 or not all(separates(v, var, plan.body) for v in updates):
            return ""
        clauses: dict[str, list[str]] = {}
        for value in values:
            if value.op == "scan" and riding:
                return ""
            if value.op == "reduction" and riding:
                extremum = value.kind in ("max", "min") and value.dtype.is_floating_point
                if extremum or value.kind in POSITIONS:  # OpenMP's own max and min may drop a NaN
                    return ""
                clauses.setdefault(SIGNS.get(value.kind, value.kind), []).append(self.names[value])
        if any(v.check for v in values):
            clauses.setdefault("|", []).append("error")
        found = ["simd" if plan.vector_width >= 8 else f"simd simdlen({plan.vector_width})"]
        found += [f"reduction({sign}:{', '.join(names)})" for sign, names in clauses.items()]
        return " ".join(found)

    def _inner(
        self,
        loop: Loop,
        values: Collection[Value],
        pragma: str,
        scratch: Mapping[Value, str] | None = None,
        divided: Sequence[Value] = (),
    ) -> None:
        """The innermost loop. `scratch`: where values stand that other loops compute or need; `divided`: what
        chunks of r have reduced so far."""
        places = scratch or {}
        with self.loop(loop, pragma):
            if divided:
                self._combine(divided)
            for value in self.in_order(operands(values) - set(values)):
                if value in places:
                    self.declare(value, places[value])
            self.compute(values, self._accumulate)
            for value in values:
                if value in places and value.op != "reduction":
                    self.line(f"{places[value]} = {self.names[value]};", value.origins)

    def _scratch(self, values: Iterable[Value], suffix: str, length: int) -> None:
        for value in values:
            text = f"{CTYPES[value.dtype]} {self.names[value]}{suffix}[{length}]"
            self.line(f"{text} {ALIGNED};", value.origins)

    def _end(self, var: sympy.Symbol, start: str, step: int | str, size: str) -> None:
        """Declare where a piece of a loop ends."""
        self.line(f"const int64_t {var}_end = {least(f'{start} + {step}', size)};")

    # ---- pointwise kernels

    def _pointwise(self, part: Pieces, opened: Collection[Loop] = (), shared: bool = False) -> None:
        """The loops of a body, or of its pieces, inside those that are `opened` already, perhaps for threads
        (`shared`)."""
        ranges, stop = leaves(part)[0].ranges, set[sympy.Symbol]()
        if isinstance(part, Cut):
            stop = {part.var, *cut_inside(part)}  # loops that differ from piece to piece
        same = itertools.takewhile(lambda var: var not in stop, ranges)
        outer = [Loop(var, ranges[var]) for var in same if ranges[var] != 1]
        outer = [loop for loop in outer if loop not in opened]
        if isinstance(part, LoopBody):
            self._piece(part, outer, shared)
            return
        share = not shared and self._enough(outer)
        with self.loops(outer, self._parallel(len(outer)) if share else ""):
            for piece in part.parts:
                with self.block("{", "}"):
                    self._pointwise(piece, [*opened, *outer], shared or share)

    def _piece(self, body: LoopBody, loops: Sequence[Loop], shared: bool) -> None:
        """A nest of loops, the innermost in vectors."""
        values = body.values
        if body is not self.plan.body:
            self.name(values)
        if not loops:
            self.compute(values)
            return
        *outer, inner = loops
        moving = varying(values, {inner.var})
        inside = [v for v in values if v in moving or v.op == "store"]
        if any(map(is_update, body.stores)):
            self._scatter(outer, inner, inside)
            return
        simd, around = self._simd(inside, inner.var), ""
        if self._enough(outer):
            around = self._parallel(len(outer)) * (not shared)
        elif not shared and self._parallel():
            simd = self._parallel(simd=bool(simd))
        elif not shared:
            around = self._parallel(len(outer))
        with self.loops(outer, around):
            self.compute(v for v in values if v not in inside)
            self._inner(inner, inside, simd)

    def _enough(self, outer: Sequence[Loop]) -> bool:
        """Iterations for all threads."""
        return count((loop.size for loop in outer), self.plan.hints) >= OUTER_ITERATIONS

    def _scatter(self, outer: Sequence[Loop], inner: Loop, inside: Sequence[Value]) -> None:
        """Threads share loops in which they can't meet: outer ones, or columns. Each element sees its updates
        in order, however many threads there are."""
        body, simd, parallel = self.plan.body, self._simd(inside, inner.var), self.plan.parallel
        updates = [store for store in body.stores if is_update(store)]
        alone = [all(owns(v, loop.var, body) for v in updates) for loop in (*outer, inner)]
        nest = next((n for n, own in enumerate(alone) if not own), len(outer))
        with contextlib.ExitStack() as stack:
            if parallel and alone[-1] and not self._enough(outer[:nest]):
                self.line(f"const int64_t share = mc_share({self.index(inner.size)});")
                columns = Loop(f"{inner.var}_start", inner.size, step="share")
                stack.enter_context(self.loop(columns, "parallel for" + "".join(self._shared(1))))
                self._end(inner.var, f"{inner.var}_start", "share", self.index(inner.size))
                inner, nest = Loop(inner.var, 0, f"{inner.var}_start", f"{inner.var}_end"), 0
            pragma = "parallel for" + "".join(self._shared(nest)) if parallel and nest else ""
            stack.enter_context(self.loops(outer, pragma))
            self.compute(v for v in body.values if v not in inside)
            self._inner(inner, inside, simd)

    def _squares(self, values: Sequence[Value]) -> None:
        """Loads that jump along the inner loop fill squares of scratch first."""
        sides = [loop for loop in self.x_loops if str(loop.var) in self.plan.tiles]
        outer = [loop for loop in self.x_loops if loop not in sides]
        across, inner = (loop.var for loop in sides)
        tile = self.plan.tiles[str(inner)]
        starts = [Loop(f"{var}_start", size, step=tile) for var, size, *_ in sides]
        with self.loops([*outer, *starts], self._parallel(len(self.x_loops))):
            for var, size, *_ in sides:
                self._end(var, f"{var}_start", tile, self.index(size))
            place = f"{tile}*({across} - {across}_start) + {inner} - {inner}_start"
            squares: dict[Value, str] = {}
            for value in values:
                if transposed(value, inner, across):
                    self._turn(value, across, inner, tile)
                    squares[value] = f"{self.names[value]}_square[{place}]"
            rows, columns = (Loop(v, 0, f"{v}_start", f"{v}_end") for v in (across, inner))
            simd = self._simd(values, inner)
            with self.loop(rows):
                self._inner(columns, [v for v in values if v not in squares], simd, squares)

    def _turn(self, value: Value, across: sympy.Symbol, inner: sympy.Symbol, tile: int) -> None:
        """Copy the square of a load, turned, into scratch."""
        assert value.index is not None
        corner = {
            var: sympy.Symbol(f"{var}_start", integer=True, nonnegative=True)
            for var in (across, inner)
        }
        self._scratch([value], "_square", tile * tile)
        source = f"{self.arguments[value.buffer].name} + {self.index(value.index.xreplace(corner))}"
        jump = self.index(coefficient_of(value.index, inner))
        counts = f"{inner}_end - {inner}_start, {across}_end - {across}_start"
        target = f"{self.names[value]}_square, {tile}"
        call = f"mc_transpose_{value.dtype.itemsize}({source}, {jump}, {target}, {counts})"
        self.line(f"{call};", value.origins)

    # ---- kernels with reductions: loops over x

    def _rows(self) -> None:
        nest = 0 if self.split else len(self.x_loops)
        with self._heap_rows(nest) as pragma, self.loops(self.x_loops, pragma):
            if not self._on_heap():
                self._scratch(self.in_order(self.plan.stashed), "_row", self.plan.row_length)
            for phase in self.plan.phases:
                if phase.level == "row":
                    self.compute(phase.values)
                else:
                    self._loop_phase(phase.values, self._row)

    @contextlib.contextmanager
    def _heap_rows(self, nest: int) -> Iterator[str]:
        """Scratch rows that are long, or whose length varies, lie on the heap, one for each thread.

        Gives the loops' pragma.
        """
        length, inner = product(self.plan.reduction_ranges.values()), self.r_loops[-1].size
        kept = self.in_order(self.plan.stashed) if self._on_heap() else []
        rows = {f"{self.names[v]}_row": (v, length) for v in kept}
        for phase in self.plan.phases:
            short = isinstance(inner, int) or self._in_blocks(phase.values)
            if phase.level == "loop" and not short:
                rows |= {f"{self.names[v]}_part": (v, inner) for v in self._filled(phase.values)}
        if not rows:
            yield self._parallel(nest)
            return
        (region, share), shared = self._shared(nest), self._threads(nest)
        self.pragma(f"parallel{region}" * shared)
        with self.block("{", "}"):
            for name, (value, size) in rows.items():
                ctype, count = CTYPES[value.dtype], self.index.within(size)
                text = f"({ctype}*)mc_scratch({value.dtype.itemsize}*{count})"
                self.line(f"{ctype}* __restrict {name} = {text};", value.origins)
            yield f"for nowait{share}" * shared
            for name, (value, _) in rows.items():
                self.line(f"mc_release({name});", value.origins)

    def _on_heap(self) -> bool:
        """Scratch rows that vary in length, or are too large for the stack of a thread."""
        size = self.plan.row_length * sum(v.dtype.itemsize for v in self.plan.stashed)
        known = all(isinstance(size, int) for size in self.plan.reduction_ranges.values())
        return not known or size > STACK_BYTES

    def _columns(self) -> None:
        *outer, last = self.x_loops
        inner, size = last.var, last.size
        tiled = not isinstance(size, int) or size > self.tile
        first = self.plan.phases[0]
        fixed = self._fixed(first.values, inner) if first.level == "row" else frozenset()
        together = len(outer) + (tiled and not fixed)  # loops without anything in between
        shared = bool(outer or tiled) and not self.split
        pragma = self._parallel(max(together, 1)) if shared else ""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.loops(outer, pragma))
            self.compute(self.in_order(fixed))
            columns, self.lane = last, str(inner)
            if tiled:
                start = f"{inner}_start"
                tiles = Loop(start, size, step=self.tile)
                stack.enter_context(self.loop(tiles, "" if outer else pragma))
                self._end(inner, start, self.tile, self.index(size))
                columns, self.lane = Loop(inner, size, start, f"{inner}_end"), f"{inner} - {start}"
            at_hand = self._at_hand() - fixed
            carried = self.in_order(self._carried() - fixed - at_hand)
            self._scratch([v for v in carried if v.op != "reduction"], "_tile", self.tile)
            arrays = {v: self.accumulator(v) for v in carried}

            def lanes(values: Sequence[Value]) -> None:
                self._inner(columns, values, self._simd(values, inner), arrays, self.divided)
                self.divided = ()

            def one_row(values: Sequence[Value], loop: Loop, *_: Size) -> None:
                still = self._fixed(values, inner, carried)
                with self.loop(loop):
                    self.compute(v for v in values if v in still)
                    lanes([v for v in values if v not in still])

            for phase in self.plan.phases:
                values = [v for v in phase.values if v not in fixed | at_hand]
                values = [*self.in_order(operands(values) & at_hand), *values]
                if phase.level == "loop":
                    if self.divided:  # the sweep reads what the last one found
                        with self.each_lane():
                            self._combine(self.divided)
                        self.divided = ()
                    self._loop_phase(values, one_row)
                elif values:
                    lanes(values)

    def _fixed(
        self, values: Sequence[Value], inner: sympy.Symbol, carried: Iterable[Value] = ()
    ) -> frozenset[Value]:
        """Those that are the same in all columns of a tile, whose loop can read them from outside."""
        written = {store.buffer for store in self.plan.body.stores}
        effects = (
            v for v in values if v.op in ("store", "reduction", "scan") or v.buffer in written
        )
        return frozenset(values) - varying(values, {inner}, {*effects, *carried})

    def _at_hand(self) -> frozenset[Value]:
        """Plain loads of row values: each phase loads for itself what it reads."""
        rows = (v for phase in self.plan.phases if phase.level == "row" for v in phase.values)
        written = {store.buffer for store in self.plan.body.stores}
        plain = (v for v in rows if v.op == "load" and v.mask is None and not v.indirect)
        return frozenset(v for v in plain if v.buffer not in written)

    def _carried(self) -> frozenset[Value]:
        """Row values and reductions that another phase than their own reads."""
        read = (operands(phase.values) - set(phase.values) for phase in self.plan.phases)
        found = frozenset[Value]().union(*read)
        return frozenset(v for v in found - self.plan.loop if v.op != "constant")

    # ---- loops over r

    def _loop_phase(self, values: Sequence[Value], innermost: Innermost) -> None:
        """One sweep over r; or threads share it, and their results are combined in order."""
        if not self.split:
            self._sweep(values, innermost)
            return
        reductions = [v for v in values if v.op == "reduction"]
        parts = [(v, *found) for v in reductions for found in self.accumulators(v)]
        size = self.index(self.r_loops[0].size)
        most = self.plan.tiles["chunks"]
        for value, suffix, ctype, _ in parts:
            length = most * max(self.tile, 1)
            self.line(f"{ctype} {self.names[value]}{suffix}_parts[{length}];", value.origins)
        self.pragma(self._parallel())
        with self.braces("for (int64_t c = 0; c < chunks; c++)"):
            self.line(f"const int64_t end = {least('(c + 1) * chunk', size)};")
            self._sweep(values, innermost, "c * chunk", "end")
            for value, suffix, _, _ in parts:
                with self.each_lane():
                    result = self.accumulator(value, suffix)
                    self.line(f"{self._part(value, suffix)} = {result};", value.origins)
        if self.tile:  # a loop over columns combines
            for value, suffix, ctype, _ in parts:
                self._declare_array(value, suffix, ctype)
            self.divided = reductions
        elif reductions:
            self._combine(reductions)

    def _combine(self, reductions: Sequence[Value]) -> None:
        """What the chunks found, in their order: for the column at hand, or for the only row."""
        for value in reductions:
            for suffix, ctype, initial in self.accumulators(value):
                self._set(value, suffix, "" if self.tile else ctype, initial)
        with self.braces("for (int64_t c = 0; c < chunks; c++)"):
            for value in reductions:
                best = self._part(value, "_best" if value.kind in POSITIONS else "")
                self._take(value, best, self._part(value))

    def _chunks(self) -> None:
        """Declare how many chunks the outermost r has, and how long they are."""
        size = self.r_loops[0].size
        chunk, most, text = self.plan.tiles["r"], self.plan.tiles["chunks"], self.index(size)
        if isinstance(size, int):
            self.line(f"const int64_t chunk = {chunk}, chunks = {-(-size // chunk)};")
        else:
            fair = f"({text} + {most - 1}) / {most}"
            self.line(f"const int64_t chunk = {fair} > {chunk} ? {fair} : {chunk};")
            self.line(f"const int64_t chunks = ({text} + chunk - 1) / chunk;")

    def _sweep(
        self, values: Sequence[Value], innermost: Innermost, start: str = "0", stop: str = ""
    ) -> None:
        """Loops over r with their accumulators; `start` and `stop` bound the outermost variable.

        Long float sums go in blocks: each block sums for itself, and the sums are added up as doubles
        (`mc_row_sum` does that itself).
        """
        *outer, last = self.r_loops
        inner, size = last.var, last.size
        reductions = [v for v in values if v.op == "reduction"]
        sums = [v for v in reductions if v.kind == "sum" and v.dtype.is_floating_point]
        in_blocks = self._in_blocks(values)
        totals = sums if in_blocks else []
        at_once = not outer and not in_blocks
        for value in values:
            if value.op == "scan" or (
                value in reductions and not (at_once and self._by_row(value))
            ):
                self._start(value)
            if value in totals:
                self._declare_accumulator(value, "_total", "double", "0.0")
        with contextlib.ExitStack() as stack:
            for loop in outer:
                stack.enter_context(self.loop(loop._replace(start=start, stop=stop)))
                start, stop = "0", ""
            if in_blocks:
                block = f"{inner}_block"
                length = COLUMN_BLOCK if self.tile else BLOCK
                stack.enter_context(self.loop(Loop(block, size, start, stop, length)))
                self._end(inner, block, length, stop or self.index(size))
                self._for_each(totals, "{0} = 0;")
                start, stop = block, f"{inner}_end"
            loop = Loop(inner, size, start, stop or self.index(size))
            innermost(values, loop, BLOCK if in_blocks else size, at_once)
            self._for_each(totals, "{1} += {0};")
        self._for_each(totals, "{0} = {1};")

    def _in_blocks(self, values: Sequence[Value]) -> bool:
        """Rows known to be long; and others whose sums no helper takes care of."""
        size = self.r_loops[-1].size
        reductions = [v for v in values if v.op == "reduction"]
        sums = [v for v in reductions if v.kind == "sum" and v.dtype.is_floating_point]
        known = isinstance(size, int)
        if self.tile and known:
            chunk = self.plan.tiles.get("r", size) if len(self.r_loops) == 1 else size
            return bool(sums) and min(size, chunk) > COLUMN_BLOCK
        if any(self._layers(values).values()):
            return not known or size > BLOCK
        if size_hint(size, self.plan.hints) > LONG_ROW or (self.split and not known):
            return bool(sums or any(map(self._by_row, reductions)))
        return not known and not all(map(self._by_row, sums))

    # ---- accumulators

    def accumulator(self, value: Value, suffix: str = "") -> str:
        """The accumulator of a reduction: one, or that of the column at hand."""
        name = self.names[value] + suffix
        return f"{name}_tile[{self.lane}]" if self.tile else name

    @contextlib.contextmanager
    def each_lane(self) -> Iterator[None]:
        """What follows is done for each column of the tile; a kernel of rows does it once."""
        if not self.tile:
            yield
            return
        outside, self.lane = self.lane, "j"
        with self.loop(Loop("j", self.tile), "simd"):
            yield
        self.lane = outside

    def _for_each(self, values: Iterable[Value], text: str) -> None:
        """A line for each accumulator, {0}, and its total, {1}."""
        for value in values:
            with self.each_lane():
                places = self.accumulator(value), self.accumulator(value, "_total")
                self.line(text.format(*places), value.origins)

    def _start(self, value: Value) -> None:
        again = value in self.started  # by an earlier loop, which computed the scan as well
        for suffix, ctype, initial in self.accumulators(value):
            self._declare_accumulator(value, suffix, "" if again else ctype, initial)
        if value.op == "scan":
            self.started.add(value)

    def _declare_accumulator(self, value: Value, suffix: str, ctype: str, initial: str) -> None:
        if self.tile and ctype:
            self._declare_array(value, suffix, ctype)
            ctype = ""
        with self.each_lane():
            self._set(value, suffix, ctype, initial)

    def _set(self, value: Value, suffix: str, ctype: str, initial: str) -> None:
        text = f"{ctype} {self.accumulator(value, suffix)} = {initial};"
        self.line(text.lstrip(), value.origins)

    def _declare_array(self, value: Value, suffix: str, ctype: str) -> None:
        array = f"{self.names[value]}{suffix}_tile[{self.tile}]"
        self.line(f"{ctype} {array} {ALIGNED};", value.origins)

    def _part(self, value: Value, suffix: str = "") -> str:
        """The result of chunk c."""
        place = f"c * {self.tile} + {self.lane}" if self.tile else "c"
        return f"{self.names[value]}{suffix}_parts[{place}]"

    def _accumulate(self, value: Value) -> None:
        self._take(value, self.ref(value.inputs[0]), self.index(self.place()))
        if value.op == "scan":
            self.declare(value, self.accumulator(value, "_so_far"))

    def _take(self, value: Value, source: str, position: str) -> None:
        """One more element, or the result of a chunk, into the accumulator."""
        total = self.accumulator(value, self.accumulators(value)[0][0])
        best = self.accumulator(value, "_best")
        place = value.kind in POSITIONS
        search = place or (value.op == "scan" and value.kind in ("max", "min"))
        if search and not self.tile:  # it seldom moves on, so a branch costs nothing
            better = self.better(value, source, best if place else total)
            with self.block(f"if ({better}) {{", "}", value.origins):
                if place:
                    self.line(f"{best} = {source};", value.origins)
                self.line(f"{total} = {position if place else source};", value.origins)
            return
        if not place:
            self.line(f"{total} = {self.combine(value, total, source)};", value.origins)
            return
        better = self.better(value, source, best)
        moves = f"{self.names[value]}_moves"  # without a branch, so that it vectorises
        self.line(f"bool {moves} = {better};", value.origins)
        self.line(f"{best} = {moves} ? {source} : {best};", value.origins)
        self.line(f"{total} = {moves} ? {position} : {total};", value.origins)

    # ---- rows in vectors

    def _by_row(self, value: Value) -> bool:
        """A helper reduces a row of floats in memory; other reductions ride along in the loop.

        Of sums those of plain loads: others are added up where they are computed. The largest and the
        smallest number and their places always, since vectors that compare may drop a NaN.
        """
        source = value.inputs[0]
        single = source.dtype is torch.float32
        extremum = value.kind in ("max", "min") and source.dtype.is_floating_point
        known = extremum or (
            single
            and (value.kind in POSITIONS or (value.kind == "sum" and self._lies_in_memory(source)))
        )
        in_memory = source in self.plan.loop and self.plan.vector_width > 1
        return known and in_memory and not self.tile

    def _filled(self, values: Sequence[Value]) -> list[Value]:
        """What row reductions and other layers read: the loop must write it to memory for them."""
        found = {v.inputs[0] for v in values if v.op == "reduction" and self._by_row(v)}
        layer = self._layers(values)
        found |= {
            v for user in values for v in user.operands if layer.get(v, layer[user]) < layer[user]
        }
        kept = self.plan.stashed
        return self.in_order({v for v in found if v not in kept and not self._lies_in_memory(v)})

    def _row(self, values: Sequence[Value], loop: Loop, most: Size, at_once: bool) -> None:
        """The innermost loop: values, stores, what row reductions will read, other reductions."""
        by_row = [v for v in values if v.op == "reduction" and self._by_row(v)]
        stashed, index = self.plan.stashed, self.index(self.place())
        scratch = {v: f"{self.names[v]}_row[{index}]" for v in self.in_order(stashed)}
        filled = self._filled(values)
        inner, _, start, *_ = loop
        before = "" if start == "0" else f" - {start}"
        for value in filled:
            scratch[value] = f"{self.names[value]}_part[{inner}{before}]"
        wanted = [v for v in values if v.op in ("store", "reduction") or v.check or v in scratch]
        if isinstance(most, int):
            self._scratch([v for v in filled if v not in self.kept], "_part", most)
            self.kept.update(filled if at_once else ())
        layer = self._layers(values)
        for k in sorted(set(layer.values())):
            roots = (v for v in wanted if v not in by_row and layer[v] == k)
            elsewhere = {v for v in scratch if layer.get(v) != k}
            inside = self.in_order(cone(roots, values, elsewhere) - elsewhere)
            if inside:
                self._inner(loop, inside, self._simd(inside, inner, riding=True), scratch)
        for value in by_row:
            self._reduce_row(value, loop, at_once)

    def _reduce_row(self, value: Value, loop: Loop, at_once: bool) -> None:
        """One call for a row in memory, or a block of it, which is not `at_once` the whole reduction."""
        name, row = self.names[value], self._row_address(value.inputs[0], loop)
        count = loop.stop if loop.start == "0" else f"{loop.stop} - {loop.start}"
        ctype = CTYPES[value.inputs[0].dtype]
        place = value.kind in POSITIONS
        helper = f"mc_row_{value.kind[place and 3 :]}" + ("_double" if ctype == "double" else "")
        best = f"{name}{'_best' if place else ''}"
        found = best if at_once else f"{name}_part"
        self.line(f"{ctype} {found} = {helper}({row}, {count});", value.origins)
        if place:
            start = self.index(self.place().xreplace({loop.var: _start_of(loop)}))
            first = f"{start} + " * (start != "0") + f"mc_row_find({row}, {count}, {found})"
            if at_once:
                self.line(f"int64_t {name} = {first};", value.origins)
            else:
                self._take(value, found, first)
        elif not at_once:
            self.line(f"{name} = {self.combine(value, name, found)};", value.origins)

    def _layers(self, values: Sequence[Value]) -> dict[Value, int]:
        """The loop over a row that computes a value: all in one, or scans in the odd ones."""
        found = dict.fromkeys(values, 0)
        if not self.tile and sum(cost(v) for v in values if v.op != "scan") >= DEAR:
            for value in values:
                before = max((found.get(v, 0) for v in value.operands), default=0)
                found[value] = before + (before % 2 != (value.op == "scan"))
        return found

    def _lies_in_memory(self, value: Value) -> bool:
        """A plain load whose elements stand side by side along the inner r, and stay there for the loop."""
        if value.buffer in self.plan.in_place and self._overwritten(value):
            return False
        inner = self.r_loops[-1].var
        plain = value.op == "load" and value.mask is None and not value.indirect
        return plain and value.index is not None and coefficient_of(value.index, inner) == 1

    def _overwritten(self, load: Value) -> bool:
        """A loop that loads an element also stores another one in its place."""
        phases = (phase.values for phase in self.plan.phases if load in phase.values)
        return any(v.op == "store" and v.buffer == load.buffer for vs in phases for v in vs)

    def _row_address(self, source: Value, loop: Loop) -> str:
        if self._lies_in_memory(source):
            assert source.index is not None
            base, place = self.arguments[source.buffer].name, source.index
        elif source in self.plan.stashed:
            base, place = f"{self.names[source]}_row", self.place()
        else:
            return f"{self.names[source]}_part"
        offset = self.index(place.xreplace({loop.var: _start_of(loop)}))
        return base if offset == "0" else f"{base} + {offset}"


Innermost = Callable[[Sequence[Value], Loop, Size, bool], None]
"""Prints the innermost loop over r, or a block of it: values, the loop, the most iterations it can have, and
whether it is the whole reduction, so that nothing has been accumulated before."""


def _start_of(loop: Loop) -> sympy.Expr:
    return sympy.Symbol(loop.start) if loop.start != "0" else sympy.Integer(0)


def operands(values: Iterable[Value]) -> set[Value]:
    """Everything that the values read."""
    return {operand for value in values for operand in value.operands}


def least(a: str, b: str) -> str:
    """The smaller of two C expressions."""
    return f"{a} < {b} ? {a} : {b}"
