"""What FakeTensor tells otherwise than eager is corrected, and what would read beyond a tensor is refused."""

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


def normalized(dtype: torch.dtype, parameters: torch.dtype) -> tuple[Any, ...]:
    x, one = torch.randn(3, 5, 4, dtype=dtype), torch.rand(5, dtype=parameters)
    return aten._batch_norm_with_update_functional.default, x, one, one, one, one, 0.1, 1e-5


def bags(dtype: torch.dtype) -> tuple[Any, ...]:
    table, places = torch.randn(6, 3, dtype=dtype), torch.tensor([1, 2, 4, 5])
    return aten._embedding_bag.default, table, places, torch.tensor([0, 2])


HALF = torch.bfloat16
CALLS = {
    "batch norm, bfloat16": normalized(HALF, HALF),
    "batch norm, float32 parameters": normalized(torch.float32, torch.float32),
    "embedding_bag, bfloat16": bags(HALF),
    "embedding_bag, float32": bags(torch.float32),
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
    "values of another dtype put": lambda x, i, m: x.index_put_((i[0, :2] - 1,), i[:2]),
    "values of another size put": lambda x, i, m: x.index_put_(
        (i[0, :2] - 1,), x.clone().view(-1)[:2]
    ),
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


NUMBERS = torch.tensor([2, 1, 4, 2, 2])
SIZED_BY_DATA: dict[Any, tuple[Any, ...]] = {
    aten._unique.default: (NUMBERS,),
    aten._unique2.default: (NUMBERS,),
    aten.unique_dim.default: (NUMBERS, 0),
    aten.unique_consecutive.default: (NUMBERS,),
    aten.nonzero.default: (NUMBERS,),
    aten.masked_select.default: (NUMBERS, NUMBERS > 1),
    aten.bincount.default: (NUMBERS,),
    aten.repeat_interleave.Tensor: (NUMBERS,),
}


@pytest.mark.parametrize("op", SIZED_BY_DATA, ids=str)
def test_no_fake_has_a_size_that_only_the_data_can_tell(op: Any) -> None:
    mode = compat.fake_mode()
    fake = compat.fakes_again(mode)
    args = (fake(x) if isinstance(x, torch.Tensor) else x for x in SIZED_BY_DATA[op])
    with mode, pytest.raises(compat.FAKE_LIMITS):
        op(*args)


def test_a_gradient_over_repeated_indices_is_eagers() -> None:
    def gradients(function: Any) -> tuple[torch.Tensor, ...]:
        x, value = torch.ones(5, 5, requires_grad=True), torch.tensor(3.0, requires_grad=True)
        weights = torch.arange(25.0).reshape(5, 5)
        return torch.autograd.grad((function(x, value) * weights).sum(), (x, value))

    def fill(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return x.index_fill(1, NUMBERS, value)

    for found, expected in zip(gradients(mc.compile(fill)), gradients(fill)):
        assert torch.equal(found, expected)
