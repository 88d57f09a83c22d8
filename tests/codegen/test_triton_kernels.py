"""Triton kernels compute what eager computes: loops, tiles, reductions, indices, masks, scatters."""

from __future__ import annotations

import dataclasses
import math

import pytest
import sympy
import torch

import minicompile as mc
from minicompile.codegen.generate import plan_rule
from minicompile.codegen.legalize import settle_checks
from minicompile.codegen.plan import KernelArgument, KernelPlan, Phase
from minicompile.codegen.triton import print_triton
from minicompile.errors import Unsupported
from minicompile.ops.registry import scoped
from minicompile.runtime.gpu_kernel import Tiles, needs_int64
from minicompile.scheduling.body import LoopBody, Recorder
from minicompile.shapes.expr import FloorDiv, ModularIndexing, float_symbol, size_symbol
from tests.codegen.fusing import Program, layer_norm, softmax
from tests.codegen.triton_running import call, devices, run, source_of

F32, I64, BOOL = torch.float32, torch.int64, torch.bool


def close(found: torch.Tensor, expected: torch.Tensor, **kw: float) -> None:
    torch.testing.assert_close(found.cpu(), expected.cpu(), equal_nan=True, **kw)


# Loops and tiles ---------------------------------------------------------------------------------------


@devices
@pytest.mark.parametrize("n", [1, 7, 1000, 1025])
def test_a_pointwise_kernel_covers_every_element_and_no_more(n, device):
    p = Program()
    p.input("x", (n,))
    p.pointwise("y", (n,), lambda o, i: o.add(o.load("x", i[0]), o.constant(1.0, F32)))
    source = source_of(p, device=device)
    x = torch.randn(n, device=device)
    y = torch.full((n + 64,), 77.0, device=device)
    call(source, {"x": x, "y": y}, tiles=Tiles(64))
    assert torch.equal(y[:n], x + 1)
    assert (y[n:] == 77).all()


@devices
def test_transposed_and_broadcast_operands_follow_their_strides(device):
    p = Program()
    p.input("x", (5, 3, 7))
    p.input("b", (3,))
    p.pointwise(
        "y",
        (7, 5, 3),
        lambda o, i: o.sub(o.load("x", i[1] * 21 + i[2] * 7 + i[0]), o.load("b", i[2])),
    )
    x, b = torch.randn(5, 3, 7), torch.randn(3)
    out = run(p, {"x": x, "b": b}, device=device, tiles=Tiles(32))
    close(out["y"], x.permute(2, 0, 1) - b)


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


@devices
def test_one_text_serves_every_symbolic_size(device):
    s0 = size_symbol("s0")
    p = Program(hints={s0: 16})
    p.input("x", (s0, 3))
    p.pointwise(
        "y",
        (3, s0),
        lambda o, i: o.add(
            o.load("x", i[1] * 3 + i[0]), o.to_dtype(o.index_expr(i[1] * s0 + i[0], I64), F32)
        ),
    )
    source = source_of(p, device=device)
    for n in (16, 1, 7, 100):
        x, y = torch.randn(n, 3, device=device), torch.empty(3, n, device=device)
        call(source, {"x": x, "y": y}, {"s0": n}, Tiles(64))
        i, j = torch.arange(n, device=device), torch.arange(3, device=device)[:, None]
        assert torch.equal(y, x.t() + (i * n + j).float()), n


@devices
@pytest.mark.parametrize("dtype", [F32, torch.float64])
def test_a_float_is_an_argument_in_double_precision(dtype, device):
    s0, f0 = size_symbol("s0"), float_symbol("f0")
    p = Program(hints={s0: 16, f0: 0.25})
    p.input("x", (s0,), dtype)
    p.pointwise("y", (s0,), lambda o, i: o.mul(o.load("x", i[0]), o.index_expr(-f0, dtype)), dtype)
    source = source_of(p, (), device)
    assert [str(symbol) for symbol in source.plan.sizes] == ["s0", "f0"]
    for number in (0.1, 1 / 3, 2.0, -1e-30):
        x = torch.randn(16, dtype=dtype, device=device)
        y = torch.empty_like(x)
        call(source, {"x": x, "y": y}, {"s0": 16, "f0": number}, Tiles(64))
        torch.testing.assert_close(y, x * -number, atol=0, rtol=0)


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


