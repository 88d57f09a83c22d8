"""`python -m minicompile demo`: one training run by eager, torch.compile and minicompile, side by side.

Three models with the same weights see the same batches of real text. Losses must agree, compile time and step
time are compared. Compile times come from fresh processes with empty caches (see bench/cold.py); the training
runs in this process, a few steps of each in turn, with the code that those processes left in the caches.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from minicompile.bench.cold import measure_in_fresh_process
from minicompile.bench.contest import (
    FIRST_STEPS,
    FULL_LENGTH,
    CompilerReport,
    Contest,
    Contestant,
    ExternCall,
    Standing,
    missed_targets,
    run_contest,
)
from minicompile.bench.screen import Screen
from minicompile.errors import MinicompileError
from minicompile.lessons.model import GPT
from minicompile.options import environment


def compile_with_minicompile(model: GPT) -> Callable[..., Any]:
    """`minicompile.compile`, imported when it is wanted."""
    import minicompile

    compiled: Callable[..., Any] = minicompile.compile(model)
    return compiled


def inspect_minicompile(model: GPT, batch: Sequence[Any]) -> CompilerReport:
    """What `explain` and `trace` say about the model on one batch."""
    import minicompile

    return report_from(minicompile.explain(model)(*batch), minicompile.trace(model, *batch))


def report_from(explanation: Any, trace: Any) -> CompilerReport:
    """Breaks of an `Explanation`; extern calls (equal ones counted) and kernels of a `Trace`."""
    calls = Counter(
        (str(extern.op), extern.reason)
        for compiled in trace.graphs.values()
        for extern in compiled.loops.externs
    )
    return CompilerReport(
        eager_frames=tuple(str(graph_break) for graph_break in explanation.breaks),
        externs=tuple(
            ExternCall(name, count, reason) for (name, reason), count in sorted(calls.items())
        ),
        kernels=sum(len(compiled.kernels) for compiled in trace.graphs.values()),
    )


EAGER = Contestant("eager")
TORCH = Contestant(
    "torch.compile",
    torch.compile,
    ("torch._dynamo", "torch._inductor.compile_fx"),
    "TORCHINDUCTOR_CACHE_DIR",
)
OURS = Contestant(
    "minicompile",
    compile_with_minicompile,
    ("minicompile.pipeline", "minicompile.api"),
    "MINICOMPILE_CACHE_DIR",
    inspect_minicompile,
)
CONTESTANTS = (EAGER, TORCH, OURS)

MeasureCold = Callable[[str, str, int], dict[str, float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minicompile demo`."""
    parser.add_argument("--device", default="cpu", help='"cpu" (default) or "cuda"')
    parser.add_argument(
        "--steps", type=int, default=FULL_LENGTH, help=f"AdamW steps (default {FULL_LENGTH})"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="CPU threads of each"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write everything measured to FILE"
    )
    parser.add_argument(
        "--plain", action="store_true", help="no colours and bars, even where rich is installed"
    )


def run(chosen: argparse.Namespace, measure_cold: MeasureCold = measure_in_fresh_process) -> int:
    """The command. Gives the exit code: 0 if every target was met, else 1."""
    device = check_device(chosen.device)
    if chosen.steps < 1 or chosen.threads < 1:
        raise MinicompileError("--steps and --threads must be at least 1")
    screen = Screen(chosen.plain)
    torch.set_num_threads(chosen.threads)
    contest = demo(screen, CONTESTANTS, device, chosen.steps, chosen.threads, measure_cold)
    missed = missed_targets(contest, OURS.name, TORCH.name)
    show(screen, contest, device)
    if chosen.json is not None:
        chosen.json.write_text(as_json(contest, missed, device, chosen.threads))
    for sentence in missed:
        screen.say(f"MISSED: {sentence}")
    if not missed:
        screen.say("Every target met.")
    return 1 if missed else 0


