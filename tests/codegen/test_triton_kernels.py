"""Triton kernels compute what eager computes: loops, tiles, reductions, indices, masks, scatters."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import minicompile as mc
from minicompile.codegen.legalize import settle_checks
from minicompile.codegen.plan import KernelArgument, KernelPlan, Phase
from minicompile.codegen.triton import print_triton
from minicompile.errors import Unsupported
from minicompile.ops.registry import scoped
from minicompile.runtime.gpu_kernel import Tiles, needs_int64
from minicompile.scheduling.body import LoopBody, Recorder
from minicompile.shapes.expr import size_symbol
from tests.codegen.fusing import Program, layer_norm, softmax
from tests.codegen.kernels import force
from tests.codegen.triton_running import call, devices, run, source_of

F32, I64, BOOL = torch.float32, torch.int64, torch.bool


def close(found: torch.Tensor, expected: torch.Tensor, **kw: float) -> None:
    torch.testing.assert_close(found.cpu(), expected.cpu(), equal_nan=True, **kw)


# Loops and tiles ---------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("tiles", [Tiles(8, y=16), Tiles(64, y=4), Tiles(32, y=32), None], ids=str)
def test_what_is_read_along_another_loop_is_read_in_squares(tiles, device):
    p = Program()
    for name, size in (("x", (3, 37, 50)), ("b", (37,)), ("c", (50,)), ("m", (3, 50, 37))):
        p.input(name, size)

    def fn(o, i):
        turned = o.load("x", i[0] * 1850 + i[2] * 50 + i[1])
        known = o.mul(o.load("b", i[2]), o.load("c", i[1]))
        return o.add(o.sub(turned, known), o.load("m", i[0] * 1850 + i[1] * 37 + i[2]))

    p.pointwise("y", (3, 50, 37), fn)
    source = source_of(p, device=device)
    assert str(list(source.plan.axes["y"])[-1]) == "x1"
    assert list(source.plan.tiles) == list(source.plan.axes) == ["y", "x"]
    x, m, b, c = torch.randn(3, 37, 50), torch.randn(3, 50, 37), torch.randn(37), torch.randn(50)
    y = torch.full((3 * 1850 + 64,), 77.0)
    tensors = {"x": x, "m": m, "b": b, "c": c, "y": y}
    tensors = {name: t.to(device) for name, t in tensors.items()}
    call(source, tensors, tiles=tiles)
    expected = x.transpose(1, 2) - b * c[:, None] + m
    close(tensors["y"][: 3 * 1850].view(3, 50, 37), expected)
    assert (tensors["y"][3 * 1850 :] == 77).all()


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


@devices
def test_an_axis_walked_in_one_stride_needs_no_digits(device):
    p = Program()
    p.input("x", (6, 5, 7))
    p.input("b", (5,))
    p.pointwise(
        "y",
        (6, 5, 7),
        lambda o, i: o.mul(o.load("x", 209 - i[0] * 35 - i[1] * 7 - i[2]), o.load("b", i[1])),
    )
    source = source_of(p, device=device)
    assert "209 - xindex" in source.text
    assert "out_ptr0 + (xindex)" in source.text
    assert "x0 =" not in source.text
    x, b = torch.randn(6, 5, 7), torch.randn(5)
    close(run(p, {"x": x, "b": b}, device=device)["y"], x.flip(0, 1, 2) * b[:, None])


@pytest.mark.long
@devices
def test_a_looped_softmax_reads_its_rows_twice_and_knows_infinities(device):
    s0 = size_symbol("s0")
    source = source_of(softmax(4096, s0, hints={s0: 50_000}), ("amax", "total"), device)
    assert source.text.count("tl.load(") == 2
    assert len(source.plan.riders) == 1
    for n in (100, 61, 300):
        x = torch.zeros(4096, n, device=device)
        x[:8] = torch.randn(8, n, device=device) * 4
        x[0], x[1, : n - 3], x[2, 5:] = -math.inf, -math.inf, -math.inf
        x[3, n // 2], x[4, n // 2], x[5, :32] = math.inf, math.nan, 1e30
        x[6], x[7, ::2] = 1000.0, -1e4
        y = torch.empty_like(x)
        call(source, {"x": x, "softmax": y}, {"s0": n}, Tiles(512, 16))
        close(y, x.softmax(1))


# Reductions --------------------------------------------------------------------------------------------


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


def test_an_atomic_addition_that_triton_lacks_is_refused():
    p = Program()
    p.input("x", (5,), torch.int8)
    p.input("target", (5,), torch.int8)
    p.scatter(
        "y",
        (5,),
        (5,),
        "target",
        lambda o, i: [i[0]],
        lambda o, i: o.load("x", i[0]),
        dtype=torch.int8,
    )
    with pytest.raises(Unsupported, match="atomic addition"):
        source_of(p)


# Text --------------------------------------------------------------------------------------------------


def scaled(constant: float) -> Program:
    p = layer_norm(6, 40)
    p.pointwise(
        "scaled",
        (6, 40),
        lambda o, i: o.mul(o.load("out", i[0] * 40 + i[1]), o.constant(constant, F32)),
    )
    return p


@pytest.mark.parametrize("looped", [False, True], ids=["persistent", "looped"])
def test_another_constant_changes_only_the_lines_of_its_operation(looped):
    with scoped():
        force("looped" if looped else "persistent")
        before, after = (source_of(scaled(c), ("sum1", "sum2", "out")) for c in (2.0, 3.5))
    changed = [(a, b) for a, b in zip(before.lines, after.lines, strict=True) if a.text != b.text]
    assert len(changed) == 1
    assert {origin.node for origin in changed[0][0].origins} == {"scaled_node"}


def test_every_line_has_origins():
    source = source_of(layer_norm(6, 40), ("sum1", "sum2"))
    assert all(line.origins for line in source.lines)
    assert len({line.origins for line in source.lines}) > 3


def test_a_plan_rule_from_outside_changes_the_kernel():
    assert source_of(softmax(4, 100)).plan.reduction == "persistent"
    with scoped():
        force("looped")
        text = source_of(softmax(4, 100)).text
    assert text.count("for roffset in range(0, rnumel, RBLOCK):") == 3


def in_place_sweeps(again: str) -> KernelPlan:
    """A kernel that sums its rows, adds the sum to x in place, and then reduces `again`."""
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
    source = ops.add(mirror, old) if again == "both" else mirror
    weight = ops.emit("index_expr", (), torch.int32, index=r0)
    weighted = ops.mul(source, ops.to_dtype(weight, F32))
    last = ops.reduction("sum", F32, weighted)
    result = ops.emit("store", (last,), F32, buffer="total", index=x0, kind="store")
    settle_checks(body)
    elsewhere = (total, new, written, result) + (() if again == "both" else (old,))
    third = tuple(v for v in body.values if v not in elsewhere)
    phases = (
        Phase("loop", (old, total)),
        Phase("loop", (old, new, written)),
        Phase("loop", third),
        Phase("row", (result,)),
    )
    arguments = (KernelArgument("in_out_ptr0", "x", F32, "inout"), plan.arguments[1])
    return dataclasses.replace(plan, body=body, phases=phases, arguments=arguments)


def test_memory_written_by_one_sweep_and_read_by_the_next_is_synchronised():
    source = print_triton(in_place_sweeps("new"))
    texts = [line.text.strip() for line in source.lines]
    loops = [n for n, text in enumerate(texts) if text.startswith("for ")]
    assert [n for n, text in enumerate(texts) if text == "tl.debug_barrier()"] == [loops[2] - 1]
    x = torch.randn(4, 300)
    memory, total = x.clone(), torch.empty(4)
    call(source, {"x": memory, "total": total}, tiles=Tiles(4, 64))
    new = x + x.sum(1, keepdim=True)
    close(memory, new, rtol=1e-5, atol=1e-4)
    close(total, (memory.flip(1) * torch.arange(300)).sum(1), rtol=1e-4, atol=1e-2)
