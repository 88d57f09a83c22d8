"""Indices are checked as in eager, of several writes the last stays, and what depends on an order of eager's
own is left to the library."""

from __future__ import annotations

import pytest
import torch

import minicompile as mc
from minicompile.errors import Unsupported
from tests.lowering.conftest import check, lowered, run

aten = torch.ops.aten


def test_a_size_that_depends_on_data_is_refused() -> None:
    x = torch.randn(4)
    with pytest.raises(Unsupported, match="depends on data"):
        lowered(lambda x: x[x > 0], x)


def test_several_values_through_a_mask_are_the_librarys() -> None:
    x, mask = torch.randn(4, 3), torch.tensor([True, False, True, False])
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
        lambda x, i: torch.slice_scatter(x, x[i][:2] * 2, 0, 0, 2),
    ],
)
def test_every_index_is_checked_though_few_elements_are_read(fn) -> None:
    x, good, bad = torch.randn(4, 3), torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 9, 3])
    graph = check(fn, x, good)
    with pytest.raises(IndexError):
        run(graph, x, bad)


def test_negative_indices_are_errors_where_eager_refuses_them() -> None:
    x, i, bad = torch.randn(4, 5), torch.tensor([0, 1]), torch.tensor([0, -1])
    for fn in (lambda x, i: x.index_select(0, i), lambda x, i: torch.nn.functional.embedding(i, x)):
        graph = check(fn, x, i)
        with pytest.raises(IndexError):
            run(graph, x, bad)


WRITES = {
    "scatter": lambda x, i, v: x.scatter(0, i[:, None].expand(9, 3), v),
    "scatter, last": lambda x, i, v: x.scatter(1, (i[:4, None] % 3).expand(4, 3), v),
    "scatter, counted": lambda x, i, v: x.scatter(0, torch.arange(4)[None].expand(9, 4)[:, :3], v),
    "put rows": lambda x, i, v: aten.index_put(x, [i - 2], v),
    "put columns": lambda x, i, v: aten.index_put(x, [None, i % 3], v.flatten()[:36].view(4, 9)),
    "put elements": lambda x, i, v: aten.index_put(x, [i, i % 3], v[:, 0]),
    "index_copy": lambda x, i, v: x.index_copy(0, i, v),
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
        check(fn, x, i, v)
    else:
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
