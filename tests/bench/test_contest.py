"""The demo compares like with like, and says what was missed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minicompile.bench import demo as demo_module
from minicompile.bench.contest import (
    CompilerReport,
    Contest,
    Contestant,
    ExternCall,
    Standing,
    largest_difference,
    missed_targets,
    run_contest,
)
from minicompile.bench.screen import Screen, plain_table
from minicompile.errors import BackendError, MinicompileError
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.lessons.train import TrainResult

SMALL = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)


def identity(model: GPT) -> Callable[..., Any]:
    return lambda *args: model(*args)


def off_by(amount: float) -> Callable[[GPT], Callable[..., Any]]:
    """A compiler whose loss is wrong by `amount`."""

    def compile_fn(model: GPT) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            logits, loss = model(*args)
            return logits, loss + amount

        return run

    return compile_fn


def contest_between(*contestants: Contestant, steps: int = 7) -> Contest:
    return run_contest(GPT(SMALL), [Contestant("eager"), *contestants], steps, steps_a_turn=3)


def test_a_compiler_that_changes_nothing_differs_by_nothing():
    contest = contest_between(Contestant("same", identity))
    assert contest["same"].all_difference == 0.0
    assert contest["same"].result.losses == contest["eager"].result.losses
    assert len(contest["same"].result.losses) == 7


def test_a_wrong_loss_is_measured():
    contest = contest_between(Contestant("wrong", off_by(0.5)))
    assert contest["wrong"].first_difference == pytest.approx(0.5, abs=1e-5)


def test_training_leaves_the_start_untouched():
    start = GPT(SMALL)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    run_contest(start, [Contestant("eager"), Contestant("same", identity)], 2)
    assert all(torch.equal(before[name], value) for name, value in start.state_dict().items())


def test_a_compiler_that_raises_is_out_and_the_others_finish():
    def broken(model: GPT) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            raise RuntimeError("no such kernel")

        return run

    contest = contest_between(Contestant("broken", broken), Contestant("same", identity))
    assert contest["broken"].error == "RuntimeError: no such kernel"
    assert len(contest["same"].result.losses) == 7


def test_progress_counts_every_step_once():
    seen: list[int] = []
    run_contest(
        GPT(SMALL), [Contestant("eager"), Contestant("b", identity)], 5, progress=seen.append
    )
    assert seen == list(range(1, 11))


def test_a_nan_or_a_missing_step_is_an_infinite_difference():
    assert largest_difference([1.0, float("nan")], [1.0, 1.0]) == float("inf")
    assert largest_difference([1.0], [1.0, 1.0]) == float("inf")


def standing(name: str, **changes: Any) -> Standing:
    """A standing that meets every target, but for `changes`."""
    losses = [4.0] + [2.0] * 299
    result = TrainResult(losses, changes.pop("step_seconds", [0.01] * 300), [0.01] * 300)
    facts = {"compile_seconds": 1.0, "import_seconds": 1.0, "report": CompilerReport()}
    return Standing(name, result, **{**facts, **changes})


def judged(**changes: Any) -> list[str]:
    rival = standing("theirs", compile_seconds=3.0)
    return missed_targets(Contest(300, [rival, standing("ours", **changes)]), "ours", "theirs")


def test_meeting_every_target_misses_none():
    assert judged() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"first_difference": 2e-5}, "first 5 steps"),
        ({"all_difference": 2e-2}, "over all steps"),
        ({"all_difference": float("inf")}, "over all steps"),
        ({"compile_seconds": 1.01}, "compiling took"),
        ({"compile_seconds": None}, "not measured"),
        ({"step_seconds": [0.0111] * 300}, "a step took 1.11 times"),
        ({"report": None}, "no report"),
        (
            {"report": CompilerReport(eager_frames=("forward: print",))},
            "a frame ran in eager: forward: print",
        ),
        (
            {"report": CompilerReport(externs=(ExternCall("aten.gelu.default", 2, "no rule"),))},
            "aten.gelu",
        ),
        (
            {"report": CompilerReport(externs=(ExternCall("aten.mm.default", 2, ""),))},
            "without a reason",
        ),
        ({"error": "boom"}, "ours failed: boom"),
    ],
)
def test_each_missed_target_is_named(changes: dict[str, Any], words: str):
    missed = judged(**changes)
    assert len(missed) == 1
    assert words in missed[0]


def test_a_loss_that_does_not_fall_is_missed_at_full_length_only():
    flat, rival = standing("ours"), standing("theirs", compile_seconds=3.0)
    flat.result.losses = [4.0] * 300
    assert "fell by 0%" in missed_targets(Contest(300, [rival, flat]), "ours", "theirs")[0]
    assert missed_targets(Contest(20, [rival, flat]), "ours", "theirs") == []


def test_matrix_products_with_a_reason_are_allowed():
    assert (
        judged(report=CompilerReport(externs=(ExternCall("aten.addmm.default", 8, "BLAS"),))) == []
    )


def run_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ours: Contestant, cold: Any
) -> tuple[int, Any]:
    """The whole command on a tiny model, with stand-ins for the compilers and the cold measurement."""
    torch_like = Contestant("torch.compile", identity)
    monkeypatch.setattr(demo_module, "CONTESTANTS", (Contestant("eager"), torch_like, ours))
    monkeypatch.setattr(demo_module, "GPT", lambda: GPT(SMALL))
    file = tmp_path / "facts.json"
    chosen = argparse.Namespace(device="cpu", steps=6, threads=1, json=file, plain=True)
    return demo_module.run(chosen, cold), json.loads(file.read_text())


def cold(name: str, device: str, threads: int) -> dict[str, float]:
    return {"import_seconds": 1.0, "compile_seconds": 9.0 if name == "torch.compile" else 2.0}


def test_the_command_reports_and_fails_on_a_missed_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    ours = Contestant(
        "minicompile", off_by(1.0), inspect=lambda model, batch: CompilerReport(kernels=3)
    )
    code, facts = run_demo(monkeypatch, tmp_path, ours, cold)
    out = capsys.readouterr().out
    assert code == 1
    assert "MISSED: losses differ from eager's by 1.0e+00 over the first 5 steps" in out
    assert "minicompile: 0 frames in eager, 3 kernels" in out
    assert [c["name"] for c in facts["contestants"]] == ["eager", "torch.compile", "minicompile"]
    assert len(facts["contestants"][2]["losses"]) == 6


def test_a_compiler_that_fails_from_cold_is_reported_not_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def failing(name: str, device: str, threads: int) -> dict[str, float]:
        if name == "minicompile":
            raise BackendError("no C++ compiler: install g++")
        return cold(name, device, threads)

    code, _ = run_demo(monkeypatch, tmp_path, Contestant("minicompile", identity), failing)
    assert code == 1
    assert "MISSED: minicompile failed: no C++ compiler: install g++" in capsys.readouterr().out


def test_the_report_counts_equal_extern_calls_and_lists_breaks():
    mm = SimpleNamespace(op="aten.mm.default", reason="library matrix product")
    forward = SimpleNamespace(loops=SimpleNamespace(externs=[mm, mm]), kernels=["a", "b"])
    backward = SimpleNamespace(loops=SimpleNamespace(externs=[mm]), kernels=["c"])
    trace = SimpleNamespace(graphs={"forward": forward, "backward": backward})
    report = demo_module.report_from(SimpleNamespace(breaks=["frame ran in eager: print"]), trace)
    assert report.externs == (ExternCall("aten.mm.default", 3, "library matrix product"),)
    assert report.kernels == 3
    assert report.eager_frames == ("frame ran in eager: print",)


def test_a_missing_gpu_and_an_unknown_device_are_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MinicompileError, match="needs a CUDA GPU"):
        demo_module.check_device("cuda")
    with pytest.raises(MinicompileError, match="takes cpu or cuda"):
        demo_module.check_device("tpu")


def test_tables_without_rich_are_aligned():
    assert plain_table(("a", "b"), [("long", "1"), ("x", "22")]) == (
        "a      b\n----  --\nlong   1\nx     22"
    )


@pytest.mark.parametrize("plain", [True, False])
def test_the_screen_shows_text_and_tables(plain: bool, capsys: pytest.CaptureFixture[str]):
    screen = Screen(plain)
    screen.say("[not markup]")
    screen.table("title", ("a", "b"), [("one", "2")])
    with screen.progress("working", 10) as update:
        for done in range(1, 11):
            update(done)
    out = capsys.readouterr().out
    assert "[not markup]" in out
    assert "one" in out
    assert "working: 10/10" in out
