"""The template of matrix products: a Triton kernel with holes, which the loops of a `TritonPlan` fill.

    program = tl.program_id(0)                              which tile: in groups of rows of tiles, so that
    ...                                                     programs that run together share operands in L2
    yindex = yblock * YBLOCK + tl.arange(0, YBLOCK)[:, None]
    xindex = xblock * XBLOCK + tl.arange(0, XBLOCK)[None, :]
    tmp4 = tl.zeros([YBLOCK, XBLOCK], tl.float32)
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + tl.arange(0, RBLOCK)[None, :]
        tmp0 = tl.load(in_ptr0 + (1024*yindex + rindex), ...)        hole: the left factor's loads
        rindex = roffset + tl.arange(0, RBLOCK)[:, None]
        tmp2 = tl.load(in_ptr1 + (1024*xindex + rindex), ...)        hole: the right factor's
        tmp4 = tl.dot(tmp0, tmp2, tmp4)
    tmp5 = ...                                                       hole: what follows, "epilogue"
    tl.store(out_ptr0 + (4096*yindex + xindex), tmp5, ymask & xmask)

Holes are filled by the printer of all other kernels: their tiles have the axes y and r, r and x, y and x.
The real compiler: mm_template in
torch/_inductor/kernel/mm.py, torch/_inductor/select_algorithm.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch

from minicompile.codegen.phases import cone
from minicompile.codegen.plan import TritonPlan
from minicompile.codegen.printing import kernel_template
from minicompile.codegen.triton import TilePrinter
from minicompile.compat import settings
from minicompile.plugins.matrix_products.tiles import Product, find_product
from minicompile.scheduling.body import Value
from minicompile.shapes.expr import product as times

GROUP = 8
"""Rows of tiles whose programs follow one another."""


def multiplies_in_tf32() -> bool:
    """Whether float32 matrix products on a GPU round their factors to TF32."""
    found = settings.matmul_precision()
    return found[0] == "tf32" if isinstance(found, tuple) else found != "highest"


@kernel_template("product")
class ProductPrinter(TilePrinter):
    """Prints the kernel of a plan whose reduction is a matrix product."""

    found: Product
    may_be_even = True

    def __init__(self, plan: TritonPlan) -> None:
        super().__init__(plan)
        product = find_product(plan.body)
        assert product is not None
        self.found, self.every = product, dict(self.blocks)

    def program(self) -> None:
        """The template; the other methods fill its holes."""
        total, origins = self.names[self.found.total], self.found.total.origins
        self.tile()
        self.line(f"{total} = tl.zeros([YBLOCK, XBLOCK], tl.float32)", origins)
        with self.steps():
            left, right, how = self.left(), self.right(), f'input_precision="{self.precision}"'
            self.line(f"{total} = tl.dot({left}, {right}, {total}, {how})", origins)
        self.epilogue()

    @property
    def precision(self) -> str:
        """How float32 factors are multiplied: as torch's own products are."""
        exact = self.found.left.dtype is not torch.float32 or not multiplies_in_tf32()
        return "ieee" if exact else "tf32"

    def tile(self) -> None:
        """Which tile the program computes, of which product."""
        found = self.found
        self.line(f"ynumel = {self.index(times(found.rows.values()))}")
        self.line(f"xnumel = {self.index(times(found.columns.values()))}")
        self.line(f"rnumel = {self.index(self.length)}")
        self.line("yblocks = (ynumel + YBLOCK - 1) // YBLOCK")
        self.line("xblocks = (xnumel + XBLOCK - 1) // XBLOCK")
        self.line("program = tl.program_id(0)")
        if found.batch:
            self.line(f"batch = (program // (yblocks * xblocks)){self.cast}")
            self.line("program = program % (yblocks * xblocks)")
            self._digits(found.batch, "batch")
        self.line(f"first = program // ({GROUP} * xblocks) * {GROUP}")
        self.line(f"place = program % ({GROUP} * xblocks)")
        self.line(f"rows = tl.minimum(yblocks - first, {GROUP})")
        self._over("yx")
        for axis, loops, place in (
            ("y", found.rows, "first + place % rows"),
            ("x", found.columns, "place // rows"),
        ):
            block = f"{axis.upper()}BLOCK"
            self.line(f"{axis}start = ({place}) * {block}")
            self.line(f"{axis}index = {axis}start + {self._lanes(axis)}{self.cast}")
            # where tiles fill the matrix, that is known when compiling, and nothing is masked
            self.line(f"{axis}mask = ({axis}index < {axis}numel) | ({axis}numel % {block} == 0)")
            self._digits(loops, f"{axis}index")

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """The loop over the terms, RBLOCK at a time."""
        with self.block("for roffset in range(0, rnumel, RBLOCK):"):
            yield

    def left(self) -> str:
        """Lines for the left factor's tile of a step, [YBLOCK, RBLOCK], and its name."""
        return self._factor(self.found.left, "yr")

    def right(self) -> str:
        """Lines for the right factor's tile of a step, [RBLOCK, XBLOCK], and its name."""
        return self._factor(self.found.right, "rx")

    def epilogue(self) -> None:
        """Lines for what is computed of the product's tile, and for what is stored."""
        total = self.found.total
        self._over("yx")
        for value in self._in_order(self.plan.body.stores, [total, *total.operands]):
            self.value(value, "loop")

    def _over(self, axes: str) -> None:
        """The tiles that are computed with next have these axes."""
        self.blocks = {axis: self.every[axis] for axis in axes}

    def _in_order(self, roots: Collection[Value], known: Collection[Value] = ()) -> list[Value]:
        """What roots are computed from, but for what is known and constants."""
        needed = cone(roots, self.plan.body.values, known) - {*known}
        return [v for v in self.plan.body.values if v in needed and v.op != "constant"]

    def _factor(self, value: Value, axes: str) -> str:
        """Lines for a factor's tile, and its name. What stands beyond the factor's ends is 0."""
        self._over(axes)
        self._row_index("roffset + ")
        for part in self._in_order([value]):
            self.value(part, "loop")
        name = self.names[value]
        if value.op != "load":
            masked = f"tl.where({self._masks(frozenset(axes))}, {name}, 0.0)"
            self.line(f"{name} = {masked}", value.origins)
        return name