def test_empty_tensors_launch_nothing_and_empty_rows_give_the_identity():
    p = Program()
    p.input("x", (0, 4))
    p.pointwise("y", (0, 4), lambda o, i: o.load("x", i[0] * 4 + i[1]))
    assert run(p, {"x": torch.empty(0, 4)})["y"].shape == (0, 4)
    q = Program()
    q.input("x", (3, 0))
    q.reduce("s", (3,), (0,), "sum", lambda o, i, r: o.load("x", r[0]))
    assert run(q, {"x": torch.empty(3, 0)})["s"].tolist() == [0, 0, 0]


# Reductions --------------------------------------------------------------------------------------------

REFERENCE = {
    "sum": lambda x: x.sum(1, dtype=x.dtype),
    "prod": lambda x: x.prod(1, dtype=x.dtype),
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "any": lambda x: x.any(1),
    "all": lambda x: x.all(1),
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(1),
}


def rows(dtype: torch.dtype, length: int) -> torch.Tensor:
    """Rows with ties, NaN, infinities, and extremes of the dtype."""
    generator = torch.Generator().manual_seed(length)
    if dtype.is_floating_point:
        x = torch.randint(-9, 9, (6, length), generator=generator).to(dtype) / 8
        x[1] = -math.inf
        x[2, length // 2] = math.nan
        x[3, length // 3 :: 2] = math.inf
        x[4] = 0.0
        return x
    x = torch.randint(0, 4, (6, length), generator=generator).to(dtype)
    if dtype is not BOOL:
        x[1], x[2] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    else:
        x[1], x[2] = False, True
    return x


@pytest.mark.long
@devices
@pytest.mark.parametrize("length", [1, 7, 64, 300], ids=lambda n: f"length{n}")
@pytest.mark.parametrize("looped", [False, True], ids=["persistent", "looped"])
def test_every_reduction_of_every_dtype_is_eagers(length, looped, device):
    for dtype in (F32, torch.float64, torch.bfloat16, I64, torch.int32, torch.uint8, BOOL):
        x = rows(dtype, length)
        p = Program()
        p.input("x", (6, length), dtype)
        kinds = [k for k in REFERENCE if dtype is not BOOL or k in ("any", "all")]
        if dtype is torch.bfloat16:
            kinds.remove("prod")  # eager's CPU product rounds after every factor
        kinds = [k for k in kinds if k not in ("any", "all") or dtype is BOOL]
        for kind in kinds:
            result = REFERENCE[kind](x).dtype
            p.reduce(
                kind,
                (6,),
                (length,),
                kind,
                lambda o, i, r: o.load("x", i[0] * length + r[0]),
                result,
            )
        with scoped():
            force(looped)
            outputs = run(p, {"x": x}, device=device, tiles=Tiles(4, 64) if looped else None)
        for kind in kinds:
            expected = REFERENCE[kind](x)
            tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-6
            if expected.dtype.is_floating_point:
                close(outputs[kind], expected, rtol=tolerance, atol=1e-6)
            else:
                assert torch.equal(outputs[kind].cpu(), expected), (kind, dtype)


def force(looped: bool) -> None:
    """Register a plan rule that decides between loops and rows held at once."""

    @plan_rule("triton:forced")
    def forced(plan, options):
        plan.reduction = "looped" if looped else "persistent"


@devices
@pytest.mark.parametrize("looped", [False, True], ids=["persistent", "looped"])
def test_outer_full_and_many_dimensional_reductions(looped, device):
    x = torch.randn(3, 40, 5)
    p = Program()
    p.input("x", (3, 40, 5))
    p.reduce(
        "outer", (3, 5), (40,), "sum", lambda o, i, r: o.load("x", i[0] * 200 + r[0] * 5 + i[1])
    )
    q = Program()
    q.input("x", (3, 40, 5))
    q.reduce(
        "full", (), (3, 40, 5), "sum", lambda o, i, r: o.load("x", r[0] * 200 + r[1] * 5 + r[2])
    )
    s = Program()
    s.input("x", (3, 40, 5))
    s.reduce(
        "both",
        (40,),
        (3, 5),
        "argmax",
        lambda o, i, r: o.load("x", r[0] * 200 + i[0] * 5 + r[1]),
        I64,
    )
    tiles = Tiles(1, 32) if looped else None
    with scoped():
        force(looped)
        close(run(p, {"x": x}, device=device, tiles=tiles)["outer"], x.sum(1))
        close(run(q, {"x": x}, device=device, tiles=tiles)["full"], x.sum())
        found = run(s, {"x": x}, device=device, tiles=tiles)["both"]
    assert torch.equal(found.cpu(), x.transpose(0, 1).reshape(40, 15).argmax(1))


@devices
@pytest.mark.parametrize("columns", [1, 7, 64, 300])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float16], ids=str)
def test_softmax_in_one_kernel(columns, dtype, device):
    x = (torch.randn(9, columns) * 5).to(dtype)
    x[2, 0] = -math.inf
    for looped in (False, True):
        with scoped():
            force(looped)
            p = softmax(9, columns, dtype)
            out = run(p, {"x": x}, ("amax", "total"), device, Tiles(4, 64) if looped else None)
        close(out["softmax"], x.to(device).softmax(1))


