"""C kernels whose loops are in pieces, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

import sympy

from minicompile.codegen.cpp_loops import PointwisePrinter
from minicompile.codegen.cpp_values import Loop
from minicompile.codegen.printing import kernel_template
from minicompile.plugins.loop_pieces.pieces import Cut, Pieces, leaves
from minicompile.scheduling.body import LoopBody


@kernel_template("pieces")
class PiecesPrinter(PointwisePrinter):
    """Prints a body whose loops `plan.details` cuts."""

    def nest(self) -> None:
        self._pieces(self.plan.details)

    def _pieces(self, part: Pieces, opened: Collection[Loop] = (), shared: bool = False) -> None:
        """The loops of a piece inside those that are `opened` already, perhaps for threads (`shared`)."""
        ranges, stop = leaves(part)[0].ranges, set[sympy.Symbol]()
        if isinstance(part, Cut):
            stop = {part.var, *cut_inside(part)}  # loops that differ from piece to piece
        same = itertools.takewhile(lambda var: var not in stop, ranges)
        outer = [Loop(var, ranges[var]) for var in same if ranges[var] != 1]
        outer = [loop for loop in outer if loop not in opened]
        if isinstance(part, LoopBody):
            self.name(part.values)
            self.nest_of(part, outer, shared)
            return
        share = not shared and self.enough(outer)
        with self.loops(outer, self._parallel(len(outer)) if share else ""):
            for piece in part.parts:
                with self.block("{", "}"):
                    self._pieces(piece, [*opened, *outer], shared or share)


def cut_inside(cut: Cut) -> Iterator[sympy.Symbol]:
    """Yield the loops that pieces are cut along further."""
    for part in cut.parts:
        if isinstance(part, Cut):
            yield part.var
            yield from cut_inside(part)
