"""Is what a fusion decision says true? Every claim is worked out again, by enumeration where it can be."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import sympy

from minicompile.debug.why import Answer
from minicompile.lowering.ir import ComputedBuffer, Scatter
from minicompile.scheduling.nodes import (
    Dependency,
    ExternKernelSchedulerNode,
    FusedSchedulerNode,
    FusionDecision,
    Schedule,
    SchedulerNode,
    SingleNode,
)
from minicompile.scheduling.schedule import dependency_graph
from minicompile.shapes.expr import size_hint


def touched(node: SingleNode) -> set[str]:
    return {d.buffer for d in (*node.reads, *node.writes)}


def pairs_with_common_buffers(schedule: Schedule) -> Iterable[tuple[SingleNode, SingleNode]]:
    for one, other in itertools.combinations(schedule.before, 2):
        if touched(one) & touched(other):
            yield one, other


def kernel_of(schedule: Schedule, name: str) -> Any:
    """The kernel or call that a node ended in."""
    for node in schedule.nodes:
        inside = node.nodes if isinstance(node, FusedSchedulerNode) else [node]
        if any(part.name == name for part in inside):
            return node
    raise AssertionError(f"{name} is in no kernel")


def part_names(node: Any) -> set[str]:
    return {part.name for part in getattr(node, "nodes", [node])}


def elements(
    place: Dependency, loops: Mapping[sympy.Symbol, int], fixed: Mapping[sympy.Symbol, int]
) -> set[int]:
    """The elements that an index reaches when the `fixed` loops stand still."""
    assert place.index is not None
    assert place.index.free_symbols <= set(loops), "its own loops only"
    free = [v for v in place.index.free_symbols & set(loops) if v not in fixed]
    index = sympy.lambdify([*free, *fixed], place.index, "math")
    return {
        int(index(*values, *fixed.values()))
        for values in itertools.product(*(range(loops[v]) for v in free))
    }


def check_answer(schedule: Schedule, answer: Answer) -> None:
    """Its verdict and its reason are true of the finished schedule."""
    decision = answer.decision
    one, other = (kernel_of(schedule, names[0]) for names in (answer.a, answer.b))
    assert answer.same_kernel == (one is other) == decision.fused
    assert answer.headline.strip() and decision.reason and str(answer)
    for number, asked in answer.asked:
        assert schedule.decisions[number] is asked
    if answer.same_kernel:
        check_fused(schedule, decision)
        assert answer.step is not None and schedule.steps()[answer.step] is decision
    else:
        # the answer is about the two as they ended
        names = {frozenset(n.name for n in g) for g in (decision.producers, decision.consumers)}
        assert names == {frozenset(part_names(one)), frozenset(part_names(other))}
        CLAIMS.get(decision.cause, check_common)(schedule, decision)


def check_fused(schedule: Schedule, decision: FusionDecision) -> None:
    made, used = ([n.name for n in g] for g in (decision.producers, decision.consumers))
    assert kernel_of(schedule, made[0]) is kernel_of(schedule, used[0])
    groups = (decision.producers, decision.consumers)
    written = [{d.buffer for n in g for d in n.writes} for g in groups]
    read = [{d.buffer for n in g for d in n.reads} for g in groups]
    told = set(re.findall(r"\b[a-z]\w*\d\w*\b", decision.reason)) & set(schedule.graph.buffers)
    assert told
    if decision.cause == "handed_over":
        assert told <= (written[0] & (read[1] | written[1])) | (written[1] & (read[0] | written[0]))
    else:
        assert decision.cause == "shared_read" and told <= read[0] & read[1]
    buffers, hints = schedule.graph.buffers, schedule.graph.size_hints
    empty = {name for name in told if size_hint(buffers[name].layout.numel, hints) == 0}
    assert told - empty <= {name for name, count in decision.saved if count}


def check_extern(schedule: Schedule, decision: FusionDecision) -> None:
    extern = next(n for n in decision.nodes if isinstance(n, ExternKernelSchedulerNode))
    assert str(extern.kernel.op) in decision.reason
    written = {d.buffer for n in decision.producers for d in n.writes}
    passed = written & {d.buffer for n in decision.consumers for d in n.reads}
    assert bool(passed) == (decision.kind != "horizontal")


def check_cycle(schedule: Schedule, decision: FusionDecision) -> None:
    """What lies between is in one finished kernel or call, which may have grown since; it waits for one side,
    and the other for it."""
    before = dependency_graph(schedule.before)
    groups = [part_names(node) for node in schedule.nodes]
    place = {name: k for k, names in enumerate(groups) for name in names}
    needs: dict[int, set[int]] = {k: set() for k in range(len(groups))}
    for i, earlier in before.items():
        here = place[schedule.before[i].name]
        needs[here] |= {place[schedule.before[j].name] for j in earlier} - {here}

    def waits_for(k: int) -> set[int]:
        found: set[int] = set()
        todo = [k]
        while todo:
            new = needs[todo.pop()] - found
            found |= new
            todo += new
        return found

    (middle,) = {place[name] for name in decision.between}
    assert set(decision.between) <= groups[middle]
    assert decision.between[0] in decision.reason
    first, last = (place[g[0].name] for g in (decision.producers, decision.consumers))
    assert len({first, middle, last}) == 3
    assert first in waits_for(middle) and middle in waits_for(last)


def check_index_mismatch(schedule: Schedule, decision: FusionDecision) -> None:
    found = re.match(r"(\w+) is written at (.+?) but (\w+) reads it at (.+)$", decision.reason)
    assert found is not None, decision.reason
    buffer, written, name, rest = found.groups()
    writer = next(n for n in decision.nodes if any(d.buffer == buffer for d in n.writes))
    reader = next(n for n in decision.nodes if n.name == name)
    assert isinstance(writer, SchedulerNode) and isinstance(reader, SchedulerNode)
    (write,) = (d for d in writer.writes if d.buffer == buffer)
    reads = [d for d in reader.reads if d.buffer == buffer]
    assert str(write.index) == written
    used, _, numbers = rest.partition(":")
    assert used in [str(d.index) for d in reads]
    hints, whole = schedule.graph.size_hints, int(numbers.split()[-1])
    assert whole == math.prod(size_hint(size, hints) for _, size in write.ranges)


def check_hazard(schedule: Schedule, decision: FusionDecision) -> None:
    scatters = {
        op.name: op.loops.target
        for op in schedule.graph.operations
        if isinstance(op, ComputedBuffer) and isinstance(op.loops, Scatter)
    }
    told = [name for name in schedule.graph.buffers if re.search(rf"\b{name}\b", decision.reason)]
    sides = [{b for n in g for b in touched(n)} for g in (decision.producers, decision.consumers)]
    assert scatters.keys() & {n.name for n in decision.nodes}
    assert told and all(name in sides[0] | sides[1] for name in told)
    assert any(sides[0] & sides[1] & {s, t} for s, t in scatters.items())


def check_common(schedule: Schedule, decision: FusionDecision) -> None:
    sides = [{b for n in g for b in touched(n)} for g in (decision.producers, decision.consumers)]
    assert bool(sides[0] & sides[1]) == ("no buffer in common" not in decision.reason)


CLAIMS = {
    "extern": check_extern,
    "cycle": check_cycle,
    "index_mismatch": check_index_mismatch,
    "hazard": check_hazard,
}
"""What is checked, by cause."""
