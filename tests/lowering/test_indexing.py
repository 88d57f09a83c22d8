"""Creation, indexing, scatter and joining equal eager; what depends on order is left to the library."""

from __future__ import annotations

import pytest
import torch

import minicompile as mc
from minicompile.errors import Unsupported
from minicompile.lowering.context import LoweringContext
from minicompile.lowering.ir import Scatter
from tests.lowering.conftest import check, lowered, run
from tests.lowering.samples import run_operator

aten = torch.ops.aten


def test_sequences_are_exact_integers() -> None:
    x = torch.zeros(1)
    check(lambda x: torch.arange(11) * 1_000_000_000, x)
    check(lambda x: [torch.arange(3, 20, 4), torch.arange(9, -3, -5), torch.arange(0)], x)
    check(lambda x: torch.arange(5, dtype=torch.int32) + 2**40 // 2**12, x)
    check(
        lambda x: [torch.arange(5, dtype=torch.float32), torch.arange(5, dtype=torch.bfloat16)], x
    )
    check(
        lambda x: torch.ops.prims.iota(
            4, start=2, step=3, dtype=torch.int64, device="cpu", requires_grad=False
        ),
        x,
    )


def test_creation_equals_eager() -> None:
    x = torch.randn(2, 3)
    check(
        lambda x: [
            torch.full((2, 2), 7),
            torch.full((), 0.5, dtype=torch.bfloat16),
            torch.zeros(3, dtype=torch.bool),
            torch.ones(2, 0),
            torch.full_like(x, 3.5),
            torch.zeros_like(x, dtype=torch.int64),
            torch.ones_like(x),
            x.new_zeros(4),
            x.new_full((2,), 9),
            torch.eye(3),
            torch.eye(2, 4, dtype=torch.int32),
            torch.scalar_tensor(2.5),
        ],
        x,
    )


@pytest.mark.parametrize("diagonal", [-2, 0, 1, 9])
def test_triangles_equal_eager(diagonal: int) -> None:
    x = torch.randn(2, 4, 5)
    x[0, 0, 4] = torch.nan
    check(lambda x: [x.tril(diagonal), x.triu(diagonal), x.bool().tril(diagonal)], x)


INDICES = {
    "one": lambda x, i, j: x[i],
    "second": lambda x, i, j: x[:, i],
    "adjacent pair": lambda x, i, j: x[:, i, j],
    "separated pair": lambda x, i, j: x[i, :, j],
    "broadcast pair": lambda x, i, j: x[i[:, None], j[None]],
    "matrix": lambda x, i, j: x[torch.stack([i, j])],
    "int32": lambda x, i, j: x[i.int()],
    "computed": lambda x, i, j: x[(i + 1) % 3],
    "of a view": lambda x, i, j: x.transpose(0, 2)[i],
    "of a value": lambda x, i, j: x.exp()[i, j] + 1,
    "constant": lambda x, i, j: x[torch.tensor([2, -1])],
    "empty": lambda x, i, j: x[i[:0]],
}


@pytest.mark.parametrize("name", INDICES)
def test_indexing_with_tensors_equals_eager(name: str) -> None:
    x, i, j = torch.randn(4, 5, 6), torch.tensor([0, -1, 2]), torch.tensor([3, 3, -4])
    check(lambda x, i, j: INDICES[name](x, i, j), x, i, j)


def test_a_size_that_depends_on_data_is_refused() -> None:
    x = torch.randn(4)
    with pytest.raises(Unsupported, match="depends on data"):
        lowered(lambda x: x[x > 0], x)


def test_one_value_through_a_mask_needs_no_index() -> None:
    x, mask = torch.randn(4, 3), torch.tensor([True, False, True, False])
    check(
        lambda x, m: [aten.index_put(x, [x > 0], x[0, 0]), aten.index_put(x, [m], x[1, 1])], x, mask
    )
    graph = check(lambda x, m: aten.index_put(x, [m], x[:2]), x, mask, externs=1)
    assert "mask" in graph.externs[0].reason


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i),
        lambda x, i: torch.nn.functional.embedding(i, x),
        lambda x, i: x.gather(0, i[:, None].expand(2, 3)),
        lambda x, i: aten.index_put(x, [i], torch.tensor(1.0)),
    ],
)
@pytest.mark.parametrize("wrong", [4, -5])
def test_an_index_out_of_range_is_an_error_as_in_eager(fn, wrong: int) -> None:
    x, good, bad = torch.randn(4, 3), torch.tensor([0, 1]), torch.tensor([1, wrong])
    graph = check(fn, x, good)
    with pytest.raises((IndexError, RuntimeError)):
        fn(x, bad)
    with pytest.raises(IndexError):
        run(graph, x, bad)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: (x[i] * 2)[:2] + 1,
        lambda x, i: x[i][i % 2],
        lambda x, i: x.gather(0, i[:, None])[::3] * 2,
        lambda x, i: torch.constant_pad_nd(x[i] + 1, (0, 0, 0, -2)),
        lambda x, i: x[i].unfold(0, 1, 3) * 1,
        lambda x, i: torch.slice_scatter(x, x[i][:2] * 2, 0, 0, 2),
    ],
)
def test_every_index_is_checked_though_few_elements_are_read(fn) -> None:
    x, good, bad = torch.randn(4, 3), torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 9, 3])
    graph = check(fn, x, good)
    with pytest.raises(IndexError):
        run(graph, x, bad)


