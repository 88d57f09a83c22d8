"""The registry of plan rules, and what the rules of both languages ask of loads and stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import sympy

from minicompile.codegen.phases import varying
from minicompile.codegen.plan import KernelPlan
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.scheduling.body import LoopBody, Value
from minicompile.shapes.expr import coefficient_of

PlanRule = Callable[[KernelPlan, Options], None]

plan_rule: Registry[PlanRule] = Registry(
    "plan", "language:decision -> rule(plan, options) that edits a kernel plan"
)


def contiguous_uses(var: sympy.Symbol, values: Iterable[Value]) -> int:
    """How many loads and stores step by one element with `var`, less those that jump."""
    score = 0
    for value in values:
        if value.op in ("load", "store"):
            step = coefficient_of(value.index, var)
            score += 1 if step == 1 else 0 if step == 0 else -1
    return score


def is_update(store: Value) -> bool:
    """The store changes some elements of memory that already holds something: a scatter."""
    return store.kind != "store" or bool(store.indirect)


def separates(store: Value, var: sympy.Symbol, body: LoopBody) -> bool:
    """Different values of `var` go to different elements, all else being equal."""
    step = coefficient_of(store.index, var)
    return step not in (None, 0) and varying(body.values, {var}).isdisjoint(store.indirect)


def transposed(load: Value, inner: sympy.Symbol, across: sympy.Symbol) -> bool:
    """A load that jumps along `inner` while its elements lie side by side along `across`."""
    if load.op != "load" or load.mask is not None or load.indirect:
        return False
    jump = coefficient_of(load.index, inner)
    return jump not in (None, 0, 1) and coefficient_of(load.index, across) == 1
