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
    "max_unpool2d, one pixel": unpooled(torch.randn(2, 3, 1, 1)),
    "channel_shuffle, rows": (aten.channel_shuffle.default, IMAGE.contiguous(), 2),
    "roll, two dimensions": (aten.roll.default, torch.randn(3, 4, 5).permute(2, 0, 1), [1, 2], [0, -1]),
    "batch norm, bfloat16": normalized(HALF, HALF),
    "batch norm, float32 parameters": normalized(torch.float32, torch.float32),
    "embedding_bag, float32": bags(torch.float32),
    "copysign": (aten.copysign.Tensor, torch.randn(3, 1), torch.randn(4, 3).t()),
    "pow": (aten.pow.Scalar, 2.0, torch.randn(3, 4).t()),
}  # fmt: skip


NOT_EXACT = {
    "max_unpool2d, channels last": unpooled(torch.randn(2, 3, 4, 5).to(memory_format=LAST)),
    "max_unpool2d, every other channel": unpooled(torch.randn(2, 4, 5, 6).permute(0, 3, 1, 2)[:, ::2]),
    "channel_shuffle, channels last": (aten.channel_shuffle.default, IMAGE, 2),
    "roll, two of an image": (aten.roll.default, IMAGE, [1, 2], [0, -1]),
    "roll": (aten.roll.default, IMAGE, [1], [1]),
    "roll, all as one": (aten.roll.default, IMAGE, [1]),
    "embedding_bag, bfloat16": bags(HALF),
}  # fmt: skip
"""What FakeTensor describes otherwise than eager."""


@pytest.mark.parametrize("name", NOT_EXACT)
def test_a_call_that_has_no_exact_fake_runs_in_eager_between_graphs(name: str) -> None:
    op, *args = NOT_EXACT[name]
    tensors = [x for x in args if isinstance(x, torch.Tensor)]

    def fn(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        return op(*(next(given) if isinstance(x, torch.Tensor) else x for x in args))

    compiled = mc.compile(fn, backend="aot_eager")
    found, expected = (compat.tree_leaves(f(*tensors)) for f in (compiled, fn))
    assert described(found) == described(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)
    told, *_ = mc.explain(compiled)(*tensors).breaks
    assert "has no exact fake" in told.reason


@pytest.mark.parametrize("name", CALLS)
def test_a_fake_result_is_as_eagers(name: str) -> None:
    op, *args = CALLS[name]
    mode = compat.fake_mode()
    fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
    with mode:
        found = op(*fakes)
    assert described(found) == described(op(*args))


REFUSED = {
    "bits of floats": lambda x, i: x & i,
    "values of another dtype put": lambda x, i: x.index_put((i[0, :2] - 1,), i[:2]),
    "values of another size put": lambda x, i: x.index_put((i[0, :2] - 1,), x.view(-1)[:2]),
    "rows of another size added": lambda x, i: x.index_add(0, i[0, :2] - 1, x),
    "a product of integers and floats": lambda x, i: i @ x.t(),
    "a number searched in rows": lambda x, i: torch.searchsorted(x, 2.0),
    "a search from both sides": lambda x, i: torch.searchsorted(x[0], x, side="both"),
}


@pytest.mark.filterwarnings("error:internal error")
@pytest.mark.parametrize("name", REFUSED)
def test_what_fakes_allow_and_eager_refuses_is_refused_when_it_runs(name: str) -> None:
    given = [torch.ones(3, 4, dtype=dtype) for dtype in (torch.float32, torch.int64)]
    for call in (REFUSED[name], mc.compile(REFUSED[name])):
        with pytest.raises(RuntimeError):
            call(*given)


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


REPEATED = {
    "a sum": lambda x: x + 1,
    "a sum with a number of another type": lambda x: x + 1.0,
    "a transpose": lambda x: x.t(),
    "a part": lambda x: x[:, 2],
    "rows": lambda x: x[1:3],
    "a product": lambda x: x @ x.t(),
    "a reduction": lambda x: x.sum([0, -1], True),
    "two in one": lambda x: torch.cat([x, x], 1),
    "another type": lambda x: x.to(torch.float64),
    "a comparison": lambda x: x > 0,
    "several results": lambda x: torch.native_layer_norm(x, (4,), None, None, 1e-5),
    "parts that share memory": lambda x: x.split(2, 1),
    "a sum in place": lambda x: x.clone().add_(1),
}


LAYOUTS = [
    torch.randn(3, 4, 2)[:, :, 1],
    torch.randn(3, 4),
    torch.randn(4, 3).t(),
    torch.randn(0, 4),
    torch.randn(5, 4),
]


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_call_that_is_computed_once_gives_new_fakes_each_time(name: str, symbolic: bool) -> None:
    mode, call = compat.fake_mode(symbolic), REPEATED[name]
    for real in (*LAYOUTS, *LAYOUTS):
        found = []
        for x in (real, mode.from_tensor(real)):
            with contextlib.nullcontext() if x is real else mode:
                leaves = compat.tree_leaves(call(x))
                found.append([*map(described, leaves), *(_shares(leaf, x) for leaf in leaves)])
        assert found[0] == found[1]


def _shares(x: torch.Tensor, y: torch.Tensor) -> bool:
    return compat.storage_id(x) == compat.storage_id(y)


def norm(x: torch.Tensor, mean: torch.Tensor, training: bool) -> torch.Tensor:
    return torch.nn.functional.batch_norm(x, mean, mean.clone(), training=training)


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (lambda x, y: x + y, ""),
        (lambda x, y: x.add_(y), "x"),
        (lambda x, y: y[0].copy_(x[0]), "y"),
        (lambda x, y: x.data.zero_(), "x"),
        (lambda x, y: torch._foreach_add_([x, y], 1), "xy"),
        (lambda x, y: torch.add(x, x, out=y), "y"),
        (lambda x, y: norm(x, y[0], True), "y"),
        (lambda x, y: norm(x, y[0], False), ""),
        (lambda x, y: x.clone().add_(y), ""),
    ],
)
def test_a_mode_notes_what_operators_write_to(call: Any, written: str) -> None:
    mode = compat.fake_mode()
    x, y = (mode.from_tensor(torch.ones(4, 4)) for _ in range(2))
    with mode:
        call(x, y)
    assert "".join(n for n, value in (("x", x), ("y", y)) if mode.has_written(value)) == written


def test_a_call_for_the_current_gpu_is_computed_each_time() -> None:
    current = {"device": torch.device("cuda")}
    assert compat.fake_mode().key(aten.empty.memory_format, ([2],), current) is None
