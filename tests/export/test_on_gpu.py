"""Packages on a real GPU: `pytest -m gpu tests/export`. They need a C compiler, no CUDA but the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minicompile as mc
from minicompile.lessons.model import GPT
from tests.export.damage import build_program
from tests.export.test_cuda_package import (
    BATCH,
    CASES,
    LENGTH,
    assert_close,
    attention,
    exported,
    exported_case,
    tokens,
)
from tests.export.test_package import Counter, run_program

pytestmark = pytest.mark.gpu


LARGER: dict[str, Any] = {
    **CASES,
    "lesson model": (
        lambda: GPT().eval(), [{0: BATCH, 1: LENGTH}], [[tokens(2, 16)], [tokens(3, 7)], [tokens(8, 60)]],
    ),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 300)).eval(),
        [{0: BATCH}],
        [[torch.randn(n, 512)] for n in (16, 2, 1000)],
    ),
    "attention": (lambda: attention, None, [[torch.randn(4, 8, 500, 64) for _ in range(3)]]),
}  # fmt: skip
"""At sizes that the interpreter of a fake GPU has no patience for."""


def target_here() -> tuple[str, int]:
    major, minor = torch.cuda.get_device_capability()
    return "cuda", 10 * major + minor


def listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [*found]


@pytest.mark.parametrize("exported_on", ["cpu", "cuda"])
@pytest.mark.parametrize("name", LARGER)
def test_results_are_those_of_eager(name: str, exported_on: str, tmp_path: Path) -> None:
    """Through Python, with tensors on the GPU and on the CPU, and through the C program."""
    fn, program, calls = exported_case(*LARGER[name], device=exported_on)
    target = target_here() if exported_on == "cpu" else None
    folder = mc.aot_package(program, tmp_path / "package", target=target)
    package, command = mc.load_package(folder), build_program(folder)
    if isinstance(fn, nn.Module):
        fn.cpu()
    for given in calls:
        here, there = [x.cpu() for x in given], [x.cuda() for x in given]
        with torch.no_grad():
            expected = listed(fn(*here))
        on_gpu = listed(package(*there))
        assert all(result.is_cuda for result in on_gpu)
        assert_close([result.cpu() for result in on_gpu], expected)
        assert_close(listed(package(*here)), expected)
        assert_close(run_program(command, folder, here), expected)


def test_a_convolution_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).cuda().eval()
    program = mc.export(model, (torch.randn(2, 3, 8, 8, device="cuda"),))
    with pytest.raises(mc.Unsupported, match=r"no aten\.convolution"):
        mc.aot_package(program, tmp_path / "package")


def test_state_and_inputs_change_as_in_eager(tmp_path: Path) -> None:
    model = Counter().cuda()
    given = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    package = mc.load_package(mc.aot_package(mc.export(model, given), tmp_path / "counter"))
    for step in range(3):
        logs = [torch.zeros(3, device="cuda"), torch.zeros(6, device="cuda")[::2]]
        expected, found = model(given[0] * step, logs[0]), package(given[0] * step, logs[1])
        torch.testing.assert_close([*found.values()], [*expected.values()], rtol=0, atol=0)
        assert logs[0].equal(logs[1])


def test_calls_follow_the_stream_and_leak_nothing(tmp_path: Path) -> None:
    fn, program, _ = exported("mlp")
    package = mc.load_package(mc.aot_package(program, tmp_path / "mlp", target=target_here()))
    fn.cuda()
    free = []
    with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
        for _ in range(100):
            x = torch.randn(40_000, 20, device="cuda")
            assert_close(package(x), fn(x))
            free.append(torch.cuda.mem_get_info()[0])
    assert free[1] - free[-1] < 2**24  # a result has 800,000 bytes


def test_a_bad_index_is_an_error(tmp_path: Path) -> None:
    """In a process of its own: the CUDA context is lost with it."""
    fn, program, calls = exported("lesson model")
    folder = mc.aot_package(program, tmp_path / "package", target=target_here())
    command = build_program(folder)
    with pytest.raises(AssertionError, match=r"failed: CUDA error 710: device-side assert"):
        run_program(command, folder, [torch.full_like(calls[0][0], 10_000)])
