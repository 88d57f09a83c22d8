"""`minicompile bench` compares right results, in turns, and says what is wrong."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minicompile.__main__ import main
from minicompile.bench import first_calls, timing
from minicompile.bench.cases import (
    COMPILERS,
    EAGER,
    OURS,
    TORCH,
    BenchCase,
    ComparedCompiler,
    find_cases,
    in_float64,
)
from minicompile.bench.patterns import PATTERNS
from minicompile.bench.speed import error_of, measure
from minicompile.bench.timing import peak_bytes, time_in_turns

pytestmark = pytest.mark.long


def identity(fn: Any, mode: str | None = None) -> Any:
    return lambda *args: fn(*args)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile needn't run."""
    monkeypatch.setitem(COMPILERS, TORCH, ComparedCompiler(identity))


def small(name: str, training: bool = False) -> BenchCase:
    return next(c for c in find_cases([name], [], ["small"]) if c.training == training)


def test_a_row_has_what_was_measured(without_torch):
    row = measure(small("softmax"), "cpu", torch.float32, 0.01)
    assert not row.failures
    assert set(row.seconds) == {EAGER, TORCH, OURS} and min(row.seconds.values()) > 0
    assert row.errors[OURS] < 1e-6 and row.errors[EAGER] > 0
    assert row.peaks[EAGER] >= row.peaks[OURS] >= 2 * 2 * 16 * 16 * 4
    assert row.to_theirs is not None and row.to_theirs.low <= row.to_theirs.median


@pytest.mark.parametrize("training", [False, True])
def test_training_times_the_backward(training):
    case = small("layer_norm", training)
    inputs = case.inputs("cpu", torch.float32)
    made = case.subject.step(case.subject.fn, inputs)()
    assert len(made) == (3 if training else 0)
    assert any(tensor.requires_grad for tensor in inputs) == training


def wrong(fn: Any, mode: str | None = None) -> Any:
    return lambda *args: fn(*args) + 1e-4


def broken(fn: Any, mode: str | None = None) -> Any:
    raise ValueError("no such kernel")


@pytest.mark.parametrize(("compiler", "said"), [(wrong, "off by"), (broken, "ValueError: no such")])
def test_wrong_results_and_errors_are_told(monkeypatch, without_torch, compiler, said):
    monkeypatch.setitem(COMPILERS, OURS, ComparedCompiler(compiler))
    row = measure(small("softmax"), "cpu", torch.float32, 0.01)
    assert row.failures[OURS].startswith(said)


def test_a_wrong_gradient_is_seen():
    pattern = PATTERNS["gelu_bias"]
    inputs = pattern.make_inputs("cpu", torch.float32, "small")
    exact = pattern.run(pattern.fn, in_float64(inputs))
    found = pattern.run(pattern.fn, inputs)
    assert error_of(found, exact) < 1e-6
    found[1] = found[1] + 1e-3
    assert error_of(found, exact) > 1e-5


def test_errors_see_nan_and_infinity():
    nan, inf = float("nan"), float("inf")
    exact = [torch.tensor([nan, inf, -inf, 2.0])]
    assert error_of([torch.tensor([nan, inf, -inf, 2.0])], exact) == 0
    for other in ([1.0, inf, -inf, 2.0], [nan, -inf, -inf, 2.0], [nan, inf, -inf, nan]):
        assert error_of([torch.tensor(other)], exact) == inf
    assert error_of([torch.empty(0)], [torch.empty(0)]) == 0
    assert error_of([torch.ones(1)], [torch.ones(4)]) == inf


def test_a_first_call_in_a_fresh_process(tmp_path: Path):
    case = "gelu_bias, cache"
    given = ("cpu", 1, str(tmp_path), "float32")
    cold, warm = (first_calls.in_fresh_process(OURS, case, *given) for _ in range(2))
    assert cold > 0 and warm > 0
    assert list(tmp_path.rglob("*.so"))


def test_turns_meet_the_same_machine():
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    samples = time_in_turns(calls, 0.0)
    assert [len(samples[name]) for name in "abc"] == [timing.LEAST_ROUNDS] * 3
    assert timing.ratio_of([1.0, 2.0, 9.0], [2.0, 4.0, 3.0]).median == 0.5


def test_peaks_count_what_lives_at_once():
    held = torch.ones(1 << 18)

    def step() -> None:
        first = held + 1
        second = first + 1
        del first
        second + 1

    assert 2 << 20 <= peak_bytes(step) < (2 << 20) + 64  # the number 1 is a tensor too


def test_the_command(without_torch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "facts.json"
    given = ["bench", "softmax", "--scales", "small", "--seconds", "0.01"]
    assert main([*given, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    (facts,) = json.loads(file.read_text())
    assert facts["threads"] == torch.get_num_threads()
    assert [case["case"] for case in facts["cases"]] == ["softmax, small"]
    if (Path(__file__).parents[2] / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{12}\+?", facts["commit"])
    assert "softmax, small" in said and "geometric mean" in said


def test_a_wrong_result_is_the_exit_code(monkeypatch, without_torch, capsys):
    monkeypatch.setitem(COMPILERS, OURS, ComparedCompiler(wrong))
    assert main(["bench", "softmax", "--scales", "small", "--seconds", "0.01"]) == 1
    assert "softmax, small: minicompile: off by" in capsys.readouterr().out


def test_what_a_network_needs_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (case,) = find_cases(["bert"], [], ["gpu"])
    row = measure(case, "cpu", torch.float32, 0.01)
    assert "transformers" in row.failures[OURS] and not row.seconds


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nonsense"], "no case 'nonsense'"),
        (["--kinds", "models"], "no kind 'models'"),
        (["--scales", "huge"], "no scale 'huge'"),
    ],
)
def test_mistakes_are_told(given, said, capsys):
    assert main(["bench", *given]) == 1
    assert said in capsys.readouterr().err
