"""What the front desk refuses runs in eager: with a reason and a line, and with eager's answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.debug.history import Explanation
from tests.comparing import assert_as_eager
from tests.dynamo.helpers import explained

Program = Callable[..., Any]


def write_first(x, y):
    x.mul_(2)
    return y + 1


def write_second(x, y):
    y.add_(x.sum())
    return x * 2, y


def grow(x):
    row = x[0]
    x.unsqueeze_(1).mul_(2)
    return x + 1, row


def turn(x):
    return x.t_() * 2


def rows_of_two(x):
    detached = (x * 2).detach()
    again = detached.detach()
    return detached[:1], again[0], again[1], x + 1


def made_without_grad(x):
    with torch.no_grad():
        part = x[1:]
    return part[0], x * 2


SHARED = {
    "whole and part": lambda x: [x, x[1:]],
    "overlapping": lambda x: [x[:3], x[1:]],
    "apart": lambda x: [x[:2], x[2:]],
    "columns": lambda x: [x[:, ::2], x[:, 1::2]],
    "transposed": lambda x: [x.t(), x],
    "several tensors of autograd": lambda x: [x.detach(), x[1:].detach()],
}


def compared(program: Program, make: Callable[[torch.Tensor], list[Any]]) -> Explanation:
    """Assert that values, memory and gradients are eager's; return what became of the program."""
    compiled = mc.compile(program, backend="aot_eager")

    def called(call: Program) -> Program:
        return lambda leaf: (inputs := make(leaf * 1), call(*inputs))

    leaf = torch.arange(24.0).view(4, 6).requires_grad_()
    assert_as_eager(called(compiled), called(program), leaf)
    return explained(compiled)


def refused(found: Explanation, reason: str) -> bool:
    """Ran the program in eager for this one reason, on a line of this file?"""
    (why,) = found.breaks
    assert why.user_line is not None and why.user_line.file == __file__
    return reason in why.reason


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("program", [write_first, write_second])
def test_writes_to_memory_that_inputs_share(program, kind):
    assert refused(compared(program, SHARED[kind]), "share memory that is written to")


def made_and_turned(x):
    y = x * 2
    y.t_()
    return y.unsqueeze_(1).mul_(2), y[0]


@pytest.mark.parametrize("program", [grow, turn, made_and_turned])
def test_what_changes_its_shape_in_place_ends_the_graph(program):
    breaks = compared(program, lambda x: [x]).breaks
    assert "_` of a tensor is used" in breaks[0].reason


@pytest.mark.parametrize(
    "reason, program",
    [
        ("views of two tensors", rows_of_two),
        ("made without grad mode", made_without_grad),
        ("the conjugate", lambda x: (torch.complex(x, x).conj(), x * 2)),
        ("memory as torch.complex64", lambda x: (torch.view_as_complex(x.view(4, 3, 2)), x * 2)),
        ("memory as torch.int32", lambda x: (x.detach().view(torch.int32), x * 2)),
    ],
)
def test_outputs_that_are_no_plain_views(reason, program):
    assert refused(compared(program, lambda x: [x]), reason)


def test_inputs_that_share_memory_are_read_in_a_graph():
    found = compared(lambda x, y: x * 2 + y.sum(), SHARED["overlapping"])
    assert found.graph_count == 1 and not found.breaks
