"""`python -m minicompile demo`: one training run by eager, torch.compile and minicompile, side by side.

Three models with the same weights see the same batches of real text. Losses must agree, compile time and step
time are compared. Compile times are from cold: fresh processes, empty cache folders, nothing compiled before.
The training runs in this process, a few steps of each in turn, with the code that those left in the caches.

Imports are not compiling: in a fresh process a compiler's modules are imported beforehand, and their seconds
are reported apart. A few eager steps come first and pay for PyTorch's own start-up. Then the clock runs over
the first compiled forward and backward, less what they usually take.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import minicompile
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
from minicompile.bench.machine import circumstances, in_new_python
from minicompile.bench.screen import Screen
from minicompile.errors import MinicompileError
from minicompile.lessons.model import GPT
from minicompile.lessons.train import TrainResult, train
from minicompile.options import environment


def inspect_minicompile(model: GPT, batch: Sequence[Any]) -> CompilerReport:
    """What `explain` and `trace` say about the model on one batch."""
    return report_from(minicompile.explain(model)(*batch), minicompile.trace(model, *batch))


def report_from(explanation: Any, trace: Any) -> CompilerReport:
    """Breaks of an `Explanation`; extern calls (equal ones counted) and kernels of a `Trace`."""
    graphs = trace.graphs.values()
    calls = Counter((str(e.op), e.reason) for graph in graphs for e in graph.loops.externs)
    return CompilerReport(
        tuple(map(str, explanation.breaks)),
        tuple(ExternCall(name, count, reason) for (name, reason), count in sorted(calls.items())),
        sum(len(graph.kernels) for graph in graphs),
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
    lambda model: minicompile.compile(model),  # the name is loaded on first use
    ("minicompile.pipeline", "minicompile.api"),
    "MINICOMPILE_CACHE_DIR",
    inspect_minicompile,
)
CONTESTANTS = (EAGER, TORCH, OURS)

MeasureCold = Callable[[str, str, int], dict[str, float]]

# -- from cold

WARM_STEPS = 3
MEASURED_STEPS = 5
TIMEOUT_SECONDS = 1200


def measure(name: str, device: str, threads: str) -> dict[str, float]:
    """In this process: seconds of importing a compiler and of its compiling the lesson model."""
    contestant = next(c for c in CONTESTANTS if c.name == name)
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    model = GPT().to(device)
    train(model, WARM_STEPS)
    start = time.perf_counter()
    for module in contestant.modules:
        importlib.import_module(module)
    imported = time.perf_counter()
    result = train(model, MEASURED_STEPS, contestant.compile_fn)
    return {"import_seconds": imported - start, "compile_seconds": result.compile_seconds}


def measure_in_fresh_process(name: str, device: str, threads: int) -> dict[str, float]:
    """`measure` in a new Python with this environment. Raises BackendError with what it printed last."""
    measured: dict[str, float] = in_new_python(
        f"compiling by {name}", TIMEOUT_SECONDS, measure, name, device, threads
    )
    return measured


# -- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minicompile demo`."""
    add, steps, threads = parser.add_argument, FULL_LENGTH, torch.get_num_threads()
    add("--device", default="cpu", help='"cpu" (default) or "cuda"')
    add("--steps", type=int, default=steps, help=f"AdamW steps (default {steps})")
    add("--threads", type=int, default=threads, help="CPU threads of each")
    add("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    add("--plain", action="store_true", help="no colours and bars, even where rich is installed")


def run(chosen: argparse.Namespace, measure_cold: MeasureCold = measure_in_fresh_process) -> int:
    """The command. Gives the exit code: 0 if every target was met, else 1."""
    device = check_device(chosen.device)
    if chosen.steps < 1 or chosen.threads < 1:
        raise MinicompileError("--steps and --threads must be at least 1")
    screen = Screen(chosen.plain)
    torch.set_num_threads(chosen.threads)
    contest = demo(screen, device, chosen.steps, chosen.threads, measure_cold)
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
    screen: Screen, device: str, steps: int, threads: int, measure_cold: MeasureCold
) -> Contest:
    """Compile from cold one after the other, then train all in turns."""
    cold: dict[str, dict[str, float]] = {}
    errors: dict[str, str] = {}
    folder = tempfile.TemporaryDirectory(prefix="minicompile-demo-", ignore_cleanup_errors=True)
    caches = {c.cache_variable: c.name for c in CONTESTANTS if c.cache_variable}
    caches = {variable: str(Path(folder.name, name)) for variable, name in caches.items()}
    with folder, environment(**caches):
        for contestant in CONTESTANTS:
            if contestant.compiles:
                screen.say(f"{contestant.name}: compiling the lesson model from cold ...")
                try:
                    cold[contestant.name] = measure_cold(contestant.name, device, threads)
                except MinicompileError as error:
                    errors[contestant.name] = str(error)
        running = [c for c in CONTESTANTS if c.name not in errors]
        torch.manual_seed(0)
        start = GPT().to(device)
        with screen.progress("training in turns", steps * len(running)) as progress:
            contest = run_contest(start, running, steps, progress=progress)
    for standing in contest.standings:
        seconds = cold.get(standing.name, {})
        standing.compile_seconds = seconds.get("compile_seconds")
        standing.import_seconds = seconds.get("import_seconds")
    for name, error_text in errors.items():
        contest.standings.append(Standing(name, TrainResult(), error=error_text))
    return contest