def test_gather_embedding_and_index_select_equal_eager() -> None:
    x, i = torch.randn(4, 5), torch.tensor([[0, 3], [2, 2], [1, 0]])
    check(lambda x, i: [x.gather(0, i), x.gather(1, i), x.index_select(1, i[:, 0])], x, i)
    check(lambda x, i: torch.nn.functional.embedding(i, x.half()), x, i)
    check(lambda x, i: torch.nn.functional.embedding(i.int(), x), x, i)


def test_negative_indices_are_errors_where_eager_refuses_them() -> None:
    x, i, bad = torch.randn(4, 5), torch.tensor([0, 1]), torch.tensor([0, -1])
    for fn in (lambda x, i: x.index_select(0, i), lambda x, i: torch.nn.functional.embedding(i, x)):
        graph = check(fn, x, i)
        with pytest.raises(IndexError):
            run(graph, x, bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_accumulating_writes_add_repeated_indices(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3).mul(9).to(dtype)
    i, v = torch.tensor([1, 1, -1]), torch.randn(3, 3).mul(9).to(dtype)
    graph = check(lambda x, i, v: aten.index_put(x, [i], v, True), x, i, v)
    assert isinstance(graph.operations[-1].loops, Scatter)
    check(lambda x, i, v: aten.index_put(x, [None, i % 3], v[:1, :1], True), x, i, v)
    check(lambda x, i, v: x.scatter_add(0, (i % 4)[:, None].expand(3, 3), v), x, i, v)
    check(lambda x, i, v: (x * 2).scatter_add(1, i[None] % 3, v) + x, x, i, v)


def test_scatter_leaves_its_base_as_it_was() -> None:
    x, i = torch.randn(4, 3), torch.tensor([1, 1])
    graph = check(lambda x, i: [aten.index_put(x, [i], torch.tensor(0.0)), x + 1], x, i)
    before = x.clone()
    run(graph, x, i)
    assert torch.equal(x, before)
    check(lambda x, i: [(y := x.sin()), aten.index_put(y, [i], y[:2], True), y * 2], x, i)


def test_one_value_may_be_written_in_any_order() -> None:
    x, i = torch.randn(4, 3), torch.tensor([[1, 0, 0]])
    check(lambda x, i: [aten.scatter.value(x, 0, i, 7.5), aten.index_put(x, [i[0]], x[0, 0])], x, i)


WRITES = {
    "scatter": lambda x, i, v: x.scatter(0, i[:, None].expand(9, 3), v),
    "scatter, last": lambda x, i, v: x.scatter(1, (i[:4, None] % 3).expand(4, 3), v),
    "scatter, counted": lambda x, i, v: x.scatter(0, torch.arange(4)[None].expand(9, 4)[:, :3], v),
    "put rows": lambda x, i, v: aten.index_put(x, [i - 2], v),
    "put columns": lambda x, i, v: aten.index_put(x, [None, i % 3], v.flatten()[:36].view(4, 9)),
    "put elements": lambda x, i, v: aten.index_put(x, [i, i % 3], v[:, 0]),
    "index_copy": lambda x, i, v: x.index_copy(0, i, v),
    "put": lambda x, i, v: x.put(i - 3, v[:, 1]),
    "put, add": lambda x, i, v: x.put(i - 3, v[:, 1], True),
}


@pytest.mark.long
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("how", ["reference", "auto", "triton"])
def test_the_last_of_several_writes_stays(name: str, dtype: torch.dtype, how: str) -> None:
    fn, x, i = WRITES[name], torch.zeros(4, 3).to(dtype), torch.tensor([3, 1, 1, 0, 3, 3, 1, 0, 1])
    v = torch.arange(1, 37).view(9, 4).to(dtype) if "columns" in name else torch.arange(1, 28)
    v = v.to(dtype) if "columns" in name else v.view(9, 3).to(dtype)
    if how == "reference":
        check(fn, x, i, v, externs=None if "add" in name else 0)
    elif not (how == "triton" and "add" in name):
        compiled = mc.compile(fn, options={"device_codegen": how})
        assert torch.equal(compiled(x, i, v), fn(x, i, v))


def test_large_writes_keep_their_order() -> None:
    """Neither threads nor vectors change which write is the last."""
    i, v = torch.randint(50, (4000, 64)), torch.arange(4000.0 * 64).view(4000, 64)
    x = torch.zeros(50, 64)
    for fn in (
        lambda x, i, v: x.scatter(0, i, v),
        lambda x, i, v: x.t().scatter(1, i.t(), v.t()),
        lambda x, i, v: aten.index_put(x, [i[:, 0]], v) + 1,
    ):
        assert torch.equal(mc.compile(fn)(x, i, v), fn(x, i, v))


def test_writes_in_an_order_of_eagers_own_are_left_to_it() -> None:
    x, i = torch.randn(4, 3), torch.tensor([[1, 1], [0, 1]])
    graph = lowered(lambda x, i: aten.index_put(x, [i], x.view(2, 2, 3)), x, i)
    assert "order matters" in graph.externs[0].reason
    graph = lowered(lambda x, i: aten.index_put(x, [i[0]], x[:2], True), x.bfloat16(), i)
    assert "round" in graph.externs[0].reason
    graph = lowered(lambda x, i: x.scatter_reduce(0, i, x, "amax"), x, i)
    assert "no atomic" in graph.externs[0].reason


def test_a_scatter_that_forgets_the_order_is_noticed(monkeypatch) -> None:
    def first_stays(ctx, base, ranges, output_index, fn, mode):
        back = lambda i: [n - 1 - p for p, n in zip(i, ranges, strict=True)]  # noqa: E731
        where, what = (lambda ops, i, f=f: f(ops, back(i)) for f in (output_index, fn))
        return right(ctx, base, ranges, where, what, mode)

    right = LoweringContext.scatter
    monkeypatch.setattr(LoweringContext, "scatter", first_stays)
    with pytest.raises(AssertionError):
        test_the_last_of_several_writes_stays("scatter", torch.float32, "auto")


SAMPLED = """
    index_add index_copy index_fill index_put masked_scatter put take scatter scatter_reduce
    diagonal_scatter diag_embed rot90 nn.functional.max_unpool2d nn.functional.pixel_shuffle
    nn.functional.pixel_unshuffle nn.functional.channel_shuffle _unsafe_masked_index
    _unsafe_masked_index_put_accumulate as_strided_scatter unfold_copy"""


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLED.split())
def test_samples_equal_eager(name: str) -> None:
    found = run_operator(name, 4, (torch.float32, torch.bfloat16, torch.int64, torch.bool))
    assert found.wrong == [] and found.agreed


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat_and_stack_equal_eager(dim: int) -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    check(lambda x, y: [torch.cat([x, y * 2, x.exp()], dim), torch.stack([x, y], dim)], x, y)
    check(lambda x, y: torch.cat([x, torch.empty(0), y], dim) + 1, x, y)
    check(lambda x, y: torch.cat([x, y.bfloat16(), (x > 0)], dim), x, y)
    check(lambda x, y: [torch.cat([x], dim), torch.cat([x[:0], x[:0]], 0)], x, y)


