"""One token through GPT-2 124M on one thread: our package against torch's, in one process, in turn.

python -m tests.bench.package [SECONDS]

The real compiler: torch/_inductor/package (aoti_compile_and_package, aoti_load_package).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import minicompile as mc
from minicompile.bench.networks import GPT2
from minicompile.bench.timing import time_in_turns, time_text
from minicompile.options import environment
from tests.export.models import Logits


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(budget: float, work: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, token = Logits("GPT2LMHeadModel", small=False, **GPT2).eval(), torch.tensor([[464]])
    with torch.no_grad():
        expected = model(token)
        theirs_path = torch._inductor.aoti_compile_and_package(
            torch.export.export(model, (token,)), package_path=str(work / "theirs.pt2")
        )
    built = seconds(lambda: mc.aot_package(mc.export(model, (token,)), work / "ours"))
    opened = seconds(lambda: mc.load_package(work / "ours"))
    theirs, ours = torch._inductor.aoti_load_package(theirs_path), mc.load_package(work / "ours")
    for name, package in (("theirs", theirs), ("ours", ours)):
        error = (package(token) - expected).abs().max()
        print(f"{name}: largest difference from eager {error:.1e}")
    with torch.no_grad():
        calls = {"theirs": lambda: theirs(token), "ours": lambda: ours(token)}
        timings = time_in_turns(calls, budget, "cpu")
    print(f"built in {built:.1f} s, opened in {opened:.2f} s")
    print(", ".join(f"{name} {time_text(timings.median(name))}" for name in calls))
    print(f"ours by theirs: {timings.ratio('ours', 'theirs')}")


def main() -> None:
    budget = sys.argv[1] if len(sys.argv) > 1 else "5"
    if "--here" not in sys.argv:  # OpenMP reads how many threads there are when it starts
        with environment(OMP_NUM_THREADS="1"):
            command = [sys.executable, "-m", "tests.bench.package", budget, "--here"]
            sys.exit(subprocess.run(command).returncode)
    with tempfile.TemporaryDirectory() as work:
        compare(float(budget), Path(work))


if __name__ == "__main__":
    main()
