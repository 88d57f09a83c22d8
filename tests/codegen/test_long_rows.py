"""Rows that are swept in a loop: what a sweep keeps, and how shares of a softmax are rounded."""

from __future__ import annotations

import math

import pytest
import torch

from minicompile.codegen.phases import riders
from minicompile.codegen.plan import CodeLine, KernelPlan, plan_rule
from minicompile.debug.gpu_assembly import cross_compile
from minicompile.ops.device import Gpu
from minicompile.ops.registry import scoped
from minicompile.options import Options
from minicompile.runtime.gpu_kernel import Tiles
from minicompile.shapes.expr import size_symbol
from tests.codegen.fusing import Program, softmax
from tests.codegen.triton_running import call, devices, run, source_of

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
INTERNAL = ("amax", "total")
S0, S1 = size_symbol("s0"), size_symbol("s1")


@pytest.fixture(autouse=True)
def looped():
    """Every row is swept in a loop, however short."""
    with scoped():

        @plan_rule("triton:reduction")
        def looped(plan: KernelPlan, options: Options) -> None:
            if plan.reduction_ranges:
                plan.reduction = "looped"
                plan.riders = riders(plan.body, plan.loop, "max")

        @plan_rule("triton:split")
        def whole(plan: KernelPlan, options: Options) -> None:
            """One program takes a row."""

        yield


def special_rows(n: int) -> torch.Tensor:
    """Eight rows: ordinary, infinite, not a number, far apart."""
    torch.manual_seed(n)
    x = torch.randn(8, n) * 4
    x[0], x[1, : n - 3], x[2, 5:] = -math.inf, -math.inf, -math.inf
    x[3, n // 2], x[4, n - 1], x[5, :32] = math.inf, math.nan, 1e30
    x[6], x[7, ::2] = 1000.0, -1e4
    return x


# What a sweep keeps --------------------------------------------------------------------------------


def best(kind: str, n: int) -> Program:
    p = Program()
    p.input("x", (8, n))
    for name, dtype in ((kind, F32), (f"arg{kind}", I64)):
        p.reduce(name, (8,), (n,), name, lambda o, i, r: o.load("x", i[0] * n + r[0]), dtype)
    return p


@devices
@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("n", [97, 128, 40])
def test_a_search_finds_the_best_element_and_its_place(kind, n, device):
    source = source_of(best(kind, n))
    assert "int64" not in source.text.partition("for roffset")[2].partition("tl.reduce")[0]
    x = special_rows(n)
    x[5, n // 3 :: 7] = -1e30 if kind == "min" else 2e30  # the first of several
    x[6, 1::2], x[7] = -0.0, torch.where(torch.arange(n) < n - 2, math.inf, -math.inf)
    x[7] = x[7] if kind == "min" else -x[7]
    x[0] = -math.inf if kind == "max" else math.inf
    for tiles in (Tiles(1, 16), Tiles(4, 32), Tiles(2, 128)):
        found = run(best(kind, n), {"x": x}, device=device, tiles=tiles)
        values, places = getattr(x, kind)(1)
        assert torch.equal(found[f"arg{kind}"].cpu(), places)
        torch.testing.assert_close(found[kind].cpu(), values, equal_nan=True, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_shares_of_a_softmax_are_rounded_as_divisions(scale):
    x = torch.randn(256, 8192) * scale
    shares = run(softmax(256, 8192), {"x": x}, INTERNAL, "cuda")["softmax"]
    source = source_of(softmax(256, 8192), INTERNAL, "cuda")
    assert "share_of" in source.text
    source.lines[:] = [
        CodeLine(line.text.replace("share_of", "tl.div_rn"), line.origins) for line in source.lines
    ]
    divided = torch.empty_like(shares)
    call(source, {"x": x.cuda(), "softmax": divided})
    assert torch.equal(shares, divided)


def test_a_share_costs_no_division():
    ptx = cross_compile(source_of(softmax(64, 4096), INTERNAL)).levels["ptx"]
    assert ptx.count("div.rn") == 1  # the inverse of the sum


@devices
@pytest.mark.parametrize("spread", [1.0, 30.0, 1e4])
def test_shares_kept_in_16_bits_are_rounded_as_well_as_those_of_eager(spread, device):
    p = softmax(64, 3000, BF16)
    source = source_of(p, INTERNAL, device)
    assert "share_of(" not in source.text and "tl.exp(" in source.text
    torch.manual_seed(0)
    x = (torch.randn(64, 3000) * spread).to(BF16)
    x[0], x[1, 7], x[2, 3], x[3, ::2], x[4, :] = 3e38, math.inf, math.nan, -math.inf, -math.inf
    exact = x.double().softmax(1)
    found = run(p, {"x": x}, INTERNAL, device)["softmax"].cpu()
    assert torch.equal(found.isnan(), exact.isnan())
    last_bit = torch.exp2(exact.log2().floor().clamp(min=-126) - 7)
    near = (found.double() - exact).abs() <= 0.51 * last_bit
    assert near[~exact.isnan()].all()


# Registers -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("n", [8192, 16384])
def test_two_programs_have_registers_where_rows_are_held_that_leave_some(n, dtype):
    @plan_rule("triton:reduction")
    def held(plan: KernelPlan, options: Options) -> None:
        """Whole rows."""
        plan.reduction = "persistent"

    source = source_of(softmax(4096, n, dtype), INTERNAL)
    assembly = cross_compile(source)
    assert assembly.registers * 32 * source.plan.num_warps <= Gpu().registers // 2
    assert assembly.spilled_bytes <= 8
