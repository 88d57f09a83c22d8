"""Every operation of the table means in a kernel what it means in eager: in C, and in Triton."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from minicompile.codegen import triton_ops
from minicompile.errors import Unsupported
from minicompile.ops.dtypes import LOOP_DTYPES, computation_dtype
from minicompile.ops.registry import scoped, without
from minicompile.ops.table import EAGER, POINTWISE, result_dtype
from tests.codegen.fusing import Program
from tests.codegen.kernels import Case, cpp_kernels
from tests.codegen.triton_running import DEVICES, source_of

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
I64, I32, I16, I8, U8, BOOL = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
DIVISIONS = {"floordiv", "truncdiv", "remainder", "fmod"}

INEXACT = {
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "asinh", "acosh", "atanh", "tanh", "sigmoid", "erf", "erfc", "lgamma", "pow",
    "atan2", "hypot", "rsqrt", "sqrt",
}  # fmt: skip
"""Results that may differ from eager's in the last bits."""

EDGES = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.7, 0.1, 7.25, 88.0, -87.0, -103.0, 1e-3,
    math.inf, -math.inf, math.nan, 1e-7, -2e-6, 300.0, -50000.0, 1e-39, 3e4, 0.9999, -4.1, 0.63, 20.0,
]  # fmt: skip
"""Zeros of both signs, ones, halves, infinities, NaN, tiny and huge numbers."""

LANGUAGES = ["cpp", *DEVICES]
languages = pytest.mark.parametrize("language", LANGUAGES)


def check(case: Case, language: str) -> None:
    """A case in C, or in Triton on a device."""
    if language == "cpp":
        case.check(cpp_kernels({"": case})[""])
    else:
        case.check(case.triton(device=language), language)


def values(dtype: torch.dtype) -> Tensor:
    if dtype is BOOL:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.tensor(EDGES, dtype=dtype)
    info = torch.iinfo(dtype)
    some = [0, 1, 2, 3, 5, 7, 10, 31, 100, info.max, info.max - 1, info.min, info.min + 1]
    return torch.tensor(some + [-1, -2, -3, -7, -100] * (info.min < 0), dtype=dtype)


def operands(name: str, dtype: torch.dtype) -> list[Tensor]:
    """All pairs of edge cases, without what eager leaves undefined."""
    base = values(dtype)
    a, b = (t.flatten().clone() for t in torch.meshgrid(base, base, indexing="ij"))
    if name in DIVISIONS and dtype.is_floating_point:
        b[(b != 0) & (b.abs() < 1e-30)] = 3  # eager's own fmod fails on denormals
    elif name in DIVISIONS and dtype is not BOOL:
        least = torch.iinfo(dtype).min
        b[(b == 0) | ((a == least) & (b == -1) & (least < 0))] = 3
    elif name == "pow" and not dtype.is_floating_point and dtype is not BOOL:
        b = b % 7 - (2 if torch.iinfo(dtype).min < 0 else 0)
    if name == "where":
        return [a.roll(1) > 0, a, b]
    return [a, b, a.flip(0).contiguous()][: POINTWISE[name].arity]


def applicable(dtype: torch.dtype) -> list[str]:
    """The operations that eager defines on this dtype."""
    found = []
    for name in POINTWISE:
        tensors = operands(name, dtype)
        try:
            expected = result_dtype(name, tuple(t.dtype for t in tensors))
            result = EAGER[name](*tensors)
        except (TypeError, RuntimeError):
            continue
        if result.dtype is expected:
            found.append(name)
    return found


def all_operations(dtype: torch.dtype) -> Case:
    """One kernel that applies all the operations."""
    p, inputs, results = Program(), dict[str, Tensor](), dict[str, Tensor]()
    size = operands("add", dtype)[0].shape
    for name in applicable(dtype):
        tensors = operands(name, dtype)
        buffers = [p.input(f"{name}{i}", size, t.dtype) for i, t in enumerate(tensors)]
        inputs.update(zip(buffers, tensors, strict=True))
        results[name] = EAGER[name](*tensors)
        if name in INEXACT and dtype in (BF16, F16):  # eager's half kernels lose tiny results
            results[name] = EAGER[name](*(t.float() for t in tensors)).to(dtype)

        def fn(o: Any, i: Any, name: str = name, buffers: list[str] = buffers) -> Any:
            return o.pointwise(name, *(o.load(b, i[0]) for b in buffers))

        p.pointwise(name, size, fn, results[name].dtype)
    return Case(p, inputs, results)


def tolerance(name: str, dtype: torch.dtype, exact: bool) -> dict[str, float]:
    """C rounds as eager does, but for functions; Triton may be 2 ulp off, and denormals 0."""
    if (
        name == "randn"
    ):  # near 0 its cosine loses digits; compiled, Triton's logarithm is approximate
        return {"rtol": 0.0, "atol": 4e-6 if exact else 1e-3}
    if not dtype.is_floating_point or (exact and name not in INEXACT):
        return {"rtol": 0.0, "atol": 0.0}
    half, tiny = dtype.itemsize == 2, torch.finfo(F32).tiny
    rough = {F32: 4e-7, F64: 1e-14}.get(dtype, torch.finfo(dtype).eps)
    return {"rtol": rough if exact else 2 * torch.finfo(dtype).eps, "atol": 0 if half else tiny}


EITHER_ZERO = {"maximum", "minimum"}
"""IEEE 754 leaves open which of +0 and -0 is the larger one, and eager answers differently on CPU and GPU."""


