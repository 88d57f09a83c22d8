"""Every loop operation, printed in C, against eager's own function over special values and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minicompile.codegen.cpp import kernel_module
from minicompile.codegen.cpp_ops import EXPRESSIONS
from minicompile.codegen.plan import KernelPlan
from minicompile.ops.build import start_build
from minicompile.ops.table import EAGER, POINTWISE
from minicompile.options import Options
from minicompile.runtime.cpp import bind
from tests.codegen.fusing import Program

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
I64, I32, I16, I8, U8, BOOL = (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
FLOATS, INTS = (F32, F64, BF16, F16), (I64, I32, I16, I8, U8)

INEXACT = {
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "asinh", "acosh", "atanh", "tanh", "sigmoid", "erf", "erfc", "lgamma", "pow",
    "atan2", "hypot", "rsqrt", "sqrt",
}  # fmt: skip
"""Results that may differ from eager's in the last bits."""

NOT_IN_EAGER = {
    ("floor", BOOL), ("ceil", BOOL), ("trunc", BOOL), ("round", BOOL), ("sub", BOOL), ("neg", BOOL),
    ("lshift", BOOL), ("rshift", BOOL), ("fmod", BOOL), ("remainder", BOOL), ("floordiv", BOOL),
    ("truncdiv", BOOL), ("pow", BOOL), ("abs", BOOL), ("sign", BOOL),
}  # fmt: skip


def values(dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, ones, halves, infinities, NaN, tiny and huge numbers."""
    if dtype is BOOL:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        inf, nan = float("inf"), float("nan")
        some = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            -0.5,
            1.5,
            2.5,
            -2.5,
            3.0,
            -3.7,
            0.1,
            7.25,
            88.0,
            -87.0,
            1e-3,
        ]
        some += [
            inf,
            -inf,
            nan,
            1e-7,
            -2e-6,
            300.0,
            -50000.0,
            1e-39,
            3e4,
            0.9999,
            4.0,
            -4.1,
            0.63,
            20.0,
        ]
        return torch.tensor(some, dtype=dtype)
    info = torch.iinfo(dtype)
    some_ints = [0, 1, 2, 3, 5, 7, 10, 100, info.max, info.max - 1, info.min, info.min + 1]
    some_ints += [-1, -2, -3, -7, -100] if info.min < 0 else []
    return torch.tensor(some_ints, dtype=dtype)


def dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    if name in ("lshift", "rshift", "gcd"):
        return INTS
    if name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"):
        return (I64, I8, U8, BOOL)
    if name in ("add", "mul", "floordiv", "remainder", "maximum", "eq", "where"):
        return (*FLOATS, *INTS, BOOL)
    if name == "nextafter":
        return (F32, F64)  # in half types its steps are larger
    if POINTWISE[name].result == "random":
        return (I64,)
    if POINTWISE[name].result == "float" or name == "isinf":
        return (F32, F64, BF16)
    return (F32, F64, BF16, I64, I32, U8, BOOL)


def operands(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """All pairs of special values (for integers, without the divisors that eager rejects)."""
    arity = POINTWISE[name].arity
    base = values(dtype)
    if arity == 1:
        return [base]
    if name in ("fmod", "remainder") and dtype.is_floating_point:
        base = base[~((base != 0) & (base.abs() < 1e-30))]  # eager's own fmod fails on denormals
    a, b = (t.reshape(-1) for t in torch.meshgrid(base, base, indexing="ij"))
    if name in ("floordiv", "truncdiv", "remainder", "fmod") and not dtype.is_floating_point:
        keep = b != 0
        a, b = a[keep], b[keep]
        least = torch.iinfo(dtype).min
        overflow = (a == least) & (b == -1) if least < 0 else torch.zeros_like(a, dtype=BOOL)
        a, b = a[~overflow], b[~overflow]
    if name == "pow" and not dtype.is_floating_point:
        keep = (b >= 0) & (b < 100)
        a, b = a[keep], b[keep]
    if name == "where":
        return [a > b, a.clone(), b.clone()]
    return [a.contiguous(), b.contiguous(), a.flip(0).contiguous()][:arity]


def case(name: str, dtype: torch.dtype) -> tuple[Program, list[torch.Tensor]]:
    inputs = operands(name, dtype)
    n = inputs[0].numel()
    p = Program()
    for i, t in enumerate(inputs):
        p.input(f"a{i}", (n,), t.dtype)
    result = {"bool": BOOL, "random": F32}.get(POINTWISE[name].result, dtype)

    def fn(ops: Any, i: Any) -> Any:
        return ops.pointwise(name, *(ops.load(f"a{k}", i[0]) for k in range(len(inputs))))

    p.pointwise("out", (n,), fn, result)
    return p, inputs


CASES = [
    (name, dtype)
    for name in POINTWISE
    for dtype in dtypes_of(name)
    if (name, dtype) not in NOT_IN_EAGER
]


@pytest.fixture(scope="module")
def kernels() -> dict[tuple[str, torch.dtype], tuple[KernelPlan, Callable[..., None]]]:
    plans = {key: case(*key)[0].plan(position=i) for i, key in enumerate(CASES)}
    text = kernel_module(list(plans.values())).text
    module = start_build(text, Options(cpp_flags=("-O1",))).result()
    return {key: (plan, bind(module, plan)) for key, plan in plans.items()}


def run(kernel: tuple[KernelPlan, Callable[..., None]], inputs: dict[str, torch.Tensor]) -> None:
    plan, call = kernel
    call(*(inputs[a.buffer] for a in plan.arguments))


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda v: str(v).removeprefix("torch."))
def test_operation_matches_eager(kernels: Any, name: str, dtype: torch.dtype) -> None:
    inputs = operands(name, dtype)
    try:
        expected = EAGER[name](*inputs)
    except RuntimeError as error:
        pytest.fail(f"eager refuses {name} on {dtype}: {error}")
    if (
        name in INEXACT and dtype is BF16
    ):  # eager's half kernels lose tiny results: its float32 doesn't
        expected = EAGER[name](*(t.float() for t in inputs)).to(dtype)
    out = torch.empty_like(expected)
    run(kernels[name, dtype], {**{f"a{i}": t for i, t in enumerate(inputs)}, "out": out})
    if name in INEXACT and dtype in (F32, F64):
        tolerance = {"rtol": 4e-7 if dtype is F32 else 1e-14, "atol": 1e-37 if dtype is F32 else 0}
    elif name == "randn":  # near 0 its cosine loses digits
        tolerance = {"rtol": 0.0, "atol": 4e-6}
    elif dtype is BF16 and name in INEXACT:
        tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 0.0}
    else:
        tolerance = {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(out, expected, equal_nan=True, **tolerance)


def test_every_operation_of_the_table_can_be_printed() -> None:
    made_of_others = {"floordiv", "remainder"}
    assert set(POINTWISE) - made_of_others == set(EXPRESSIONS)