@devices
@pytest.mark.parametrize("looped", [False, True], ids=["persistent", "looped"])
def test_layer_norm_with_residual_in_one_kernel(looped, device):
    x, z, w, b = torch.randn(5, 200), torch.randn(5, 200), torch.randn(200), torch.randn(200)
    with scoped():
        force(looped)
        p = layer_norm(5, 200, residual=True)
        inputs = {"x": x, "z": z, "w": w, "b": b}
        out = run(p, inputs, ("sum1", "sum2"), device, Tiles(2, 64) if looped else None)
    close(out["out"], torch.nn.functional.layer_norm(x + z, (200,), w, b))
    close(out["rstd"], 1 / ((x + z).var(1, correction=0) + 1e-5).sqrt())


@devices
def test_a_reduction_of_values_that_lack_an_axis_counts_every_element(device):
    p = Program()
    p.input("b", (7,))
    p.input("x", (3,))
    p.reduce("same_rows", (3,), (7,), "sum", lambda o, i, r: o.load("b", r[0]))
    p.reduce("same_columns", (3,), (7,), "sum", lambda o, i, r: o.load("x", i[0]))
    p.reduce("ones", (3,), (7,), "sum", lambda o, i, r: o.constant(1.0, F32))
    b, x = torch.randn(7), torch.randn(3)
    for looped in (False, True):
        with scoped():
            force(looped)
            out = run(p, {"b": b, "x": x}, device=device, tiles=Tiles(2, 4) if looped else None)
        close(out["same_rows"], b.sum().expand(3))
        close(out["same_columns"], x * 7)
        assert out["ones"].tolist() == [7, 7, 7]


# Indices -----------------------------------------------------------------------------------------------


@devices
def test_index_values_are_computed_wide_enough(device):
    p = Program()
    p.input("x", (11,))
    p.pointwise("y", (11,), lambda o, i: o.index_expr(i[0] * 1_000_000_000, I64), I64)
    found = run(p, {}, device=device)["y"]
    assert torch.equal(found.cpu(), torch.arange(11) * 1_000_000_000)


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


