"""The demo compares like with like, and says where losses differ."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minicompile.bench import demo
from minicompile.bench.cases import COMPILERS, EAGER, OURS, TORCH, Compiler
from minicompile.bench.demo import Standing, largest_difference, train_in_turns
from minicompile.errors import BackendError, MinicompileError
from minicompile.lessons.model import GPT, GPTConfig

pytestmark = pytest.mark.long

SMALL = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)


def off_by(amount: float) -> Compiler:
    """A compiler whose loss is wrong by `amount`."""

    def compile(model: GPT, mode: str | None = None) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            logits, loss = model(*args)
            return logits, loss + amount

        return run

    return Compiler(compile, cache_variable="SOME_CACHE_DIR")


def broken(model: GPT, mode: str | None = None) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        raise RuntimeError("no such kernel")

    return run


def trained(monkeypatch: pytest.MonkeyPatch, ours: Compiler, steps: int = 7) -> list[Standing]:
    monkeypatch.setitem(COMPILERS, OURS, ours)
    monkeypatch.setattr(demo, "STEPS_A_TURN", 3)
    start = GPT(SMALL)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    standings = train_in_turns(start, (EAGER, OURS), steps)
    assert all(torch.equal(before[name], value) for name, value in start.state_dict().items())
    return standings


def test_a_compiler_that_changes_nothing_trains_as_eager(monkeypatch: pytest.MonkeyPatch):
    eager, ours = trained(monkeypatch, off_by(0.0))
    assert ours.result.losses == eager.result.losses and len(ours.result.losses) == 7


def test_a_compiler_that_raises_is_out_and_the_others_finish(monkeypatch: pytest.MonkeyPatch):
    eager, ours = trained(monkeypatch, Compiler(broken, cache_variable="OTHER_CACHE_DIR"))
    assert ours.error == "RuntimeError: no such kernel"
    assert len(eager.result.losses) == 7


def test_differences_of_losses():
    assert largest_difference([1.0, 2.5], [1.0, 2.0]) == 0.5
    assert largest_difference([1.0, float("nan")], [1.0, 1.0]) == float("inf")


def cold(name: str, device: str, threads: int, cache: str) -> float:
    if name == TORCH:
        raise BackendError("no C++ compiler: install g++")
    return 2.0


@pytest.mark.parametrize(
    ("ours", "code", "said"),
    [
        (off_by(0.0), 0, "lesson model on cpu"),
        (off_by(1e-3), 1, "WRONG: losses of the first 5 steps differ"),
        (
            Compiler(broken, cache_variable="OTHER_CACHE_DIR"),
            1,
            "minicompile: RuntimeError: no such kernel",
        ),
    ],
)
def test_the_command_fails_where_ours_is_wrong(
    ours: Compiler, code: int, said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(COMPILERS, TORCH, off_by(0.0))
    monkeypatch.setitem(COMPILERS, OURS, ours)
    monkeypatch.setattr(demo, "GPT", lambda: GPT(SMALL))
    chosen = argparse.Namespace(device="cpu", steps=6, threads=torch.get_num_threads())
    assert demo.run(chosen, cold) == code
    out = capsys.readouterr().out
    assert said in out and "no C++ compiler" in out
    assert ("2.0 s" in out) is (code == 0 or "WRONG" in said)


def test_a_missing_gpu_and_an_unknown_device_are_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MinicompileError, match="needs a CUDA GPU"):
        demo.check_device("cuda")
    with pytest.raises(MinicompileError, match="takes cpu or cuda"):
        demo.check_device("tpu")
