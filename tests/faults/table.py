"""The table of planted faults: each is a plausible bug of one part of the compiler, switched on by a test.

    @fault("lowering", "aten.relu.default", torch.relu, [WITH_NAN])
    def relu_forgets_nan(patch): ...

A number in a fault's docstring is a closed issue of github.com/pytorch/pytorch that it is modelled on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

Plant = Callable[[pytest.MonkeyPatch], object]

LOOPS = {"device_codegen": "reference"}
"""Kernels run in the interpreter of loops: nothing waits for a C++ compiler."""
CPP: dict[str, Any] = {}

X = torch.linspace(-3, 3, 36).reshape(4, 9)
WITH_NAN = torch.where(X[1, 1] == X, torch.nan, X)
SQUARE = torch.linspace(-2, 5, 36).reshape(6, 6)
NUMBERS = torch.arange(-18, 18).reshape(4, 9)


def leaf(value: torch.Tensor = X) -> torch.Tensor:
    """A copy that requires grad."""
    return value.clone().requires_grad_()


@dataclass(frozen=True)
class Fault:
    """A planted bug: what the bisector is to name, and a program that shows it."""

    plant: Plant
    subsystem: str
    """Empty where the bisector can't name one."""
    operation: str
    """A part of the culprit's name."""
    program: Callable[..., Any]
    args: Sequence[Any]
    more: Sequence[Sequence[Any]] = ()
    options: Mapping[str, Any] = field(default_factory=lambda: LOOPS)

    @property
    def issues(self) -> list[str]:
        return re.findall(r"#\d+", self.plant.__doc__ or "")


FAULTS: dict[str, Fault] = {}


def fault(
    subsystem: str,
    operation: str,
    program: Callable[..., Any],
    args: Sequence[Any],
    **more: Any,
) -> Callable[[Plant], Plant]:
    """Decorator of what plants a fault; the function's name is the fault's."""

    def add(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", " ")
        FAULTS[name] = Fault(plant, subsystem, operation, program, args, **more)
        return plant

    return add
