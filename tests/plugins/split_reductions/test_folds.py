"""Folds: sums of columns that ride in a kernel which holds whole rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import minicompile as mc
from minicompile.codegen.plan import KernelPlan, plan_rule
from minicompile.debug.gpu_assembly import cross_compile
from minicompile.options import Options
from minicompile.pipeline_result import Trace
from tests.codegen.triton_running import devices

TRITON = {"device_codegen": "triton"}


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def rms_norm(x: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    scale = torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * scale).to(x.dtype) * w, h


def traced(fn: Callable[..., Any], *args: Tensor) -> Trace:
    return mc.trace(mc.compile(fn, options=TRITON), *args)


def names(trace: Trace, graph: str = "forward") -> list[str]:
    return [kernel.name.split("_")[-2] for kernel in trace.graph(graph).kernels]


@pytest.mark.long
@devices
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("rows", [2048, 2100])
@pytest.mark.parametrize("fn", [layer_norm, rms_norm])
def test_a_norms_backward_reads_its_rows_once(fn, rows, ahead, device, monkeypatch) -> None:
    if ahead:
        monkeypatch.setattr("minicompile.plugins.split_reductions.fold.LONG_ROW", 40)
        monkeypatch.setattr("minicompile.plugins.split_reductions.fold.AHEAD", 16)

    def given() -> list[Tensor]:
        torch.manual_seed(0)
        last = (rows, 40) if fn is rms_norm else (40,)
        made = [torch.randn(rows, 40), torch.randn(40), torch.randn(last)]
        return [t.to(device).requires_grad_() for t in made]

    def gradients(run: Any) -> tuple[Tensor, ...]:
        args = given()
        out = run(*args)
        outputs = out if isinstance(out, tuple) else (out,)
        return torch.autograd.grad(outputs, args, [o.detach().cos() for o in outputs])

    traces = traced(fn, *given())
    assert names(traces, "backward") == ["rows", "columns"]
    lines = [line.strip() for line in traces.backward.kernels[0].text.splitlines()]
    loads = [line for line in lines if re.search(r"load\(\w+ \+ \(r0 \+ 40\*x0\)", line)]
    assert len(loads) >= 2
    # ahead: before the loop, and in it
    assert all(lines.count(line) == 1 + ahead == 1 + line.startswith("_tmp") for line in loads)
    found = gradients(mc.compile(fn, options=TRITON))
    torch.testing.assert_close(found, gradients(fn), rtol=1e-4, atol=2e-4)


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that need their own sum, and the sums of columns, halved."""
    return x - (x * y).sum(1, keepdim=True), (x - y).sum(0) * 0.5


@pytest.mark.long
@devices
def test_what_follows_from_the_sums_is_computed_with_them(device) -> None:
    x, y = (torch.randn(3000, 24, device=device) for _ in range(2))
    assert names(traced(both, x, y)) == ["rows", "columns"]
    found = mc.compile(both, options=TRITON)(x, y)
    torch.testing.assert_close(found, both(x, y), rtol=1e-4, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("rule", ["reduction", "split", "tiles", "index_dtype"])
def test_no_rule_is_needed_for_the_right_answer(rule) -> None:
    x, y = torch.randn(2100, 24), torch.randn(2100, 24)
    with mc.scoped(), mc.without(f"plan:triton:{rule}"):
        if rule == "tiles":

            @plan_rule("triton:tiles")
            def tiles(plan: KernelPlan, options: Options) -> None:
                plan.tiles, plan.num_warps = {"x": 2, "r": 2}, 1

        found = mc.compile(both, options=TRITON)(x, y)
        assert "rows" in names(traced(both, x, y))
    torch.testing.assert_close(found, both(x, y), rtol=1e-4, atol=1e-3)


def test_the_schedule_says_what_rides_along_and_can_be_told_not_to() -> None:
    x, y = torch.randn(3000, 24), torch.randn(3000, 24)
    schedule = traced(both, x, y).schedule
    last = schedule.decisions[-1]
    assert last.fused and "rows of one are columns of the other" in last.reason
    (kernel,) = schedule.kernels
    assert set(kernel.levels) == {"elem", "column"}
    again = schedule.what_if(forbid=[(last.producer.split("_")[0], last.consumer.split("_")[0])])
    assert len(again.after.kernels) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("fn", "size"),
    [
        (both, (500, 24)),
        (both, (3000, 20000)),
        (lambda x, y: (x - x.sum(0), x - x.sum(1, keepdim=True)), (3000, 24)),
        (lambda x, y: (x - x.sum(1, keepdim=True), y.sum(0)), (3000, 24)),
        (lambda x, y: (x - x.sum(1, keepdim=True), x.amax(0)), (3000, 24)),
        (lambda x, y: both(x.t(), y.t()), (24, 3000)),
    ],
    ids=["few rows", "long rows", "needed again", "nothing shared", "a maximum", "jumping rows"],
)
def test_others_stay_apart(fn, size) -> None:
    trace = traced(fn, torch.randn(size), torch.randn(size))
    assert "rows" not in names(trace)


def test_what_one_of_them_needs_of_the_other_comes_first() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        columns = x.sum(0)
        return x - (x * columns).sum(1, keepdim=True), columns

    x = torch.randn(3000, 24)
    assert "rows" not in names(traced(fn, x))
    torch.testing.assert_close(mc.compile(fn, options=TRITON)(x), fn(x), rtol=1e-4, atol=1e-2)


def test_c_kernels_stay_apart() -> None:
    x = torch.randn(3000, 24)
    assert len(mc.trace(both, x, x).kernels) == 2


@pytest.mark.long
def test_the_launches_compile_without_spills() -> None:
    def given(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, requires_grad=True)

    trace = traced(layer_norm, given(8192, 4096), given(4096), given(4096))
    kernels = trace.graph("backward").kernels
    assert [cross_compile(kernel).spilled_bytes for kernel in kernels] == [0, 0]
