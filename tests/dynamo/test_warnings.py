"""Warnings of torch's functions: those about the user's call come when it is captured, no others do."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import minicompile as mc

X, Y = torch.randn(3, 4), torch.randn(4)


def heard(function: Callable[..., Any], *args: Any) -> list[str]:
    """Call a function; return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_torch_is_asked_while_capturing_warns_of_nothing(
    backend: str, dynamic: bool | None, capfd: Any
) -> None:
    def function(x: torch.Tensor) -> Any:
        return x.std(1).sum() + torch.var_mean(x.t(), 1)[0].sum()

    assert heard(mc.compile(function, backend=backend, dynamic=dynamic), X) == []
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_warning_of_python_code_in_torch_comes_at_the_first_call(backend: str) -> None:
    function = mc.compile(lambda x, y: F.mse_loss(x, y + 1), backend=backend)
    assert set(heard(function, X, Y)) == set(heard(lambda: F.mse_loss(X, Y + 1)))
    torch.testing.assert_close(function(X, Y), F.mse_loss(X, (Y + 1).expand(3, 4)))
