"""Whether programs share the rows of a kernel: where few rows, each of many elements, leave a GPU idle."""

from __future__ import annotations

from minicompile.codegen.phases import loop_needs, riders, stages
from minicompile.codegen.plan import TritonPlan, plan_rule, power_of_two
from minicompile.codegen.triton_rules import busy, rows_are_contiguous
from minicompile.errors import Unsupported
from minicompile.ops.device import Gpu, gpu_of
from minicompile.options import Options
from minicompile.plugins.split_reductions.split import refusal, split

COLUMNS, LEAST_COLUMN, LEAST_ROW = 64, 64, 4096
"""Columns that a program reduces side by side; fewest elements in a part of a column, and of a row."""

LAUNCH_SECONDS = 3e-6
"""What one more kernel costs, until its first programs have loaded."""


def seconds(plan: TritonPlan, gpu: Gpu, parts: int, programs: int) -> float:
    """Roughly how long a looped reduction takes, or one whose rows `parts` programs share.

    Programs that are fewer than those which keep the device busy get up to 1.5 times their share of the
    bandwidth. A sweep after the first finds half of what it reads in the cache. Parts are combined by one
    more launch for each sweep that reduces.
    """
    own = riders(plan.body, plan.loop, "max" if parts == 1 else "sum")
    sweeps = len(loop_needs(plan.body, plan.loop, riders=own))
    launches = 1 if parts == 1 else sweeps + max(stages(plan.body, own).values())
    share = min(1.5 * programs * parts / busy(gpu), 1.0)
    moved = plan.cost.bytes * (sweeps + 1) / 2
    return moved / gpu.bytes_per_second / share + launches * LAUNCH_SECONDS


@plan_rule("triton:split", before="triton:tiles", whole=True)
def choose_split(plan: TritonPlan, options: Options) -> None:
    """Few long rows are shared by programs: each takes a part."""
    gpu = gpu_of(plan.device)
    if plan.reduction != "looped":
        return
    least, columns = (LEAST_ROW, 1) if rows_are_contiguous(plan) else (LEAST_COLUMN, COLUMNS)
    programs = max(-(-plan.rows // columns), 1)
    parts = power_of_two(min(2 * busy(gpu) // programs, plan.row_length // least))
    alone, shared = (1e6 * seconds(plan, gpu, n, programs) for n in (1, parts))
    if (why := refusal(plan)) is not None:
        plan.reject("split reduction", why)
    elif shared < alone:
        plan.reduction, plan.parts = "split", parts
        plan.riders = riders(plan.body, plan.loop, "sum")
        plan.reject("one program for each row", f"about {alone:.0f} us, split {shared:.0f} us")
    else:
        plan.reject("split reduction", f"about {shared:.0f} us, in one launch {alone:.0f} us")


@plan_rule("triton:launches", whole=True, needed=True)
def split_rows(plan: TritonPlan, options: Options) -> None:
    """Give a kernel whose rows are to be shared its launches."""
    if plan.reduction != "split":
        return
    if (why := refusal(plan)) is not None:
        raise Unsupported(f"{plan.name} can't be split: {why}")
    split(plan)
