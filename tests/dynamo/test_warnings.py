"""Warnings of torch's functions come at every call, about the user's line, as in eager."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import minicompile as mc
from minicompile import compat
from minicompile.ops.eager_checks import refusal


@pytest.fixture(autouse=True)
def all_of_them() -> Iterator[None]:
    """Those too that come once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y = y + 1
    return F.mse_loss(x, y)


def deprecated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y.sum().mT


def implicit(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.softmax(x) * y


def variances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x[:1].var(0) + torch.var_mean(y, correction=y.shape[0])[0]


def of_nothing(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x[:, 4:].var(0, unbiased=False), torch.std_mean(x[:, :0], 0)


def caught(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    try:
        return F.mse_loss(x, y)
    except UserWarning:
        return x * 2


def deviations(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x[:1].std(0) + torch.std_mean(y[:1])[0]


def searches(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(x.t(), y.sort()[0]) + torch.searchsorted(y.sort()[0][::2], x.t() * 1)


def heard(function: Callable[..., Any], *args: Any) -> list[tuple[Any, ...]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function(*args)
    return [(str(one.message), one.category, one.filename, one.lineno) for one in found]


X, Y = torch.randn(3, 4), torch.randn(4)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "function", [loss, deprecated, implicit, variances, of_nothing, deviations, searches]
)
def test_every_call_warns_as_eager_does(function: Any, dynamic: bool | None) -> None:
    compiled = mc.compile(function, dynamic=dynamic, fullgraph=True)
    for x in (X, X, torch.randn(5, 4), X):
        expected = heard(function, x, Y)
        assert expected and heard(compiled, x, Y) == expected
    assert mc.explain(compiled)(X, Y).compiled_calls == 5


@pytest.mark.parametrize("trained", [False, True])
def test_the_librarys_kernel_does_not_warn_again(trained: bool, capfd: Any) -> None:
    scale = torch.ones(3, requires_grad=trained)
    function = lambda x, y: torch.bucketize(x.t(), y[::2]) * scale  # noqa: E731
    expected = heard(function, X, Y.sort()[0])
    assert len(expected) == 2 and heard(mc.compile(function), X, Y.sort()[0]) == expected
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_torch_is_asked_while_capturing_warns_of_nothing(backend: str, capfd: Any) -> None:
    refusal.cache_clear()  # which asks about one element
    assert heard(mc.compile(lambda x: x.std(1).sum(), backend=backend), X) == []
    mc.trace(variances, X, Y)
    assert "Warning: var()" not in capfd.readouterr().err


def test_filters_know_the_line_and_its_module() -> None:
    compiled = mc.compile(loss)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        compiled(X, Y), compiled(X, Y), loss(X, Y)
        assert len(found) == 1
        warnings.filterwarnings("ignore", module=re.escape(__name__))
        compiled(X, Y[:1])
    assert len(found) == 1


def test_a_warning_that_is_an_error_is_one() -> None:
    compiled, handled = mc.compile(loss), mc.compile(caught)
    expected = heard(compiled, X, Y), heard(handled, X, Y)
    assert all(expected)
    with warnings.catch_warnings(action="error"):
        with pytest.raises(UserWarning, match="target size"):
            compiled(X, Y)
        assert torch.equal(handled(X, Y), X * 2)


def test_the_capture_lists_what_it_will_warn_of() -> None:
    compiled = mc.compile(loss, backend="eager")
    with pytest.warns(UserWarning):
        (capture,) = mc.explain(compiled)(X, Y).captures
    assert capture.side_effects[0].startswith("UserWarning: Using a target size (torch.Size([4]))")


def test_fakes_silence_their_own_thread_alone() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "unwanted")
        with compat.quiet_fakes() as quiet:
            for text in ("elsewhere", "unwanted"):
                other = threading.Thread(target=warnings.warn, args=(text,))
                other.start()
                other.join()
            warnings.warn("here", stacklevel=1)
    assert [str(one.message) for one in found] == ["elsewhere"]
    assert [str(one.message) for one in quiet] == ["here"]


def test_code_that_is_in_no_module_warns_too() -> None:
    names: dict[str, Any] = {"F": F, "__name__": "cell"}
    exec(compile("def cell(x, y): return F.mse_loss(x, y)", "<cell>", "exec"), names)
    expected = heard(names["cell"], X, Y)
    assert expected and heard(mc.compile(names["cell"]), X, Y) == expected


def wrong(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x += x.sum().mT
    return x[i]


def test_a_graph_that_raises_leaves_the_warnings_to_eager() -> None:
    compiled, i = mc.compile(wrong), torch.tensor([0])
    heard(compiled, torch.ones(3), i)

    def outcome(function: Any) -> Any:
        x = torch.ones(3)
        with warnings.catch_warnings(record=True) as found, pytest.raises(IndexError):
            warnings.simplefilter("always")
            function(x, i + 5)
        return [str(one.message) for one in found], x.tolist()

    assert outcome(compiled) == outcome(wrong)
    x = torch.ones(3)
    with warnings.catch_warnings(action="error"), pytest.raises(UserWarning):
        compiled(x, i)
    assert x.tolist() == [1.0] * 3
