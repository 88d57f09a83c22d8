"""The compiler with a part off: which applications of its rules are allowed, and what was heard of them.

    Limit  := "inductor" | "inductor; fusion < 5" (the first five) | "inductor; fusion != 5" (all but one)
            | "inductor; lowering without aten.erf.default" (all but those of one name)
    Report := counts of applications by subsystem, the last one allowed, what went wrong inside the compiler

Numbers count from 0, in each process for itself. A script that is bisected reads its limit, as JSON, from
`MINICOMPILE_BISECT` and leaves a report in the folder `MINICOMPILE_BISECT_REPORT`.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from minicompile.api import backends
from minicompile.ops.events import Event, observer
from minicompile.ops.gates import Application, gate
from minicompile.ops.origin import source_lines
from minicompile.options import bisection

COMPILER_ERRORS = ("internal-error", "missing-tool")
"""Ids of reasons to run in eager that are no fault of the program."""


@dataclass(frozen=True)
class Limit:
    """A backend, and the applications of one subsystem that are allowed: in `relation` to `bound`."""

    backend: str = "inductor"
    subsystem: str = ""
    relation: str = ""
    bound: int | str = 0

    def __str__(self) -> str:
        part = f"; {self.subsystem} {self.relation} {self.bound}"
        return self.backend + part * bool(self.subsystem)

    def allows(self, what: Application, number: int) -> bool:
        if what.subsystem != self.subsystem:
            return True
        if isinstance(self.bound, str):
            return what.name != self.bound
        return number < self.bound if self.relation == "<" else number != self.bound


@dataclass(frozen=True)
class Applied:
    """An application in words; `lines` are the user's."""

    name: str
    before: str
    after: str
    lines: tuple[str, ...]


@dataclass
class Report:
    """The report of a run under a limit, which may come from another process."""

    counts: Counter[str] = field(default_factory=Counter)
    last: Applied | None = None
    """The last application that was allowed."""
    errors: list[str] = field(default_factory=list)

    @property
    def error(self) -> str:
        """The first exception inside the compiler, in one line; "" if there was none."""
        return "\n".join(self.errors).partition("\n")[0]

    @classmethod
    def read(cls, folder: Path) -> Report:
        """Merge the reports of all processes."""
        merged = cls()
        for file in sorted(folder.iterdir()):
            report = json.loads(file.read_text(encoding="utf-8"))
            merged.counts |= Counter(report["counts"])
            if merged.last is None and report["last"] is not None:
                name, before, after, lines = report["last"]
                merged.last = Applied(name, before, after, tuple(lines))
            merged.errors += report["errors"]
        return merged


class Counting:
    """The gate that holds a limit; also an observer that notes errors of the compiler."""

    def __init__(self, limit: Limit) -> None:
        self.limit, self.counts, self.errors = limit, Counter[str](), list[str]()
        self.last: tuple[Application, str] | None = None
        """The last application allowed, and its text before."""

    def __call__(self, what: Application) -> bool:
        number, limit = self.counts[what.subsystem], self.limit
        self.counts[what.subsystem] += 1
        if what.subsystem == limit.subsystem and number + 1 == limit.bound:
            self.last = what, text_of(what.before)
        return limit.allows(what, number)

    def listen(self, event: Event) -> None:
        if event.kind == "break" and event.subject.id in COMPILER_ERRORS:
            self.errors.append(event.subject.reason)

    def report(self) -> Report:
        applied = None
        if self.last is not None:
            what, before = self.last
            lines = text_of(lambda: "\n".join(map(str, source_lines(what.origins()))))
            applied = Applied(what.name, before, text_of(what.after), tuple(lines.splitlines()))
        return Report(self.counts, applied, self.errors)


def text_of(text: Callable[[], object]) -> str:
    """Return the text, or nothing where a crash came before what it describes."""
    try:
        return str(text())
    except Exception:
        return ""


def obey() -> None:
    """In a script that is bisected, hold its limit in whatever it compiles."""
    text, folder = bisection()
    if not text:
        return
    counting = Counting(Limit(*json.loads(text)))
    backends.records["inductor"] = backends.records[counting.limit.backend]

    def write() -> None:
        report = counting.report()
        last = report.last and dataclasses.astuple(report.last)
        told = {"counts": report.counts, "last": last, "errors": report.errors}
        (Path(folder) / str(os.getpid())).write_text(json.dumps(told), encoding="utf-8")

    def listen(event: Event) -> None:
        counting.listen(event)
        if event.kind == "done":  # a kernel may end the process
            write()

    gate("bisection")(counting)
    observer("bisection")(listen)
    atexit.register(write)


obey()
