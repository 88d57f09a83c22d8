"""`python -m tests.bench.kernels`: the kernels of every named pattern beside torch.compile's.

What is counted, by one rule for both compilers, over forward and backward:

    loop nests   outermost `for` statements of the generated C++ functions, and calls outside of them of our
                 helpers that loop (`mc_row_sum`). Loops inside one outer loop are one nest. A library
                 call counts as one, and so does a result that is copied back into an input
    bytes        for each kernel and library call, the distinct elements of each buffer that it reads from
                 memory or writes there, at most the whole buffer; library calls touch all of it
    launches     calls of Triton kernels, library calls and such copies

First the results are compared with eager's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._inductor import dependencies, scheduler

import minicompile
from minicompile.bench.machine import table_text
from minicompile.bench.patterns import PATTERNS
from minicompile.compat.torch_compiler import inductor_kernels, inductor_told
from minicompile.errors import MinicompileError
from minicompile.ops.display import bytes_text
from minicompile.ops.handler import Index
from minicompile.pipeline_result import CompiledStages, Trace
from minicompile.scheduling.nodes import FusedSchedulerNode, SchedulerNode
from minicompile.shapes.expr import Ranges, product, size_hint
from minicompile.shapes.strided import StridedIndex, elements, footprint

WANTED = 22
"""Patterns in which we must not need more than torch.compile."""
ALLOWED_ERROR = 1e-4
"""Largest difference from eager, by the largest number of a result (fp32)."""


class Touch(NamedTuple):
    """What a kernel does to a buffer: all of it if `loops` is None, any elements if `place` is."""

    buffer: str
    written: bool
    place: Index | None
    loops: Ranges | None
    elements: int
    """Those of the whole buffer."""
    itemsize: int


RivalGraph = tuple[str, list[list[Touch]], int]


@dataclass(frozen=True)
class Counts:
    """One compiler's kernels for one pattern."""

    nests: int = 0
    bytes: int = 0
    launches: int | None = None


@dataclass(frozen=True)
class Row:
    """What was found for one pattern."""

    name: str
    error: float
    ours: Counts
    theirs: Counts
    failure: str = ""

    def wins(self, on_gpu: bool) -> bool:
        """Are the results right, and does nothing that this device shows take more?"""
        ours, theirs = self.ours, self.theirs
        few = (
            (ours.launches or 0) <= (theirs.launches or 0) if on_gpu else ours.nests <= theirs.nests
        )
        right = not self.failure and self.error <= ALLOWED_ERROR
        return right and few and ours.bytes <= theirs.bytes


def loop_nests(text: str) -> int:
    """How many loops of C++ functions aren't inside another."""
    found, end = 0, 0
    for match in re.finditer(r"\b(for|mc_row_\w+)\s*\(", text):
        if match.start() >= end:
            found, end = found + 1, _statement_end(text, match.end() - 1)
    return found


def _statement_end(text: str, at: int) -> int:
    """Where the statement ends whose parentheses open at `at`."""
    depth = 0
    for match in re.compile(r"[(){};]").finditer(text, at):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] in "};":
            return match.end()
    return len(text)


def bytes_moved(touches: Iterable[Touch]) -> int:
    """Bytes that one kernel reads from memory and writes there."""
    places: dict[tuple[str, bool], dict[object, int]] = defaultdict(dict)
    whole: dict[tuple[str, bool], int] = {}
    for touch in touches:
        buffer, loops, index = (touch.buffer, touch.written), touch.loops, touch.place
        where: object = index
        count = touch.elements if loops is None else size_hint(product(loops.values()), {})
        if loops is not None and index is not None and index.free_symbols <= loops.keys():
            area = footprint(StridedIndex.of(index, loops), loops, {})
            where = area or index
            used = {v: size for v, size in loops.items() if v in index.free_symbols}
            count = elements(area or (index, tuple(used.items())), {})
        places[buffer][where] = count * touch.itemsize
        whole[buffer] = touch.elements * touch.itemsize
    return sum(min(whole[buffer], sum(found.values())) for buffer, found in places.items())


