"""C kernels that add to elements which loaded indices name: threads share loops in which they can't meet.

Each element sees its updates in order, however many threads there are. Without this, one thread does all.
"""

from __future__ import annotations

import contextlib

import sympy

from minicompile.codegen.cpp_loops import PointwisePrinter
from minicompile.codegen.cpp_rules import share
from minicompile.codegen.cpp_values import Loop
from minicompile.codegen.phases import innermost, is_update
from minicompile.codegen.plan import OUTER_ITERATIONS, CppPlan, count, plan_rule
from minicompile.codegen.printing import kernel_template
from minicompile.options import Options
from minicompile.scheduling.body import LoopBody, Value
from minicompile.shapes.expr import bounds, coefficient_of, exact_quotient, is_nonnegative

SCATTER = "shared_scatter"
"""The kind of kernel whose updates threads share."""


@plan_rule("cpp:shared_scatter")
def choose_threads(plan: CppPlan, options: Options) -> None:
    """Threads share the loops of a scatter in which they can't meet."""
    if plan.reduction == "none" and plan.ranges and updates(plan.body):
        share(plan)
        plan.reduction = SCATTER if plan.parallel else "none"


def updates(body: LoopBody) -> list[Value]:
    """Stores that change some elements of memory that already holds something."""
    return [store for store in body.stores if is_update(store)]


def owns(store: Value, var: sympy.Symbol, body: LoopBody) -> bool:
    """Different values of `var` go to different elements, whatever the other loops and loaded indices are."""
    index, size = sympy.expand(store.index), body.all_ranges[var]
    step = coefficient_of(index, var)
    if step is None or not step.is_positive or size == 0:
        return False
    others = sympy.Add.make_args(index - step * var)
    near = [
        t for t in others if t.free_symbols and exact_quotient(t, sympy.expand(step * size)) is None
    ]
    ranges = {**body.all_ranges, **{v.symbol: v.size for v in store.indirect if v.symbol}}
    ends = bounds(sympy.Add(*near), ranges)
    return ends is not None and is_nonnegative(step - 1 - ends[1] + ends[0])


@kernel_template(SCATTER)
class ScatterPrinter(PointwisePrinter):
    """Threads share outer loops, or columns."""

    def nest(self) -> None:
        if not self.x_loops:
            super().nest()
            return
        body = self.plan.body
        *outer, inner = self.x_loops
        inside = innermost(body, inner.var)
        alone = [all(owns(v, loop.var, body) for v in updates(body)) for loop in self.x_loops]
        shared = next((n for n, own in enumerate(alone) if not own), len(outer))
        with contextlib.ExitStack() as stack:
            rounds = count((loop.size for loop in outer[:shared]), self.plan.hints)
            if alone[-1] and rounds < OUTER_ITERATIONS:
                self.line(f"const int64_t share = mc_share({self.index(inner.size)});")
                columns = Loop(f"{inner.var}_start", inner.size, step="share")
                stack.enter_context(self.loop(columns, self._parallel()))
                self._end(inner.var, f"{inner.var}_start", "share", self.index(inner.size))
                inner, shared = Loop(inner.var, 0, f"{inner.var}_start", f"{inner.var}_end"), 0
            stack.enter_context(self.loops(outer, self._parallel(shared)))
            self.compute(v for v in body.values if v not in inside)
            self._inner(inner, inside, self._simd(inside, inner.var))
