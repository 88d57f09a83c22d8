"""What a program decides by `torch.compiler.is_compiling()` holds for a whole frame or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dynamo.helpers import compiled, explained, lenient

is_compiling = torch.compiler.is_compiling
x = torch.randn(3, 4)


def no_mask_for_compilers(a: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    if mask is None and not is_compiling():
        mask = torch.ones(3, 4)
    print(end="")
    return a * mask[:, :]  # type: ignore[index]


def raises_for_compilers(a: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    if mask is None and not is_compiling():
        mask = torch.ones(3, 4)
    return a * mask[:, :]  # type: ignore[index]


def asked_in_a_callee(a: torch.Tensor) -> Any:
    def chosen() -> torch.Tensor | None:
        return None if is_compiling() else torch.ones(3, 4)

    mask = chosen()
    print(end="")
    return a * mask, mask is None  # type: ignore[operator]


def asked_in_a_loop(a: torch.Tensor) -> Any:
    flags = []
    for _ in range(3):
        flags.append(is_compiling())
        print(end="")
        a = a + 1
    return a, flags


def data_dependent(a: torch.Tensor) -> Any:
    if not is_compiling() and a.sum() > 100:
        return a
    scale = 1.0 if is_compiling() else 2.0
    print(end="")
    return a * scale


CUT: list[Callable[..., Any]] = [
    no_mask_for_compilers, raises_for_compilers, asked_in_a_callee, asked_in_a_loop, data_dependent,
]  # fmt: skip


@pytest.mark.parametrize("function", CUT, ids=lambda f: f.__name__)
def test_a_frame_that_breaks_takes_eagers_branches(function: Callable[..., Any]) -> None:
    run = lenient(function)
    for _ in range(2):
        assert repr(run(x)) == repr(function(x))


def test_a_frame_captured_as_a_whole_takes_the_compilers_branch() -> None:
    def function(a: torch.Tensor) -> Any:
        return (a + 1, is_compiling()) if is_compiling() else (a, a.sum() > 0)

    for make in (compiled, lenient):
        run = make(function)
        assert run(x)[1] is True
        assert (explained(run).graph_count, len(explained(run).breaks)) == (1, 0)


def test_a_frame_after_a_break_takes_the_compilers_branch_if_nobody_asked_before() -> None:
    def function(a: torch.Tensor) -> Any:
        print(end="")
        return a + 1, is_compiling()

    assert lenient(function)(x)[1] is True
