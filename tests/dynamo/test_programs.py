"""Every corner of Python that capture interprets gives what CPython gives, in one graph that is reused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.dynamo.helpers import compiled, equal, explained
from tests.dynamo.programs import PROGRAMS, x


@pytest.mark.parametrize(
    ("program", "args"), PROGRAMS, ids=lambda value: getattr(value, "__name__", "")
)
def test_program_is_one_graph_that_gives_what_python_gives(
    program: Any, args: tuple[Any, ...]
) -> None:
    changes_inputs = program.__name__ == "mutinput_program"
    run = compiled(program)
    for _ in range(2):
        ours, theirs = (
            (copy.deepcopy(args), copy.deepcopy(args)) if changes_inputs else (args, args)
        )
        assert equal(run(*ours), program(*theirs))
        assert not changes_inputs or equal(ours, theirs)
    assert explained(run).graph_count == 1
    assert explained(run).compiled_calls == 2


def test_an_input_that_is_returned_is_the_same_object() -> None:
    def program(a: torch.Tensor, items: list[Any]) -> Any:
        return a, [a, items], a.contiguous(), a.to(torch.float32)

    items = [1]
    first, (again, given), contiguous, converted = compiled(program)(x, items)
    assert first is again is contiguous is converted is x
    assert given is items


def test_one_object_made_by_the_frame_stays_one_object_in_the_result() -> None:
    def program(a: torch.Tensor) -> Any:
        shared = [a * 2]
        loop: list[Any] = [shared]
        loop.append(loop)
        return shared, {"same": shared}, loop

    shared, named, loop = compiled(program)(x)
    assert named["same"] is shared and loop[0] is shared and loop[1] is loop


def test_random_operators_draw_the_same_numbers() -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        return torch.rand(3) + torch.nn.functional.dropout(a, 0.5).sum()

    run = compiled(program)
    run(x)
    torch.manual_seed(3)
    want = program(x)
    torch.manual_seed(3)
    assert equal(run(x), want)


def test_gradients_flow_through_the_captured_graph() -> None:
    def program(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = (a * 3).mean()
        return (a @ w).relu().sum() * scale

    a = torch.randn(3, 4)
    ours, theirs = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    compiled(program)(a, ours).backward()
    program(a, theirs).backward()
    assert equal(ours.grad, theirs.grad)