def check_device(name: str) -> str:
    """The device, if this machine has it. Raises MinicompileError otherwise."""
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise MinicompileError(f"no device {name!r}: --device takes cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise MinicompileError(
            "--device cuda needs a CUDA GPU and a CUDA build of torch; none was found"
        )
    return name


def demo(
    screen: Screen,
    contestants: Sequence[Contestant],
    device: str,
    steps: int,
    threads: int,
    measure_cold: MeasureCold,
) -> Contest:
    """Compile from cold one after the other, then train all in turns."""
    with tempfile.TemporaryDirectory(
        prefix="minicompile-demo-", ignore_cleanup_errors=True
    ) as folder:
        caches = {
            c.cache_variable: str(Path(folder, c.name)) for c in contestants if c.cache_variable
        }
        with environment(**caches):
            cold: dict[str, dict[str, float]] = {}
            errors: dict[str, str] = {}
            for contestant in contestants:
                if contestant.compiles:
                    with screen.waiting(
                        f"{contestant.name}: compiling the lesson model from cold ..."
                    ):
                        try:
                            cold[contestant.name] = measure_cold(contestant.name, device, threads)
                        except MinicompileError as error:
                            errors[contestant.name] = str(error)
            running = [c for c in contestants if c.name not in errors]
            torch.manual_seed(0)
            start = GPT().to(device)
            with screen.progress("training in turns", steps * len(running)) as progress:
                contest = run_contest(start, running, steps, progress=progress)
    for standing in contest.standings:
        if standing.name in cold:
            standing.compile_seconds = cold[standing.name]["compile_seconds"]
            standing.import_seconds = cold[standing.name]["import_seconds"]
    contest.standings += [
        Standing(name, contest.standings[0].result, error=text) for name, text in errors.items()
    ]
    return contest


HEADER = (
    "",
    "first loss",
    "last loss",
    "fall",
    f"off by, first {FIRST_STEPS}",
    "off by, all",
    "import s",
    "compile s",
    "ms a step",
)
"""Off by: the largest difference of a loss to eager's."""


def table_row(standing: Standing) -> tuple[str, ...]:
    """One line of the table."""
    if standing.error:
        return (standing.name, "failed", *[""] * (len(HEADER) - 2))
    result = standing.result
    seconds = [
        f"{s:.1f}" if s is not None else ""
        for s in (standing.import_seconds, standing.compile_seconds)
    ]
    return (
        standing.name,
        f"{result.losses[0]:.4f}",
        f"{result.losses[-1]:.4f}",
        f"{result.fall:.0%}",
        f"{standing.first_difference:.1e}",
        f"{standing.all_difference:.1e}",
        *seconds,
        f"{result.step_ms:.2f}",
    )


def show(screen: Screen, contest: Contest, device: str) -> None:
    """The table, and what each compiler says about itself."""
    title = f"{contest.steps} AdamW steps of the lesson model on {device}, fp32"
    screen.table(title, HEADER, [table_row(standing) for standing in contest.standings])
    for standing in contest.standings:
        report = standing.report
        if report is None:
            continue
        screen.say(
            f"{standing.name}: {len(report.eager_frames)} frames in eager, {report.kernels} kernels"
        )
        for line in report.eager_frames:
            screen.say(f"  {line}")
        if report.externs:
            rows = [(call.name, str(call.calls), call.reason) for call in report.externs]
            screen.table(
                "calls of PyTorch's own kernels", ("operator", "calls a step", "reason"), rows
            )


def as_json(contest: Contest, missed: list[str], device: str, threads: int) -> str:
    """Everything measured, for a file."""
    facts = {
        "steps": contest.steps,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "missed": missed,
        "contestants": [
            {
                **{k: v for k, v in asdict(standing).items() if k != "result"},
                "losses": standing.result.losses,
                "step_ms": standing.result.step_ms,
                "fall": standing.result.fall,
            }
            for standing in contest.standings
        ],
    }
    return json.dumps(facts, indent=2) + "\n"
