"""The demo compares like with like, and says where losses differ."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minicompile.bench import demo
from minicompile.bench.cases import COMPILERS, EAGER, OURS, TORCH, ComparedCompiler
from minicompile.bench.demo import largest_difference, train_in_turns
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.lessons.train import TrainResult

pytestmark = pytest.mark.long

SMALL = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)


def off_by(amount: float) -> ComparedCompiler:
    """A compiler whose loss is wrong by `amount`."""

    def compile(model: GPT, mode: str | None = None) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            logits, loss = model(*args)
            return logits, loss + amount

        return run

    return ComparedCompiler(compile, cache_variable="SOME_CACHE_DIR")


def broken(model: GPT, mode: str | None = None) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        raise RuntimeError("no such kernel")

    return run


def trained(
    monkeypatch: pytest.MonkeyPatch, ours: ComparedCompiler, steps: int = 7
) -> tuple[dict[str, TrainResult], dict[str, str]]:
    monkeypatch.delitem(COMPILERS, TORCH)
    monkeypatch.setitem(COMPILERS, OURS, ours)
    monkeypatch.setattr(demo, "STEPS_A_TURN", 3)
    start = GPT(SMALL)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    found = train_in_turns(start, steps)
    assert all(torch.equal(before[name], value) for name, value in start.state_dict().items())
    return found


def test_a_compiler_that_changes_nothing_trains_as_eager(monkeypatch: pytest.MonkeyPatch):
    results, errors = trained(monkeypatch, off_by(0.0))
    assert not errors and len(results[OURS].losses) == 7
    assert results[OURS].losses == results[EAGER].losses


def test_differences_of_losses():
    assert largest_difference([1.0, 2.5], [1.0, 2.0]) == 0.5
    assert largest_difference([1.0, float("nan")], [1.0, 1.0]) == float("inf")


@pytest.mark.parametrize(
    ("ours", "code", "said"),
    [
        (off_by(0.0), 0, "lesson model on cpu"),
        (off_by(1e-3), 1, "WRONG: losses of the first 5 steps differ"),
        (ComparedCompiler(broken, "OTHER_CACHE_DIR"), 1, "RuntimeError: no such kernel"),
    ],
)
def test_the_command_fails_where_ours_is_wrong(
    ours: ComparedCompiler, code: int, said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(COMPILERS, TORCH, off_by(0.0))
    monkeypatch.setitem(COMPILERS, OURS, ours)
    monkeypatch.setattr(demo, "GPT", lambda: GPT(SMALL))
    chosen = argparse.Namespace(device="cpu", steps=6, threads=torch.get_num_threads())
    assert demo.run(chosen) == code
    assert said in capsys.readouterr().out
