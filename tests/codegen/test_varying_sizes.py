"""Triton kernels for sizes that vary: planned by the sizes at hand, right at all others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import minicompile as mc
from minicompile.codegen import triton_rules
from minicompile.codegen.phases import riders
from minicompile.codegen.plan import KernelPlan, plan_rule
from minicompile.ops.registry import scoped
from minicompile.options import Options
from minicompile.runtime.gpu_kernel import (
    needs_int64,
)
from minicompile.shapes.expr import FloorDiv, float_symbol, size_symbol
from tests.codegen.fusing import Program, softmax
from tests.codegen.test_triton_compiling import FakeGpu, cuda_kernel
from tests.codegen.triton_running import DEVICES, call, source_of

F32 = torch.float32
TRITON = {"device_codegen": "triton"}
S0, S1 = size_symbol("s0"), size_symbol("s1")


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def compiled(fn: Callable[..., Any]) -> Any:
    return mc.compile(fn, dynamic=True, fullgraph=True, options=TRITON)


def gradients(fn: Callable[..., Any], *args: Tensor) -> list[Tensor]:
    """Outputs and gradients, at weights that differ."""
    leaves = [a.clone().requires_grad_() for a in args]
    found = fn(*leaves)
    outputs = list(found) if isinstance(found, tuple) else [found]
    down = [o.detach().cos() for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, down)]


# Rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_held_whole_whatever_their_length(device) -> None:
    source = source_of(softmax(4, S0, hints={S0: 100}), ("amax", "total"), device)
    assert source.plan.reduction == "persistent"
    assert source.text.count("tl.load(") == 1
    for n in (100, 1, 2, 16, 64, 128, 129, 1000, 4096):
        x, y = torch.randn(4, n, device=device), torch.empty(4, n, device=device)
        call(source, {"x": x, "softmax": y}, {"s0": n})
        close(y, x.softmax(1))


def test_longer_rows_than_a_program_holds_are_compiled_once_more() -> None:
    fn = compiled(lambda x: torch.softmax(x, -1))
    for size in ((5, 100), (7, 300), (3, 2), (2, 32_768), (900, 64), (0, 4), (4, 0), (3, 1)):
        x = torch.randn(size)
        close(fn(x), x.softmax(-1))
    before = mc.explain(fn)(torch.randn(3, 5))
    x = torch.randn(2, 40_000)
    close(fn(x), x.softmax(-1))
    x = torch.randn(2, 70_001)
    close(fn(x), x.softmax(-1))
    after = mc.explain(fn)(torch.randn(3, 5))
    guard = "x.size(1) <= 32768"
    assert guard in str(before)
    assert "holds whole rows" in str(before)
    assert len(after.captures) == len(before.captures) + 1


def test_a_launch_picks_the_tile_of_its_row(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    kernel = cuda_kernel(source_of(softmax(640, S0, hints={S0: 1024}), ("amax", "total"), "cuda"))
    x = torch.empty(640, 1024)
    for n in (1024, 1000, 513, 512, 40):
        kernel.launch(x, x, n)
    constants = (kernel.constants.values() for kernel in gpu.kernels())
    x_block, r_block = zip(*constants, strict=True)
    assert r_block == (1024, 1024, 1024, 512, 64)
    assert [launch[1] for launch in gpu.launches] == [math.ceil(640 / n) for n in x_block]
    assert x_block[0] * 1024 == x_block[3] * 512
    versions = [launch[0] for launch in gpu.launches]
    assert versions[1] == versions[2]
    assert len(set(versions)) == 4


# Widths --------------------------------------------------------------------------------------------------


def scaled(hint: int = 32) -> Program:
    p = Program(hints={S0: hint})
    p.input("x", (S0, 100))
    p.pointwise("y", (S0, 100), lambda o, i: o.load("x", i[0] * 100 + i[1]))
    return p


def test_a_launch_has_int64_indices_from_where_int32_end(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    source = source_of(scaled(), device="cuda")
    kernel = cuda_kernel(source)
    assert source.plan.index_dtype is torch.int32
    x = torch.empty(1)
    last = (2**31 - triton_rules.LARGEST_BLOCK - 1) // 100
    for n in (32, last, last + 1, 2**40):
        assert needs_int64(source.plan, {S0: n}) == (n > last)
        kernel.launch(x, x, n)
    types = [kernel.types["s0"] for kernel in gpu.kernels()]
    assert types == ["i32", "i32", "i64", "i64"]
    assert [facts[-1] for facts in gpu.bound] == [
        kernel.types["s0"] == "i64" for kernel in gpu.compiled
    ]


def test_large_strides_count_too() -> None:
    p = Program(hints={S0: 8})
    p.input("x", (4, 2**30))
    p.pointwise("y", (4, S0), lambda o, i: o.load("x", i[0] * 2**30 + i[1]))
    assert needs_int64(source_of(p).plan, {S0: 8})
    q = Program(hints={S0: 8, S1: 8})
    q.input("x", (S0, S1))
    q.pointwise("y", (S0,), lambda o, i: o.load("x", i[0] * S1))
    plan = source_of(q).plan
    assert not needs_int64(plan, {S0: 2, S1: 2**31 - 1})
    assert needs_int64(plan, {S0: 3, S1: 2**30})
    assert needs_int64(plan, {S0: 2, S1: 2**31})


@pytest.mark.parametrize("reduce", [torch.argmax, torch.argmin])
def test_positions_of_equal_elements_and_nan(reduce) -> None:
    fn = mc.compile(lambda x: reduce(x, -1), dynamic=True, fullgraph=True, options=TRITON)
    inf = math.inf
    for row in (
        [1.0, 3.0, 3.0, 1.0] * 20_000,
        [-inf] * 70_000,
        [inf] * 70_000,
        [0.0] * 50_000 + [math.nan] * 20_000,
        [-inf] * 66_000 + [inf, -inf],
    ):
        x = torch.tensor([row, row[::-1]])
        close(fn(x), reduce(x, -1))


# Quotients of sizes, and floats --------------------------------------------------------------------------


def test_quotients_of_sizes_are_right_at_all_sizes() -> None:
    p = Program(hints={S0: 256, S1: 24})
    p.input("x", (S0, S1, S1))
    half = FloorDiv(S0, 2)
    p.pointwise(
        "y", (half, S1, S1), lambda o, i: o.load("x", (i[0] + half) * S1**2 + i[1] * S1 + i[2])
    )
    source = source_of(p)
    for s0, s1 in ((256, 24), (9, 5), (2, 3)):
        x, y = torch.randn(s0, s1, s1), torch.empty(s0 // 2, s1, s1)
        call(source, {"x": x, "y": y}, {"s0": s0, "s1": s1})
        close(y, x[s0 // 2 : 2 * (s0 // 2)])


def test_dividends_count_among_what_int32_must_hold() -> None:
    p = Program(hints={S0: 8, S1: 8})
    p.input("x", (S0, S1))
    p.pointwise("y", (FloorDiv(S0 * S1, 4),), lambda o, i: o.load("x", i[0]))
    plan = source_of(p).plan
    assert not needs_int64(plan, {S0: 2**15, S1: 2**15})
    assert needs_int64(plan, {S0: 2**16, S1: 2**16})


def test_floats_follow_sizes(monkeypatch) -> None:
    gpu = FakeGpu(monkeypatch)
    half, f0 = FloorDiv(S0, 2), float_symbol("f0")
    p = Program(hints={S0: 64, f0: 1.5})
    p.input("x", (S0,))
    p.pointwise("y", (half,), lambda o, i: o.mul(o.load("x", i[0] + half), o.index_expr(f0, F32)))
    kernel = cuda_kernel(source_of(p, device="cuda"))
    x = torch.empty(64)
    for n in (64, 40, 41):
        kernel.launch(x, x, n, 0.25)
    assert [launch[5:] for launch in gpu.launches] == [(64, 0.25), (40, 0.25), (41, 0.25)]
    assert [facts[5:] for facts in gpu.bound] == [(2, 1, 1, False)] * 2
    types = ["*fp32", "*fp32", "i32", "fp64"]
    assert all(list(found.types.values()) == types for found in gpu.compiled)


@pytest.mark.long
@pytest.mark.parametrize("name", ["max", "min"])
def test_swept_rows_of_varying_length_are_right(name) -> None:
    """Maxima that ride and that are twins, in sweeps whose rows stay in the cache."""

    def fn(x: Tensor) -> Any:
        best, place = getattr(x, name)(-1)
        return x.softmax(-1), best, place, x.logsumexp(-1)

    with scoped():

        @plan_rule("triton:reduction")
        def looped(plan: KernelPlan, options: Options) -> None:
            if plan.reduction_ranges:
                plan.reduction, plan.riders = "looped", riders(plan.body, plan.loop, "max")

        swept = compiled(fn)
        plans = mc.trace(swept, torch.randn(64, 100)).plans
        assert all(plan.varying for plan in plans)
        assert any(plan.riders for plan in plans)
        for rows, n in ((64, 100), (3, 7), (5, 70_001), (2, 65_536), (4, 1)):
            torch.manual_seed(n)
            x = torch.randn(rows, n)
            x[0, n // 2] = x[0, 0]
            x[1, -1], x[-1] = math.nan, -math.inf
            close(swept(x), fn(x))


def test_a_row_without_elements_at_run_time_is_not_whole() -> None:
    p = Program(hints={S0: 64})
    p.input("x", (4, S0))
    p.reduce("y", (4,), (S0 - 2,), "sum", lambda o, i, r: o.load("x", i[0] * S0 + r[0]))
    source = source_of(p)
    y = torch.full((4,), 7.0)
    call(source, {"x": torch.ones(4, 2), "y": y}, {"s0": 2})
    assert y.tolist() == [0, 0, 0, 0]