def test_cat_of_many_tensors_is_a_library_call() -> None:
    x = torch.randn(2)
    check(lambda x: torch.cat([x + i for i in range(40)]), x, externs=1)


@pytest.mark.parametrize(
    "pad", [(1, 2), (0, 0), (-1, 2), (1, 1, 2, 0), (-1, -1), (0, 0, 0, 3)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool], ids=str)
def test_padding_equals_eager(pad: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(3, 4).to(dtype)
    check(lambda x: aten.constant_pad_nd(x, pad, 1), x)
    check(lambda x: aten.constant_pad_nd(x.t(), pad), x)


def test_partial_replacement_equals_eager() -> None:
    x, v = torch.randn(4, 6), torch.randn(6)
    check(
        lambda x, v: [aten.select_scatter(x, v, 0, -1), aten.select_scatter(x, v[:4], 1, 2)], x, v
    )
    check(lambda x, v: aten.slice_scatter(x, v.expand(2, 6), 0, 1, 3), x, v)
    check(lambda x, v: aten.slice_scatter(x, x[:, :3] * 0, 1, 1, None, 2), x, v)
    check(lambda x, v: aten.slice_scatter(x, x[:, :2] * 0, 1, -5, -1, 3), x, v)
    check(lambda x, v: aten.slice_scatter(x, x * 2), x, v)
    check(lambda x, v: aten.slice_scatter(x, x[2:2], 0, 2, 2), x, v)


def test_roll_and_repeat_equal_eager() -> None:
    x = torch.randn(4, 6)
    check(lambda x: [x.roll(1, 0), x.roll((-2, 9), (0, 1)), x.roll(3), x.roll(0, 1)], x)
    check(lambda x: [x.repeat(2, 3), x.repeat(2, 1, 1), x.sin().repeat(1, 2)], x)
    check(lambda x: x[:0].roll(1, 0), x)


def test_positions_known_without_loading_need_no_check() -> None:
    x = torch.randn(8, 3)
    graph = check(lambda x: torch.nn.functional.embedding(torch.arange(5), x), x)
    assert "arg0_1[3*p0 + p1]" in str(graph)
    assert {o.node for o in graph.operations[0].origins} == {"arange", "embedding"}
    graph = check(lambda x: x[torch.arange(7, 0, -2)[1:]], x)
    assert "<" not in str(graph.operations[0])
    graph = lowered(lambda x: x[torch.arange(9)], x)
    with pytest.raises(IndexError):
        run(graph, x)
