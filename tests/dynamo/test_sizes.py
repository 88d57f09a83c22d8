"""Symbolic sizes on request: one graph for all sizes from 2 on, with guards for what was assumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import minicompile as mc
from minicompile.dynamo.sizes import any_marked
from minicompile.errors import OptionError
from tests.dynamo.helpers import compiled, equal, explained, graphs

pytest.importorskip("minicompile.shapes.env")
w = torch.randn(4, 6)


def arithmetic(a: torch.Tensor) -> object:
    b = a @ w
    n = a.shape[0]
    return (
        b.view(n * 2, -1).sum(0) * n,
        n + 1,
        torch.arange(a.size(0)),
        b[: n // 2],
        a.reshape(-1, 2),
        n % 3,
    )


def test_a_marked_dimension_runs_at_every_size_in_one_graph() -> None:
    run = compiled(arithmetic)
    for size in (5, 7, 8, 2, 33):
        a = torch.randn(size, 4)
        mc.mark_dynamic(a, 0)
        assert equal(run(a), arithmetic(a))
    assert graphs(run) == 1 and explained(run).shape_guard_count >= 1
    capture = explained(run).captures[0]
    assert str(capture.fakes[0].shape[0]) == "s0" and capture.shape_env is not None


@pytest.mark.parametrize("size", [0, 1])
def test_sizes_zero_and_one_are_compiled_apart(size: int) -> None:
    function = lambda a: a * 2 + a.shape[0]  # noqa: E731
    run = compiled(function, dynamic=True)
    for n in (5, size, 6):
        assert equal(run(torch.ones(n, 3)), function(torch.ones(n, 3)))
    assert graphs(run) == 2
    assert "a.size(0) >= 2 failed: found" in str(explained(run).failures[0])


KERNELS: dict[str, Any] = {
    "pad": lambda a: functional.pad(a, (0, a.shape[0])),
    "cut by padding": lambda a: functional.pad(a, (0, 0, 1, -1)),
    "baddbmm": lambda a: torch.baddbmm(a[:, :1], a, a.transpose(1, 2)),
    "composite": lambda a: functional.scaled_dot_product_attention(a, a, a),
}


@pytest.mark.parametrize("name", KERNELS)
def test_operators_whose_kernels_in_cpp_want_numbers(name: str) -> None:
    run = compiled(KERNELS[name], dynamic=True)
    for size in (5, 9):
        a = torch.randn(size, 6, 6)
        assert equal(run(a), KERNELS[name](a))
    assert graphs(run) == 1


def test_with_dynamic_false_sizes_are_numbers() -> None:
    run = compiled(arithmetic, dynamic=False)
    for size in (5, 7, 9):
        a = torch.randn(size, 4)
        mc.mark_dynamic(a, 0)
        assert equal(run(a), arithmetic(a))
    assert graphs(run) == 3 and explained(run).shape_guard_count == 0


def test_a_dimension_that_does_not_exist() -> None:
    with pytest.raises(OptionError, match="no dimension 2"):
        mc.mark_dynamic(w, 2)
    with pytest.raises(OptionError, match="not from 100 to 200"):
        mc.mark_dynamic(w, 0, min=100, max=200)


def test_a_mark_counts_in_nested_containers_to_a_depth_of_four() -> None:
    value: Any = torch.zeros(3)
    mc.mark_dynamic(value, 0)
    for depth in range(1, 6):
        value = [value] if depth % 2 else {"k": value}
        assert any_marked(value) == (depth <= 4)
