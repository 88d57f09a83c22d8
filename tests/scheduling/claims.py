"""Is what a fusion decision says true? Every claim is worked out again, by enumeration where it can be."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import sympy

from minicompile.debug.why import Answer
from minicompile.lowering.ir import ComputedBuffer, Scatter
from minicompile.scheduling.body import LoopBody
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


def at_hints(place: Dependency, schedule: Schedule) -> Dependency:
    """The same place with numbers for sizes."""
    if place.index is None:
        return place
    return Dependency(place.buffer, place.index.xreplace(dict(schedule.graph.size_hints)))


def hinted(body: LoopBody, schedule: Schedule, reduced: bool) -> dict[sympy.Symbol, int]:
    ranges = body.reduction_ranges if reduced else body.ranges
    return {v: size_hint(size, schedule.graph.size_hints) for v, size in ranges.items()}


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
        CLAIMS[decision.cause](schedule, decision)


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
        nowhere = re.search(r"no need to write (.*?) to memory", decision.reason)
        if nowhere:
            names = set(re.split(r", | and ", nowhere.group(1))) & set(schedule.graph.buffers)
            assert names and names <= schedule.memory.internal
    else:
        assert decision.cause == "shared_read" and told <= read[0] & read[1]
    assert decision.score > 0 and told <= {name for name, count in decision.saved if count}


def check_extern(schedule: Schedule, decision: FusionDecision) -> None:
    extern = next(n for n in decision.nodes if isinstance(n, ExternKernelSchedulerNode))
    assert str(extern.kernel.op) in decision.reason
    written = {d.buffer for n in decision.producers for d in n.writes}
    passed = written & {d.buffer for n in decision.consumers for d in n.reads}
    assert bool(passed) == (decision.kind != "horizontal")
    told = re.search(r"all of (.*?) (?:in memory|before)", decision.reason)
    assert bool(told) == bool(passed)
    if told is not None:
        assert set(re.split(r", | and ", told.group(1))) == passed
    if decision.kind == "template_epilogue":
        assert extern is decision.producers[0]
        found = re.search(r"could compute (\w+) tile", decision.reason)
        assert found is not None
        (reader,) = (n for n in decision.consumers if n.name == found.group(1))
        assert isinstance(reader, SchedulerNode) and not reader.is_reduction
        assert passed & {d.buffer for d in reader.reads} and decision.score > 0


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


def rounds_of(schedule: Schedule, name: str, buffer: str, op: str) -> list[frozenset[int]]:
    """The elements that a node touches in each round of its finished kernel's parallel loops."""
    kernel = kernel_of(schedule, name)
    x, r = (
        {v: size_hint(n, schedule.graph.size_hints) for v, n in g.items()}
        for g in (kernel.ranges, kernel.reduction_ranges)
    )
    place = [part.name for part in kernel.nodes].index(name)
    values = [v for v in kernel.bodies[place].values if v.op == op and v.buffer == buffer]
    return [
        frozenset().union(
            *(
                elements(
                    at_hints(Dependency(buffer, v.index), schedule),
                    {**x, **r},
                    dict(zip(x, at, strict=True)),
                )
                for v in values
            )
        )
        for at in itertools.product(*(range(n) for n in x.values()))
    ]


NO_STRIDES = ", which isn't a sum of strides"


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
    read = next(
        d for d in reads if re.match(re.escape(str(d.index)) + r"(,|:| and (\w+ )?at |$)", rest)
    )
    rest = rest.removeprefix(str(read.index))
    loops = {
        node.name: {**hinted(node.body, schedule, False), **hinted(node.body, schedule, True)}
        for node in (writer, reader)
    }
    whole, part = (
        elements(at_hints(place, schedule), loops[node.name], {})
        for place, node in ((write, writer), (read, reader))
    )
    if limited := re.match(r", only (\d+) of its (\d+) elements", rest):
        assert (len(part), len(whole)) == tuple(map(int, limited.groups())) and part < whole
    elif rest == ", from another start":
        assert write.index is not None and read.index is not None
        starts = [i.xreplace(dict.fromkeys(i.free_symbols, 0)) for i in (write.index, read.index)]
        assert starts[0] != starts[1]
    elif also := re.match(r" and (?:(\w+) )?at (.+?): two elements at once", rest):
        second = next(n for n in decision.nodes if n.name == (also.group(1) or name))
        assert also.group(2) in {str(d.index) for d in second.reads if d.buffer == buffer}
        kernel = kernel_of(schedule, name)
        bodies = dict(zip((n.name for n in kernel.nodes), kernel.bodies, strict=True))
        both = [
            {v.index for v in bodies[n].loads if v.buffer == buffer} for n in (name, second.name)
        ]
        assert any(i != j for i in both[0] for j in both[1])
    elif rounds := re.match(
        r": each round of its parallel loops makes (\d+) .* takes (\d+)( others)?$", rest
    ):
        made, taken = (
            rounds_of(schedule, node.name, buffer, op)
            for node, op in ((writer, "store"), (reader, "load"))
        )
        told = [int(number) for number in rounds.groups()[:2]]
        assert [max(map(len, made)), max(map(len, taken))] == told
        assert (told[0] == told[1]) == bool(rounds.group(3))
        assert not set(made) & set(taken), "a round would do"
    else:
        assert rest in (", in an order that doesn't suit what else they share", NO_STRIDES)
        if rest == NO_STRIDES:
            indices = ((write.index, writer), (read.index, reader))
            assert any(i is not None and not is_linear(i, loops[n.name]) for i, n in indices)
        else:  # something else fixes how the loops of the two correspond
            sides = [
                {b for n in g for b in touched(n)} for g in (decision.producers, decision.consumers)
            ]
            assert str(read.index) != written or len(sides[0] & sides[1]) > 1


