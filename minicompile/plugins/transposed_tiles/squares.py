"""C kernels that work in squares of two loops: what is read along the outer one is turned first."""

from __future__ import annotations

import sympy

from minicompile.codegen.cpp_loops import PointwisePrinter
from minicompile.codegen.cpp_values import Loop
from minicompile.codegen.printing import kernel_template
from minicompile.plugins.transposed_tiles.choose import SQUARES, transposed
from minicompile.scheduling.body import Value
from minicompile.shapes.expr import coefficient_of


@kernel_template(SQUARES)
class SquarePrinter(PointwisePrinter):
    """Loops over x by squares."""

    def nest(self) -> None:
        """Loads that jump along the inner loop fill squares of scratch first."""
        values = self.plan.body.values
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
