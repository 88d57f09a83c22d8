"""Whole C kernels: each loop shape against eager, over sizes, dtypes and special values."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch

import minicompile as mc
from minicompile.codegen.cpp import kernel_module, print_kernel
from minicompile.codegen.plan import KernelPlan, plan_rule
from minicompile.ops.build import start_build
from minicompile.ops.toolchain import processor_features
from minicompile.options import Options
from minicompile.runtime.cpp import bind
from minicompile.shapes.expr import FloorDiv, ModularIndexing, size_symbol
from tests.codegen.fusing import Program, layer_norm, softmax
from tests.codegen.races import shared_writes

F32, F64, BF16, I64, BOOL = torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool


def run(plan: KernelPlan, tensors: dict[str, torch.Tensor], *sizes: int) -> None:
    """Build one kernel and call it."""
    text = kernel_module([plan]).text
    assert not shared_writes(text)
    call = bind(start_build(text, Options()).result(), plan)
    call(*(tensors[a.buffer] for a in plan.arguments), *sizes)


def special(*size: int, dtype: torch.dtype = F32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).to(dtype)


# ---- rows


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("size", [(5, 37), (64, 1024), (3, 1), (0, 8), (9, 50_257)])
def test_softmax_rows_match_eager(size: tuple[int, int], dtype: torch.dtype) -> None:
    x = special(*size, dtype=dtype)
    if x.numel() > 4:
        x[0, 0] = float("-inf")
        x[1, 1 % size[1]] = float("nan")
    plan = softmax(*size, dtype=dtype).plan(["amax", "total"])
    out = torch.empty_like(x)
    run(plan, {"x": x, "softmax": out})
    torch.testing.assert_close(out, torch.softmax(x, -1), equal_nan=True)


@pytest.mark.parametrize("rule", ["vector", "tiles", "stash", "parallel", ""])
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


def test_layer_norm_stashes_the_sum_that_three_phases_need() -> None:
    plan = layer_norm(6, 200, residual=True).plan(["sum1", "sum2"])
    assert [v.op for v in plan.stashed] == ["add"]
    x, z, w, b = special(6, 200), special(6, 200) * 2, special(200), special(200) + 1
    out, rstd = torch.empty(6, 200), torch.empty(6)
    run(plan, {"x": x, "z": z, "w": w, "b": b, "out": out, "rstd": rstd})
    expected = torch.nn.functional.layer_norm(x + z, (200,), w, b)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("columns", "kept", "heap"), [(1000, 1, 0), (50_257, 1, 1), (200_000, 0, 0)]
)
def test_exponentials_are_kept_while_a_row_fits_the_cache(
    columns: int, kept: int, heap: int
) -> None:
    plan = softmax(16, columns).plan(["amax", "total"])
    text = print_kernel(plan).text
    assert len(plan.stashed) == kept
    assert text.count("mc_exp(") == 2 - kept
    assert text.count("mc_scratch(") == text.count("mc_release(") == heap


@pytest.mark.long
@pytest.mark.parametrize("size", [(8, 1, 3), (3, 1, 1), (2, 4, 77), (16, 3, 3136), (2, 2, 20_000)])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_sums_of_computed_terms_ride_along(
    size: tuple[int, int, int], dtype: torch.dtype, dynamic: bool
) -> None:
    """The terms of several sums, chosen by a comparison, are written down in short rows alone."""

    def fn(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> Any:
        normal = (x.float() - 0.5) * scale
        chosen = torch.where(torch.relu(normal) <= 0, 0.0, y.float())
        moments = [(chosen * t).sum((0, 2), keepdim=True) for t in (normal, scale)]
        return *moments, (chosen * scale - moments[0] * normal * 1e-3).to(x.dtype)

    compiled = mc.compile(fn, fullgraph=True, dynamic=dynamic)
    for number in (0.0, float("inf"), float("-inf"), float("nan")):
        x, y = special(*size, dtype=dtype), special(*size, dtype=dtype) + 0.25
        scale = special(1, size[1], 1).abs() + 0.5
        y[0, 0, -1] = x[-1, -1, 0] = number
        expected = fn(x.double(), y.double(), scale.double())
        found = compiled(x, y, scale)
        close = {"rtol": 1e-5, "atol": 1e-3} if dtype is F32 else {"rtol": 2e-2, "atol": 2e-2}
        for ours, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), exact, equal_nan=True, **close)
    (kernel,) = mc.trace(compiled, x, y, scale).kernels
    short = size[2] <= 256 and not dynamic
    assert ("_part[" in kernel.text) == short
    assert ("reduction(+:" in kernel.text) != short


def one_reduction(
    kind: str,
    rows: Any,
    columns: Any,
    dtype: torch.dtype,
    result: torch.dtype,
    across: bool,
    **kw: Any,
) -> Program:
    """Reduce x[rows, columns] along its columns, or (`across`) along its rows."""
    p = Program(**kw)
    size = (rows, columns)
    p.input("x", size, dtype)
    if across:
        fn = lambda ops, i, r: ops.load("x", p.at(r[0], i[0], size=size))  # noqa: E731
        p.reduce("out", (columns,), (rows,), kind, fn, result)
    else:
        fn = lambda ops, i, r: ops.load("x", p.at(i[0], r[0], size=size))  # noqa: E731
        p.reduce("out", (rows,), (columns,), kind, fn, result)
    return p


REFERENCE: dict[str, Any] = {
    "sum": torch.sum, "prod": torch.prod, "max": torch.amax, "min": torch.amin, "any": torch.any,
    "all": torch.all, "argmax": torch.argmax, "argmin": torch.argmin,
}  # fmt: skip


def data(kind: str, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(1)
    if dtype is BOOL:
        return torch.rand(size) > (0.05 if kind == "all" else 0.95)
    if not dtype.is_floating_point:
        return torch.randint(-3, 4, size).to(dtype)
    x = (torch.randint(-8, 9, size) / 4 + (1 if kind == "prod" else 0)).to(dtype)
    if kind not in ("sum", "prod") and x.numel() > 40:
        x[2, 3] = float("nan")
        x[:, 7] = float("nan")
        x[1] = float("-inf")
    return x


REDUCTIONS = [
    (kind, dtype, across, size)
    for kind in REFERENCE
    for dtype in ((BOOL,) if kind in ("any", "all") else (F32, F64, BF16, I64))
    for across in (False, True)
    for size in ((9, 70), (70, 9), (3, 1))
]


@pytest.fixture(scope="module")
def reductions() -> dict[Any, tuple[KernelPlan, Any]]:
    plans = {}
    for i, (kind, dtype, across, size) in enumerate(REDUCTIONS):
        result = I64 if kind.startswith("arg") else dtype
        p = one_reduction(kind, *size, dtype, result, across)
        plans[kind, dtype, across, size] = p.plan(position=i)
    text = kernel_module(list(plans.values())).text
    assert not shared_writes(text)
    module = start_build(text, Options()).result()
    return {key: (plan, bind(module, plan)) for key, plan in plans.items()}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "dtype", "across", "size"), REDUCTIONS)
def test_reductions_match_eager(
    reductions: Any, kind: str, dtype: torch.dtype, across: bool, size: tuple[int, int]
) -> None:
    plan, call = reductions[kind, dtype, across, size]
    x = data(kind, size, dtype)
    expected = REFERENCE[kind](x, 0 if across else 1)
    out = torch.empty(expected.shape, dtype=I64 if kind.startswith("arg") else dtype)
    tensors = {"x": x, "out": out}
    call(*(tensors[a.buffer] for a in plan.arguments))
    torch.testing.assert_close(out, expected.to(out.dtype), equal_nan=True)


def test_reductions_over_nothing_give_the_identity() -> None:
    for kind, expected in (("sum", 0.0), ("prod", 1.0)):
        out = torch.full((4,), 9.0)
        run(one_reduction(kind, 4, 0, F32, F32, False).plan(), {"x": torch.empty(4, 0), "out": out})
        assert out.tolist() == [expected] * 4


@pytest.mark.parametrize("kind", ["sum", "max", "argmin", "argmax"])
def test_few_long_rows_are_split_into_chunks(kind: str) -> None:
    result = I64 if kind.startswith("arg") else F32
    plan = one_reduction(kind, 2, 100_003, F32, result, False).plan()
    assert plan.tiles["r"] > 0 and plan.parallel
    x = special(2, 100_003)
    x[1, 70_000] = float("nan") if kind in ("max", "argmax") else -99.0
    x[1, 70_100] = x[1, 70_000]
    out = torch.empty(2, dtype=result)
    run(plan, {"x": x, "out": out})
    torch.testing.assert_close(out, REFERENCE[kind](x, 1), equal_nan=True)


def test_split_sum_does_not_depend_on_the_number_of_threads() -> None:
    plan = one_reduction("sum", 1, 300_000, F32, F32, False).plan()
    x, found = special(1, 300_000), []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = torch.empty(1)
        run(plan, {"x": x, "out": out})
        found.append(out.item())
    torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_long_float_sums_do_not_pile_up_rounding_errors() -> None:
    plan = one_reduction("sum", 16, 1_000_000, F32, F32, False).plan()
    x = torch.full((16, 1_000_000), 0.1)
    out = torch.empty(16)
    run(plan, {"x": x, "out": out})
    torch.testing.assert_close(out, x.double().sum(1).float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("size", [(8, 64, 3136), (64, 128, 70)])
def test_sums_of_several_rows_are_as_exact_as_eager(size: tuple[int, int, int]) -> None:
    x = special(*size)
    total = lambda x: x.sum((0, 2))  # noqa: E731
    found, eager = ((f(x) - total(x.double())).norm() for f in (mc.compile(total), total))
    assert found < 0.8 * eager


# ---- pointwise, indices, masks


def test_views_index_with_division_and_remainder() -> None:
    p = Program()
    p.input("x", (6, 10))
    p.pointwise(
        "out",
        (60,),
        lambda ops, i: ops.load(
            "x", 10 * ModularIndexing(i[0], 1, 6) + FloorDiv(i[0], sympy.Integer(6))
        ),
    )
    x, out = special(6, 10), torch.empty(60)
    run(p.plan(), {"x": x, "out": out})
    torch.testing.assert_close(out, x.t().reshape(60), rtol=0, atol=0)


def test_scalar_kernel_has_no_loops() -> None:
    p = Program()
    p.input("x", ())
    p.pointwise(
        "out", (), lambda ops, i: ops.add(ops.load("x", sympy.Integer(0)), ops.constant(1.5, F32))
    )
    plan = p.plan()
    assert "for" not in print_kernel(plan).text
    x, out = torch.tensor(2.0), torch.tensor(0.0)
    run(plan, {"x": x, "out": out})
    assert out.item() == 3.5


def test_masked_loads_stay_inside_the_buffer() -> None:
    """Shift right by 3, zeros before: the masked-off lanes would read before the buffer."""
    p = Program()
    p.input("x", (40,))

    def shift(ops: Any, i: Any) -> Any:
        mask = ops.ge(ops.index_expr(i[0], I64), ops.constant(3, I64))
        return ops.masked(mask, lambda o: o.load("x", i[0] - 3), -1.0)

    p.pointwise("out", (43,), shift)
    x, out = special(40), torch.empty(43)
    run(p.plan(), {"x": x, "out": out})
    torch.testing.assert_close(out, torch.cat([torch.full((3,), -1.0), x]), rtol=0, atol=0)


def test_large_index_values_do_not_overflow() -> None:
    p = Program()
    p.pointwise("out", (11,), lambda ops, i: ops.index_expr(i[0] * 1_000_000_000, I64), I64)
    out = torch.empty(11, dtype=I64)
    run(p.plan(), {"out": out})
    assert torch.equal(out, torch.arange(11) * 1_000_000_000)


def test_bool_buffers_hold_zeros_and_ones() -> None:
    p = Program()
    p.input("x", (9,))
    p.input("m", (9,), BOOL)
    p.pointwise(
        "out",
        (9,),
        lambda ops, i: ops.logical_xor(
            ops.to_dtype(ops.load("x", i[0]), BOOL), ops.load("m", i[0])
        ),
        BOOL,
    )
    x, m = torch.tensor([0.0, 1, -0.0, 2, float("nan"), 0, 0, 5, 1e-40]), torch.arange(9) % 2 == 0
    out = torch.empty(9, dtype=BOOL)
    run(p.plan(), {"x": x, "m": m, "out": out})
    assert torch.equal(out, x.bool() ^ m)


def gather(rows: int, columns: int, count: int, check: bool = True) -> Program:
    p = Program()
    p.input("weight", (rows, columns))
    p.input("index", (count,), I64)

    def fn(ops: Any, i: Any) -> Any:
        row = ops.indirect_indexing(ops.load("index", i[0]), rows, check)
        return ops.load("weight", row * columns + i[1])

    p.pointwise("out", (count, columns), fn)
    return p


def test_loaded_indices_wrap_around_when_negative() -> None:
    w, index = special(7, 33), torch.tensor([0, 6, -1, -7, 3])
    out = torch.empty(5, 33)
    run(gather(7, 33, 5).plan(), {"weight": w, "index": index, "out": out})
    torch.testing.assert_close(out, w[index], rtol=0, atol=0)


@pytest.mark.parametrize("bad", [7, -8, 2**40])
def test_an_index_out_of_range_is_an_index_error(bad: int) -> None:
    w, index = special(7, 33), torch.tensor([0, bad, 1])
    with pytest.raises(IndexError, match=r"out of range in a dimension of size 7.*user.py"):
        run(gather(7, 33, 3).plan(), {"weight": w, "index": index, "out": torch.empty(3, 33)})


def test_an_index_into_nothing_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        tensors = {
            "weight": torch.empty(0, 4),
            "index": torch.tensor([0]),
            "out": torch.empty(1, 4),
        }
        run(gather(0, 4, 1).plan(), tensors)


def test_integer_division_by_zero_raises_as_eager_does() -> None:
    p = Program()
    p.input("a", (5,), I64)
    p.input("b", (5,), I64)
    p.pointwise(
        "out", (5,), lambda ops, i: ops.floordiv(ops.load("a", i[0]), ops.load("b", i[0])), I64
    )
    a, b = torch.arange(5), torch.tensor([1, 2, 0, 3, 4])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(p.plan(), {"a": a, "b": b, "out": torch.empty(5, dtype=I64)})
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        a // b


# ---- scatter


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_scatter_adds_duplicates(dtype: torch.dtype) -> None:
    p = Program()
    p.input("target", (4, 20), dtype)
    p.input("index", (30,), I64)
    p.input("source", (30, 20), dtype)

    def where(ops: Any, i: Any) -> Any:
        return [ops.indirect_indexing(ops.load("index", i[0]), 4), i[1]]

    p.scatter(
        "out", (4, 20), (30, 20), "target", where,
        lambda ops, i: ops.load("source", 20 * i[0] + i[1]), dtype=dtype,
    )  # fmt: skip
    plan = p.plan()
    assert [a.role for a in plan.arguments] == ["in", "in", "inout"]
    index = torch.randint(-4, 4, (30,), generator=torch.Generator().manual_seed(0))
    target, source = special(4, 20, dtype=dtype), special(30, 20, dtype=dtype)
    out = target.clone()
    run(plan, {"index": index, "source": source, "out": out})
    expected = target.clone().index_put_((index % 4,), source, accumulate=True)
    torch.testing.assert_close(out, expected)


def test_an_index_that_all_columns_share_is_read_once_a_row() -> None:
    """A sum over rows beside a scatter of them."""

    def step(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grad = x * 2
        return grad.sum(0), x.new_zeros(50, 96).index_put((index,), grad, accumulate=True)

    x, index = torch.randn(4, 30, 96), torch.randint(-50, 50, (4, 30))
    compiled = mc.compile(step)
    [text] = [k.text for k in mc.trace(compiled, x, index).kernels if "_tile" in k.text]
    sharing = text.index("bool i0_bad")
    assert text.index("for (int64_t r0") < sharing < text.index("for (int64_t x1", sharing)
    assert "for (int64_t" not in text[text.index("for (int64_t r0") + 1 : sharing]
    for got, wanted in zip(compiled(x, index), step(x, index)):
        torch.testing.assert_close(got, wanted)
    with pytest.raises(IndexError):
        compiled(x, index + 51)


def test_scatter_along_the_inner_loop_runs_in_order() -> None:
    p = Program()
    p.input("target", (3,))
    p.input("index", (100,), I64)

    def where(ops: Any, i: Any) -> Any:
        return [ops.indirect_indexing(ops.load("index", i[0]), 3)]

    p.scatter("out", (3,), (100,), "target", where, lambda ops, i: ops.constant(1.0, F32))
    plan = p.plan()
    assert "simd" not in print_kernel(plan).text
    index, out = torch.arange(100) % 3, torch.zeros(3)
    run(plan, {"index": index, "out": out})
    assert out.tolist() == [34.0, 33.0, 33.0]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows, columns", [(2000, 24), (400, 50), (300, 1000), (3, 40000)])
@pytest.mark.parametrize("inner", [False, True])
def test_scatters_shared_by_threads_add_in_order(
    inner: bool, rows: int, columns: int, threads: int
) -> None:
    """Along rows each column, along columns each row has an owner: sums are the same to the last bit."""
    p = Program()
    p.input("target", (rows, columns))
    p.input("index", (rows, columns), I64)
    p.input("source", (rows, columns))
    at = columns if inner else rows

    def where(ops: Any, i: Any) -> Any:
        found = ops.indirect_indexing(ops.load("index", columns * i[0] + i[1]), at)
        return [i[0], found] if inner else [found, i[1]]

    p.scatter(
        "out", (rows, columns), (rows, columns), "target", where,
        lambda ops, i: ops.load("source", columns * i[0] + i[1]),
    )  # fmt: skip
    plan = p.plan()
    assert ("mc_share" in print_kernel(plan).text) == (not inner)
    assert "parallel for" in print_kernel(plan).text
    source, out = special(rows, columns), special(rows, columns) * 3
    index = torch.randint(min(at, 7), (rows, columns), generator=torch.Generator().manual_seed(1))
    expected = out.clone().scatter_add_(int(inner), index, source)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        run(plan, {"index": index, "source": source, "out": out})
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_scatter_whose_rows_can_meet_runs_on_one_thread() -> None:
    """`x[index[i] + i]`: no loop owns its elements."""
    p = Program()
    p.input("target", (50_000,))
    p.input("index", (30_000,), I64)

    def where(ops: Any, i: Any) -> Any:
        return [i[0] + ops.indirect_indexing(ops.load("index", i[0]), 20_000)]

    p.scatter("out", (50_000,), (30_000,), "target", where, lambda ops, i: ops.constant(1.0, F32))
    assert "parallel" not in print_kernel(p.plan()).text


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


def test_one_kernel_runs_for_many_sizes() -> None:
    s0 = size_symbol("s0")
    plan = softmax(s0, 24, hints={s0: 8}).plan(["amax", "total"])
    assert plan.sizes == (s0,)
    text = kernel_module([plan]).text
    call = bind(start_build(text, Options()).result(), plan)
    for rows in (1, 3, 3000):
        x = special(rows, 24)
        out = torch.empty_like(x)
        call(x, out, rows)
        torch.testing.assert_close(out, torch.softmax(x, -1))


@pytest.mark.parametrize("hint", [64, 12_000])
def test_rows_of_unknown_length_keep_their_exponentials_on_the_heap(hint: int) -> None:
    s0, s1 = size_symbol("s0"), size_symbol("s1")
    plan = softmax(s0, s1, hints={s0: 8, s1: hint}).plan(["amax", "total"])
    text = print_kernel(plan).text
    assert text.count("mc_exp(") == 1
    assert text.count("mc_scratch(") == text.count("mc_release(") == 1
    for rows, columns in ((3, 2), (5, 1000), (2, 30_001)):
        x = torch.randn(rows, columns) * 3
        out = torch.empty_like(x)
        run(plan, {"x": x, "softmax": out}, rows, columns)
        torch.testing.assert_close(out.double(), x.double().softmax(-1), rtol=2e-6, atol=1e-12)


def test_sums_of_unknown_length_do_not_pile_up_rounding_errors() -> None:
    s0 = size_symbol("s0")
    plan = one_reduction("sum", 3, s0, F32, F32, False, hints={s0: 10}).plan()
    x, out = torch.rand(3, 3_000_000), torch.empty(3)
    run(plan, {"x": x, "out": out}, x.shape[1])
    torch.testing.assert_close(out.double(), x.double().sum(1), rtol=1e-6, atol=0)


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


@pytest.mark.long
@pytest.mark.parametrize("dtype", [F32, F64, BF16, torch.int8])
@pytest.mark.parametrize("size", [(64, 128), (70, 45), (16, 200)])
def test_transposed_loads_are_turned_in_squares(size: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = size
    p = Program()
    p.input("x", (columns, rows), dtype)
    p.input("y", size, dtype)

    def fn(ops: Any, i: Any) -> Any:
        return ops.add(ops.load("x", rows * i[1] + i[0]), ops.load("y", columns * i[0] + i[1]))

    p.pointwise("out", size, fn, dtype)
    plan = p.plan()
    assert plan.tiles == {"x0": 64, "x1": 64}
    x, y = (special(columns, rows) * 9).to(dtype), special(*size).to(dtype)
    out = torch.empty(size, dtype=dtype)
    run(plan, {"x": x, "y": y, "out": out})
    torch.testing.assert_close(out, x.t() + y, rtol=0, atol=0)


def test_comparisons_of_indices_hold_at_every_threshold() -> None:
    """`16*x0 + x1 >= 32` may be compared as `x0 >= 2`; 31 and 33 must not be."""
    p = Program()
    asked = [
        (op, t) for op in ("ge", "gt", "lt", "le") for t in (-16, -1, 0, 15, 16, 17, 32, 95, 96)
    ]

    def compare(op: str, threshold: int) -> Any:
        return lambda ops, i: ops.pointwise(
            op, ops.index_expr(16 * i[0] + i[1], I64), ops.constant(threshold, I64)
        )

    for op, threshold in asked:
        p.pointwise(f"{op}_{threshold}".replace("-", "m"), (6, 16), compare(op, threshold), BOOL)
    plan = p.plan()
    tensors = {a.buffer: torch.empty(6, 16, dtype=BOOL) for a in plan.arguments}
    run(plan, tensors)
    index = torch.arange(96).view(6, 16)
    for op, threshold in asked:
        found = tensors[f"{op}_{threshold}".replace("-", "m")]
        assert torch.equal(found, getattr(torch, op)(index, threshold)), (op, threshold)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("columns", [1, 5, 16, 63, 200, 1100, 9000])
def test_rows_of_any_length_reduce_in_lanes(columns: int, dtype: torch.dtype) -> None:
    """Sum, largest and smallest of computed values and where these are: NaN and infinities included."""
    p = Program()
    size = (7, columns)
    p.input("x", size, dtype)

    def doubled(ops: Any, i: Any, r: Any) -> Any:
        value = ops.load("x", p.at(*i, *r, size=size))
        return ops.add(value, value)

    for name, kind in (("s", "sum"), ("a", "max"), ("b", "min")):
        p.reduce(name, (7,), (columns,), kind, doubled, dtype)
    for name, kind in (("i", "argmax"), ("j", "argmin")):
        p.reduce(name, (7,), (columns,), kind, doubled, I64)
    x = special(*size, dtype=dtype)
    x[1, columns // 2], x[2, -1], x[3, 0] = float("nan"), float("inf"), float("-inf")
    x[4], x[5] = float("-inf"), -0.0
    x[5, 3::2], x[6, columns * 2 // 3 :] = 0.0, float("nan")
    outs = {name: torch.empty(7, dtype=dtype) for name in "sab"}
    places = {name: torch.empty(7, dtype=I64) for name in "ij"}
    run(p.plan(), {"x": x, **outs, **places})
    assert torch.equal(places["i"], x.argmax(1)) and torch.equal(places["j"], x.argmin(1))
    torch.testing.assert_close(outs["s"], (2 * x).sum(1), equal_nan=True)
    torch.testing.assert_close(outs["a"], (2 * x).amax(1), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(outs["b"], (2 * x).amin(1), rtol=0, atol=0, equal_nan=True)


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


@pytest.mark.long
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e30, -1.5])
@pytest.mark.parametrize("to", [torch.int64, torch.int32, torch.uint8])
def test_numbers_that_no_integer_is_become_eagers(number: float, to: torch.dtype) -> None:
    """gcc, where it knows the number, makes other integers of it than the processor."""

    def whole(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        empty_mean = x[:0].mean(0) * 0 + number
        chosen = torch.where(x > 0, number, number)
        return (
            chosen.to(to),
            empty_mean.to(to),
            (x * 0 + number).to(to),
            torch.full_like(x, number).to(to),
        )

    x = torch.ones(3, 16)
    assert all(map(torch.equal, mc.compile(whole)(x), whole(x)))


def test_a_long_chain_of_numbers_compiles_in_linear_time() -> None:
    def squares(x: torch.Tensor) -> torch.Tensor:
        value = torch.where(x > 0, 1.0, 0.5)
        for _ in range(40):
            value = value * value
        return value.to(torch.int64)

    x = torch.randn(3, 16)
    assert torch.equal(mc.compile(squares)(x), squares(x))
