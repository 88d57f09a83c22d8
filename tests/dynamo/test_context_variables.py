"""Context variables: read with a guard; set by Python between two graphs."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import minicompile as mc

LEVEL: contextvars.ContextVar[Any] = contextvars.ContextVar("level", default=2)
EMPTY: contextvars.ContextVar[Any] = contextvars.ContextVar("empty")


@contextlib.contextmanager
def level(value: Any) -> Iterator[None]:
    token = LEVEL.set(value)
    try:
        yield
    finally:
        LEVEL.reset(token)


def same_value(x: torch.Tensor) -> Any:
    with level(2):
        return x * LEVEL.get()


def other_value(x: torch.Tensor) -> Any:
    with level(5):
        x = x * LEVEL.get()
    return x + LEVEL.get()


def break_inside(x: torch.Tensor) -> Any:
    with level(2):
        print(end="")
        x = x * LEVEL.get()
    return x + LEVEL.get()


def left_set(x: torch.Tensor) -> Any:
    LEVEL.set(9)
    return x * LEVEL.get()


def left_as_it_was(x: torch.Tensor) -> Any:
    LEVEL.set(LEVEL.get())
    return x * LEVEL.get(7)


def old_value(x: torch.Tensor) -> Any:
    token = LEVEL.set(LEVEL.get())
    unset = token.old_value is contextvars.Token.MISSING
    LEVEL.reset(token)
    return x + 1, unset


def without_a_value(x: torch.Tensor) -> Any:
    try:
        return x * EMPTY.get()
    except LookupError:
        return x - 1


FUNCTIONS = (
    same_value, other_value, break_inside, left_set, left_as_it_was, old_value, without_a_value,
)  # fmt: skip


def outcome(function: Callable[..., Any], values: list[Any]) -> list[Any]:
    """Return results, and what the variables are after each call, in a context of its own."""

    def calls() -> list[Any]:
        results = []
        for value in values:
            if value is not None:
                LEVEL.set(value)
            y = function(torch.arange(3.0))
            own = LEVEL in contextvars.copy_context()
            results.append((str(y), type(LEVEL.get()), LEVEL.get(), own, EMPTY.get("none")))
        return results

    return contextvars.Context().run(calls)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("values", [[None, None], [None, 3, 2], [4, 2, None]], ids=str)
def test_results_and_values_afterwards_are_eager_s(function: Any, values: list[Any]):
    assert outcome(mc.compile(function, backend="eager"), values) == outcome(function, values)
