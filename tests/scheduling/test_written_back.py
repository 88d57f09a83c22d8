"""New contents of inputs: written where they belong by the kernel that makes them, if nothing can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile
from tests.comparing import fresh

LANGUAGES = ("cpp", "triton")
Tensors = list[torch.Tensor]


def momentum(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor) -> None:
    m.mul_(0.9).add_(g)
    p.sub_(m.sqrt() * 0.1)


def swap(x: torch.Tensor, y: torch.Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def softmax(x: torch.Tensor) -> None:
    x.copy_(torch.softmax(x, -1))


def transposed(x: torch.Tensor) -> None:
    x.copy_(x.t() + 1)


def shifted(x: torch.Tensor) -> None:
    x[1:].add_(x[:-1].clone())


def scanned(x: torch.Tensor) -> None:
    x.copy_(x.cumsum(1))


def summed(x: torch.Tensor, total: torch.Tensor) -> None:
    total.copy_(x.sum(1))
    x.div_(total[:, None])


def cleared(x: torch.Tensor) -> None:
    x.fill_(3)


def returned_too(x: torch.Tensor) -> torch.Tensor:
    y = x * 2 + 1
    x.copy_(y)
    return y


def read_later(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    before = x.clone()
    x.add_(1)
    return torch.mm(before, y)


def gathered(x: torch.Tensor, i: torch.Tensor) -> None:
    x.add_(x[i])


def square() -> torch.Tensor:
    return torch.rand(16, 16) + 0.5


PROGRAMS: list[tuple[Callable[..., Any], Callable[[], Tensors], int]] = [
    (momentum, lambda: [square(), square(), square()], 2),
    (swap, lambda: [square(), square()], 1),
    (softmax, lambda: [square()], 1),
    (transposed, lambda: [square()], 0),
    (shifted, lambda: [square()], 0),
    (scanned, lambda: [square()], 0),
    (summed, lambda: [square(), torch.rand(16)], 2),
    (cleared, lambda: [square()], 1),
    (returned_too, lambda: [square()], 1),
    (read_later, lambda: [square(), square()], 1),
    (gathered, lambda: [square(), torch.randint(16, (16,))], 0),
    (momentum, lambda: [square()[:, ::2] for _ in range(3)], 0),
    (momentum, lambda: [square().t() for _ in range(3)], 2),
    (momentum, lambda: [torch.rand(0, 4) for _ in range(3)], 2),
]
"""Functions, their arguments, and how many inputs a kernel writes to at once."""


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(("fn", "make", "at_once"), PROGRAMS)
def test_inputs_hold_what_eager_leaves_in_them(
    fn: Callable[..., Any], make: Callable[[], Tensors], at_once: int, language: str, dynamic: bool
) -> None:
    options = {"device_codegen": language, "verify": True}
    compiled = minicompile.compile(fn, fullgraph=True, dynamic=dynamic, options=options)
    for _ in range(2):
        given = make()
        eager, ours = fresh(given), fresh(given)
        addresses = [t.data_ptr() for t in ours]
        versions = [(a._version, b._version) for a, b in zip(ours, eager, strict=True)]
        expected, found = fn(*eager), compiled(*ours)
        torch.testing.assert_close([*ours, found], [*eager, expected], equal_nan=True)
        assert [t.data_ptr() for t in ours] == addresses
        for a, b, (old_a, old_b) in zip(ours, eager, versions, strict=True):
            assert (a._version > old_a) == (b._version > old_b)
        if found is not None:  # the result is no alias of an input
            kept = found.clone()
            ours[0].zero_()
            assert found.equal(kept)
    decisions = minicompile.trace(compiled, *fresh(make())).forward.schedule.memory.decisions
    inputs = [d for d in decisions if not d.old.startswith("buf")]
    assert sum(d.done for d in inputs) == at_once
    assert all(d.done or "each element is read" not in d.reason for d in inputs)


def test_inputs_that_share_memory_are_told_apart() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    def arguments() -> list[Tensors]:
        base, other = torch.arange(12.0), torch.arange(8.0)
        return [[base[:8], other], [base[:8], base[4:]], [base[:8], base[:8]], [other, other]]

    compiled = minicompile.compile(fn, dynamic=False)
    for eager, ours in zip(arguments(), arguments(), strict=True):
        assert compiled(*ours).equal(fn(*eager))
        assert all(a.equal(b) for a, b in zip(ours, eager, strict=True))


def test_what_eager_forbids_stays_forbidden() -> None:
    compiled = minicompile.compile(momentum)
    p, g, m = (torch.rand(8).requires_grad_(k == 0) for k in range(3))
    with pytest.raises(RuntimeError, match="leaf Variable"):
        compiled(p, g, m)
    with torch.no_grad():
        compiled(p, g, m)
    with torch.inference_mode():
        frozen = [torch.rand(8) for _ in range(3)]
        compiled(*frozen)
    with pytest.raises(RuntimeError, match="inference"):
        compiled(*frozen)
