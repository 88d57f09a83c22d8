"""What a compilation makes, told as it is made: logs, the dump folder and traces listen here.

    Event       := kind, subject, of: Compilation, graph ("forward", "backward" or ""), seconds, took
    Compilation := frame, version, name, options: one function compiled once, `[0/1]`

| kind | subject |
| --- | --- |
| start | the failed guards that made it necessary: [GuardFailure], empty the first time |
| capture | Capture |
| break | GraphBreak: the graph ends there, or the frame runs in eager |
| aot | AotResult |
| loops, schedule, plans, kernels, wrapper | of one graph: LoopGraph, Schedule, [KernelPlan], ... |
| graph | CompiledStages: all of these |
| building | [KernelModule]: their compilers run; told before waiting for them |
| cudagraphs | what becomes of the CUDA graph that was asked for, or why there is none; also when called |
| autotuning | Tuning: times of a kernel's tiles so far, told when it is called (plugins/matrix_products) |
| error | Failure: what the compiler raised |
| done | the Capture, its code loaded; None where there is none: the frame runs in eager, or raised |

`@observer("mine")` registers a function that is called with each Event; if it raises, a warning says so and
the compilation goes on. The real compiler:
torch/_logging/_internal.py (trace_structured), torch/_inductor/debug.py.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minicompile.ops.registry import Registry
from minicompile.options import Options

KINDS = (
    *("start", "capture", "break", "aot", "loops", "schedule", "plans", "kernels", "wrapper"),
    *("groups", "graph", "building", "cudagraphs", "autotuning", "error", "done"),
)

CALLED = ("cudagraphs", "autotuning")
"""Told when what was compiled is called, too."""


@dataclass(frozen=True)
class Compilation:
    """One function compiled once: the number of the function (frame), how many compilations of it came before
    (version), its name."""

    frame: int
    version: int
    name: str
    options: Options

    def __str__(self) -> str:
        return f"[{self.frame}/{self.version}]"


@dataclass(frozen=True)
class Event:
    """Something that was made, `seconds` after the compilation began, `took` after the event before."""

    kind: str
    subject: Any
    of: Compilation
    graph: str = ""
    seconds: float = 0.0
    took: float = 0.0


@dataclass(frozen=True)
class Failure:
    """An error of the compiler's own. Observers add to `advice` what the user should be told."""

    error: Exception
    advice: list[str] = field(default_factory=list)

    def told(self, what_now: str = "") -> str:
        first = f"internal error of minicompile: {type(self.error).__name__}: {self.error}"
        return "\n".join([first + what_now, *self.advice])

    def annotate(self) -> None:
        """Let the exception say it where it is raised."""
        for line in self.advice:
            self.error.add_note(line)


Observer = Callable[[Event], None]

observer: Registry[Observer] = Registry("observer", "name -> function called with every Event")


class Watch:
    """Tells observers about one compilation. `listeners` hear of this one alone."""

    def __init__(self, of: Compilation) -> None:
        self.of, self.began = of, time.perf_counter()
        self.told = 0.0
        self.listeners: list[Observer] = []

    def tell(self, kind: str, subject: Any, graph: str = "") -> None:
        seconds = time.perf_counter() - self.began
        event = Event(kind, subject, self.of, graph, seconds, seconds - self.told)
        self.told = seconds
        for listen in (*observer.values(), *self.listeners):
            try:
                listen(event)
            except Exception as error:
                told = f"an observer failed on {kind}: {type(error).__name__}: {error}"
                warnings.warn(told, stacklevel=2)
