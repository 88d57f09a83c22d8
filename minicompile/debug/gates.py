"""One try of a bisection: which applications of rules are allowed, and what was heard of them.

    Setting := "inductor" | "inductor; fusion < 5" (the first five) | "inductor; fusion != 5" (all but one)
             | "inductor; lowering without aten.erf.default" (all but those of one name)
             | "graph 2 from 5 to 9" (only that part of a graph is compiled: debug/parts.py)
    Report  := counts of applications by subsystem, the last one allowed, what went wrong inside the compiler

Numbers count from 0, in each process for itself. A script that is bisected reads its setting from
`MINICOMPILE_BISECT` and leaves a report in the folder `MINICOMPILE_BISECT_REPORT`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minicompile.ops.events import Event, observer
from minicompile.ops.gates import Application, gate
from minicompile.ops.origin import source_lines
from minicompile.options import bisection

COMPILER_ERRORS = ("internal-error", "missing-tool")
"""Ids of reasons to run in eager that are no fault of the program."""


@dataclass(frozen=True)
class Setting:
    """A backend, and the applications of one subsystem that are allowed: in `relation` to `limit`."""

    backend: str = "inductor"
    subsystem: str = ""
    relation: str = ""
    limit: int | str = 0

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Raises ValueError for what is no setting."""
        found = re.fullmatch(r"(\w+)(?:; ([\w ]+?) (<|!=|without) (.+))?", text)
        if found is None:
            raise ValueError(f"no setting of a bisection: {text!r}")
        backend, subsystem, relation, limit = found.groups("")
        return cls(
            backend, subsystem, relation, limit if relation == "without" else int(limit or 0)
        )

    def __str__(self) -> str:
        part = f"; {self.subsystem} {self.relation} {self.limit}"
        return self.backend + part * bool(self.subsystem)

    def allows(self, what: Application, number: int) -> bool:
        if what.subsystem != self.subsystem:
            return True
        if isinstance(self.limit, str):
            return what.name != self.limit
        return number < self.limit if self.relation == "<" else number != self.limit


@dataclass(frozen=True)
class Found:
    """An application in words."""

    name: str
    before: str
    after: str
    lines: tuple[str, ...]
    """The user's."""


@dataclass
class Report:
    """What a process tells about a try."""

    counts: dict[str, int] = field(default_factory=dict)
    found: Found | None = None
    errors: list[str] = field(default_factory=list)

    @property
    def error(self) -> str:
        """What the compiler raised first, in a line."""
        return "\n".join(self.errors).partition("\n")[0]

    @classmethod
    def read(cls, folder: Path) -> Report:
        """Those of all processes in one."""
        merged = cls()
        for file in sorted(folder.glob("*.json")):
            told = json.loads(file.read_text(encoding="utf-8"))
            for name, count in told["counts"].items():
                merged.counts[name] = max(count, merged.counts.get(name, 0))
            if merged.found is None and told["found"] is not None:
                merged.found = Found(**{**told["found"], "lines": tuple(told["found"]["lines"])})
            merged.errors += told["errors"]
        return merged


class Counting:
    """A gate that does what a setting says; also an observer that notes errors of the compiler."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.counts, self.errors = setting, Counter[str](), list[str]()
        self.last: Application | None = None
        """The last one allowed."""
        self.before = ""

    def __call__(self, what: Application) -> bool:
        number, setting = self.counts[what.subsystem], self.setting
        self.counts[what.subsystem] += 1
        if what.subsystem == setting.subsystem and number + 1 == setting.limit:
            self.last, self.before = what, said(what.before)
        return setting.allows(what, number)

    def listen(self, event: Event) -> None:
        if event.kind == "break" and event.subject.id in COMPILER_ERRORS:
            self.errors.append(event.subject.reason)

    def report(self) -> Report:
        found, last = None, self.last
        if last is not None:
            lines = said(lambda: "\n".join(map(str, source_lines(last.origins()))))
            found = Found(last.name, self.before, said(last.after), tuple(lines.splitlines()))
        return Report(dict(self.counts), found, self.errors)


def said(text: Callable[[], object]) -> str:
    """The text, or nothing where a crash came before what it tells of."""
    try:
        return str(text())
    except Exception:
        return ""


def obey(backends: MutableMapping[str, Any]) -> None:
    """In a script that is bisected: let its setting rule whatever it compiles. `backends` by name."""
    told, folder = bisection()
    if not told:
        return
    if told.startswith("graph "):
        real = backends["inductor"]

        @functools.cache
        def maker() -> Any:
            from minicompile.debug.parts import backend_of  # which compiles: it needs this page

            return backend_of(told, folder, real)

        backends["inductor"] = lambda options: maker()(options)
        return
    counting = Counting(Setting.parse(told))
    backends["inductor"] = backends[counting.setting.backend]
    file = Path(folder) / f"{os.getpid()}.json"

    def write() -> None:
        file.write_text(json.dumps(asdict(counting.report())), encoding="utf-8")

    def listen(event: Event) -> None:
        counting.listen(event)
        if event.kind == "done":  # a kernel may end the process
            write()

    gate("bisection")(counting)
    observer("bisection")(listen)
    atexit.register(write)
