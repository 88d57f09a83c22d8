"""The registry of plan rules, and the rule and helpers that both languages share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import sympy
import torch

from minicompile.codegen.plan import Alternative, KernelPlan
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.scheduling.body import LoopBody, Value
from minicompile.shapes.expr import Size, bounds, coefficient_of, size_hint

PlanRule = Callable[[KernelPlan, Options], None]

plan_rule: Registry[PlanRule] = Registry(
    "plan", "language:decision -> rule(plan, options) that edits a kernel plan"
)


def count(sizes: Iterable[Size], hints: Mapping[sympy.Symbol, int]) -> int:
    """How many elements, at the hints."""
    total = 1
    for size in sizes:
        total *= size_hint(size, hints)
    return total


def contiguous_uses(plan: KernelPlan, var: sympy.Symbol, values: Iterable[Value]) -> int:
    """How many loads and stores step by one element with `var`, less those that jump."""
    score = 0
    for value in values:
        if value.op not in ("load", "store") or value.index is None:
            continue
        step = coefficient_of(value.index, var)
        if step == 1:
            score += 1
        elif step is None or step != 0:
            score -= 1
    return score


def is_update(store: Value) -> bool:
    """The store changes some elements of memory that already holds something: a scatter."""
    return store.kind != "store" or bool(store.indirect)


def varying(values: Iterable[Value], var: sympy.Symbol) -> frozenset[Value]:
    """The values that differ with a loop variable: their index has it, or an operand does."""
    found: set[Value] = set()
    for value in values:
        uses = value.index is not None and var in value.index.free_symbols
        if uses or any(v in found for v in value.operands):
            found.add(value)
    return frozenset(found)


def separates(store: Value, var: sympy.Symbol, body: LoopBody) -> bool:
    """Different values of `var` go to different elements, all else being equal."""
    assert store.index is not None
    step = coefficient_of(store.index, var)
    moving = varying(body.values, var)
    return step is not None and step != 0 and not any(v in moving for v in store.indirect)


def transposed(load: Value, inner: sympy.Symbol, across: sympy.Symbol) -> bool:
    """A load that jumps along `inner` while its elements lie side by side along `across`."""
    if load.op != "load" or load.mask is not None or load.indirect or load.index is None:
        return False
    jump = coefficient_of(load.index, inner)
    return jump is not None and jump not in (0, 1) and coefficient_of(load.index, across) == 1


@plan_rule("any:index_dtype")
def choose_index_dtype(plan: KernelPlan, options: Options) -> None:
    """int32 only where every index provably fits; C++ compilers do best with int64."""
    if plan.language == "cpp":
        return
    for value in plan.body.values:
        if value.indirect or value.index is None:
            continue
        found = bounds(value.index, plan.body.all_ranges)
        if found is None or not all(b.is_Integer and abs(int(b)) < 2**31 for b in found):
            plan.alternatives += (Alternative("int32 indices", f"{value.index} may not fit"),)
            return
    storage = [v for v in plan.body.values if v.indirect]
    if any(not _indirect_fits(v, plan.body) for v in storage):
        plan.alternatives += (Alternative("int32 indices", "a loaded index may not fit"),)
        return
    plan.index_dtype = torch.int32


def _indirect_fits(value: Value, body: LoopBody) -> bool:
    assert value.index is not None
    ranges = dict(body.all_ranges)
    ranges.update({v.symbol: v.size for v in value.indirect if v.symbol is not None})
    found = bounds(value.index, ranges)
    return found is not None and all(b.is_Integer and abs(int(b)) < 2**31 for b in found)
