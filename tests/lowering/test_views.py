"""Views are index maps: no copies where memory allows, and the right elements always."""

from __future__ import annotations

import random

import pytest
import sympy
import torch

import minicompile as mc
from minicompile.lowering import views
from minicompile.lowering.ir import Layout
from tests.lowering.conftest import check, lowered


def random_reshape(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    factors = [rng.choice([1, 2, 3, 4]) for _ in range(5)]

    def grouped() -> tuple[int, ...]:
        out, product = [], 1
        for factor in factors:
            product *= factor
            if rng.random() < 0.6:
                out.append(product)
                product = 1
        return (*out, product)

    return grouped(), grouped()


def test_reshape_is_strided_exactly_when_torch_can_view() -> None:
    rng = random.Random(1)
    found = {True: 0, False: 0}
    for _ in range(200):
        old, new = random_reshape(rng)
        order = rng.sample(range(len(old)), len(old))
        x = torch.empty([old[d] for d in order]).permute([order.index(d) for d in range(len(old))])
        assert x.shape == old
        layout = views.reshape(old, new).over(Layout(x.device, x.dtype, old, x.stride()))
        try:
            expected = x.view(new).stride()
        except RuntimeError:
            assert layout is None
            found[False] += 1
        else:
            assert layout is not None
            for n, a, b in zip(new, layout.stride, expected, strict=True):
                assert n == 1 or a == b
            found[True] += 1
    assert min(found.values()) > 20


def test_a_matrix_product_copies_neither_a_transposed_input_nor_an_intermediate() -> None:
    x, w = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    for program, operations in (
        (lambda x, w: torch.bmm(x.transpose(1, 2), w), 1),
        (lambda x, w: torch.bmm(x.sin().transpose(1, 2), w[:, :, 1:]), 2),
    ):
        assert len(check(program, x, w, externs=1).operations) == operations


def test_computed_values_keep_channels_last() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    w = torch.randn(6, 3, 1, 1)
    graph = check(
        lambda x, w: torch.conv2d(x.relu(), w).sin(), x, w, externs=1, rtol=1e-4, atol=1e-5
    )
    assert graph.operations[0].layout.stride == x.stride()
    assert graph.operations[-1].layout.stride[1] == 1


def test_as_strided_sees_the_storage_that_eager_sees() -> None:
    part = torch.randn(30)[6:].view(4, 6)
    check(lambda x: x.as_strided((3, 2), (2, 1), 8) + 1, part)
    graph = lowered(lambda x: x.as_strided((3, 2), (2, 1), 0) + 1, part)
    assert "beyond" in graph.externs[0].reason


@pytest.mark.parametrize("start", [None, 0, 2, -2, -9, 9])
@pytest.mark.parametrize("end", [None, 0, 3, -1, 9, 2**63 - 1])
@pytest.mark.parametrize("step", [1, 2, 7])
def test_slice_bounds_are_cut_as_in_eager(start: int | None, end: int | None, step: int) -> None:
    x = torch.arange(5)
    expected = torch.ops.aten.slice.Tensor(x, 0, start, end, step).tolist()
    view = views.slice_((5,), 0, start, step, len(expected))
    found = [int(view.index([sympy.Integer(i)])[0]) for i in range(int(view.size[0]))]
    assert found == expected


def test_a_lone_row_for_a_library_lies_as_in_eager() -> None:
    """Of a row with strides (1, 1) a matrix product takes the slower way for columns."""
    weight = torch.randn(8, 4)
    trace = mc.trace(lambda x: (x + 1).view(-1, 8) @ weight, torch.randn(1, 1, 8))
    (product,) = trace.graphs["forward"].loops.externs
    assert [view.layout.stride for view in product.views()] == [(8, 1), (4, 1)]