def our_kernels(stages: CompiledStages) -> Iterator[list[Touch]]:
    """What each kernel and library call of a graph touches in memory."""
    schedule, buffers = stages.schedule, stages.loops.buffers
    for node in schedule.nodes:
        kernel = isinstance(node, FusedSchedulerNode)
        inside = {d.buffer for d in node.writes} if kernel else set()
        touches: list[Touch] = []
        for part in node.nodes if isinstance(node, FusedSchedulerNode) else [node]:
            loops = part.body.all_ranges if isinstance(part, SchedulerNode) else None
            for written, places in ((False, part.reads), (True, part.writes)):
                for d in places:
                    hidden = schedule.memory.internal if written else inside
                    if d.buffer not in hidden:
                        layout = buffers[d.buffer].layout
                        size, itemsize = int(layout.storage_size), layout.dtype.itemsize
                        touches.append(Touch(d.buffer, written, d.index, loops, size, itemsize))
        yield touches


def count_ours(trace: Trace, launches: int) -> Counts:
    """From what every stage made of a function; `launches` is how many Triton kernels it has."""
    nests = moved = others = 0
    for stages in trace.graphs.values():
        moved += sum(map(bytes_moved, our_kernels(stages)))
        nests += sum(loop_nests(kernel.text) for kernel in stages.kernels)
        others += len(stages.loops.externs)
    assert trace.aot is not None
    forward = trace.graphs["forward"]
    written = {a.reuses for step in forward.schedule.memory.allocate for a in step}
    for index in trace.aot.metadata.mutated_inputs:
        if getattr(forward.loops.inputs[index], "name", "") in written:  # by the kernel itself
            continue
        others += 1
        moved += 2 * trace.capture.fakes[index].nbytes
    return Counts(nests + others, moved, launches + others)


def count_theirs(graphs: Sequence[RivalGraph], on_gpu: bool) -> Counts:
    """From the text of torch.compile's graphs and what their kernels touch."""
    nests = launches = moved = 0
    for text, kernels, externs in graphs:
        nests, launches = nests + externs, launches + externs
        nests += sum(map(loop_nests, re.findall(r"r'''(.*?)'''", text, re.S)))
        launches += len(re.findall(r"^\s+triton_\w+\.run\(", text, re.M))
        launches += len(
            re.findall(r"\.(?:sum|prod|amin|amax)\(dim=0\)", text)
        )  # of split reductions
        moved += sum(bytes_moved(kernel) for kernel in kernels)
    return Counts(nests, moved, launches if on_gpu else None)


@contextlib.contextmanager
def inductor_graphs() -> Iterator[list[RivalGraph]]:
    """What torch.compile makes inside: of each graph the text, what each kernel touches, and how many library
    calls there are."""
    found: list[RivalGraph] = []

    def tell(kind: str, graph: Any, text: str) -> None:
        if kind == "lowered":
            touches = [their_touches(graph, node) for node in graph.scheduler.nodes]
            found.append((text, touches, inductor_kernels(graph)[1]))

    with inductor_told(tell):
        yield found


def their_touches(graph: Any, node: Any) -> list[Touch]:
    inside, found = node.get_buffer_names(), []
    for part in node.get_nodes():
        every = {}
        if isinstance(part, scheduler.SchedulerNode):
            every = dict(enumerate(size for sizes in part.get_ranges() for size in sizes))
        places = [(False, dep) for dep in part.read_writes.reads if dep.name not in inside]
        places += [
            (True, d) for d in part.read_writes.writes if d.name not in graph.removed_buffers
        ]
        for written, dep in places:
            buffer = graph.try_get_buffer(dep.name)
            layout: Any = None if buffer is None else buffer.maybe_get_layout()
            nothing = isinstance(part, scheduler.NopKernelSchedulerNode) or not hasattr(
                layout, "size"
            )
            if nothing or isinstance(dep, dependencies.WeakDep):
                continue
            size, index, loops = int(layout.storage_size()), None, None
            if isinstance(dep, dependencies.MemoryDep):
                index, loops = dep.index, every if dep.is_indirect() else dict(dep.ranges)
            for way in {
                written,
                written and not getattr(dep, "mode", None),
            }:  # atomic_add reads too
                found.append(Touch(dep.name, way, index, loops, size, layout.dtype.itemsize))
    return found


