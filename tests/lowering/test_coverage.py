"""The count of operators that become kernels, and the list of those that don't."""

from __future__ import annotations

import pytest
import torch

from minicompile.ops.registry import without
from tests.lowering.coverage import FILE, Seen, attempt, registry_part, torch_compiles
from tests.torch_versions import needs

aten = torch.ops.aten


def test_the_list_of_extern_operators_is_the_registrys() -> None:
    """`python -m tests.lowering.coverage --registry` writes it again."""
    assert registry_part() in FILE.read_text(encoding="utf-8")


def test_calls_are_noted_in_functional_form_with_their_own_memory() -> None:
    x = torch.ones(3)
    with Seen(lambda call: True) as seen:
        x.add_(1).mul_(2)
    (add, given, _), (mul, _, _) = seen.calls
    assert (add, mul) == (aten.add.Tensor, aten.mul.Tensor)
    assert given[0].tolist() == [1, 1, 1]


def test_a_call_is_kernels_or_says_why_not() -> None:
    x = torch.randn(4, 4)
    assert attempt((aten.frac.default, (x,), {})) == ("", "")
    assert attempt((aten.linspace.default, (0, 1, 5), {})) == ("", "")
    assert attempt((aten.mm.default, (x, x), {})) == ("library matrix product", "")
    with without("decomposition:aten.frac"):
        assert attempt((aten.frac.default, (x,), {}))[0].startswith("no lowering")


@pytest.mark.parametrize(
    ("op", "known"),
    [
        (aten.add.Tensor, True),
        pytest.param(aten.sort.stable, True, marks=needs("Inductor has a rule for stable sort")),
        (aten.gcd.default, False),
    ],
)
def test_torch_compiles_rules_are_told_from_its_fallbacks(op: object, known: bool) -> None:
    assert torch_compiles(op) == known  # type: ignore[arg-type]
