"""docs/operators.md says what the compiler does with each operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minicompile.extension import register_vjp
from minicompile.ops import plugins
from minicompile.ops.registry import scoped, without
from tests.lowering.conftest import lowered
from tests.lowering.operators import FILE, TORCH, gradient, page

aten = torch.ops.aten
X = torch.randn(4, 4)


def row(name: str) -> list[str]:
    """The cells of an operator's row; nothing where it has none."""
    found = [line for line in page().splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for line in found for cell in line.split("|")[2:-1]]


def test_the_page_is_what_the_registries_say() -> None:
    """`python -m tests.lowering.operators` writes it again."""
    text = FILE.read_text(encoding="utf-8")
    if f"of torch {TORCH}," not in text or not plugins.available():
        pytest.skip("the page is written with another torch, and with all plug-ins")
    assert text == page()


CALLS: dict[str, Callable[..., Any]] = {
    "relu": aten.relu,
    "gather": lambda x: aten.gather(x, 0, torch.zeros(1, 4, dtype=torch.int64)),
    "silu": aten.silu,
    "mish": aten.mish,
    "mm": lambda x: aten.mm(x, x),
    "sort": lambda x: aten.sort(x)[0],
    "col2im": lambda x: aten.col2im(x, [2, 2], [1, 1], [1, 1], [0, 0], [1, 1]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_row_says_what_becomes_of_a_call(name: str) -> None:
    reasons = [kernel.reason for kernel in lowered(CALLS[name], X).externs]
    taken_apart, loops, called, _ = row(name)
    said = [called.replace("no rule", f"no lowering for aten.{name}.default")]
    assert reasons == ([] if taken_apart or loops else said)


def test_a_rule_that_is_taken_away_leaves_its_row() -> None:
    with without("decomposition:aten.add.Scalar", "lowering:aten.exp"):
        assert row("add.Scalar")[:3] == ["", "", "no rule"]
        assert row("exp")[1:3] == ["", "no rule"]
    assert row("add.Scalar")[0] == "pointwise"


def test_gradients_are_torchs_or_a_rules() -> None:
    assert gradient(aten.threshold_backward.default) == "formula"
    assert gradient(aten.gelu.default) == "gelu_backward"
    assert gradient(aten.argmax.default) == ""
    with scoped():
        register_vjp(aten.gelu.default)(lambda grad, result, x: grad)
        assert gradient(aten.gelu.default) == "ours"
