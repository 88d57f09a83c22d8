"""Compiled captures on disk.

- The second process compiles nothing, and what comes back is what was made.
- Whatever decides what is made is in the key; what has no text has no key and is not kept.
- What is damaged is compiled again.

Tensors on the CPU stand for those on a GPU: their kernels are Triton's, interpreted.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from minicompile import pipeline
from minicompile.lowering.lower import lowering
from minicompile.ops.events import observer
from minicompile.ops.registry import ALL, scoped, without
from minicompile.options import Options
from minicompile.plugins.graph_cache import store as graph_cache
from minicompile.runtime import load
from tests.comparing import Answer, answer, assert_answer, assert_same

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")


class Disk:
    """Counts what is looked for and found; kernels that come from disk are those that were interpreted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, interpreted: bool) -> None:
        self.keys: list[str | None] = []
        self.found: list[bool] = []
        kernels: dict[str, Any] = {}
        key_of, read, load_kernel = graph_cache.key_of, graph_cache.read, load.triton.load_kernel

        def key_and_tell(*given: Any) -> str | None:
            self.keys.append(key_of(*given))
            return self.keys[-1]

        def read_and_tell(*given: Any) -> Any:
            entry = read(*given)
            self.found.append(entry is not None)
            return entry

        def load_and_keep(source: Any, *given: Any) -> Any:
            (kernel,) = load.gpu_kernels([source]).values()
            return kernels.setdefault(kernel.key, load_kernel(source, *given))

        def start_kernels(asked: Any, options: Options) -> Any:
            return lambda: {name: kernels[kernel.key] for name, kernel in asked.items()}

        monkeypatch.setattr(graph_cache, "key_of", key_and_tell)
        monkeypatch.setattr(graph_cache, "read", read_and_tell)
        if interpreted:
            monkeypatch.setattr(load.triton, "load_kernel", load_and_keep)
            monkeypatch.setattr(load.triton, "start_kernels", start_kernels)


@pytest.fixture(autouse=True)
def races() -> None:
    """Nobody watches, unlike in other tests (tests/conftest.py): else nothing would come from the disk."""


@pytest.fixture(autouse=True)
def on_cpu(request, monkeypatch) -> None:
    if "gpu" in request.keywords:
        return
    monkeypatch.setattr(graph_cache, "KIND", "cpu")
    monkeypatch.setattr(graph_cache, "gpu_text", str)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture
def disk(request, monkeypatch) -> Disk:
    return Disk(monkeypatch, interpreted="gpu" not in request.keywords)


def compiled(fn: Any, folder: Any, dynamic: Any = False, **options: Any) -> Any:
    mc.reset()
    chosen = {"device_codegen": "triton", "cache_dir": str(folder)} | options
    return mc.compile(fn, dynamic=dynamic, options=chosen)


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.layer_norm(x, x.shape[-1:]) @ w
    return F.gelu(y).softmax(-1).sum(0)


