"""Grading: a learner's answers laid over the pristine lesson, run by nbval, judged in another process.

    learner's notebook --answer cells only--> guard --> processes: answer and probe --data--> judge --> Grade

Only the source of answer cells is taken from the learner: what was deleted, edited or printed elsewhere
counts for nothing. Answer cells are found by the name in their metadata, which survives splitting and
copying, then by id; the parts of a split cell are joined. An exercise that is as it was released is not run.
Each other answer that `lessons/guard.py` lets pass runs in a process of its own, together with the probe of
its check, and sends data, which another process judges (`lessons/processes.py`).
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minicompile.errors import MinicompileError
from minicompile.lessons.exercise import Exercise, checks
from minicompile.lessons.guard import refusal
from minicompile.lessons.notebook import (
    answer_from,
    cells_of,
    checks_text,
    lesson_of,
    need,
    pristine,
    read,
    released,
    same_code,
)
from minicompile.lessons.probe import probe_of
from minicompile.lessons.processes import Nursery
from minicompile.ops.display import Shown, aligned, count_text

SECONDS = 120
"""Longest time that an answer may take."""


@dataclass(frozen=True)
class Grade:
    """One exercise: points earned and possible, and a sentence."""

    exercise: str
    earned: int
    points: int
    feedback: str


@dataclass(frozen=True)
class GradeReport(Shown):
    """A graded notebook; `problem` says why there are no grades at all."""

    notebook: str
    lesson: str
    grades: tuple[Grade, ...] = ()
    problem: str = ""

    @property
    def earned(self) -> int:
        return sum(grade.earned for grade in self.grades)

    @property
    def points(self) -> int:
        return sum(grade.points for grade in self.grades)

    @property
    def headline(self) -> str:
        total = f"lesson {self.lesson}, {self.earned} of {self.points} points"
        return self.problem or total

    def __str__(self) -> str:
        rows = [[g.exercise, f"{g.earned}/{g.points}", ""] for g in self.grades]
        lines = [f"  {line.rstrip()}  " for line in aligned(rows)] if rows else []
        feedback = [line + grade.feedback for line, grade in zip(lines, self.grades)]
        return "\n".join([f"{self.notebook}: {self.headline}", *feedback])


@dataclass(frozen=True)
class Task:
    """The cells that are run for an exercise, or the `reason` why none are. The remark goes with a pass."""

    cells: tuple[str, ...]
    reason: str
    remark: str = ""


def task(number: str, exercise: Exercise, learner: Any) -> Task:
    """What is run for one exercise of a learner's notebook."""
    name = exercise.name
    setup, answer = cells_of(pristine(number), name)
    text, remark = answer_from(answer, learner)
    _, stub = cells_of(released(number), name)
    if text and same_code(text, stub.source):
        return Task((), f"{name}: no answer yet")
    if reason := refusal(text, setup, exercise):
        return Task((), f"not run: {reason}")
    probe = probe_of(checks_text(number), name)
    sending = f"from minicompile.lessons.exercise import send\nsend({name!r}, {probe!r}, globals())"
    return Task((*(cell.source for cell in setup), text, sending), "", remark)


def grade(
    path: Path,
    nursery: Nursery,
    only: Iterable[str] = (),
    seconds: float = SECONDS,
    jobs: int = 2,
) -> GradeReport:
    """Grade a notebook; the file is only read. `only`: names of exercises (default: all).

    `jobs` answers run at a time; a line on standard error tells of each that is judged.
    """
    number = ""

    def graded(exercise: Exercise) -> Grade:
        name, work = exercise.name, task(number, exercise, learner)
        if not (wrong := work.reason):
            wrong = nursery.verdict(number, name, list(work.cells), seconds)
            print(f"  {path}: {name} judged", file=sys.stderr, flush=True)
        earned = 0 if wrong else exercise.points
        return Grade(name, earned, exercise.points, wrong or f"pass{work.remark}")

    try:
        need("nbval")
        learner = read(path)
        number = lesson_of(path, learner)
        chosen = [e for name, e in checks(number).exercises.items() if not only or name in only]
        with ThreadPoolExecutor(max(1, jobs)) as pool:
            return GradeReport(path.name, number, tuple(pool.map(graded, chosen)))
    except MinicompileError as error:
        return GradeReport(path.name, number, problem=str(error))


# ------------------------------------------------------------------------------------------- reports


def as_csv(reports: Sequence[GradeReport]) -> str:
    """A row for each notebook: points, those possible, each exercise, and what went wrong."""
    names = sorted({grade.exercise for report in reports for grade in report.grades})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["notebook", "lesson", "points", "possible", *names, "problem"])
    for report in reports:
        by_name = {grade.exercise: grade.earned for grade in report.grades}
        cells = [by_name.get(name, "") for name in names]
        notebook = report.notebook if report.notebook[:1] not in "=+-@" else f"'{report.notebook}"
        row = [notebook, report.lesson, report.earned, report.points, *cells, report.problem]
        writer.writerow(row)
    return out.getvalue()


# -------------------------------------------------------------------------------- the command line


def add_arguments(to: Any) -> None:
    """The arguments of `minicompile grade`."""
    to.add_argument("notebooks", nargs="+", help="notebooks, or folders of them (a class)")
    to.add_argument(
        "--exercise", action="append", default=[], help="grade only this one (repeatable)"
    )
    to.add_argument("--seconds", type=float, default=SECONDS, help="longest time of an answer")
    to.add_argument("--jobs", type=int, default=2, help="answers at a time (default 2)")
    to.add_argument("--csv", help="write a table here, a row a notebook (a folder alone prints it)")


def found_in(given: str) -> list[tuple[str, Path]]:
    """Notebooks by what to call them: a file, or all below a folder. Raises MinicompileError."""
    path = Path(given)
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        raise MinicompileError(f"no notebook or folder {given}")
    below = [p for p in sorted(path.rglob("*.ipynb")) if ".ipynb_checkpoints" not in p.parts]
    if not below:
        raise MinicompileError(f"no notebooks in {given}")
    return [(str(p.relative_to(path)), p) for p in below]


def run(chosen: Any) -> int:
    """Grade and report; exit code 0 if every notebook has all points."""
    named = [pair for given in chosen.notebooks for pair in found_in(given)]
    notebooks = count_text(len(named), "notebook")
    print(f"grading {notebooks}: every answer in a process of its own ...", file=sys.stderr)
    reports = []
    with Nursery() as nursery:
        for name, path in named:
            done = grade(path, nursery, chosen.exercise, chosen.seconds, chosen.jobs)
            reports.append(replace(done, notebook=name))
            print(reports[-1], flush=True)
    if chosen.csv:
        Path(chosen.csv).write_text(as_csv(reports), encoding="utf-8")
    elif any(map(Path.is_dir, map(Path, chosen.notebooks))):
        print(as_csv(reports), end="")
    return 0 if all(r.grades and r.earned == r.points for r in reports) else 1
