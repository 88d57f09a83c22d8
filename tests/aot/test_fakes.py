"""What FakeTensor tells otherwise than eager is corrected: a kernel reads memory as the fake describes it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile import compat

aten = torch.ops.aten


def described(values: Any) -> list[tuple[Any, ...]]:
    values = values if isinstance(values, tuple | list) else (values,)
    return [(v.dtype, tuple(v.shape), v.stride()) for v in values]


def unpooled(x: torch.Tensor) -> tuple[Any, ...]:
    places = torch.arange(x.numel()).reshape(x.shape) % x[0, 0].numel()
    return (
        aten.max_unpool2d.default,
        x,
        torch.empty_like(x, dtype=torch.int64).copy_(places),
        [8, 9],
    )


def normalized(dtype: torch.dtype, parameters: torch.dtype) -> tuple[Any, ...]:
    x, one = torch.randn(3, 5, 4, dtype=dtype), torch.rand(5, dtype=parameters)
    return aten._batch_norm_with_update_functional.default, x, one, one, one, one, 0.1, 1e-5


def bags(dtype: torch.dtype) -> tuple[Any, ...]:
    table, places = torch.randn(6, 3, dtype=dtype), torch.tensor([1, 2, 4, 5])
    return aten._embedding_bag.default, table, places, torch.tensor([0, 2])


HALF = torch.bfloat16
LAST = torch.channels_last
IMAGE = torch.randn(2, 4, 6, 5).to(memory_format=LAST)
CALLS = {
    "max_unpool2d": unpooled(torch.randn(2, 3, 4, 5)),
    "max_unpool2d, channels last": unpooled(torch.randn(2, 3, 4, 5).to(memory_format=LAST)),
    "max_unpool2d, every other channel": unpooled(torch.randn(2, 4, 5, 6).permute(0, 3, 1, 2)[:, ::2]),
    "max_unpool2d, one pixel": unpooled(torch.randn(2, 3, 1, 1)),
    "channel_shuffle, channels last": (aten.channel_shuffle.default, IMAGE, 2),
    "channel_shuffle, rows": (aten.channel_shuffle.default, IMAGE.contiguous(), 2),
    "roll, two of an image": (aten.roll.default, IMAGE, [1, 2], [0, -1]),
    "roll": (aten.roll.default, IMAGE, [1], [1]),
    "roll, two dimensions": (aten.roll.default, torch.randn(3, 4, 5).permute(2, 0, 1), [1, 2], [0, -1]),
    "roll, all as one": (aten.roll.default, IMAGE, [1]),
    "batch norm, bfloat16": normalized(HALF, HALF),
    "batch norm, float32 parameters": normalized(torch.float32, torch.float32),
    "embedding_bag, bfloat16": bags(HALF),
    "embedding_bag, float32": bags(torch.float32),
    "copysign": (aten.copysign.Tensor, torch.randn(3, 1), torch.randn(4, 3).t()),
    "pow": (aten.pow.Scalar, 2.0, torch.randn(3, 4).t()),
    "a number and no element": (aten.sub.Tensor, torch.randn(0, 1), 1.5),
    "a number and one row": (aten.sub.Tensor, torch.randn(2, 1)[::2], 1.5),
    "one column": (aten.relu.default, torch.empty_strided((4, 1), (1, 4)).zero_()),
    "one column and a row": (aten.add.Tensor, torch.randn(1, 1), torch.randn(4)),
    "flip, every other row": (aten.flip.default, torch.randn(2, 4)[::2], [0]),
    "sort, every other row": (aten.sort.default, torch.randn(2, 4)[::2]),
    "sum, no column": (aten.sum.dim_IntList, torch.randn(1, 0), [0], True),
    "view, one element": (aten.view.default, torch.empty_strided((1, 1), (1, 4)).zero_(), [1]),
    "zeros, every other row": (aten.zeros_like.default, torch.randn(2, 4)[::2]),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_fake_result_is_as_eagers(name: str) -> None:
    op, *args = CALLS[name]
    mode = compat.fake_mode()
    fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
    with mode:
        found = op(*fakes)
    assert described(found) == described(op(*args))


REFUSED = {
    "a mask subtracted": lambda x, i, m: 1 - m,
    "a mask among operands": lambda x, i, m: x - m,
    "mixed into an integer in place": lambda x, i, m: i.mul_(x),
    "bits of floats": lambda x, i, m: x & i,
    "an elementwise kernel": lambda x, i, m: torch.nn.functional.gelu(i),
    "a reduction": lambda x, i, m: i.var(0),
    "values of another dtype put": lambda x, i, m: x.index_put_((i[0, :2] - 1,), i[:2]),
    "values of another size put": lambda x, i, m: x.index_put_(
        (i[0, :2] - 1,), x.clone().view(-1)[:2]
    ),
    "a product of masks": lambda x, i, m: m[0] @ m[0],
    "a trace of a mask": lambda x, i, m: m.trace(),
    "a loss of integers": lambda x, i, m: torch.nn.functional.multi_margin_loss(i, i[:, 0]),
    "a loss of integers, with several labels": lambda x, i, m: (
        torch.nn.functional.multilabel_margin_loss(i, i)
    ),
    "a search in a number": lambda x, i, m: torch.searchsorted(x[0, 0], x),
    "a number searched in rows": lambda x, i, m: torch.searchsorted(x, 2.0),
    "buckets in rows": lambda x, i, m: torch.bucketize(x, x),
    "a search from both sides": lambda x, i, m: torch.searchsorted(x[0], x, side="both"),
    "a search in a mask": lambda x, i, m: torch.searchsorted(m[0], m),
    "rows of another size added": lambda x, i, m: x.index_add_(0, i[:, 0], x[:, :1].clone()),
    "more rows added than are named": lambda x, i, m: x.index_add_(0, i[:2, 0], x.clone()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_fake_refuses_what_eager_refuses(name: str) -> None:
    for fake in (False, True):
        with compat.fake_mode() if fake else contextlib.nullcontext():
            given = [
                torch.ones(3, 4, dtype=dtype) for dtype in (torch.float32, torch.int64, torch.bool)
            ]
            with pytest.raises(RuntimeError):
                REFUSED[name](*given)


EMPTY = {
    "max": lambda x, i: x.max(0),
    "min of all": lambda x, i: x.min(),
    "median": lambda x, i: x.median(0),
    "mode": lambda x, i: x.mode(0),
    "index": lambda x, i: x[i],
    "gather": lambda x, i: x.gather(0, i[:, None]),
    "written": lambda x, i: x.index_put_((i,), x.sum()),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_fake_without_elements_is_refused_as_in_eager(name: str) -> None:
    raised = []
    for fake in (False, True):
        with compat.fake_mode() if fake else contextlib.nullcontext():
            with pytest.raises((IndexError, RuntimeError)) as error:
                EMPTY[name](torch.ones(0, 4), torch.zeros(1, dtype=torch.int64))
            raised.append((error.type, str(error.value)))
    assert raised[0] == raised[1]


def test_a_product_of_unlike_dtypes_is_refused_as_eager_does() -> None:
    with pytest.raises(RuntimeError, match="to have the same dtype"):
        mc.compile(lambda x: x @ x.double().t())(torch.ones(3, 4))


@pytest.mark.parametrize("rows", [2, 3])
def test_memory_is_not_read_where_it_is_put(rows: int) -> None:
    def put(x: torch.Tensor) -> torch.Tensor:
        x[torch.tensor([0, 1])] = x[:2]
        return x

    for call in (put, mc.compile(put)):
        with pytest.raises(RuntimeError, match="single memory location"):
            call(torch.ones(rows, 4))


def test_symbols_of_sizes_that_became_known_do_not_stop_a_compilation() -> None:
    def rows(x: torch.Tensor) -> torch.Tensor:
        for row in x:
            part = x.chunk(2)[0] * 1
            last = row
        return part + last

    compiled = mc.compile(rows, backend="aot_eager")
    for n in (3, 5):
        x = torch.randn(n, 4)
        assert torch.equal(compiled(x), rows(x))
    assert mc.explain(compiled)(x).eager_calls == 0


def test_a_result_whose_size_depends_on_data_has_no_fake() -> None:
    """torch 2.11 makes one element of it, and so another gradient of what `index_fill` puts in."""
    with compat.fake_mode() as mode, pytest.raises(RuntimeError, match="_unique"):
        torch.ops.aten._unique.default(mode.from_tensor(torch.tensor([1, 1, 0])))


def test_the_gradient_of_a_filled_in_value_counts_every_place_once() -> None:
    def program(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        filled = x.index_fill(0, torch.tensor([1, 1, 2]), value)
        return (filled * torch.arange(12.0).view(4, 3)).sum()

    x, value = torch.randn(4, 3), torch.randn((), requires_grad=True)
    mc.compile(program)(x, value).backward()
    assert value.grad.item() == sum(range(3, 9))