def check_loops(schedule: Schedule, decision: FusionDecision) -> None:
    told = re.findall(r"(?:goes over (\d+) elements|runs) (\d+) times", decision.reason)
    assert len(told) == 2
    names = [g[0].name for g in (decision.producers, decision.consumers)]
    numbers = []
    for name in names:
        kernel = kernel_of(schedule, name)
        x, r = 1, 1
        for size in kernel.ranges.values():
            x *= size_hint(size, schedule.graph.size_hints)
        for size in kernel.reduction_ranges.values():
            r *= size_hint(size, schedule.graph.size_hints)
        numbers.append((str(r) if kernel.reduction_ranges else "", str(x)))
    assert sorted(told) == sorted(numbers)


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


def check_unknown_index(schedule: Schedule, decision: FusionDecision) -> None:
    found = re.match(r"(\w+) reads (\w+) at a position known only at run time", decision.reason)
    assert found is not None
    (reader,) = (n for n in decision.nodes if n.name == found.group(1))
    assert any(d.buffer == found.group(2) and d.index is None for d in reader.reads)
    assert any(d.buffer == found.group(2) for n in decision.nodes for d in n.writes)


def check_nothing_saved(schedule: Schedule, decision: FusionDecision) -> None:
    """No elements that both read, as sets; or they are read in different orders."""
    if "in different orders" in decision.reason:
        assert decision.score > 0
        return
    groups = (decision.producers, decision.consumers)
    common = {b for n in groups[0] for b in touched(n)} & {b for n in groups[1] for b in touched(n)}
    assert bool(common) == ("no buffer in common" not in decision.reason)
    assert decision.score == 0
    places: list[list[tuple[str, frozenset[int]]]] = [[], []]
    unknown = False
    for found, group in zip(places, groups, strict=True):
        for node in group:
            assert isinstance(node, SchedulerNode)
            loops = {**hinted(node.body, schedule, False), **hinted(node.body, schedule, True)}
            for place in (p for p in node.reads if p.buffer in common):
                strides = place.index is not None and is_linear(place.index, loops)
                unknown |= place.index is None
                if strides:
                    reached = frozenset(elements(at_hints(place, schedule), loops, {}))
                    found.append((place.buffer, reached))
    same = {place for place in places[0] if place[1]} & set(places[1])
    assert ("depends on the data" in decision.reason) == unknown
    for buffer, _ in same if not unknown else ():
        starts = {
            str(d.index.xreplace(dict.fromkeys(n.body.all_ranges, 0)))
            for n in decision.nodes
            for d in n.reads
            if d.buffer == buffer and d.index is not None and isinstance(n, SchedulerNode)
        }
        assert len(starts) > 1, f"{buffer}: one walks it backwards"


def is_linear(index: sympy.Expr, loops: Mapping[sympy.Symbol, int]) -> bool:
    return all(
        not term.free_symbols & set(loops)
        or term.is_symbol
        or (term.is_Mul and not term.atoms(sympy.Function))
        for term in sympy.Add.make_args(index)
    )


def operations(decision: FusionDecision) -> int:
    bodies = [n.body for n in decision.nodes if isinstance(n, SchedulerNode)]
    return sum(v.op not in ("constant", "store") for body in bodies for v in body.values)


def check_size(schedule: Schedule, decision: FusionDecision) -> None:
    told = re.search(r"have (\d+) operations, more than options\.\w+ = (\d+)", decision.reason)
    assert told is not None and operations(decision) == int(told.group(1)) > int(told.group(2))


def alive(decision: FusionDecision) -> int:
    """Values alive at once, counted anew: bodies one after the other, what is shared kept in between."""
    nodes = sorted(
        (n for n in decision.nodes if isinstance(n, SchedulerNode)), key=lambda n: int(n.name[3:])
    )
    uses: dict[object, list[int]] = {}
    for i, node in enumerate(nodes):
        sizes = {v: int(size) for v, size in node.body.all_ranges.items()}
        for place in (*node.reads, *node.writes):
            key: object = place.buffer
            if place.index is not None:
                key = place.buffer, frozenset(elements(place, sizes, {}))
            uses.setdefault(key, []).append(i)
    most = 0
    for i, node in enumerate(nodes):
        held = sum(1 for used in uses.values() if used[0] < i < used[-1])
        values = node.body.values
        own = 1
        for k, value in enumerate(values):
            # before it runs: what it or a later one takes, if it is computed, or loaded for an earlier one
            taken = [
                v for v in values if v.op != "constant" and any(v in w.operands for w in values[k:])
            ]
            ready = [
                v
                for v in taken
                if (values.index(v) < k and v.operands)
                or v in value.operands
                or any(v in w.operands for w in values[:k])
            ]
            own = max(own, len(ready))
        most = max(most, own + held)
    return most


def check_registers(schedule: Schedule, decision: FusionDecision) -> None:
    told = re.search(r"(\d+) values would be alive at once, more than \S+ = (\d+)", decision.reason)
    assert told is not None and alive(decision) == int(told.group(1)) > int(told.group(2))


def check_device(schedule: Schedule, decision: FusionDecision) -> None:
    buffers = schedule.graph.buffers
    assert len({buffers[d.buffer].layout.device for n in decision.nodes for d in n.writes}) == 2


CLAIMS = {
    "extern": check_extern,
    "cycle": check_cycle,
    "index_mismatch": check_index_mismatch,
    "loop_mismatch": check_loops,
    "hazard": check_hazard,
    "unknown_index": check_unknown_index,
    "no_saving": check_nothing_saved,
    "size_limit": check_size,
    "register_limit": check_registers,
    "device": check_device,
}
"""What is checked, by cause."""