@devices
def test_index_divisions_round_down(device):
    p = Program()
    p.input("x", (40,))
    p.pointwise(
        "q", (40,), lambda o, i: o.index_expr(FloorDiv(i[0] - 20, sympy.Integer(7)), I64), I64
    )
    p.pointwise(
        "m",
        (40,),
        lambda o, i: o.index_expr(
            ModularIndexing(i[0] - 20, sympy.Integer(3), sympy.Integer(5)), torch.int32
        ),
        torch.int32,
    )
    out = run(p, {}, device=device)
    n = torch.arange(40) - 20
    assert torch.equal(out["q"].cpu(), n // 7)
    assert torch.equal(out["m"].cpu(), (n // 3 % 5).int())


@devices
def test_masked_loads_touch_nothing_outside_the_mask(device):
    """A pad: x[i - 2] where that exists, else -1."""
    p = Program()
    p.input("x", (6,))

    def pad(o, i):
        at = o.index_expr(i[0] - 2, torch.int32)
        inside = o.logical_and(
            o.ge(at, o.constant(0, torch.int32)), o.lt(at, o.constant(6, torch.int32))
        )
        return o.masked(inside, lambda ops: ops.load("x", i[0] - 2), -1.0)

    p.pointwise("y", (10,), pad)
    x = torch.randn(6)
    found = run(p, {"x": x}, device=device)["y"]
    close(found, torch.nn.functional.pad(x, (2, 2), value=-1.0))


def gather(n: int, **kw: bool) -> Program:
    p = Program()
    p.input("table", (5, 4))
    p.input("index", (n,), I64)

    def row(o, i):
        at = o.indirect_indexing(o.load("index", i[0]), 5, **kw)
        return o.load("table", at * 4 + i[1])

    p.pointwise("y", (n, 4), row)
    return p


@devices
def test_gathered_rows_with_negative_indices_counting_from_the_end(device):
    table, index = torch.randn(5, 4), torch.tensor([0, -1, 4, -5, 2, 2, 1])
    close(run(gather(7), {"table": table, "index": index}, device=device)["y"], table[index])


def test_an_index_out_of_range_is_an_error_as_in_eager():
    table = torch.randn(5, 4)
    for bad in (5, -6):
        with pytest.raises(IndexError, match="out of range"):
            run(gather(3), {"table": table, "index": torch.tensor([0, bad, 1])})


def test_an_index_outside_its_mask_is_no_error():
    p = Program()
    p.input("table", (5,))
    p.input("index", (4,), I64)

    def pick(o, i):
        index = o.load("index", i[0])
        good = o.ge(index, o.constant(0, I64))

        def inside(ops):
            return ops.load("table", ops.indirect_indexing(index, 5, wrap_negative=False))

        return o.masked(good, inside, 0.0)

    p.pointwise("y", (4,), pick)
    table, index = torch.randn(5), torch.tensor([2, -100, 4, -1])
    found = run(p, {"table": table, "index": index})["y"]
    assert torch.equal(found, torch.where(index >= 0, table[index.clamp(min=0)], 0.0))


@devices
@pytest.mark.parametrize(
    "dtype", [F32, torch.float64, torch.float16, torch.bfloat16, I64, torch.int32], ids=str
)
def test_scattered_additions_all_count(dtype, device):
    p = Program()
    p.input("index", (50,), I64)
    p.input("x", (50,), dtype)
    p.input("target", (6,), dtype)
    p.scatter(
        "y",
        (6,),
        (50,),
        "target",
        lambda o, i: [o.indirect_indexing(o.load("index", i[0]), 6)],
        lambda o, i: o.load("x", i[0]),
        dtype=dtype,
    )
    source = source_of(p, device=device)
    index, x = torch.randint(-6, 6, (50,)), torch.randint(-9, 9, (50,)).to(dtype)
    memory = torch.arange(6).to(dtype).to(device)
    expected = memory.cpu().index_put((index,), x, accumulate=True)
    tensors = {"index": index.to(device), "x": x.to(device), "target": memory, "y": memory}
    call(source, tensors, tiles=Tiles(16))
    assert torch.equal(memory.cpu(), expected)


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
        force(looped)
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
        force(looped=True)
        text = source_of(softmax(4, 100)).text
    assert text.count("for roffset in range(0, rnumel, RBLOCK):") == 3


def in_place_sweeps(again: str) -> KernelPlan:
    """A kernel that sums its rows, adds the sum to x in place, and then reduces `again`."""
    p = Program()
    p.input("x", (4, 300))
    p.reduce("total", (4,), (300,), "sum", lambda o, i, r: o.load("x", i[0] * 300 + r[0]))
    with scoped():
        force(looped=True)
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


def test_values_of_a_sweep_are_computed_again_in_the_next():
    p = Program()
    p.input("x", (4, 300))
    p.reduce("s", (4,), (300,), "sum", lambda o, i, r: o.load("x", i[0] * 300 + r[0]))
    p.pointwise(
        "y", (4, 300), lambda o, i: o.add(o.load("x", i[0] * 300 + i[1]), o.load("s", i[0]))
    )
    p.reduce("t", (4,), (300,), "sum", lambda o, i, r: o.load("y", i[0] * 300 + r[0]))
    x = torch.randn(4, 300)
    with scoped():
        force(looped=True)
        out = run(p, {"x": x}, ("s",), tiles=Tiles(4, 64))
    close(out["t"], (x + x.sum(1, keepdim=True)).sum(1), rtol=1e-4, atol=1e-3)
