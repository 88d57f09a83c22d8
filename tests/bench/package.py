"""One token through GPT-2 124M on one thread: our package against torch's, in one process, in turn.

python -m tests.bench.package [ROUNDS]

The real compiler: torch/_inductor/package (aoti_compile_and_package, aoti_load_package).
"""

from __future__ import annotations

import statistics
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
from minicompile.options import environment
from tests.export.models import Logits


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(rounds: int, work: Path) -> None:
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
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    with torch.no_grad():
        for number in range(rounds):
            pair = [("theirs", theirs), ("ours", ours)]
            for name, package in pair if number % 2 else pair[::-1]:
                times[name].append(seconds(lambda call=package: call(token)))
    middle = {name: statistics.median(found) for name, found in times.items()}
    ratios = sorted(a / b for a, b in zip(times["ours"], times["theirs"]))
    print(f"built in {built:.1f} s, opened in {opened:.2f} s")
    print(", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in middle.items()))
    print(f"ours / theirs: {middle['ours'] / middle['theirs']:.3f} of medians, "
          f"{statistics.median(ratios):.3f} median of pairs")  # fmt: skip


def main() -> None:
    rounds = sys.argv[1] if len(sys.argv) > 1 else "51"
    if "--here" not in sys.argv:  # OpenMP reads how many threads there are when it starts
        with environment(OMP_NUM_THREADS="1"):
            command = [sys.executable, "-m", "tests.bench.package", rounds, "--here"]
            sys.exit(subprocess.run(command).returncode)
    with tempfile.TemporaryDirectory() as work:
        compare(int(rounds), Path(work))


if __name__ == "__main__":
    main()
