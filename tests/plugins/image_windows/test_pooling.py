"""Pooling equals eager: windows of any kind, forward and backward, in one kernel of bounded size."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from minicompile.plugins.image_windows import pooling, windows
from tests.lowering.conftest import check, run
from tests.lowering.samples import Found, as_sample, run_operator
from tests.lowering.samples import check as check_sample

aten = torch.ops.aten

OPERATORS = [f"nn.functional.{name}{n}d" for name in ("avg_pool", "max_pool") for n in (1, 2)]
OPERATORS.append("max_pool2d_with_indices_backward")


@pytest.mark.long
@pytest.mark.parametrize("name", OPERATORS)
def test_samples_equal_eager(name: str) -> None:
    found = run_operator(name, 6, (torch.float32, torch.bfloat16, torch.int64))
    assert found.wrong == [] and found.agreed
    assert not found.externs


WINDOWS = {
    "max": lambda x: aten.max_pool2d_with_indices(x, [3, 2], [2, 1], [1, 1]),
    "max, dilated": lambda x: aten.max_pool2d_with_indices(x, [2, 3], [1, 2], [1, 1], [3, 2]),
    "max, ceil": lambda x: aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [0, 1], [1, 1], True),
    "max, large": lambda x: aten.max_pool2d_with_indices(x, [7, 5], [1, 2], [3, 2]),
    "max, large, dilated": lambda x: aten.max_pool2d_with_indices(
        x, [6, 5], [1, 1], [3, 1], [2, 1]
    ),
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average, only elements": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "average, ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "average, divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "average, large": lambda x: F.avg_pool2d(x, 6, 1, 3, count_include_pad=False),
}


def images(*size: int) -> torch.Tensor:
    """NaN, infinities and zeros of both signs among ordinary numbers."""
    x = torch.randn(*size)
    special = torch.tensor([torch.nan, -torch.inf, torch.inf, -0.0, 0.0, -torch.inf, 1.0, 1.0])
    chosen = torch.randint(0, 3, size) == 0
    return torch.where(chosen, special[torch.randint(0, len(special), size)], x)


@pytest.mark.long
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_special_values_are_as_in_eager(name: str, dtype: torch.dtype) -> None:
    fn = WINDOWS[name]
    x = images(2, 3, 10, 9).to(dtype)
    inputs = [x, torch.full_like(x, -torch.inf), x.contiguous(memory_format=torch.channels_last)]
    for given in inputs:
        exact = {"rtol": 0, "atol": 0} if "max" in name else {}
        check(fn, given, **exact)


def test_the_sign_of_zero_is_that_of_the_first() -> None:
    x = torch.tensor([[[[-0.0, 0.0], [0.0, -0.0]]]])
    for given in (x, -x):
        graph = check(lambda x: F.max_pool2d(x, 2), given)
        (found,) = run(graph, given)
        assert torch.equal(found.signbit(), F.max_pool2d(given, 2).signbit())


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in WINDOWS if "large" not in name])
def test_gradients_of_half_types_are_rounded_as_in_eager(name: str) -> None:
    fn = WINDOWS[name]
    x = torch.randn(2, 3, 10, 9).bfloat16().requires_grad_()
    first = lambda x: fn(x)[0] if "max" in name else fn(x)  # noqa: E731
    grad = torch.randn_like(first(x))
    (expected,) = torch.autograd.grad(first(x), x, grad)
    compiled = mc.compile(first)
    (found,) = torch.autograd.grad(compiled(x), x, grad)
    assert torch.equal(found, expected)


@pytest.mark.long
@pytest.mark.parametrize("language", ["auto", "triton"])
@pytest.mark.parametrize("name", WINDOWS)
def test_kernels_equal_eager(name: str, language: str) -> None:
    fn, x = WINDOWS[name], images(1, 2, 10, 9)
    compiled = mc.compile(fn, options={"device_codegen": language})
    torch.testing.assert_close(compiled(x), fn(x), equal_nan=True)


@pytest.mark.long
@pytest.mark.parametrize("name", WINDOWS)
def test_sizes_may_be_symbols(name: str) -> None:
    found, fn = Found(), WINDOWS[name]
    sample = as_sample(name, fn, torch.randn(2, 3, 10, 9, requires_grad=True))
    check_sample(sample, found, dynamic=True)
    assert found.wrong == [] and found.agreed == 1 and not found.externs


@pytest.mark.long
def test_a_window_is_one_kernel_of_bounded_size() -> None:
    def pool(size: int):
        def fn(x: torch.Tensor) -> torch.Tensor:
            return F.max_pool2d(x.relu(), size, 1, size // 2) + 1

        return fn

    lines = {}
    for size in (3, 5, 7, 15):
        x = torch.randn(2, 3, 32, 32)
        kernels = mc.trace(pool(size), x).graphs["forward"].kernels
        assert len(kernels) <= 2
        lines[size] = sum(len(kernel.lines) for kernel in kernels)
    assert lines[7] == lines[15] < 60 and lines[5] < 300


def test_places_that_cannot_be_outside_are_not_checked() -> None:
    x = torch.randn(2, 3, 8, 8)
    graph = check(lambda x: F.avg_pool2d(x, 2), x)
    assert "masked" not in str(graph)
    graph = check(lambda x: F.avg_pool2d(x, 3, 1, 1), x)
    assert str(graph).count("masked") == 8  # all but the middle


def test_other_pools_stay_calls() -> None:
    x = torch.randn(2, 3, 10, 9)
    for fn in (lambda x: F.adaptive_avg_pool2d(x, (4, 5)), lambda x: F.max_pool3d(x, 2)):
        found = Found()
        check_sample(as_sample("a", fn, x.clone().requires_grad_()), found)
        assert found.wrong == [] and found.agreed == 1 and found.externs


@dataclasses.dataclass(eq=False)
class OneLess(windows.Strided):
    """Windows that lack their last element."""

    def element(self, window, tap):
        at, conditions = super().element(window, tap)
        return at, [*conditions, self.taps - 2 - tap]


def test_a_wrong_rule_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(pooling, "Strided", OneLess)
    assert run_operator("nn.functional.max_pool2d", 6, (torch.float32,)).wrong


def test_a_rule_that_forgets_to_round_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(pooling, "summation_dtype", lambda grad: torch.float32)
    with pytest.raises(AssertionError):
        test_gradients_of_half_types_are_rounded_as_in_eager("average")
