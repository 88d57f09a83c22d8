"""Sums of which one term isn't zero are computed without a loop."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from tests.codegen.fusing import Program
from tests.codegen.triton_running import run

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64


def loss_step(x, labels, reduction):
    return F.cross_entropy(x, labels, reduction=reduction, ignore_index=3)


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_gradient_of_a_loss_is_eagers_without_summing_a_row(dtype, reduction, language):
    torch.manual_seed(0)
    x = torch.randn(8, 37).to(dtype).requires_grad_()
    labels = torch.tensor([0, 36, 3, 5, 3, 36, 0, 17])
    compiled = mc.compile(loss_step, options={"device_codegen": language})
    down = torch.randn(8).to(dtype) if reduction == "none" else torch.tensor(-0.0).to(dtype) + 1
    (ours,), (eager,) = (
        torch.autograd.grad(fn(x, labels, reduction), [x], [down]) for fn in (compiled, loss_step)
    )
    coarse = {"rtol": 0.05, "atol": 1e-3} if dtype is BF16 else {}
    torch.testing.assert_close(ours, eager, **coarse)
    backward = mc.trace(compiled, x, labels, reduction).backward
    assert not any(plan.body.reductions for plan in backward.plans)


def chosen(test, other=0.0) -> Program:
    p = Program()
    p.input("at", (4,), I64)
    p.input("c", (4,))

    def term(o, i, r):
        place = o.index_expr(r[0], I64)
        return o.where(
            test(o, place, o.load("at", i[0])), o.load("c", i[0]), o.constant(other, F32)
        )

    p.reduce("y", (4,), (8,), "sum", term)
    return p


def eq(o, place, at):
    return o.eq(place, at)


def test_places_out_of_range_add_nothing_and_no_sum_is_minus_zero():
    at, c = torch.tensor([-1, 8, 7, 0]), torch.tensor([1.0, 2.0, -0.0, math.nan])
    assert not chosen(eq).plan(language="triton").body.reductions
    found = run(chosen(eq), {"at": at, "c": c})["y"]
    assert found.tolist()[:3] == [0, 0, 0]
    assert not found[2].signbit()
    assert found[3].isnan()


@pytest.mark.parametrize(
    "program",
    [
        chosen(lambda o, place, at: o.le(place, at)),
        chosen(lambda o, place, at: o.logical_or(o.eq(place, at), o.eq(at, o.constant(1, I64)))),
        chosen(eq, other=1.0),
    ],
)
def test_sums_of_several_terms_stay(program):
    assert program.plan(language="triton").body.reductions
