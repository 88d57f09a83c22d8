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

aten = torch.ops.aten
Program = Callable[..., Any]


def write_first(x, y):
    x.mul_(2)
    return y + 1


def write_second(x, y):
    y.add_(x.sum())
    return x * 2, y


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


@pytest.mark.parametrize(
    "reason, program",
    [
        ("views of two tensors", rows_of_two),
        ("as_strided of a view", lambda x: (x[1:].as_strided((2,), (1,), 1), x * 2)),
        ("made without grad mode", made_without_grad),
        ("the conjugate", lambda x: (torch.complex(x, x).conj(), x * 2)),
        ("memory as torch.complex64", lambda x: (torch.view_as_complex(x.view(4, 3, 2)), x * 2)),
        ("memory as torch.int32", lambda x: (x.detach().view(torch.int32), x * 2)),
    ],
)
def test_outputs_that_are_no_plain_views(reason, program):
    assert refused(compared(program, lambda x: [x]), reason)


@pytest.mark.parametrize(
    "reason, program",
    [
        ("the shape of an input", lambda x: (aten.t_(x), x * 2)[1]),
        ("a tensor's storage", lambda x: aten.resize_(x * 2, [3]) * 2),
        (
            "running statistics",
            lambda x: torch.batch_norm_update_stats(x, x[0] * 0, x[0] * 0, 0.1),
        ),
        ("outside of the tensor", lambda x: x.as_strided((2,), (1,), 24) * 2),
    ],
)
def test_operators_that_do_more_than_write_elements(reason, program):
    x = torch.arange(30.0).view(5, 6)
    compiled = mc.compile(program, backend="aot_eager")
    torch.testing.assert_close(compiled(x[:4]), program(x.clone()[:4]))
    assert refused(explained(compiled), reason)


def test_inputs_that_share_memory_are_read_in_a_graph():
    found = compared(lambda x, y: x * 2 + y.sum(), SHARED["overlapping"])
    assert found.graph_count == 1 and not found.breaks
