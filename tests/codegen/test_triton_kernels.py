"""Triton kernels compute what eager computes: loops, tiles, reductions, indices, masks, scatters."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import minicompile as mc
from minicompile.codegen.phases import barriers
from minicompile.codegen.plan import KernelArgument, KernelPlan, Phase
from minicompile.codegen.triton import print_triton
from minicompile.ops.registry import scoped
from minicompile.runtime.gpu_kernel import Tiles, needs_int64
from minicompile.scheduling.body import LoopBody, Recorder
from minicompile.shapes.expr import size_symbol
from tests.codegen.fusing import Program
from tests.codegen.kernels import force
from tests.codegen.triton_running import call, devices, source_of

F32, I64, BOOL = torch.float32, torch.int64, torch.bool


def close(found: torch.Tensor, expected: torch.Tensor, **kw: float) -> None:
    torch.testing.assert_close(found.cpu(), expected.cpu(), equal_nan=True, **kw)


# Loops and tiles ---------------------------------------------------------------------------------------


@devices
def test_a_tile_that_leaves_lanes_over_masks_them_whatever_was_planned(device):
    p = Program()
    p.input("x", (2, 3 * 2**14))
    p.reduce("s", (2,), (3 * 2**14,), "sum", lambda o, i, r: o.load("x", i[0] * 3 * 2**14 + r[0]))
    with mc.without("plan:triton:split"):
        source = source_of(p, device=device)
    assert 3 * 2**14 % source.plan.tiles["r"] == 0
    assert "rnumel % RBLOCK == 0" in source.text
    x, s = torch.randn(2, 3 * 2**14, device=device), torch.empty(2, device=device)
    for r in (2**14, 2**15):
        call(source, {"x": x, "s": s}, tiles=Tiles(2, r))
        close(s, x.sum(1), rtol=1e-4, atol=1e-3)


# Indices -----------------------------------------------------------------------------------------------


@devices
def test_symbolic_sizes_are_multiplied_wide_enough(device):
    s0, s1 = size_symbol("s0"), size_symbol("s1")
    p = Program(hints={s0: 4, s1: 8})
    p.pointwise("y", (s0,), lambda o, i: o.index_expr(i[0] * s0 * s1 - s1, I64), I64)
    source = source_of(p, (), device)
    for far in (8, 2**31 - 1, 2**31, 2**40):
        assert needs_int64(source.plan, {s0: 5, s1: far}) == (far > 8)
        y = torch.empty(5, dtype=I64, device=device)
        call(source, {"y": y}, {"s0": 5, "s1": far}, Tiles(64))
        assert y.tolist() == [i * 5 * far - far for i in range(5)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_more_elements_than_32_bits_count():
    s0 = size_symbol("s0")
    p = Program(hints={s0: 4096})
    p.input("x", (s0,), torch.int8)
    p.pointwise(
        "y",
        (s0,),
        lambda o, i: o.add(o.load("x", s0 - 1 - i[0]), o.constant(1, torch.int8)),
        torch.int8,
    )
    source = source_of(p, (), "cuda")
    for n in (4096, 2**31 + 1000):
        x = torch.randint(-128, 127, (n,), dtype=torch.int8, device="cuda")
        y = torch.empty_like(x)
        call(source, {"x": x, "y": y}, {"s0": n})
        assert torch.equal(y[:1000].flip(0), x[-1000:] + 1)
        assert torch.equal(y[-1000:].flip(0), x[:1000] + 1)
        assert torch.equal(y, x.flip(0) + 1)


# Text --------------------------------------------------------------------------------------------------


def in_place_sweeps() -> KernelPlan:
    """A kernel that sums its rows, adds the sum to x in place, and then reduces the new rows, backwards."""
    p = Program()
    p.input("x", (4, 300))
    p.reduce("total", (4,), (300,), "sum", lambda o, i, r: o.load("x", i[0] * 300 + r[0]))
    with scoped():
        force("looped")
        plan = p.plan((), language="triton")
    body = LoopBody("in_place", plan.ranges, plan.reduction_ranges)
    ops = Recorder(body)
    x0, r0 = (*plan.ranges, *plan.reduction_ranges)
    old = ops.emit("load", (), F32, buffer="x", index=300 * x0 + r0)
    total = ops.reduction("sum", F32, old)
    new = ops.add(old, total)
    written = ops.emit("store", (new,), F32, buffer="x", index=300 * x0 + r0, kind="store")
    mirror = ops.emit("load", (), F32, buffer="x", index=300 * x0 + 299 - r0)
    weight = ops.emit("index_expr", (), torch.int32, index=r0)
    weighted = ops.mul(mirror, ops.to_dtype(weight, F32))
    last = ops.reduction("sum", F32, weighted)
    result = ops.emit("store", (last,), F32, buffer="total", index=x0, kind="store")
    elsewhere = (total, new, written, result, old)
    third = tuple(v for v in body.values if v not in elsewhere)
    phases = (
        Phase("loop", (old, total)),
        Phase("loop", (old, new, written)),
        Phase("loop", third),
        Phase("row", (result,)),
    )
    arguments = (KernelArgument("in_out_ptr0", "x", F32, "inout"), plan.arguments[1])
    changed = {"body": body, "phases": phases, "barriers": barriers(phases, True, ())}
    return dataclasses.replace(plan, arguments=arguments, **changed)


def test_memory_written_by_one_sweep_and_read_by_the_next_is_synchronised():
    source = print_triton(in_place_sweeps())
    texts = [line.text.strip() for line in source.lines]
    loops = [n for n, text in enumerate(texts) if text.startswith("for ")]
    assert [n for n, text in enumerate(texts) if text == "tl.debug_barrier()"] == [loops[2] - 1]
    x = torch.randn(4, 300)
    memory, total = x.clone(), torch.empty(4)
    call(source, {"x": memory, "total": total}, tiles=Tiles(4, 64))
    new = x + x.sum(1, keepdim=True)
    close(memory, new, rtol=1e-5, atol=1e-4)
    close(total, (memory.flip(1) * torch.arange(300)).sum(1), rtol=1e-4, atol=1e-2)
