"""What a Triton kernel's plan decides: persistent or looped reduction, tiles, warps.

Tiles are "x" and "r": elements of the flattened parallel and reduction dimensions that one program holds.
Starting points read off torch/_inductor/runtime/triton_heuristics.py.
"""

from __future__ import annotations

import torch

from minicompile.codegen.phases import contiguous_uses, turned
from minicompile.codegen.plan import KernelPlan, plan_rule, power_of_two
from minicompile.codegen.printing import index_dtype
from minicompile.codegen.split import PART, refusal
from minicompile.options import Options
from minicompile.scheduling.body import iterate_indices
from minicompile.shapes.expr import is_float, product

ROW_REGISTERS = 2**15
"""Elements of loaded rows that one program may hold: about 64 registers in each of 512 threads."""

LONGEST_ROW = 2**14
"""Longest persistent row."""

MULTIPROCESSORS = 132
LEAST_PART, LEAST_COLUMN, COLUMNS = 4096, 64, 64
"""Fewest elements of a part of a row; of a column, of which a program has so many side by side."""

SQUARE = 32
"""Side of the tiles of a kernel that reads along one loop and writes along another."""

PROGRAMS = 264
"""Programs that keep a large GPU busy: two for each of 132 multiprocessors."""

LARGEST_BLOCK = 2**20
"""Triton's limit on a block's elements: how far past its end a flattened index may run."""


def clamp(n: int, low: int, high: int) -> int:
    return max(low, min(n, high))


def rows_are_contiguous(plan: KernelPlan) -> bool:
    """The reduction runs along memory: an inner reduction."""
    return contiguous_uses(next(reversed(plan.reduction_ranges)), plan.loop) >= 0


def longest_persistent(plan: KernelPlan) -> int:
    """The longest row to hold at once, by how many different rows the kernel loads and scans."""
    if not rows_are_contiguous(plan):
        return 64
    rows = sum(1 for v in plan.loop if v.op in ("load", "scan"))
    return min(ROW_REGISTERS // max(rows, 1), LONGEST_ROW)


@plan_rule("triton:index_dtype")
def choose_index_dtype(plan: KernelPlan, options: Options) -> None:
    """int32 only where every index provably fits, and the flattened ones to the end of their last block."""
    flat = (product(plan.ranges.values()), product(plan.reduction_ranges.values()))
    if not all(isinstance(n, int) and n + LARGEST_BLOCK < 2**31 for n in flat):
        plan.reject("int32 indices", "too many elements, or their number varies")
        return
    body = plan.body
    ranges = body.all_ranges | {v.symbol: v.size for v in body.values if v.symbol is not None}
    for index in iterate_indices(body):
        if not is_float(index) and index_dtype(index, ranges) is not torch.int32:
            plan.reject("int32 indices", f"{index} may not fit")
            return
    plan.index_dtype = torch.int32


@plan_rule("triton:reduction")
def choose_reduction(plan: KernelPlan, options: Options) -> None:
    """Rows that fit into registers are read once; longer ones are swept in a loop."""
    if not plan.reduction_ranges:
        return
    known = all(isinstance(size, int) for size in plan.reduction_ranges.values())
    limit = longest_persistent(plan)
    if known and plan.row_length <= limit:
        plan.reduction = "persistent"
    else:
        reason = f"a row has {plan.row_length} elements, more than {limit}"
        plan.reject("persistent reduction", reason if known else "its length varies")


@plan_rule("triton:split")
def choose_split(plan: KernelPlan, options: Options) -> None:
    """Few long rows are shared by programs: each takes a part."""
    if plan.reduction != "looped" or PART in plan.body.all_ranges:
        return
    least, columns = (LEAST_PART, 1) if rows_are_contiguous(plan) else (LEAST_COLUMN, COLUMNS)
    programs = -(-plan.rows // columns)
    parts = min(4 * MULTIPROCESSORS // max(programs, 1), plan.row_length // least)
    if programs * 4 > MULTIPROCESSORS * 3 or parts < 2:
        plan.reject("split reduction", f"{programs} programs for rows of {plan.row_length}")
    elif why := refusal(plan):
        plan.reject("split reduction", why)
    else:
        plan.reduction, plan.tiles = "split", {"parts": power_of_two(parts)}


@plan_rule("triton:tiles")
def choose_tiles(plan: KernelPlan, options: Options) -> None:
    """Elements per program, and warps to compute them: 8 to 16 elements a thread, so that loads are wide."""
    if plan.reduction == "split":
        return
    if plan.reduction == "none" and (found := turned(plan.body, plan.hints, SQUARE)):
        plan.across, side = found[0], SQUARE
        plan.tiles, plan.num_warps = {"y": side, "x": side}, 4
        return
    if plan.reduction == "none":
        block = clamp(power_of_two(plan.rows // PROGRAMS), 128, 1024)
        plan.tiles, plan.num_warps = {"x": block}, clamp(block // 256, 1, 4)
        return
    length = power_of_two(plan.row_length)
    # rows per program that still leave enough programs
    busy = power_of_two(plan.rows // PROGRAMS)
    along_r = rows_are_contiguous(plan)
    if plan.reduction == "persistent":
        room = max((1024 if along_r else 4096) // length, 1)
        block = min(room, busy) if along_r else clamp(busy, min(16, room), room)
        plan.tiles = {"x": min(block, 64), "r": length}
    elif along_r:
        r = min(length, 2048 if plan.rows > PROGRAMS else 8192)
        plan.tiles = {"x": clamp(1024 // r, 1, busy), "r": r}
    else:
        x = clamp(busy, 16, 64)
        plan.tiles = {"x": x, "r": min(length, 2048 // x)}
    plan.num_warps = clamp(plan.tiles["x"] * plan.tiles["r"] // 512, 1, 16)
