"""Cutting a body into phases at its reductions.

A kernel with reductions alternates between row level (once per x) and loops over r:

    row    what needs no reduction
    loop   every r: what the first reductions need, and stores that are already possible
    row    what the first reductions make possible
    loop   every r: what needs the first reductions: further reductions, stores
    ...

A loop value that a later phase needs again is computed again there, or kept in a scratch row ("stashed").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import sympy
import torch

from minicompile.codegen.plan import Phase
from minicompile.ops.dtypes import HALF_TYPES, is_int
from minicompile.ops.table import POINTWISE
from minicompile.scheduling.body import LoopBody, Value, users, varying
from minicompile.shapes.expr import (
    coefficient_of,
)

NO_RIDERS: Mapping[Value, Value] = {}


def stages(body: LoopBody, riders: Mapping[Value, Value] = NO_RIDERS) -> dict[Value, int]:
    """How many loops over r must have run before a value can be computed."""
    found: dict[Value, int] = {}
    for value in body.values:
        before = max((found[v] for v in value.operands), default=0)
        found[value] = before + (value.op == "reduction" and value not in riders)
    return found


def float_sums(values: Iterable[Value]) -> list[Value]:
    """Reductions in which rounding errors pile up."""
    sums = (v for v in values if v.op == "reduction" and v.kind == "sum")
    return [v for v in sums if v.dtype.is_floating_point]


def riders(body: LoopBody, loop: Collection[Value], kind: str) -> dict[Value, Value]:
    """Reductions that need no loop of their own, and those in whose loop they ride.

    A sum of exp(v - m) rides beside the maximum of v (`kind` "max"), a sum of (v - m)^2 beside the sum of v
    ("sum"), where m is one number a row: terms relative to another number than m are corrected in the end.
    (Milakov, Gimelshein: "Online normalizer calculation for softmax", 2018; Chan, Golub, LeVeque: "Updating
    formulae and a pairwise algorithm for computing sample variances", 1979.)
    """
    beside = {v.inputs[0]: v for v in body.reductions if v.kind == kind}
    found: dict[Value, Value] = {}
    for value in body.reductions:
        term, form = value.inputs[0], {"max": "exp", "sum": "mul"}[kind]
        if value.kind != "sum" or term.op != form or term.inputs[0] is not term.inputs[-1]:
            continue
        apart = term.inputs[0]
        if apart.op != "sub" or apart.inputs[0] not in loop or apart.inputs[1] in loop:
            continue
        other, stage = beside.get(apart.inputs[0]), stages(body, found)
        if other is not None and stage[apart.inputs[1]] == stage[other]:
            found[value] = other
    return found


def middle(rider: Value) -> Value:
    """m, one number a row, of a sum of exp(v - m) or of (v - m)^2."""
    return rider.inputs[0].inputs[0].inputs[1]


def is_share(value: Value, loop: Collection[Value]) -> bool:
    """exp(v - m), with m the maximum of v, by its sum in the row: a division of a number from 0 to 1 by one
    from 1 on, or of NaN by NaN."""
    term, total = value.inputs
    if term.op != "exp" or term.dtype is not torch.float32 or term.inputs[0].op != "sub":
        return False
    apart, most = term.inputs[0].inputs
    ends = [(v.op, v.kind, *v.inputs[:1]) for v in (total, most)]
    softmax = ends == [("reduction", "sum", term), ("reduction", "max", apart)]
    return softmax and {term, value} <= set(loop)


def quick_forms(body: LoopBody, loop: Collection[Value]) -> dict[Value, str]:
    """How a GPU computes shares: "share" rounds as division does, "narrowed_share" nearly so.

    An exp(v - m) that serves only a narrowed share is a "rough_exp": a float32 may have some more roundings
    there, since 16 bits have none of them.
    """
    using, forms = users(body.values), dict[Value, str]()
    for share in body.values:
        if share.op != "truediv" or not is_share(share, loop):
            continue
        term, total = share.inputs
        narrowed = all(v.op == "to_dtype" and v.dtype in HALF_TYPES for v in using[share])
        forms[share] = "narrowed_share" if narrowed else "share"
        if narrowed and set(using[term]) == {share, total} and using[total] == [share]:
            forms[term] = "rough_exp"
    return forms


def barriers(
    phases: Iterable[Phase], swept: bool, in_place: Collection[str]
) -> frozenset[Value | Phase]:
    """Loads, stores in place and loops before which the threads of a program wait for each other's accesses.

    `swept`: phases of level "loop" are loops, before which threads wait for all that they load.
    """
    waits, stored = set[Value | Phase](), set[str]()
    for phase in phases:
        loads = (v.buffer for v in phase.values if v.op == "load")
        if swept and phase.level == "loop" and not stored.isdisjoint(loads):
            waits.add(phase)
            stored.clear()
        for value in phase.values:
            if value.op == "load" and value.buffer in stored:
                waits.add(value)
                stored.clear()
            elif value.op == "store":
                waits |= {value} if value.buffer in in_place else set()
                stored.add(value.buffer)
    return frozenset(waits)


def cut(
    body: LoopBody,
    loop: Collection[Value],
    stashed: Collection[Value],
    recompute: bool = True,
    riders: Mapping[Value, Value] = NO_RIDERS,
) -> tuple[Phase, ...]:
    """The phases of a body whose loop-level values are `loop`.

    `recompute=False` computes every value once: a persistent kernel holds its rows in registers.
    """
    stage = stages(body, riders)
    needs = loop_needs(body, loop, stashed, riders)
    # constants are written in place, reductions belong to their loop, but riders are corrected after it
    ops = ("constant", "reduction")
    rows = [v for v in body.values if v not in loop and (v.op not in ops or v in riders)]
    phases: list[Phase] = []
    done: set[Value] = set()
    for k in range(max(stage.values(), default=0) + 1):
        row = [v for v in rows if stage[v] == k]
        if row:
            phases.append(Phase("row", tuple(row)))
        inside = needs.get(k, frozenset())
        kept = done.intersection(stashed) if recompute else done
        again = [v for v in body.values if v in inside and v not in kept]
        if again:
            phases.append(Phase("loop", tuple(again)))
            done.update(again)
    return tuple(phases)


def loop_needs(
    body: LoopBody,
    loop: Collection[Value],
    stashed: Collection[Value] = (),
    riders: Mapping[Value, Value] = NO_RIDERS,
) -> dict[int, frozenset[Value]]:
    """For each loop, by stage: what it must compute or read back from a scratch row."""
    stage = stages(body, riders)
    roots: dict[int, list[Value]] = {}
    for value in body.values:
        if value.op == "reduction" and value not in riders:
            roots.setdefault(stage[value] - 1, []).append(value)
        elif value in loop and (value.op == "store" or value.check):
            roots.setdefault(stage[value], []).append(value)
    found: dict[int, frozenset[Value]] = {}
    kept: set[Value] = set()
    for k in sorted(roots):
        needed = cone(roots[k], loop, kept)
        found[k] = frozenset(needed)
        kept |= {v for v in needed if v in stashed}
    return found


def cone(roots: Iterable[Value], among: Collection[Value], stop: Collection[Value]) -> set[Value]:
    """The roots and every value among these they are computed from, not going beyond `stop`."""
    found: set[Value] = set()
    pending = list(roots)
    while pending:
        value = pending.pop()
        if value in found:
            continue
        found.add(value)
        if value not in stop:
            pending += [v for v in value.operands if v in among]
    return found


def choose_stashed(
    body: LoopBody, loop: Collection[Value], limit: int, worth: int
) -> frozenset[Value]:
    """Values to keep in scratch rows: to compute them again costs at least `worth` operations, and all
    together have at most `limit` bytes an element."""
    using = users(body.values)
    stashed: set[Value] = set()
    computed: set[Value] = set()
    for k in sorted(loop_needs(body, loop)):
        inside = loop_needs(body, loop, stashed)[k]
        for value in reversed(body.values):
            if value not in inside or value not in computed or value in stashed:
                continue
            wanted = any(u in inside and u not in computed for u in using[value])
            size = sum(v.dtype.itemsize for v in {*stashed, value})
            if not wanted or value.op in ("store", "indirect") or size > limit:
                continue
            again = cone([value], loop, stashed)
            if sum(1 if v in stashed else cost(v) for v in again) >= worth:
                stashed.add(value)
        computed |= inside
    return frozenset(stashed)


def cost(value: Value) -> int:
    """Rough operations for one element; loads of scattered elements are dear."""
    if value.op in POINTWISE:
        return POINTWISE[value.op].flops
    if value.op in ("load", "scan"):
        return 6 if value.indirect or value.op == "scan" else 1
    return 0 if value.op == "constant" else 1


# -- what the rules of both languages ask of loads and stores


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


def operands(values: Iterable[Value]) -> set[Value]:
    """Everything that the values read."""
    return {operand for value in values for operand in value.operands}


def was_float(value: Value) -> bool:
    """An integer that a float was cut to."""
    if value.op != "to_dtype" or not is_int(value.dtype):
        return False
    return value.inputs[0].dtype.is_floating_point or was_float(value.inputs[0])


def innermost(body: LoopBody, var: sympy.Symbol) -> list[Value]:
    """Values that the loop over `var` must compute: those that vary along it, and stores."""
    along = varying(body.values, {var})
    return [v for v in body.values if v in along or v.op == "store"]


def separates(store: Value, var: sympy.Symbol, body: LoopBody) -> bool:
    """Different values of `var` go to different elements, all else being equal."""
    step = coefficient_of(store.index, var)
    return step not in (None, 0) and varying(body.values, {var}).isdisjoint(store.indirect)
