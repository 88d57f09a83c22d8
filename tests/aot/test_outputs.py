"""Outputs that are views of one tensor are linked as in eager: a write to one reaches all, with history."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import minicompile as mc

BASES = {
    "computed": lambda a: a * 2,
    "made": lambda a: torch.ones(3, 4),
    "detached": lambda a: (a * 2).detach(),
    "detached input": lambda a: a.detach(),
    "computed without history": lambda a: a.detach() * 2,
    "detached view": lambda a: (a * 2)[:2].detach(),
    "view of detached": lambda a: (a * 2).detach()[:2],
    "view of input": lambda a: a[:2],
}
VIEWS = {
    "select": lambda base: base[0],
    "slice": lambda base: base[1:],
    "transposed": lambda base: base.t(),
    "flat": lambda base: base.view(-1),
    "one of several": lambda base: base.unbind()[0],
    "detached": lambda base: base.detach(),
    "itself": lambda base: base,
}
ORDERS = [lambda base, view: (view,), lambda *both: both, lambda base, view: (view, base)]
WRITES = {
    "history into the first": lambda found, w: found[0].mul_(w),
    "history into the last": lambda found, w: found[-1].mul_(w),
    "numbers into the first": lambda found, w: found[0].mul_(3),
    "numbers without grad": lambda found, w: torch.no_grad()(found[-1].mul_)(3),
}


def shown(function: Any, write: Any, trained: bool) -> Any:
    """The results before and after a write, or its error; and what the factor gets of the gradient."""
    a = torch.arange(12.0).view(3, 4).requires_grad_(trained) * 1
    w = torch.ones((), requires_grad=True)
    found = function(a)
    before = [(x.stride(), x.storage_offset(), x.requires_grad, x.is_leaf) for x in found]
    try:
        write(found, w)
        after = [(x.requires_grad, x.tolist()) for x in found]
        if any(x.requires_grad for x in found):
            sum(x.sum() for x in found).backward()
    except RuntimeError as error:
        return before, type(error)
    return before, after, w.grad


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("base", BASES)
def test_a_write_to_a_view_reaches_what_it_reaches_in_eager(base: str, mode: Any) -> None:
    for view, order in itertools.product(VIEWS, ORDERS):

        def function(a: torch.Tensor, view: str = view, order: Any = order) -> Any:
            made = BASES[base](a)
            with mode():
                part = VIEWS[view](made)
            return order(made, part)

        mc.reset()
        compiled = mc.compile(function, backend="aot_eager")
        for trained, write in itertools.product([True, False], WRITES):
            expected = shown(function, WRITES[write], trained)
            assert shown(compiled, WRITES[write], trained) == expected, (view, trained, write)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("base", ["computed", "made", "computed without history", "view of input"])
def test_a_row_that_is_filled_after_a_break_trains(base: str, dynamic: bool | None) -> None:
    def function(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        whole = BASES[base](a * 1)
        row = whole[1]
        print(end="")
        row.copy_(a[1] * w)
        return whole

    mc.reset()
    gradients = []
    for call in (function, mc.compile(function, dynamic=dynamic)):
        a, w = torch.arange(12.0).view(3, 4), torch.ones(4, requires_grad=True)
        call(a, w).sum().backward()
        gradients.append(w.grad)
    assert torch.equal(*gradients) and gradients[0].tolist() == [4, 5, 6, 7]


def test_what_outputs_are_views_of_is_no_output() -> None:
    compiled = mc.compile(lambda a: ((a * 2).detach()[:1], a + 1), fullgraph=True)
    found = compiled(torch.ones(3, 4, requires_grad=True))
    assert isinstance(found, tuple) and len(found) == 2
    base = found[0]._base
    assert base is None or (base.shape == (3, 4) and not base.requires_grad)
