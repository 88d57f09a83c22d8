"""Long rows shared by several programs.

- They give what one program gives, with the same bits every time.
- Few long rows are split; plans say what either way costs, and why others are not.

`test_varying_sizes.py` has sizes that vary.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import minicompile as mc
from minicompile.codegen.phases import riders
from minicompile.codegen.plan import KernelPlan, plan_rule
from minicompile.debug.gpu_assembly import cross_compile
from minicompile.ops.registry import scoped
from minicompile.options import Options
from minicompile.pipeline_result import Trace
from minicompile.plugins.split_reductions.split import PART, refusal
from tests.codegen.triton_running import devices
from tests.comparing import assert_as_eager, fresh

TRITON = {"device_codegen": "triton"}
F32, F64 = torch.float32, torch.float64


@contextlib.contextmanager
def parts(count: int) -> Iterator[None]:
    """Every reduction that can be split is, in about so many parts."""
    with scoped():

        @plan_rule("triton:split")
        def rule(plan: KernelPlan, options: Options) -> None:
            if plan.reduction_ranges and PART not in plan.body.all_ranges and not refusal(plan):
                plan.riders = riders(plan.body, plan.loop, "sum")
                plan.reduction, plan.parts = "split", count

        yield


def compiled(fn: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    return mc.compile(fn, options=TRITON)


def traced(fn: Callable[..., Any], *args: Any) -> Trace:
    return mc.trace(mc.compile(fn, options=TRITON), *args)


def agrees(fn: Callable[..., Any], *args: Tensor, **tolerance: float) -> Trace:
    """Compiled with splits and in eager: the same results, and changes of the inputs. Gives the trace."""
    trace = traced(fn, *fresh(args))
    assert any(plan.launches for plan in trace.plans)
    assert_as_eager(compiled(fn), fn, *args, **tolerance)
    return trace


def roles(trace: Trace) -> list[str]:
    return [kernel.name.split("_")[-2] for kernel in trace.kernels]


# Decisions ---------------------------------------------------------------------------------------------


def test_few_long_rows_are_split_and_the_plan_says_what_either_way_costs() -> None:
    trace = traced(lambda x: x.sum(0), torch.empty(2**18, 64))
    (plan,) = trace.plans
    assert plan.reduction == "split"
    assert plan.parts > 64
    told = {a.description: a.reason for a in plan.alternatives}
    assert "split" in told["one program for each row"]
    assert roles(trace) == ["sweep", "finish"]
    assert "triton:launches: launches" in str(plan)


@pytest.mark.parametrize(
    ("fn", "size", "why"),
    [
        (lambda x: x.sum(0), (256, 64), "in one launch"),
        (lambda x: x.argmax(-1), (2, 200000), "positions are counted along the whole row"),
    ],
    ids=["short columns", "argmax"],
)
def test_other_rows_have_one_program_and_the_plan_says_why(fn, size, why) -> None:
    (plan,) = traced(fn, torch.empty(size)).plans
    assert not plan.launches
    assert any(a.description == "split reduction" and why in a.reason for a in plan.alternatives)


def test_a_chain_of_sweeps_keeps_what_later_ones_need() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        top = x.abs().amax(0)
        total = (x / top).pow(3).sum(0)
        return x * total + top, total

    with parts(4):
        trace = agrees(fn, torch.randn(64, 24))
    assert roles(trace) == ["sweep", "finish", "sweep1", "finish1", "spread2"]


# Numbers -----------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, d: x.sum(d),
    "prod": lambda x, d: x.prod(d),
    "max": lambda x, d: x.amax(d),
    "min": lambda x, d: x.amin(d),
    "any": lambda x, d: (x > 7).any(d),
    "all": lambda x, d: (x > -8).all(d),
    "var": lambda x, d: x.var(d) if x.is_floating_point() else x.sum(d),
}


@pytest.mark.long
@devices
@pytest.mark.parametrize("length", [8, 35, 96])
@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("dim", [0, 1], ids=["columns", "rows"])
def test_every_kind_of_reduction_agrees_with_eager(length, dtype, dim, device) -> None:
    x = torch.randint(-9, 9, (5, length)).to(dtype)
    if dtype.is_floating_point:
        x = x / 8 + 1
        x[1, length // 2], x[2, 0], x[3] = math.nan, math.inf, -math.inf
    x = (x if dim == 1 else x.t().contiguous()).to(device)

    def every(x: Tensor) -> list[Tensor]:
        skipped = ("prod",) if dtype is torch.bfloat16 else ()  # eager's CPU product rounds
        return [kind(x, dim) for name, kind in KINDS.items() if name not in skipped]

    with parts(4):
        agrees(every, x)


@devices
@pytest.mark.parametrize("length", [64, 61])
def test_softmax_and_logsumexp_with_infinities(length, device) -> None:
    x = torch.randn(9, length, device=device) * 4
    x[0] = -math.inf
    x[1, :40] = -math.inf
    x[2, 3], x[3, 5], x[4, :32] = math.inf, math.nan, 1e30
    x[5], x[6], x[7, 50:] = -1000.0, 1000.0, -1e4
    with parts(4):
        agrees(lambda x: (x.softmax(-1), x.logsumexp(-1)), x)


@devices
@pytest.mark.parametrize("rows", [96, 101])
def test_variances_far_from_zero_keep_their_digits(rows, device) -> None:
    x = torch.randn(rows, 7, dtype=F64) + 10_000
    with parts(8):
        found = compiled(lambda x: x.var(0))(x.float().to(device))
    # the mean's rounding, not its square
    expected = x.float().double().var(0)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=10_000 * 2**-23, atol=0)


@devices
@pytest.mark.parametrize("shape", [(6, 5, 8, 8), (2, 5, 9, 7)])
def test_batch_norm_in_training(shape, device) -> None:
    def fn(x: Tensor, mean: Tensor, var: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.relu(F.batch_norm(x, mean, var, w, b, training=True))

    own = (torch.randn(5, device=device).abs() for _ in range(4))
    with parts(4):
        trace = agrees(fn, torch.randn(shape, device=device) + 3, *own, rtol=1e-5, atol=1e-5)
    assert roles(trace) == ["sweep", "finish", "spread1"]


@devices
def test_a_sweep_stores_what_needs_no_reduction(device) -> None:
    def fn(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.gelu(x + b)
        return h, h.sum(0), b * 2

    with parts(4):
        trace = agrees(fn, torch.randn(50, 24, device=device), torch.randn(24, device=device))
    assert roles(trace) == ["sweep", "finish"]


@devices
def test_loaded_indices_and_masks_in_parts(device) -> None:
    def fn(t: Tensor, i: Tensor) -> Tensor:
        return F.pad(t[i], (0, 0, 3, 4), value=0.5).sum(0)

    t, i = torch.randn(9, 6, device=device), torch.randint(-9, 9, (70,), device=device)
    with parts(4):
        agrees(fn, t, i)
        if device == "cpu":
            i[69] = 9
            with pytest.raises(IndexError):
                compiled(fn)(t, i)


@pytest.mark.long
@devices
def test_one_plan_serves_every_length(device) -> None:
    for dim in (0, 1):

        def fn(x: Tensor, dim: int = dim) -> tuple[Tensor, ...]:
            return x.var(dim), x.softmax(dim), x.amax(dim)

        with parts(4):
            run = mc.compile(fn, options=TRITON, dynamic=True)
            for n in (64, 65, 3, 300, 2):
                x = torch.randn((n, 6) if dim == 0 else (6, n), device=device)
                torch.testing.assert_close(run(x), fn(x))


@devices
def test_the_same_bits_every_time(device) -> None:
    x = torch.randn(4096, 40, device=device)
    with parts(64):
        run = compiled(lambda x: (x.sum(), x.sum(0), x.var(0)))
        first = run(x)
        for _ in range(3):
            assert all(map(torch.equal, run(x), first))


# Compiled ----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("fn", "size"),
    [
        (lambda x: x.sum(0), (16384, 4096)),
        (lambda x: F.batch_norm(x, None, None, training=True), (32, 64, 56, 56)),
    ],
    ids=["columns", "batch_norm"],
)
def test_launches_compile_without_spills(fn, size) -> None:
    x = torch.empty(size, dtype=torch.bfloat16)
    for kernel in traced(fn, x).kernels:
        assert cross_compile(kernel).spilled_bytes == 0, kernel.name