def one_decimal(seconds: float | None) -> str:
    return f"{seconds:.1f}" if seconds is not None else ""


COLUMNS: dict[str, Callable[[Standing], str]] = {
    "first loss": lambda s: f"{s.result.losses[0]:.4f}",
    "last loss": lambda s: f"{s.result.losses[-1]:.4f}",
    "fall": lambda s: f"{s.result.fall:.0%}",
    f"off by, first {FIRST_STEPS}": lambda s: f"{s.first_difference:.1e}",
    "off by, all": lambda s: f"{s.all_difference:.1e}",
    "import s": lambda s: one_decimal(s.import_seconds),
    "compile s": lambda s: one_decimal(s.compile_seconds),
    "ms a step": lambda s: f"{s.result.step_ms:.2f}",
}
"""What the table tells of each. Off by: the largest difference of a loss to eager's."""


def table_row(standing: Standing) -> list[str]:
    if standing.error:
        return [standing.name, "failed", *[""] * (len(COLUMNS) - 1)]
    return [standing.name, *(column(standing) for column in COLUMNS.values())]


def show(screen: Screen, contest: Contest, device: str) -> None:
    """The table, and what each compiler says about itself."""
    title = f"{contest.steps} AdamW steps of the lesson model on {device}, fp32"
    screen.table(title, ["", *COLUMNS], [table_row(standing) for standing in contest.standings])
    for standing in contest.standings:
        report = standing.report
        if report is None:
            continue
        frames = f"{len(report.eager_frames)} frames in eager"
        screen.say(f"{standing.name}: {frames}, {report.kernels} kernels")
        for line in report.eager_frames:
            screen.say(f"  {line}")
        if report.externs:
            head = ("operator", "calls a step", "reason")
            rows = [(call.name, str(call.calls), call.reason) for call in report.externs]
            screen.table("calls of PyTorch's own kernels", head, rows)


def measured(standing: Standing) -> dict[str, Any]:
    """A standing for the file; no averages where the training broke off at once."""
    result, facts = standing.result, asdict(standing)
    facts["losses"] = facts.pop("result")["losses"]
    if result.losses:
        facts |= {"step_ms": result.step_ms, "fall": result.fall}
    return facts


def as_json(contest: Contest, missed: list[str], device: str, threads: int) -> str:
    """Everything measured, for a file."""
    facts = {
        **circumstances(device.partition(":")[0]),
        "steps": contest.steps,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "threads": threads,
        "missed": missed,
        "contestants": list(map(measured, contest.standings)),
    }
    return json.dumps(facts, indent=2) + "\n"
