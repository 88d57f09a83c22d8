"""One symbolic dimension runs from capture to kernels in both languages: one compilation, many sizes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from tests.comparing import assert_as_eager

PROGRAMS = {
    "cat with a slice": lambda a: torch.cat([a, a[..., :1]], -1),
    "cat with a class token": lambda a: torch.cat([torch.zeros(a.shape[0], 1, 8), a], 1),
    "cat of two sizes": lambda a: torch.cat([a, a[:, 1:]], 1) * 2,
    "triu": lambda a: torch.ones(a.shape[1], a.shape[1] + 1).triu(1),
    "repeat and flip": lambda a: a.reshape(-1).repeat(2).flip(0),
    "expand and flip": lambda a: a[None].expand(2, *a.shape).reshape(-1).flip(0),
    "attention heads": lambda a: a.view(*a.shape[:2], 2, 4).transpose(1, 2) * 2,
    "reshape to one size": lambda a: a.reshape(20, 4) + 1,
    "reshape with the rest": lambda a: a.reshape(a.shape[0], 2, -1) * 1.5,
    "pixel_shuffle": lambda a: F.pixel_shuffle(a.reshape(4, -1, a.shape[0]), 2),
    "stack with a constant": lambda a: torch.stack([a[0, 0], torch.ones(8)]),
    "nll_loss": lambda a: F.nll_loss(a[0].T.log_softmax(1), torch.arange(8) % 5),
    "steps from a negative start": lambda a: a[:, -6::4] * 2,
    "a quotient that is 1": lambda a: a[::2].repeat(2, 1, 2),
}
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_dynamic_programs_are_right_at_the_first_size_and_at_others(name):
    compiled = mc.compile(PROGRAMS[name], dynamic=True)
    for size in ((2, 5, 8), (4, 5, 8), (2, 6, 8), (8, 7, 8), (1, 10, 8)):
        x = torch.arange(1.0, 1 + math.prod(size)).reshape(size).requires_grad_()
        assert_as_eager(compiled, PROGRAMS[name], x, **CLOSE)


def test_a_size_that_guards_make_an_expression_of_others_still_reaches_the_backward():
    def fn(x, weight, bias, n, c, spatial):
        return torch.native_group_norm(x, weight, bias, n, c, spatial, 2, 0.5)[0].sin()

    compiled = mc.compile(fn, dynamic=True, fullgraph=True, options={"verify": True})
    for n, spatial in ((1, 3), (4, 5)):
        given = [torch.randn(size).requires_grad_() for size in ((n, 6, spatial), (6,), (6,))]
        assert_as_eager(compiled, fn, *given, n, 6, spatial, rtol=1e-5, atol=1e-5)


def test_padding_with_a_number_known_at_run_time():
    def fn(x, value):
        return torch.constant_pad_nd(x, (1, -1, 2, 0), value) * 2

    compiled = mc.compile(fn, dynamic=True, fullgraph=True, options={"verify": True})
    for value in (2.0, -3.5):
        assert_as_eager(compiled, fn, torch.randn(3, 4), value)
