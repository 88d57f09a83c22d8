"""Whole C kernels: each loop shape against eager, over sizes, dtypes and special values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.codegen.cpp_units import kernel_module
from minicompile.codegen.plan import plan_rule
from minicompile.ops.build import start_build
from minicompile.ops.toolchain import processor_features
from minicompile.options import Options
from minicompile.runtime.cpp import bind
from minicompile.shapes.expr import size_symbol
from tests.codegen.fusing import Program, softmax
from tests.codegen.kernels import one_reduction, special
from tests.codegen.kernels import run_cpp as run

F32, F64, BF16, I64, BOOL = torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool


# ---- rows


@pytest.mark.parametrize(
    "rule", ["vector", "columns", "chunks", "squares", "stash", "parallel", ""]
)
def test_kernels_are_right_without_any_rule_of_their_plans(rule: str) -> None:
    def columns(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.softmax(x.double() * 2, -1).cumsum(-1)
        return first, torch.softmax(x, 0), x.sum(0), x.t() + 1, (x * 2).cumsum(-1).cumsum(-1)

    x = special(40, 150)
    keys = [key for key in plan_rule if str(key).startswith(f"cpp:{rule}")]
    with mc.without(*(f"plan:{key}" for key in keys)):
        found = mc.compile(columns, fullgraph=True)(x)
    for one, other in zip(found, columns(x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("hint", [None, 10])
def test_long_float_sums_do_not_pile_up_rounding_errors(hint: int | None) -> None:
    n, s0 = 1_000_000, size_symbol("s0")
    columns = n if hint is None else s0
    plan = one_reduction("sum", 16, columns, F32, F32, False, hints={s0: hint or n}).plan()
    x, out = torch.full((16, n), 0.1), torch.empty(16)
    run(plan, {"x": x, "out": out}, *([n] if hint else []))
    torch.testing.assert_close(out, x.double().sum(1).float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("size", [(8, 64, 3136), (64, 128, 70)])
def test_sums_of_several_rows_are_as_exact_as_eager(size: tuple[int, int, int]) -> None:
    x = special(*size)
    total = lambda x: x.sum((0, 2))  # noqa: E731
    found, eager = ((f(x) - total(x.double())).norm() for f in (mc.compile(total), total))
    assert found < 0.8 * eager


# ---- pointwise, indices, masks


# ---- scatter


def test_an_index_that_all_columns_share_is_read_once_a_row() -> None:
    """A sum over rows beside a scatter of them."""

    def step(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grad = x * 2
        return grad.sum(0), x.new_zeros(50, 96).index_put((index,), grad, accumulate=True)

    x, index = torch.randn(4, 30, 96), torch.randint(-50, 50, (4, 30))
    compiled = mc.compile(step)
    torch.testing.assert_close(compiled(x, index), step(x, index))
    [text] = [k.text for k in mc.trace(compiled, x, index).kernels if "_tile" in k.text]
    assert text.index("bool i0_bad") < text.index("for (int64_t x1", text.index("for (int64_t r0"))
    with pytest.raises(IndexError):
        compiled(x, index + 51)


def test_a_scatter_without_elements_is_compiled() -> None:
    """Whether the rows of nothing have owners is not asked of a division by their length."""
    p = Program()
    p.input("target", (5, 0))
    p.input("index", (3, 0), I64)

    def where(ops: Any, i: Any) -> Any:
        return [ops.indirect_indexing(ops.load("index", i[1]), 5), i[1]]

    p.scatter("out", (5, 0), (3, 0), "target", where, lambda ops, i: ops.constant(1.0, F32))
    run(p.plan(), {"index": torch.zeros(3, 0, dtype=I64), "out": torch.zeros(5, 0)})


# ---- symbolic sizes


@pytest.mark.parametrize("hint", [16, 100_000])
def test_reductions_over_a_symbolic_range(hint: int) -> None:
    s0 = size_symbol("s0")
    for across in (False, True):
        size = (s0, 12) if across else (3, s0)
        plan = one_reduction("sum", *size, F32, F32, across, hints={s0: hint}).plan()
        text = kernel_module([plan]).text
        call = bind(start_build(text, Options()).result(), plan)
        for n in (1, 77, 20_000, 300_001):
            x = special(n, 12) if across else special(3, n)
            out = torch.empty(12 if across else 3)
            call(x, out, n)
            expected = x.double().sum(0 if across else 1).float()
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-3)


def test_row_reductions_run_on_processors_without_wide_vectors() -> None:
    """The helpers are plain C with vector types: without AVX they give the same."""
    plan = softmax(5, 100).plan(["amax", "total"])
    text = kernel_module([plan]).text
    options = Options(cpp_flags=("-mno-avx512f", "-mno-avx", "-mno-fma", "-mno-avx2"))
    x = special(5, 100)
    out = torch.empty_like(x)
    if processor_features().count("avx") == 0:
        pytest.skip("this processor has no AVX to leave out")
    bind(start_build(text, options).result(), plan)(x, out)
    torch.testing.assert_close(out, torch.softmax(x, -1))


@pytest.mark.parametrize("to", [torch.int64, torch.int32, torch.uint8])
def test_numbers_that_no_integer_is_become_eagers(to: torch.dtype) -> None:
    """gcc takes a float that was cut to an integer for truncf(x), which differs."""
    x = torch.tensor([float("nan"), float("inf"), -1e30, -0.5] * 4)
    whole = lambda x: 1 / x.to(to).float()  # noqa: E731
    assert torch.equal(mc.compile(whole)(x), whole(x))
