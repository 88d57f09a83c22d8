"""Sums of rows and sums of columns of the same elements, in one kernel that reads them once.

The backward of a norm reduces each row, and the gradients of its weights add up all rows. A kernel that holds
whole rows adds each to one row of sums, a "fold"; what its programs found is added up by another launch
(fold.py). The real compiler: FusedMixOrderReductions in torch/_inductor/scheduler.py.
"""

from __future__ import annotations

import itertools

from minicompile.lowering.ir import Template
from minicompile.ops.handler import Index
from minicompile.options import Options
from minicompile.scheduling.fusion import Fuser, NoPolicy, join_rule, may_fuse
from minicompile.scheduling.nodes import FusedSchedulerNode, FusionDecision, ScheduledNode
from minicompile.shapes.expr import ZERO, coefficient_of, product, simplify_index, size_hint
from minicompile.shapes.strided import Hints

HELD, LEAST_ROWS = 2**15, 2048
"""Most elements of rows that a program holds, and fewest rows for which another launch pays."""


@join_rule("columns")
def join_columns(groups: dict[int, ScheduledNode], fuser: Fuser) -> None:
    """Let sums of columns ride in kernels that hold the rows, where none must run before the other."""
    mask, ancestors = fuser.mask, fuser.ancestors
    reductions = [
        number
        for number, group in groups.items()
        if isinstance(group, FusedSchedulerNode) and group.reduction_ranges
    ]
    for i, j in itertools.permutations(reductions, 2):
        if i not in groups or j not in groups:
            continue
        if ancestors[i] & mask[j] or ancestors[j] & mask[i]:
            continue
        rows, columns = groups[i], groups[j]
        joined = folded(rows, columns, fuser.context.hints, fuser.context.options)
        if joined is None:
            continue
        assert isinstance(rows, FusedSchedulerNode) and isinstance(columns, FusedSchedulerNode)
        sides = ({n.name for n in rows.nodes}, {n.name for n in columns.nodes})
        apart = (all(pair & side for side in sides) for pair in map(set, fuser.wishes.forbid))
        if isinstance(fuser.policy, NoPolicy) or any(apart):
            continue
        told = (
            "rows of one are columns of the other: as it holds each row, it adds it to the others"
        )
        one, other = tuple(rows.nodes), tuple(columns.nodes)
        decision = FusionDecision(one, other, "horizontal", True, "shared_read", told)
        if not may_fuse(decision):
            continue
        fuser.decisions.append(decision)
        fuser.join(i, j)
        groups[i] = joined
        del groups[j]


def folded(
    rows: ScheduledNode, columns: ScheduledNode, hints: Hints, options: Options
) -> FusedSchedulerNode | None:
    """Both as one kernel over the rows' loops: the columns' sums are folds. None if they can't be."""
    if not isinstance(rows, FusedSchedulerNode) or not isinstance(columns, FusedSchedulerNode):
        return None
    device = rows.nodes[0].buffer.layout.device
    triton = options.device_codegen == "triton" or (
        options.device_codegen == "auto" and device.type == "cuda"
    )
    x, r = list(rows.ranges.values()), list(rows.reduction_ranges.values())
    sizes = [*columns.reduction_ranges.values()], [*columns.ranges.values()]
    if not triton or not r or sizes != (x, r) or columns.nodes[0].buffer.layout.device != device:
        return None
    every = [v for body in (*rows.bodies, *columns.bodies) for v in body.values]
    sums = [v for body in columns.bodies for v in body.reductions]
    plain = all(v.op != "scan" and v.kind != "atomic_add" and not v.indirect for v in every)
    small = len(every) <= options.max_kernel_operations
    if size_hint(product(x), hints) < LEAST_ROWS or not plain or not sums or not small:
        return None
    if any(isinstance(n.buffer.loops, Template) for n in (*rows.nodes, *columns.nodes)):
        return None
    if any(v.kind != "sum" or not v.dtype.is_floating_point for v in sums):
        return None
    names = dict(zip([*columns.ranges, *columns.reduction_ranges],
                     [*rows.reduction_ranges, *rows.ranges], strict=True))  # fmt: skip
    over = {**rows.ranges, **rows.reduction_ranges}

    def moved(index: Index) -> Index:
        return simplify_index(index.xreplace(names), over)

    made: set[str] = set()
    """What is known when the columns have been added up."""
    bodies = []
    for body, level in zip(columns.bodies, columns.levels, strict=True):
        later = any(v.buffer in made for v in body.loads)
        if later != (level == "row"):
            return None
        if later or body.reductions:
            made.update(v.buffer for v in body.stores)
        bodies.append(body.reindexed(moved, rows.ranges, rows.reduction_ranges))
        for value in bodies[-1].reductions:
            value.op = "fold"
    inner = next(reversed(rows.reduction_ranges))
    one, other = (
        {(v.buffer, v.index or ZERO) for body in group for v in body.loads}
        for group in (rows.bodies, bodies)
    )
    shared = [index for _, index in one & other if index.free_symbols >= over.keys()]
    held = sum(inner in index.free_symbols for _, index in one | other)
    side_by_side = any(coefficient_of(index, inner) == 1 for index in shared)
    if not side_by_side or held * size_hint(product(r), hints) > HELD:
        return None
    nodes, bodies = [*rows.nodes, *columns.nodes], [*rows.bodies, *bodies]
    levels = list(rows.levels)
    levels += ["elem" if level == "elem" else "column" for level in columns.levels]
    return FusedSchedulerNode(nodes, bodies, levels, rows.ranges, rows.reduction_ranges)
