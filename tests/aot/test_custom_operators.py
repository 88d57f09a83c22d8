"""Operators of a user that write to their arguments are in the graph, and write what they write in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import minicompile as mc
from minicompile.api import dispatcher_of
from tests.torch_versions import needs


@torch.library.custom_op("mc_writes::add_to", mutates_args={"x"})
def add_to(x: Tensor, y: Tensor, by: float = 1.0) -> None:
    x.add_(y * by)


@torch.library.custom_op("mc_writes::both", mutates_args={"x", "z"})
def both(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    x.mul_(2)
    z.copy_(x + y)
    return x.sum() + y


@torch.library.custom_op("mc_writes::optional", mutates_args={"out"})
def optional(x: Tensor, out: Tensor | None = None) -> Tensor:
    if out is not None:
        out.copy_(x * 3)
    return x * 3


@torch.library.custom_op("mc_writes::lists", mutates_args={"xs"})
def lists(xs: list[Tensor], by: int) -> None:
    for x in xs:
        x.add_(by)


both.register_fake(lambda x, y, z: torch.empty_like(y))
optional.register_fake(lambda x, out=None: torch.empty_like(x))
LIBRARY = torch.library.Library("mc_writes", "FRAGMENT")
LIBRARY.define("inc_(Tensor(a!) x, int by) -> Tensor(a!)")
LIBRARY.impl("inc_", lambda x, by: x.add_(by), "CompositeExplicitAutograd")
LIBRARY.define("two(Tensor(a!) x, Tensor y) -> (Tensor, Tensor)")
LIBRARY.impl("two", lambda x, y: (x.add_(1) * y, x - y), "CompositeExplicitAutograd")
LIBRARY.define("mixed(Tensor(a!) x, Tensor y) -> (Tensor(a!), Tensor)")
LIBRARY.impl("mixed", lambda x, y: (x.add_(1), x - y), "CompositeExplicitAutograd")
LIBRARY.define("keywords(Tensor x, Tensor(a!)? y=None, *, Tensor(b!) z, Tensor(c!)? w=None) -> ()")


def add_to_each(x: Tensor, y: Tensor | None = None, *, z: Tensor, w: Tensor | None = None) -> None:
    for i, written in enumerate((y, z, w)):
        if written is not None:
            written.add_(x, alpha=i + 1)


LIBRARY.impl("keywords", add_to_each, "CompositeExplicitAutograd")
torch.library.register_fake("mc_writes::keywords", lambda *_, **__: None, lib=LIBRARY)


OPS = torch.ops.mc_writes


def argument(x: Tensor, y: Tensor) -> Any:
    add_to(x, y)
    return x * 2


def several(x: Tensor, y: Tensor) -> Any:
    z = torch.empty_like(x)
    return both(x, y, z), z, x + 1


def given(x: Tensor, y: Tensor) -> Any:
    z = torch.zeros_like(x)
    return optional(y, z) + z


def left_out(x: Tensor, y: Tensor) -> Any:
    return optional(y) + optional(x, None)


def by_keyword(x: Tensor, y: Tensor) -> Any:
    z, w = x.sin(), y.cos()
    OPS.keywords(x, z=z)
    OPS.keywords(x, None, z=z, w=w)
    OPS.keywords(x, y, z=y.exp())
    return z, w


def returned(x: Tensor, y: Tensor) -> Any:
    z = OPS.inc_(x, 2)
    return z * 2, z is x


def results(x: Tensor, y: Tensor) -> Any:
    return *OPS.two(x, y), x


def part(x: Tensor, y: Tensor) -> Any:
    columns = x[:, 1:3]
    add_to(columns, y[:, :2], 2.0)
    return x.sum(), columns


def turned(x: Tensor, y: Tensor) -> Any:
    add_to(x.t(), y.t())
    add_to(x.t(), y.t())
    return x


def computed(x: Tensor, y: Tensor) -> Any:
    z = x + 1
    add_to(z, y)
    add_to(z[0], y[1])
    return z.relu()


def equal(x: Tensor, y: Tensor) -> Any:
    z = x.clone()
    w = both(x, y, z)
    v = x.clone()
    add_to(v, x)
    return w, z, v


PROGRAMS: list[Any] = [
    *(argument, several, given, returned, results, part, turned, computed, equal),
    pytest.param(
        by_keyword, marks=needs("an argument that is written may be left out"), id="by_keyword"
    ),
    pytest.param(
        left_out, marks=needs("an argument that is written may be left out"), id="left_out"
    ),
]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_writes_are_in_the_graph(program: Callable[..., Any], backend: str) -> None:
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    copies = [x.clone() for x in inputs]
    compiled = mc.compile(program, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), program(*copies))
    torch.testing.assert_close(inputs, copies)
    assert dispatcher_of(compiled).explanation().graph_count == 1


def test_a_buffer_that_is_written_trains_as_in_eager() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        buffer = torch.zeros(4, 4)
        add_to(buffer, x)
        return (weight * 2 * buffer).sum()

    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(program(x, weight), weight)
    (found,) = torch.autograd.grad(mc.compile(program)(x, weight), weight)
    torch.testing.assert_close(found, expected)


def to_lists(x: Tensor, y: Tensor) -> Tensor:
    lists([x, y], 3)
    return x + y


def to_what_is_read(x: Tensor, y: Tensor) -> Tensor:
    both(x, x, y)
    return x


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (to_lists, "writes into lists of tensors"),
        (lambda x, y: OPS.mixed(x, y), "or returns views or what it writes"),
        (to_what_is_read, "goes several times into one memory"),
    ],
)
def test_what_has_no_functional_form_is_left_to_eager(
    program: Callable[..., Any], reason: str
) -> None:
    inputs = [torch.randn(4), torch.randn(4)]
    copies = [x.clone() for x in inputs]
    compiled = mc.compile(program)
    torch.testing.assert_close(compiled(*inputs), program(*copies))
    torch.testing.assert_close(inputs, copies)
    (told,) = dispatcher_of(compiled).explanation().breaks
    assert reason in told.reason
