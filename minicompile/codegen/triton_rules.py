"""Chooses the numbers of a Triton kernel: persistent or looped reduction, sizes of tiles, warps.

Tiles are "y", "x" and "r": elements of the flattened axes that one program holds. The choices follow from
three facts about the device. A thread loads up to 16 bytes at once, and a few such loads hide memory's
latency: 8 to 32 elements a thread. A multiprocessor's registers hold what its programs have loaded. And
memory is only as fast as all multiprocessors together ask for it: each needs programs to run.
Starting points read off torch/_inductor/runtime/triton_heuristics.py.
"""

from __future__ import annotations

import sympy
import torch
from sympy import sympify

from minicompile.codegen.phases import contiguous_uses, quick_forms, riders
from minicompile.codegen.plan import INT32_END, TritonPlan, plan_rule, power_of_two
from minicompile.codegen.printing import reach
from minicompile.ops.device import Gpu, gpu_of
from minicompile.options import Options
from minicompile.scheduling.body import Value, numbers
from minicompile.shapes.expr import Expr, is_float, product

LARGEST_BLOCK = 2**20
"""Triton's limit on a block's elements: how far past its end a flattened index may run."""


def clamp(n: int, low: int, high: int) -> int:
    return max(low, min(n, high))


def busy(gpu: Gpu) -> int:
    """Programs that keep all multiprocessors busy: two each."""
    return 2 * gpu.multiprocessors


def rows_are_contiguous(plan: TritonPlan) -> bool:
    """The reduction runs along memory: an inner reduction. What differs in each row and column counts."""
    inner = next(reversed(plan.reduction_ranges))
    return contiguous_uses(inner, widest(plan)) >= 0


def widest(plan: TritonPlan) -> list[Value]:
    """Loads and stores that differ with the most loops: they move the most."""
    loops = plan.body.all_ranges
    found: dict[int, list[Value]] = {0: []}
    for value in plan.body.values:
        if value.op in ("load", "store") and value.index is not None:
            found.setdefault(len(value.index.free_symbols & loops.keys()), []).append(value)
    return found[max(found)]


def longest_persistent(plan: TritonPlan, gpu: Gpu) -> int:
    """The longest row to hold at once, by how many different rows the kernel loads and scans.

    Rows in fp32 may fill half of the registers; the other half is for what is computed from them.
    """
    if not rows_are_contiguous(plan):
        return 64
    rows = sum(1 for v in plan.loop if v.op in ("load", "scan"))
    return gpu.registers // 2 // max(rows, 1)


@plan_rule("triton:shares")
def choose_forms(plan: TritonPlan, options: Options) -> None:
    """Shares of a softmax are products with an inverse, and roughly computed where they are narrowed."""
    if forms := quick_forms(plan.body, plan.loop):
        plan.forms = forms


@plan_rule("triton:index_dtype")
def choose_index_dtype(plan: TritonPlan, options: Options) -> str | None:
    """int32 only where every index fits, and the flattened ones to the end of their last block.

    Where sizes vary, each launch finds out.
    """
    body = plan.body
    flat = (product(plan.ranges.values()), product(plan.reduction_ranges.values()))
    ends: set[Expr] = {sympify(n) + LARGEST_BLOCK for n in flat}
    ends |= {*plan.integers}
    ranges = body.all_ranges | {v.symbol: v.size for v in body.values if v.symbol is not None}
    for number in dict.fromkeys(map(sympify, numbers(body))):
        found = set() if is_float(number) else reach(number, ranges)
        ends |= {sympify(INT32_END)} if found is None else found
    if any(end.is_Integer and end >= INT32_END for end in ends):
        plan.reject("int32 indices", "some index may not fit")
        return None
    plan.index_dtype = torch.int32
    plan.index_reach = tuple(sorted((end for end in ends if end.free_symbols), key=str))
    return "every index fits" + ", or the launch sees that it doesn't" * bool(plan.index_reach)


@plan_rule("triton:reduction")
def choose_reduction(plan: TritonPlan, options: Options) -> str | None:
    """Rows that fit into registers are read once; longer ones are swept in a loop."""
    if plan.reduction != "looped":
        return None
    limit = longest_persistent(plan, gpu_of(plan.device))
    varies = not all(isinstance(size, int) for size in plan.reduction_ranges.values())
    if plan.row_length > limit:
        why = f"a row has {plan.row_length} elements, more than {limit}"
    elif varies and not rows_are_contiguous(plan):
        why = "columns of varying length may soon be longer"
    elif varies and not options.library:
        why = "no other kernel will take longer rows"
    else:
        plan.reduction = "persistent"
        assume_row(plan, limit)
        return f"registers hold rows of up to {limit} elements"
    plan.riders = riders(plan.body, plan.loop, "max")
    plan.reject("persistent reduction", why)
    return "a sum of exponentials rides beside its maximum"


def assume_row(plan: TritonPlan, limit: int) -> None:
    """Longer rows, if there may be such, are another compilation's."""
    if plan.varying:
        fits = sympy.Le(plan.length, max(limit, plan.row_length))
        plan.assumes = {**plan.assumes, fits: f"{plan.name} holds whole rows"}


@plan_rule("triton:tiles", needed=True)
def choose_tiles(plan: TritonPlan, options: Options) -> None:
    """Elements per program, and warps to compute them."""
    if plan.tiles or plan.reduction not in ("none", "persistent", "looped"):
        return
    gpu = gpu_of(plan.device)
    programs = busy(gpu)
    if plan.reduction == "none":
        block = clamp(power_of_two(plan.rows // programs), 128, 1024)
        plan.tiles, plan.num_warps = {"x": block}, clamp(block // 256, 1, 4)
        return
    length = power_of_two(plan.row_length)
    # rows per program that still leave enough programs
    spare = power_of_two(plan.rows // programs)
    along_r, each = rows_are_contiguous(plan), 16
    # a single load keeps memory busy alone: more of it at once
    alone = sum(value.op == "load" for value in widest(plan)) == 1
    if plan.reduction == "persistent":
        room = max((1024 if along_r else 4096) // length, 1)
        block = min(room, spare) if along_r else clamp(spare, min(16, room), room)
        few = plan.rows <= programs  # nothing else hides a lone row's latency
        each = 8 if few else 32 if length >= LONG_ROW else 16
        plan.tiles = {"x": min(block, 64), "r": length}
        # the longest rows that are held need the registers of two programs
        longest = longest_persistent(plan, gpu) // 2
        plan.side_by_side = along_r and plan.tiles["x"] * length <= longest
    elif along_r:
        aligned = plan.row_length % 8 == 0  # else loads are narrow, or many are computed from
        r = min(length, 2048 if not aligned else 8192 if alone else 4096)
        plan.tiles = {"x": clamp(1024 // r, 1, spare), "r": r}
        each = 8 if aligned or stores_rows(plan) else 16
    else:
        x = clamp(spare, 16, 128 if alone else 64)
        plan.tiles = {"x": x, "r": min(length, (8192 if alone else 2048) // x)}
        each = 32 if alone else 8
    plan.num_warps = clamp(plan.tiles["x"] * plan.tiles["r"] // (32 * each), 1, 32)


def stores_rows(plan: TritonPlan) -> bool:
    """The kernel writes as much as it reads."""
    return any(v in plan.loop for v in plan.body.stores)


LONG_ROW = 4096
"""Elements from which on a thread that holds part of a row has many: fewer threads wait for each other."""
