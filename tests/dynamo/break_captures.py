"""Breaks captures where nothing is wrong: after any number of instructions, and again and again.

A program of the tables runs once for each (or every n-th) instruction that its capture executes: the capture
is given up there and goes on behind a graph break. Then some runs with breaks at random places, in resume
functions too. Whatever a caller could notice must be as in plain Python.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import minicompile as mc
from minicompile.dynamo.breaks import places
from minicompile.dynamo.interpreter import Frame
from minicompile.dynamo.world import World, is_users
from tests.dynamo.helpers import explained
from tests.dynamo.program_table import run

STEPS = ("first call", "second call")
FORCED = "a break for the test"
LIFETIMES = ("finalizer",)
"""Not here: what a cut frame holds lives until the rest of it has run, so a finalizer runs late."""


@contextlib.contextmanager
def broken(stop: Callable[[World, int], bool]) -> Iterator[list[int]]:
    """Captures end where `stop` says, given the tracer and the number of executed instructions.

    Gives the numbers at which it was asked, for the first capture.
    """
    plain, seen = World.step, list[int]()
    first: list[World] = []

    def step(self: World, frame: Frame, instruction: Any) -> None:
        plain(self, frame, instruction)
        if self.frames.cut is not None or instruction.opname in ("RETURN_VALUE", "YIELD_VALUE"):
            return
        number = len(self.frames.log.steps)
        first.append(self)
        if self is first[0]:
            seen.append(number)
        if stop(self, number):
            self.frames.places = places(frame, self.comes_and_goes, is_users)
            self.unsupported("internal-error", FORCED)

    World.step = step  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        World.step = plain  # type: ignore[method-assign]


def compile_eager(function: Any) -> Any:
    return mc.compile(function, backend="eager")


def resumed(tracer: World) -> bool:
    return "_minicompile_uncut" in tracer.root.__dict__


class Outcome:
    """Counts over many runs."""

    def __init__(self) -> None:
        self.runs = self.cut = 0
        self.wrong: list[str] = []

    def compare(
        self, table: str, name: str, expected: Any, what: str, stop: Callable[[World, int], bool]
    ) -> None:
        with broken(stop):
            found, compiled = run(table, name, compile_eager, STEPS)
        self.runs += 1
        kinds = {(stop.reason, stop.kind) for stop in explained(compiled).breaks}
        self.cut += (FORCED, "instruction") in kinds
        for step, shown in expected.items():
            if found[step] != shown:
                self.wrong.append(f"{name}, {what}: {step} differs")
                break

    def program(self, table: str, name: str, every: int, random_runs: int = 3) -> None:
        """Cut one program after every `every`-th instruction, and at random places."""
        expected, _ = run(table, name, lambda function: function, STEPS)
        with broken(lambda tracer, number: False) as seen:
            run(table, name, compile_eager, STEPS[:1])
        offset = zlib.crc32(name.encode()) % every
        for place in seen[offset::every]:
            stop = lambda tracer, number: number == place and not resumed(tracer)  # noqa: B023, E731
            self.compare(table, name, expected, f"cut after {place}", stop)
        for seed in range(random_runs):
            choose = random.Random(f"{name} {seed}")
            often = lambda tracer, number: choose.random() < 0.06  # noqa: B023, E731
            self.compare(table, name, expected, f"random cuts {seed}", often)
