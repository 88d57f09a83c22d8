"""Processes that compile the same graphs into one cache folder, and are killed at random moments.

    python -m tests.runtime.killing --seconds 60

Each round forks ten processes. Eight are killed a random moment after an event: a graph begun, a compiler
started, a file about to appear (which is slowed down) or there. The others must give the right answers, and
so must a last process that finds what all of them left. What each one loads is noted: a library half-written
would differ from the others of its key. Exits with 1 and says why if a promise is broken.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import minicompile as mc
from minicompile.ops import build, files

EVENTS = {
    b"g": "a graph begun", b"c": "a compiler at work", b"r": "a file about to appear",
    b"R": "a file there", b"e": "a graph finished",
}  # fmt: skip
VICTIMS = [b"c", b"c", b"c", b"r", b"r", b"r", b"R", b"g"]
"""The events after which they are killed."""
X = torch.linspace(-2, 2, 24).reshape(4, 6)


def graphs(number: int) -> Iterator[Callable[[Any], Any]]:
    """The graphs of a round: never the kernels of another."""
    add = number / 64
    yield lambda x: torch.softmax(x * add + x.sin(), -1)
    yield lambda x: (x.t() + add).relu().sum(0)


def right(number: int, cache: Path, tell: Callable[[bytes], object] = lambda event: None) -> bool:
    """Compile a round's graphs and compare with eager."""
    for graph in graphs(number):
        tell(b"g")
        out = mc.compile(graph, fullgraph=True, options={"cache_dir": str(cache)})(X)
        if not torch.allclose(out, graph(X), rtol=1e-5, atol=1e-6):
            return False
        tell(b"e")
    return True


def worker(number: int, folder: Path, pipe: int) -> None:
    """One of the ten; tells its events."""
    chance = random.Random(os.getpid())
    real_load, real_replace, real_popen = build.Library, os.replace, build.subprocess.Popen

    def tell(event: bytes) -> None:
        os.write(pipe, event)

    def replace(old: str, new: Path) -> None:
        tell(b"r")
        time.sleep(chance.uniform(0, 0.02))
        real_replace(old, new)
        tell(b"R")

    def popen(*args: Any, **kw: Any) -> Any:
        process = real_popen(*args, **kw)
        tell(b"c")
        return process

    def load(path: Path) -> Any:
        note = f"{path.stem} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"
        with (folder / "loaded").open("a") as file:
            file.write(note)
        return real_load(path)

    files.os.replace, build.subprocess.Popen, build.Library = replace, popen, load  # type: ignore[assignment,misc]
    os._exit(0 if right(number, folder / "cache", tell) else 3)


def forked(function: Callable[..., object], *args: Any) -> int:
    """The id of a process that runs a function."""
    child = os.fork()
    if child == 0:
        try:
            function(*args)
        finally:
            sys.stderr.flush()
            os._exit(4)
    return child


def one_round(number: int, folder: Path, chance: random.Random) -> tuple[list[str], list[int]]:
    """At what each victim was killed, and the exit codes of the others."""
    pipes: dict[int, int] = {}
    last: dict[int, bytes] = {}
    fatal: dict[int, list[bytes]] = {}
    due: dict[int, float] = {}
    for event in [*VICTIMS, b"", b""]:
        end, own = os.pipe()
        child = forked(worker, number, folder, own)
        os.close(own)
        pipes[end], last[child] = child, b""
        fatal[child] = [event] * chance.choice([1, 1, 2, 3])  # the first such event, or a later one
    while pipes:
        for end in select.select(list(pipes), [], [], 0.002)[0]:
            child = pipes[end]
            if not (told := os.read(end, 64)):
                os.close(end)
                del pipes[end]
                continue
            last[child] = told[-1:]
            fatal[child] = fatal[child][told.count(fatal[child][0]) if fatal[child][0] else 0 :]
            if not fatal[child]:
                fatal[child], due[child] = [b""], time.monotonic() + chance.uniform(0, 0.03)
        for child in [child for child, moment in due.items() if moment < time.monotonic()]:
            os.kill(child, signal.SIGKILL)  # it can't be reaped yet, so the id is still its own
            due[child] = float("inf")
    codes = {child: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in last}
    killed = [EVENTS[last[child]] for child in last if codes[child] == -signal.SIGKILL]
    return killed, [code for code in codes.values() if code != -signal.SIGKILL]


def compilers(folder: Path) -> int:
    """Compilers that still work for processes of this run."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += str(folder / "tmp").encode() in path.read_bytes()
    return found


def run(seconds: float, seed: int, folder: Path) -> str:
    """What happened; raises AssertionError."""
    chance = random.Random(seed)
    tempfile.tempdir = str(folder / "tmp")
    (folder / "tmp").mkdir()
    torch.set_num_threads(1)  # forks and pools of threads don't mix
    assert right(0, folder / "before"), "wrong before anything was killed"
    killed: collections.Counter[str] = collections.Counter()
    finished, rounds, start = 0, 0, time.monotonic()
    wanted = {EVENTS[b"c"], EVENTS[b"r"]}
    while time.monotonic() < start + seconds or (rounds < 5 and not wanted <= killed.keys()):
        rounds += 1
        victims, codes = one_round(rounds, folder, chance)
        assert not any(codes), f"round {rounds}: exit codes {codes}"
        killed.update(victims)
        finished += len(codes)
    deadline = time.monotonic() + 60
    while compilers(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert compilers(folder) == 0, "compilers work on for dead processes"
    for number in range(1, rounds + 1):
        assert right(number, folder / "cache"), f"wrong answers of round {number} afterwards"
    loaded = set((folder / "loaded").read_text().splitlines())
    assert len(loaded) == len({line.split()[0] for line in loaded}), "two libraries of one key"
    stages = ", ".join(f"{number} at {stage}" for stage, number in sorted(killed.items()))
    return f"{rounds} rounds, {finished} finished, {killed.total()} killed: {stages}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(run(chosen.seconds, chosen.seed, Path(folder)))
        except AssertionError as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
