"""Prints the index arithmetic of Triton kernels: which elements of a tile a program has, and their addresses.

A pointwise kernel works on blocks [XBLOCK], or, where it reads along another loop than it writes, on squares
[YBLOCK, XBLOCK]; one with reductions on tiles [XBLOCK, RBLOCK]. A value has the axes its operands and index
mention: [XBLOCK, 1] for one value a row, [1, RBLOCK] for one that all rows share.

    an axis       `xindex` numbers the elements of all its loops as one; `xmask` says which lanes have one
    its loops     digits of that number, where an index needs them apart: `x0 = xindex % 64`
    an index      its formula in these, printed (`_index`), and a block of addresses (`_pointer`)
"""

from __future__ import annotations

import sympy
import torch

from minicompile.codegen.plan import TritonPlan, power_of_two
from minicompile.codegen.printing import OperationPrinter
from minicompile.codegen.triton_axes import Axes, digits, flat_index, index_axes, value_axes
from minicompile.codegen.triton_ops import TritonIndex, triton_op, typed_constant
from minicompile.scheduling.body import Value
from minicompile.shapes.expr import Size, is_nonnegative, loop_symbol, product


class AddressPrinter(OperationPrinter):
    """Prints which elements a program has, and indices, masks and pointers to them."""

    plan: TritonPlan
    table = triton_op
    may_be_even = False
    """Does the compiler of the kernel find out whether tiles fill their rows?"""

    def __init__(self, plan: TritonPlan) -> None:
        super().__init__(plan)
        self.blocks = {axis: f"{axis.upper()}BLOCK" for axis in plan.axes}
        self.wide = plan.index_dtype is torch.int64
        width = "tl.int64" if self.wide else f"{plan.integers[0]}.dtype" if plan.index_reach else ""
        self.cast = f".to({width})" * bool(width)
        """What makes an index as wide as it must be: as wide as a launch passes sizes."""
        self.position = "rindex" if self.wide else "rindex.to(tl.int64)"
        self.index = TritonIndex({})
        self.axes = value_axes(plan)
        self.length = plan.length
        whole = bool(self.length == power_of_two(plan.row_length))
        self.full_row = plan.reduction == "persistent" and whole
        """No lane is left over."""
        self.row_end = "rnumel"
        """Where a sweep over a row ends."""

    # Lanes and loops ---------------------------------------------------------------------------------

    def _indices(self) -> None:
        """Which elements the program computes."""
        plan = self.plan
        program = f"tl.program_id(0){self.cast}"
        parallel = {axis: loops for axis, loops in plan.axes.items() if axis != "r"}
        for axis, loops in parallel.items():
            self.line(f"{axis}numel = {self.index(product(loops.values()))}")
        places = dict.fromkeys(parallel, program)
        if "y" in parallel:
            self.line("xblocks = (xnumel + XBLOCK - 1) // XBLOCK")
            places = {"y": f"({program} // xblocks)", "x": f"({program} % xblocks)"}
        for axis, loops in parallel.items():
            block = self.blocks[axis]
            self.line(f"{axis}index = {places[axis]} * {block} + {self._lanes(axis)}")
            self.line(f"{axis}mask = {axis}index < {axis}numel")
            self._digits(loops, f"{axis}index")
        if not plan.reduction_ranges:
            return
        self.line(f"rnumel = {self.index(self.length)}")
        if plan.varying and is_nonnegative(self.length - 1):
            self.line("tl.assume(rnumel > 0)")
        if plan.reduction == "persistent":
            self._row_index("")

    def _lanes(self, axis: str) -> str:
        """0, 1, ... along an axis."""
        lanes = f"tl.arange(0, {self.blocks[axis]})"
        if len(self.blocks) == 1:
            return lanes
        return lanes + ("[:, None]" if axis == next(iter(self.blocks)) else "[None, :]")

    def _row_index(self, start: str) -> None:
        """Which r the tile holds."""
        self.line(f"rindex = {start}{self._lanes('r')}{self.cast}")
        if not self.full_row:
            tile = self.plan.tiles.get("r", 1)
            even = start and isinstance(self.length, int) and self.length % tile == 0 and tile > 1
            if even or self.may_be_even:  # known when compiling: then no lane is masked
                self.line("rmask = (rindex < rnumel) | (rnumel % RBLOCK == 0)")
            else:
                self.line("rmask = rindex < rnumel")
        self._digits(self.plan.reduction_ranges, "rindex")

    def _digits(self, ranges: dict[sympy.Symbol, Size], linear: str) -> None:
        """Each loop variable that an index mentions, as a digit of the flattened index."""
        for var, below, size, origins in digits(self.plan, ranges):
            text = linear if below == 1 else f"{linear} // {self.index.within(below)}"
            if size is not None:
                text = f"({text})" if below != 1 else text
                text += f" % {self.index.within(size)}"
            self.line(f"{var} = {text}", origins, scaffold=True)

    # Indices and addresses ---------------------------------------------------------------------------

    def _index(self, value: Value) -> str:
        """A value's index."""
        assert value.index is not None
        loaded = {v.symbol: self.names[v] for v in value.indirect}
        ranges = self.plan.body.all_ranges
        flat = {loop_symbol(f"{a}index"): product(r.values()) for a, r in self.plan.axes.items()}
        names = TritonIndex({**ranges, **flat}, lambda s: loaded.get(s, str(s)))
        return names(flat_index(self.plan, value.index))

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
        if index_axes(self.plan, value, self.axes) != axes:
            index = f"tl.full({self._shape(axes)}, 0, tl.int32) + {index}"
        return f"{self.arguments[value.buffer].name} + ({index})"

    def constant(self, value: Value) -> str:
        return typed_constant(value.constant, value.dtype)

    def declare(self, value: Value, expression: str) -> None:
        self.line(f"{self.names[value]} = {expression}", value.origins)
