"""Every operation of the table means in a Triton kernel what it means in eager."""

from __future__ import annotations

import math

import pytest
import torch

from minicompile.codegen import triton_ops
from minicompile.errors import Unsupported
from minicompile.ops.dtypes import LOOP_DTYPES
from minicompile.ops.registry import scoped, without
from minicompile.ops.table import EAGER, POINTWISE, result_dtype
from tests.codegen.fusing import Program
from tests.codegen.triton_running import devices, run, source_of

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
DIVISIONS = {"floordiv", "truncdiv", "remainder", "fmod"}

EDGE = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -7.0]
EDGE += [1e-3, 1e4, -1e4, 88.0, -103.0, 1e-39, 6e4]


def operands(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """All pairs of edge cases and random values, without what eager leaves undefined."""
    generator = torch.Generator().manual_seed(1)
    if dtype.is_floating_point:
        values = torch.cat([torch.tensor(EDGE), torch.randn(9, generator=generator) * 4])
    elif dtype is torch.bool:
        values = torch.tensor([0.0, 1.0])
    else:
        info = torch.iinfo(dtype)
        values = torch.tensor([0.0, 1, 2, 3, 7, 31, 100, info.max if info.bits < 32 else 2**30])
        if info.min < 0:
            values = torch.cat([values, -values[1:]])
    values = values.to(dtype)
    first, second = (t.flatten().clone() for t in torch.meshgrid(values, values, indexing="ij"))
    third = second.roll(5)
    if dtype.is_floating_point and name in DIVISIONS:
        second[second == torch.tensor(1e-39, dtype=dtype)] = 3  # eager's CPU fmod gives NaN
    if not dtype.is_floating_point and dtype is not torch.bool:
        if name in DIVISIONS:
            second[second == 0] = 3
        if name == "pow":
            second = (second % 7) - (2 if torch.iinfo(dtype).min < 0 else 0)
    if name == "where":
        return [first.roll(1) > 0, first, second]
    return [first, second, third][: POINTWISE[name].arity]


def applicable(dtype: torch.dtype) -> list[str]:
    """The operations that eager defines on this dtype."""
    found = []
    for name in POINTWISE:
        tensors = operands(name, dtype)
        try:
            result_dtype(name, tuple(t.dtype for t in tensors))
            result = EAGER[name](*tensors)
        except (TypeError, RuntimeError):
            continue
        if name == "nextafter" and dtype.itemsize == 2:
            continue  # no rule makes one: in half types its steps are larger
        if result.dtype is result_dtype(name, tuple(t.dtype for t in tensors)):
            found.append(name)
    return found


def program(names: list[str], dtype: torch.dtype) -> tuple[Program, dict[str, torch.Tensor]]:
    """One kernel that applies all the operations."""
    p = Program()
    inputs: dict[str, torch.Tensor] = {}
    size = (len(operands("add", dtype)[0]),)
    for name in names:
        tensors = operands(name, dtype)
        buffers = [p.input(f"{name}{i}", size, t.dtype) for i, t in enumerate(tensors)]
        inputs.update(zip(buffers, tensors, strict=True))

        def fn(ops, index, name=name, buffers=buffers):
            return ops.pointwise(name, *[ops.load(b, index[0]) for b in buffers])

        p.pointwise(name, size, fn, result_dtype(name, tuple(t.dtype for t in tensors)))
    return p, inputs


EITHER_ZERO = {"maximum", "minimum"}
"""IEEE 754 leaves open which of +0 and -0 is the larger one, and eager answers differently on CPU and GPU."""


def difference(name: str, found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """What is wrong, if anything. Right is equal up to 2 ulp, denormals may be 0; NaN, infinities and the
    signs of zeros exactly."""
    if not expected.dtype.is_floating_point:
        return None if torch.equal(found, expected) else f"{name}: {found} is not {expected}"
    tolerance = 2 * torch.finfo(expected.dtype).eps
    denormal = torch.finfo(torch.float32).tiny
    if (
        name == "randn"
    ):  # near 0 its cosine loses digits; compiled, Triton's logarithm is approximate
        return None if (found - expected).abs().max() < 1e-3 else f"{name}: {found - expected}"
    try:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=denormal, equal_nan=True)
    except AssertionError as error:
        return f"{name}: {error}"
    zero = expected == 0
    if name in EITHER_ZERO or torch.equal(found[zero].signbit(), expected[zero].signbit()):
        return None
    return f"{name}: sign of zero"


@pytest.mark.long
@devices
@pytest.mark.parametrize("dtype", [*FLOATS, *INTS, torch.bool], ids=str)
def test_each_operation_gives_eagers_value_on_edge_cases(dtype, device):
    names = applicable(dtype)
    assert len(names) > 20
    p, inputs = program(names, dtype)
    outputs = run(p, inputs, device=device)
    wrong = []
    for name in names:
        expected = EAGER[name](*[t.to(device) for t in operands(name, dtype)])
        found = difference(name, outputs[name], expected)
        if found is not None:
            wrong.append(found)
    assert not wrong, "\n".join(wrong)


def test_together_the_dtypes_cover_the_whole_table():
    covered = {name for dtype in LOOP_DTYPES for name in applicable(dtype)}
    assert covered == set(POINTWISE)


@devices
def test_conversions_between_all_dtypes_are_eagers(device):
    dtypes = sorted(LOOP_DTYPES, key=str)
    values = torch.tensor([0.0, -0.0, 1.0, 1.5, 2.5, 3.999, 17.0, 100.25, 1 + 2**-9, 127.0])
    signed = torch.cat([values, -values])
    p, inputs, pairs = Program(), {}, []
    for source in dtypes:
        tensor = (values if source is torch.uint8 else signed).repeat(2)[:20].to(source)
        inputs[p.input(f"from_{source}"[5:], (20,), source)] = tensor
        for target in dtypes:
            if target is torch.uint8 and source.is_floating_point:
                continue  # negative floats to unsigned: undefined in eager
            name = f"{source}_{target}".replace("torch.", "")

            def fn(ops, index, source=source, target=target):
                return ops.to_dtype(ops.load(f"from_{source}"[5:], index[0]), target)

            pairs.append((p.pointwise(name, (20,), fn, target), source, target))
    outputs = run(p, inputs, device=device)
    for name, source, target in pairs:
        expected = inputs[f"from_{source}"[5:]].to(device).to(target)
        assert torch.equal(outputs[name], expected), name


@devices
def test_constants_of_every_dtype_arrive_exactly(device):
    p = Program()
    wanted: dict[str, torch.Tensor] = {}
    p.input("zero", (3,), torch.float32)
    for dtype, values in {
        torch.float64: [0.1, -0.0, math.inf, math.nan, 1e300],
        torch.float32: [0.1, -0.0, -math.inf, math.nan, 1e-42, -3.4028234663852886e38],
        torch.int64: [2**63 - 1, -(2**63), 5_000_000_000],
        torch.int32: [2**31 - 1, -(2**31)],
        torch.uint8: [255],
        torch.int8: [-128],
        torch.bool: [True, False],
        torch.bfloat16: [0.1],
    }.items():
        for i, value in enumerate(values):
            name = f"c{len(wanted)}_{i}"

            def fn(ops, index, value=value, dtype=dtype):
                return ops.constant(value, dtype)

            p.pointwise(name, (3,), fn, dtype)
            wanted[name] = torch.full((3,), value, dtype=dtype, device=device)
    outputs = run(p, {"zero": torch.zeros(3)}, device=device)
    for name, expected in wanted.items():
        torch.testing.assert_close(outputs[name], expected, rtol=0, atol=0, equal_nan=True)
        if expected.dtype.is_floating_point:
            assert torch.equal(outputs[name].signbit(), expected.signbit()), name


@devices
def test_constant_operands_keep_their_dtype_and_sign(device):
    p = Program()
    x64 = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    i64 = torch.tensor([1, -2, 3])
    p.input("x", (3,), torch.float64)
    p.input("i", (3,), torch.int64)

    def constant(ops, value, dtype=torch.float64):
        return ops.constant(value, dtype)

    p.pointwise("a", (3,), lambda o, n: o.mul(o.load("x", n[0]), constant(o, 0.1)), torch.float64)
    p.pointwise("b", (3,), lambda o, n: o.mul(o.load("x", n[0]), constant(o, -0.0)), torch.float64)
    p.pointwise(
        "c",
        (3,),
        lambda o, n: o.where(
            o.gt(o.load("x", n[0]), constant(o, 0.0)), constant(o, 0.1), constant(o, math.nan)
        ),
        torch.float64,
    )
    big = 3_000_000_000_000
    p.pointwise(
        "d",
        (3,),
        lambda o, n: o.mul(o.load("i", n[0]), constant(o, big, torch.int64)),
        torch.int64,
    )
    p.pointwise(
        "e",
        (3,),
        lambda o, n: o.sub(constant(o, 7, torch.int64), o.load("i", n[0])),
        torch.int64,
    )
    out = run(p, {"x": x64, "i": i64}, device=device)
    x64, i64 = x64.to(device), i64.to(device)
    assert torch.equal(out["a"], x64 * 0.1)
    assert torch.equal(out["b"].signbit(), (x64 * -0.0).signbit())
    assert out["c"][0].item() == 0.1
    assert out["c"][1:].isnan().all()
    assert torch.equal(out["d"], i64 * big)
    assert torch.equal(out["e"], 7 - i64)


@devices
def test_bitcast_reads_the_same_bits(device):
    p = Program()
    x = torch.tensor([1.0, -0.0, math.inf, 1e-40])
    h = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.bfloat16)
    p.input("x", (4,))
    p.input("h", (4,), torch.bfloat16)
    p.pointwise("bits", (4,), lambda o, n: o.bitcast(o.load("x", n[0]), torch.int32), torch.int32)
    p.pointwise(
        "half_bits", (4,), lambda o, n: o.bitcast(o.load("h", n[0]), torch.int16), torch.int16
    )
    out = run(p, {"x": x, "h": h}, device=device)
    assert torch.equal(out["bits"].cpu(), x.view(torch.int32))
    assert torch.equal(out["half_bits"].cpu(), h.view(torch.int16))


def relu_program() -> Program:
    p = Program()
    p.input("x", (8,))
    p.pointwise("y", (8,), lambda o, n: o.exp(o.load("x", n[0])))
    return p


def test_a_rule_from_outside_changes_the_printed_line():
    with scoped():

        @triton_ops.triton_op("exp")
        def fast_exp(dtype, a):
            return f"tl.exp({a})"

        text = source_of(relu_program()).text
        assert "= tl.exp(tmp0)" in text
    assert "= libdevice.exp(tmp0)" in source_of(relu_program()).text


def test_an_operation_without_a_rule_is_refused_by_name():
    with without("triton_op:exp"), pytest.raises(Unsupported, match=r"ops\.exp"):
        source_of(relu_program())
