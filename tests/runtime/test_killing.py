"""Processes that share a cache folder may be killed at any moment."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.ops import build, files

X = torch.linspace(-2, 2, 24).reshape(4, 6)
ROUNDS, PROCESSES, VICTIMS = 3, 8, 6


def right(number: int, cache: Path) -> bool:
    """Compile a round's graph, which no other round has, and compare with eager."""
    add = number / 64
    fn = lambda x: torch.softmax(x * add + x.sin(), -1)  # noqa: E731
    call = mc.compile(fn, fullgraph=True, options={"cache_dir": str(cache)})
    return torch.allclose(call(X), fn(X), rtol=1e-5, atol=1e-6)


def worker(number: int, folder: Path, victim: bool) -> None:
    """Compile slowly where files appear, and note which library is loaded. A victim waits for its end."""
    chance, load, replace = random.Random(os.getpid()), build.Library, os.replace

    def slowly(old: str, new: Path) -> None:
        time.sleep(chance.uniform(0, 0.1))
        replace(old, new)

    def noted(path: Path) -> Any:
        with (folder / "loaded").open("a") as file:
            file.write(f"{path.stem} {hashlib.sha256(path.read_bytes()).hexdigest()}\n")
        return load(path)

    files.os.replace, build.Library = slowly, noted  # type: ignore[assignment,misc]
    fine = right(number, folder / "cache")
    if victim:
        signal.pause()
    os._exit(0 if fine else 3)


def forked(number: int, folder: Path, victim: bool) -> int:
    """The id of a process that works on a round's graph."""
    child = os.fork()
    if child == 0:
        try:
            worker(number, folder, victim)
        finally:
            os._exit(4)
    return child


def compilers(folder: Path) -> int:
    """Compilers that still work for processes of this test."""
    working = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            working += str(folder / "tmp").encode() in path.read_bytes()
    return working


def kill_some(folder: Path) -> None:
    """Rounds of processes that compile one graph, most of which are killed at random moments."""
    chance = random.Random(0)
    torch.set_num_threads(1)  # forks and pools of threads don't mix
    assert right(0, folder / "before")
    start = time.monotonic()
    assert right(ROUNDS + 1, folder / "before")
    usual = time.monotonic() - start
    for number in range(1, ROUNDS + 1):
        children = [forked(number, folder, at < VICTIMS) for at in range(PROCESSES)]
        for child in children[:VICTIMS]:
            time.sleep(chance.uniform(0, usual / VICTIMS * 4))
            os.kill(child, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [-signal.SIGKILL] * VICTIMS + [0] * (PROCESSES - VICTIMS)
    deadline = time.monotonic() + 60
    while compilers(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert compilers(folder) == 0, "compilers work on for dead processes"
    assert all(right(number, folder / "cache") for number in range(1, ROUNDS + 1))
    loaded = set((folder / "loaded").read_text().splitlines())
    assert len(loaded) == len({line.split()[0] for line in loaded}), "two libraries of one key"


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="looks for processes in /proc")
def test_processes_killed_at_random_leave_a_sound_cache(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    program = (
        "import pathlib, tempfile; from tests.runtime.test_killing import kill_some; "
        "kill_some(pathlib.Path(tempfile.gettempdir()).parent)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