def difference(ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> float:
    """The largest difference, by the largest number of each tensor."""
    worst = 0.0
    for a, b in zip(ours, eager, strict=True):
        largest = b.double().abs().max().item() or 1.0
        found = (a.double() - b.double()).abs().max().item() / largest
        worst = max(worst, found if found == found else float("inf"))
    return worst


def measure(name: str, device: str) -> Row:
    """One pattern, by eager, minicompile and torch.compile."""
    pattern, on_gpu = PATTERNS[name], device.startswith("cuda")
    try:
        eager = pattern.run(pattern.fn, pattern.make_inputs(device, torch.float32))
        compiled = minicompile.compile(pattern.fn, fullgraph=True, dynamic=False)
        results = pattern.run(compiled, pattern.make_inputs(device, torch.float32))
        with torch.no_grad():
            error = difference(results, eager)
        del results, eager
        trace, triton = (
            minicompile.trace(
                minicompile.compile(
                    pattern.fn, dynamic=False, options={"device_codegen": language}
                ),
                *pattern.make_inputs(device, torch.float32),
            )
            for language in ("auto", "triton")
        )
        launches = sum(len(stages.kernels) for stages in triton.graphs.values())
        with inductor_graphs() as graphs:
            rival = torch.compile(pattern.fn, dynamic=False)
            pattern.run(rival, pattern.make_inputs(device, torch.float32))
        if len(graphs) != 1 + pattern.training:
            raise RuntimeError(f"torch.compile made {len(graphs)} graphs where the code was read")
        ours, theirs = count_ours(trace, launches), count_theirs(graphs, on_gpu)
    except Exception as failure:  # whatever a compiler raises is the result
        reason = f"{type(failure).__name__}: {failure}".splitlines()[0]
        return Row(name, float("inf"), Counts(), Counts(), reason)
    return Row(name, error, ours, theirs)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kernels", description=__doc__)
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="patterns to compare (all)")
    add("--gpu", action="store_const", const="cuda", default="cpu", help="compare Triton kernels")
    add("--jobs", type=int, default=1, help="patterns compared at a time, each in its process")
    add("--json", type=Path, metavar="FILE", help="write what was counted to FILE")
    return parser.parse_args(given)


def run(chosen: argparse.Namespace) -> int:
    """The command: 1 if too few patterns do with what torch.compile needs."""
    names = chosen.names or list(PATTERNS)
    unknown = [name for name in names if name not in PATTERNS]
    if unknown:
        raise MinicompileError(f"no pattern {unknown[0]!r}; known: {', '.join(PATTERNS)}")
    device = chosen.gpu
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        each: Any = map
        if chosen.jobs > 1:
            pool = ProcessPoolExecutor(chosen.jobs, get_context("spawn"))
            each = stack.enter_context(pool).map
        for row in each(measure, names, [device] * len(names)):
            rows.append(row)
            print(f"{len(rows)} of {len(names)}: {row.name}", flush=True)
    on_gpu = device == "cuda"
    head = [
        "pattern",
        "off by",
        "loop nests",
        "theirs",
        "bytes",
        "theirs",
        "launches",
        "theirs",
        "",
    ]
    print(table_text(head, [cells(row, on_gpu) for row in rows]))
    for row in rows:
        if row.failure:
            print(f"{row.name}: {row.failure}")
    won, wanted = sum(row.wins(on_gpu) for row in rows), min(WANTED, len(rows))
    print(f"{won} of {len(rows)} need no more than torch.compile; wanted {wanted}")
    if chosen.json is not None:
        facts = [{**asdict(row), "wins": row.wins(on_gpu)} for row in rows]
        chosen.json.write_text(json.dumps({"device": device, "patterns": facts}, indent=2) + "\n")
    return int(won < wanted)


def cells(row: Row, on_gpu: bool) -> list[str]:
    """A row of the table."""
    found = [row.name, f"{row.error:.0e}"]
    for what in ("nests", "bytes", "launches"):
        for counts in (row.ours, row.theirs):
            number = getattr(counts, what)
            shown = bytes_text(number) if what == "bytes" else str(number)
            found.append("-" if number is None or (what == "nests" and on_gpu) else shown)
    return [*found, "" if row.wins(on_gpu) else "more"]


if __name__ == "__main__":
    sys.exit(run(arguments()))
