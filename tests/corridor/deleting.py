"""What becomes of kernel lines when operations are deleted from the source.

The kernel lines of a program and of the same program without an operation (line numbers stay) are compared
as multisets of (text, operations). Text is taken without the numbers of values, arguments and loaded
indices, and scaffold isn't counted. What moves a value without computing anything (to and from memory or a
scratch row, into another dtype or index) is known by its kind alone: where it lies is up to the loops around.

The law, where D are the operations that the second program lacks (or whose results nothing reads any more),
and their neighbours those that gave D operands or read its results (also by way of views and sums):

1. what computes and lists no operation of D is in both programs, as often and with the same origins. A
   neighbour's may be there more or less often: it is inlined in its readers, and these are others now;
2. what computes and lists D alone is gone;
3. what lists D and others is gone. What they have in common (a sum of the gradients of several readers) lists
   the others, and perhaps neighbours in the place of D;
4. what moves a value and lists neither D nor a neighbour is in both programs, as in 1. At the joint the
   neighbours meet, and hand values over in other ways than they did to D; so a load there may also become one
   with a neighbour's. A neighbour's sum of a row or column that D computed rode in D's loop; of what now lies
   in memory a helper computes it, or it is summed four at a time.

It holds where the compiler decides alike for both programs: `DECISIONS` takes away what weighs and chooses.
What stays a choice is where loops are cut (a scan in C++ has a loop of its own beside dear operations), and
which dimension runs innermost; and a deletion that leaves another operation without a reader deletes that,
too, in part if it has several results. No program here asks for these.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from minicompile.codegen.plan import CodeLine
from minicompile.ops.graph import origins_of
from minicompile.ops.origin import Origins
from minicompile.pipeline_result import Trace

DECISIONS = {
    "partitioner": "default",  # what the backward reads is saved, and nothing computed again
    "inline": "never",  # each value is computed once
    "assert_indirect_indexing": False,  # nothing stays for the sake of a check
}

Operation = tuple[int, str]
"""An operation by its innermost line and what it calls: the same in both programs."""
Operations = frozenset[Operation]

MOVES = {
    "store": r"ptr\[.*\] = tmp;|tl\.store\(.*|tmp_\w+\[.*\] = tmp;",
    "load": r"\w+ tmp = (tmp \? )?(ptr|tmp_\w+)\[.*\]( : 0)?;|tmp = tl\.load\(.*|mc_transpose.*",
    "scratch": r".*aligned\(64\).*",
    "cast": r"\w+ tmp = (\(\w+\)|mc_(to|from)_b?f16)\(?tmp\)?;|tmp = tmp\.to\(.*\)",
    "column sum": r"float tmp_part = 0;|tmp_part = tmp_part \+ tmp;|"
    r"tmp_(total_)?tile\[\w+\] \+?= (0(\.0)?|tmp_part|tmp_(total_)?tile\[\w+\]( \+ tmp)?);",
    "index": r"int\d+_t tmp = [^t]*;|tmp = \([^t]*\)\.to\(.*\)",
}
"""Lines that compute nothing; and the ways to sum a column."""
SHARED = r"tmp \+ (tmp|0)\b"
"""Computing lines that stay though an operation of theirs is deleted: sums of gradients, and the positions
that GPT-2 computes for embeddings and mask alike."""


ROW_SUM = "float tmp = mc_row_sum(row);"


class Line(NamedTuple):
    """A kernel line without the numbers that depend on what else is in the kernel."""

    text: str
    operations: Operations

    @property
    def moves(self) -> bool:
        return self.text in MOVES


def operations(origins: Origins) -> Operations:
    return frozenset((o.line.line, o.target) for o in origins if o.line is not None)


def kernel_lines(trace: Trace) -> Iterator[CodeLine]:
    """Every kernel line that computes, loads or stores."""
    for stages in trace.graphs.values():
        for kernel in stages.kernels:
            yield from (line for line in kernel.lines if not line.scaffold)


def normal(text: str) -> str:
    text = re.sub(r"(?<![A-Za-z])tmp\d+", "tmp", text.strip())
    text = re.sub(r"\b(in|out|in_out)_ptr\d+", "ptr", text)
    text = re.sub(r"\bi\d+(?=\b|_bad)", "i", text)
    text = re.sub(r"(mc_row_\w+)\(.*\)", r"\1(row)", text)
    return next((kind for kind, form in MOVES.items() if re.fullmatch(form, text)), text)


def lines_of(trace: Trace) -> Counter[Line]:
    lines = kernel_lines(trace)
    return Counter(Line(normal(line.text), operations(line.origins)) for line in lines)


VIEWS = frozenset(
    {"view", "reshape", "transpose", "permute", "expand", "unsqueeze", "split", "getitem"}
)
SUMS = frozenset({"add"})
"""What hands a gradient on as it is."""


def sources(node: fx.Node, through: frozenset[str]) -> set[fx.Node]:
    """The node, and those whose values or gradients it only hands on."""
    name = str(getattr(node.target, "__name__", node.target))
    further = node.all_input_nodes if name in through else []
    return {node}.union(*(sources(used, through) for used in further))


def neighbours(
    nodes: dict[fx.Node, Operations], deleted: Operations, through: frozenset[str]
) -> Operations:
    """Who gave the deleted operations operands, or read their results."""
    found: set[Operation] = set()
    for node, own in nodes.items():
        read = (sources(used, through) for used in node.all_input_nodes)
        for given in (nodes.get(used, frozenset()) for used in set[fx.Node]().union(*read)):
            if not deleted.isdisjoint(own | given):
                found |= own | given
    return frozenset(found) - deleted


def living(trace: Trace) -> list[fx.Node]:
    """The captured calls that the output depends on."""
    found: set[fx.Node] = set()
    for node in reversed(list(trace.capture.graph.nodes)):
        if node.op == "output" or node in found:
            found.update(node.all_input_nodes)
    return [n for n in trace.capture.graph.nodes if n in found and n.op.startswith("call")]


@dataclass
class Deletion:
    """What a deletion did to the kernel lines."""

    deleted: Operations
    near: Operations
    """The neighbours, by way of views."""
    neighbours: Operations
    """By way of sums, too."""
    removed: Counter[Line]
    added: Counter[Line]
    kept: Counter[Line]

    @classmethod
    def between(cls, before: Trace, after: Trace) -> Deletion:
        old, new = (
            {n: operations(origins_of(n)) for n in living(trace)} for trace in (before, after)
        )
        there, left = (frozenset[Operation]().union(*nodes.values()) for nodes in (old, new))
        deleted = there - left
        assert deleted and not left - there, "operations are deleted, and only that"
        around = (neighbours(old, deleted, through) for through in (VIEWS, VIEWS | SUMS))
        a, b = lines_of(before), lines_of(after)
        return cls(deleted, *around, a - b, b - a, a & b)

    def joint(self, line: Line) -> bool:
        """The move is a neighbour's, or has become one with a neighbour's."""
        merged = (new for new in self.added if new.text == line.text)
        others = (new.operations for new in merged if new.operations > line.operations)
        return any(map(self.neighbours.intersection, (line.operations, *others)))

    def violations(self) -> list[str]:
        """Where the law doesn't hold."""
        found = []
        shared = Counter[Line]()
        for line, count in self.removed.items():
            if self.deleted & line.operations:
                shared[line] = count * bool(line.operations - self.deleted)
            elif not (self.joint(line) if line.moves else self.inlined(line)):
                found.append(f"gone: {line}")
        for line, count in self.added.items():
            met = line.moves or line.text == ROW_SUM or self.inlined(line)
            if met and line.operations & self.neighbours:
                continue
            for old in shared:
                rest = old.operations - self.deleted
                fits = rest <= line.operations <= rest | self.neighbours
                fits &= line.moves or bool(re.search(SHARED, line.text))
                taken = min(count, shared[old]) if old.text == line.text and fits else 0
                shared[old] -= taken
                count -= taken
            if count:
                found.append(f"new: {line}")
        return found

    def inlined(self, line: Line) -> bool:
        """A neighbour computes it in both programs."""
        return line in self.kept and line.operations <= self.near

    @property
    def exact(self) -> int:
        """How many lines list what was deleted alone; all of them are gone."""
        return sum(n for line, n in self.removed.items() if line.operations <= self.deleted)