def several(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Outputs that need no gradient, that are inputs, that are one object, and no tensors."""
    y = (x @ w).relu()
    return y, w, y.argmax(-1), y, 3, None, [y.sum(), 2.5]


def writing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return (x @ w).sin()


def results(fn: Any, device: str = "cpu") -> Answer:
    torch.manual_seed(0)
    x, w = torch.randn(5, 8, device=device), torch.randn(8, 6, device=device)
    return answer(fn, [x, w.requires_grad_()])


def check_kept(fn: Any, disk: Disk, folder: Any, device: str = "cpu", close: float = 1e-5) -> None:
    """The second time it comes from disk, gives the same bits, and both are near eager's."""
    first, second = (results(compiled(fn, folder), device) for _ in range(2))
    assert disk.found == [False, True]
    assert_answer(second, first, rtol=0, atol=0)
    assert_answer(second, results(fn, device), rtol=close * 10, atol=close)


@pytest.mark.parametrize("fn", [block, several, writing])
def test_the_second_time_all_is_the_same(fn, disk, tmp_path) -> None:
    check_kept(fn, disk, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("fn", [block, several, writing])
def test_on_a_gpu_what_is_kept_gives_the_same(fn, disk, tmp_path) -> None:
    check_kept(fn, disk, tmp_path, "cuda", 1e-4)


def test_the_second_time_nothing_is_lowered(disk, monkeypatch, tmp_path) -> None:
    x, w = torch.randn(5, 8), torch.randn(8, 6)
    for stage in ("", "ahead_of_time", "lower", "make_plans"):
        if stage:
            monkeypatch.setattr(pipeline, stage, None)
        with torch.no_grad():
            torch.testing.assert_close(compiled(block, tmp_path)(x, w), block(x, w))
    assert disk.found == [False, True, True, True]


def test_gradients_that_are_missing_or_batched_are_as_without_the_disk(disk, tmp_path) -> None:
    def two(x, w):
        return x.sin() * 2, w.cos() * 3

    for _ in range(2):
        x, w = (torch.randn(4, requires_grad=True) for _ in range(2))
        y, z = compiled(two, tmp_path)(x, w)
        y.sum().backward()
        assert w.grad is None
        torch.testing.assert_close(x.grad, 2 * x.cos())
        y, z = compiled(two, tmp_path)(x, w)
        rows = torch.eye(4)
        (batched,) = torch.autograd.grad(z, w, rows, is_grads_batched=True)
        torch.testing.assert_close(batched, torch.diag(-3 * w.detach().sin()))
    assert disk.found == [False, True, True, True]


def test_what_is_damaged_is_compiled_again(disk, tmp_path) -> None:
    results(compiled(block, tmp_path))
    (file,) = (tmp_path / "graphs").iterdir()
    whole = file.read_bytes()
    for damaged in (
        b"",
        whole[:-1],
        whole.replace(b"gelu", b"relu"),
        whole[:40] + b"x" + whole[41:],
    ):
        file.write_bytes(damaged)
        assert_same(results(compiled(block, tmp_path)).results, results(block).results)
        assert file.read_bytes() == whole
    assert disk.found == [False] * 5


X, Y = torch.randn(4, 8), torch.randn(8, 4)
PLAIN: Callable[[torch.Tensor], Any] = lambda x: x.sin() + 1  # noqa: E731
DIFFERENT: list[Callable[[torch.Tensor], Any]] = [
    PLAIN,
    lambda x: x.sin() + 1.5,
    lambda x: x.sin() + True,
    lambda x: x.sin() * 0.0,
    lambda x: x.sin() * -0.0,
    lambda x: (x.sin() + 1, x.cos()),
    lambda x: x.sin().sum(0),
    lambda x: x.sin()[1:],
    lambda x: x.sin().to(torch.float16),
    lambda x: torch.full_like(x, 1, dtype=torch.bool),
    lambda x: F.gelu(x, approximate="tanh"),
]


def test_whatever_decides_is_in_the_key(disk, tmp_path) -> None:
    """Each differs from all others; the same function asked again has the same key."""

    def key(fn: Callable[..., Any], x: torch.Tensor = X, **options: Any) -> str | None:
        compiled(fn, tmp_path, **options)(x)
        return disk.keys[-1]

    keys = [
        *map(key, DIFFERENT),
        *(key(PLAIN, x) for x in (X.double(), X.clone().requires_grad_(), Y, Y.t().clone())),
        key(PLAIN, fusion=False),
        key(lambda x: x.sin_() + 1, X.clone()),
    ]
    with torch.no_grad():
        keys.append(key(PLAIN))
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert keys[0] == key(PLAIN)
    assert keys[0] == key(PLAIN, torch.zeros(4, 8))


def test_settings_of_torch_and_the_gpu_are_in_the_key(disk, monkeypatch, tmp_path) -> None:
    def key() -> str | None:
        compiled(torch.sin, tmp_path)(X)
        compiled(lambda x: x.sin(), tmp_path)(X)
        return disk.keys[-1]

    found = [key()]
    torch.use_deterministic_algorithms(True)
    try:
        found.append(key())
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    found.append(key())
    monkeypatch.undo()
    assert None not in found
    assert len(set(found)) == 3


def test_what_has_no_text_has_no_key(disk, tmp_path, monkeypatch) -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    for fn, given, dynamic in (
        (lambda x: x.sin(), X, True),
        (lambda x: x.sin(), torch.randn(9, 4)[1:], False),
        (lambda x: x[:, :3] + torch.tensor([1.0, 2.0, 3.0]), X, False),
        (lambda x: Custom.apply(x).sin(), X.clone().requires_grad_(), False),
    ):
        compiled(fn, tmp_path, dynamic)(given)
        assert not list((tmp_path / "graphs").rglob("*"))
    with torch.autocast("cpu", torch.bfloat16):
        compiled(lambda x: x @ x.t(), tmp_path)(X)
    assert disk.keys[-1] is None
    monkeypatch.setattr(graph_cache, "KIND", "cuda")
    compiled(lambda x: x.sin(), tmp_path)(X)
    assert disk.keys[-1] is None


def test_rules_from_elsewhere_and_rules_taken_away_are_seen(disk, tmp_path) -> None:
    def key() -> str | None:
        compiled(lambda x: x.sin(), tmp_path)(X)
        return disk.keys[-1]

    before = key()
    with without("lowering:aten.cos"):
        assert key() not in (before, None)
    with scoped():
        lowering(torch.ops.aten.cos.default)(lambda ctx, x: x)
        assert key() is None
    with scoped():
        passes = ALL["pass"]
        name, entry = next(iter(passes.items()))
        passes(name)(dataclasses.replace(entry, run=lambda gm, mode: 0))
        assert key() is None
    with scoped():
        observer("mine")(lambda event: None)
        assert key() is None
    assert key() == before


def test_who_watches_sees_every_stage(disk, tmp_path) -> None:
    for _ in range(2):
        trace = mc.trace(compiled(block, tmp_path), torch.randn(4, 8), torch.randn(8, 8))
        assert trace.loops is not None and trace.aot is not None
        assert disk.keys[-1] is None
    for options in ({"disk_cache": False}, {"mode": "reduce-overhead"}, {"trace": True}):
        made = compiled(lambda x: x.sin(), tmp_path, debug_dir=str(tmp_path / "debug"), **options)
        made(X)
        assert disk.keys[-1] is None