@pytest.mark.long
@languages
@pytest.mark.parametrize("dtype", sorted(LOOP_DTYPES, key=str), ids=str)
def test_each_operation_gives_eagers_value_on_edge_cases(dtype: torch.dtype, language: str) -> None:
    case, exact, wrong = all_operations(dtype), language == "cpp", []
    assert len(case.results) > 20
    kernel = cpp_kernels({"": case})[""] if exact else case.triton(device=language)
    device = "cpu" if exact else language
    found = {name: torch.full_like(x, 77, device=device) for name, x in case.results.items()}
    kernel({**found, **{name: x.to(device) for name, x in case.inputs.items()}})
    for name, expected in case.results.items():
        near = tolerance(name, expected.dtype, exact)
        if name == "fma" and language == "cpu":  # Triton's interpreter rounds the product
            a, b, c = (t.to(computation_dtype(dtype)) for t in operands(name, dtype))
            expected = (a * b + c).to(dtype)
        if device != "cpu":
            expected = EAGER[name](*(t.to(device) for t in operands(name, dtype)))
        try:
            torch.testing.assert_close(found[name], expected, equal_nan=True, **near)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
        zero, signed = expected == 0, expected.dtype.is_floating_point and name not in EITHER_ZERO
        if signed and not torch.equal(found[name][zero].signbit(), expected[zero].signbit()):
            wrong.append(f"{name}: sign of zero")
    assert not wrong, "\n".join(wrong)


def test_together_the_dtypes_cover_the_whole_table() -> None:
    assert {name for dtype in LOOP_DTYPES for name in applicable(dtype)} == set(POINTWISE)


@languages
def test_conversions_between_all_dtypes_are_eagers(language: str) -> None:
    numbers = torch.tensor([0.0, -0.0, 1.0, 1.5, 2.5, 3.999, 17.0, 100.25, 1 + 2**-9, 127.0])
    p, inputs, results = Program(), dict[str, Tensor](), dict[str, Tensor]()
    for source in sorted(LOOP_DTYPES, key=str):
        signed = torch.cat([numbers, numbers if source is U8 else -numbers]).to(source)
        buffer = p.input(f"from_{source}"[5:], (20,), source)
        inputs[buffer] = signed
        for target in sorted(LOOP_DTYPES, key=str):
            if target is U8 and source.is_floating_point:
                continue  # negative floats to unsigned: undefined in eager

            def fn(o: Any, i: Any, buffer: str = buffer, target: torch.dtype = target) -> Any:
                return o.to_dtype(o.load(buffer, i[0]), target)

            name = p.pointwise(f"{source}_{target}".replace("torch.", ""), (20,), fn, target)
            results[name] = signed.to(target)
    check(Case(p, inputs, results), language)


CONSTANTS: dict[torch.dtype, list[Any]] = {
    F64: [0.1, -0.0, math.inf, math.nan, 1e300],
    F32: [0.1, -0.0, -math.inf, math.nan, 1e-42, -3.4028234663852886e38],
    I64: [2**63 - 1, -(2**63), 5_000_000_000], I32: [2**31 - 1, -(2**31)],
    U8: [255], I8: [-128], BOOL: [True, False], BF16: [0.1],
}  # fmt: skip


OPERANDS: dict[str, tuple[Callable[[Any, Any, Any], Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "product": (lambda o, x, n: o.mul(x, o.constant(0.1, F64)), lambda x, n: x * 0.1),
    "zeros": (lambda o, x, n: o.mul(x, o.constant(-0.0, F64)), lambda x, n: x * -0.0),
    "chosen": (
        lambda o, x, n: o.where(
            o.gt(x, o.constant(0.0, F64)), o.constant(0.1, F64), o.constant(math.nan, F64)
        ),
        lambda x, n: torch.where(x > 0, torch.tensor(0.1, dtype=F64), math.nan),
    ),
    "wide": (
        lambda o, x, n: o.sub(o.constant(7, I64), o.mul(n, o.constant(3_000_000_000_000, I64))),
        lambda x, n: 7 - n * 3_000_000_000_000,
    ),
}
"""A number beside what is loaded, in a kernel and in eager."""


@languages
def test_constants_arrive_exactly_alone_and_as_operands(language: str) -> None:
    p, results = Program(), dict[str, Tensor]()
    p.input("x", (3,), F64)
    p.input("n", (3,), I64)
    x, n = torch.tensor([1.0, -2.0, 0.0], dtype=F64), torch.tensor([1, -2, 3])
    for dtype, numbers in CONSTANTS.items():
        for value in numbers:
            alone = lambda o, i, value=value, dtype=dtype: o.constant(value, dtype)  # noqa: E731
            name = p.pointwise(f"c{len(results)}", (3,), alone, dtype)
            results[name] = torch.full((3,), value, dtype=dtype)
    for name, (fn, eager) in OPERANDS.items():
        both = lambda o, i, fn=fn: fn(o, o.load("x", i[0]), o.load("n", i[0]))  # noqa: E731
        results[name] = eager(x, n)
        p.pointwise(name, (3,), both, results[name].dtype)
    signed = [name for name, result in results.items() if result.is_floating_point()]
    check(Case(p, {"x": x, "n": n}, results, signed=signed), language)


def exponential() -> Program:
    p = Program()
    p.input("x", (8,))
    p.pointwise("y", (8,), lambda o, i: o.exp(o.load("x", i[0])))
    return p


def test_a_rule_from_outside_changes_the_printed_line() -> None:
    with scoped():

        @triton_ops.triton_op("exp")
        def fast_exp(dtype: torch.dtype, a: str) -> str:
            return f"tl.exp({a})"

        assert "= tl.exp(tmp0)" in source_of(exponential()).text
    assert "= libdevice.exp(tmp0)" in source_of(exponential()).text


def test_an_operation_without_a_rule_is_refused_by_name() -> None:
    with without("triton_op:exp"), pytest.raises(Unsupported, match=r"ops\.exp"):
        source_of(exponential())
