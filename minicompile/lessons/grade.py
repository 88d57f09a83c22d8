"""Grading: a learner's answers laid over the pristine lesson, run by nbval, judged in another process.

    learner's notebook --answer cells only--> guard --> kernels: answer and probe --data--> judge --> Grade

Only the source of answer cells is taken from the learner: what was deleted, edited or printed elsewhere
counts for nothing. Answer cells are found by the name in their metadata, which survives splitting and
copying, then by id; the parts of a split cell are joined. An exercise that is as it was released is not run.
Each other answer that `lessons/guard.py` lets pass runs in a kernel of its own, together with the probe of
its check, and sends data; expected values and verdicts are only in the judge (`lessons/processes.py`).
"""

from __future__ import annotations

import concurrent.futures
import csv
import functools
import io
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minicompile.errors import MinicompileError
from minicompile.lessons.guard import refusal
from minicompile.lessons.notebook import (
    Node,
    answer_from,
    cells_of,
    code_cell,
    lesson_of,
    need_not_import,
    pristine,
    read,
    released,
    same_code,
    write,
)
from minicompile.lessons.outline import Outline, checks_text, outlines
from minicompile.lessons.probe import probe_of
from minicompile.lessons.processes import Helpers, Row, run_notebooks
from minicompile.ops.display import Shown, aligned, count_text

Told = Callable[[str], None]

SECONDS = 120
"""Longest time that a cell of an exercise may take."""


@dataclass(frozen=True)
class Grade:
    """One exercise: points earned and possible, and a sentence."""

    exercise: str
    earned: int
    points: int
    feedback: str


@dataclass(frozen=True)
class Report(Shown):
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

    def __str__(self) -> str:
        if self.problem:
            return f"{self.notebook}: {self.problem}"
        rows = [[g.exercise, f"{g.earned}/{g.points}", ""] for g in self.grades]
        lines = [f"  {line.rstrip()}  " for line in aligned(rows)] if rows else []
        told = [line + grade.feedback for line, grade in zip(lines, self.grades)]
        head = f"{self.notebook}: lesson {self.lesson}, {self.earned} of {self.points} points"
        return "\n".join([head, *told])


@dataclass(frozen=True)
class Task:
    """An exercise's cells for a kernel; `reason` says why there are none. The remark goes with a pass."""

    cells: list[Node]
    reason: str
    remark: str


def task(number: str, exercise: Outline, learner: Any) -> Task:
    """What is run for one exercise of a learner's notebook."""
    name = exercise.name
    setup, answer = cells_of(pristine(number), name)
    text, remark = answer_from(answer, learner)
    _, stub = cells_of(released(number), name)
    if text and same_code(text, stub.source):
        return Task([], f"{name}: no answer yet", "")
    if reason := refusal(text, setup, exercise):
        return Task([], f"not run: {reason}", "")
    probe = probe_of(checks_text(number), name)
    cells = [code_cell(cell.source, cell["id"]) for cell in setup]
    sending = f"from minicompile.lessons.exercise import send\nsend({name!r}, {probe!r}, globals())"
    sent = {"name": "stdout", "output_type": "stream", "text": f"{name} sent\n"}
    tags = {"tags": ["nbval-check-output"], "last": True}
    last = code_cell(sending, f"{name}-check", outputs=[sent], execution_count=1, metadata=tags)
    return Task([*cells, code_cell(text, answer["id"]), last], "", remark)


def grade(
    path: Path,
    only: Iterable[str] = (),
    seconds: float = SECONDS,
    told: Told = lambda line: None,
    helpers: Helpers | None = None,
) -> Report:
    """Grade a notebook; the file is only read. `only`: names of exercises (default: all).

    `told` hears a line whenever something is done. `helpers` are processes that several calls share.
    """
    if helpers is None:
        with Helpers() as own:
            return grade(path, only, seconds, told, own)
    number = ""
    try:
        learner = read(path)
        number = lesson_of(path, learner)
        chosen = [e for name, e in outlines(number).items() if not only or name in only]
        return Report(
            path.name, number, tuple(grades_of(number, chosen, learner, seconds, told, helpers))
        )
    except MinicompileError as error:
        return Report(path.name, number, problem=str(error))


def grades_of(
    number: str,
    chosen: Sequence[Outline],
    learner: Any,
    seconds: float,
    told: Told,
    helpers: Helpers,
) -> list[Grade]:
    """Run the exercises, each in a kernel of its own, and judge what they sent."""
    need_not_import("nbval")
    tasks = {exercise.name: task(number, exercise, learner) for exercise in chosen}
    feedback = {name: each.reason for name, each in tasks.items()}
    answered = {name: each.cells for name, each in tasks.items() if not each.reason}
    if answered:
        feedback |= said_of(number, answered, seconds, told, helpers)
    return [
        Grade(
            exercise.name,
            0 if feedback[exercise.name] else exercise.points,
            exercise.points,
            feedback[exercise.name] or f"pass{tasks[exercise.name].remark}",
        )
        for exercise in chosen
    ]


def said_of(
    number: str,
    answered: Mapping[str, Sequence[Node]],
    seconds: float,
    told: Told,
    helpers: Helpers,
) -> dict[str, str]:
    """What is said of each exercise whose cells are run: "" for a right answer."""
    nursery, judge, folder = helpers.start()
    for name, cells in answered.items():
        (folder / name).mkdir()
        write(folder / name / f"{name}.ipynb", cells)
    failures: dict[str, str] = {}
    verdicts: dict[str, Future[str]] = {}

    def heard(row: Row) -> None:
        name = row["notebook"]
        if not row["passed"]:
            failures.setdefault(name, row["message"])
        if row["last"]:
            told(f"{name} ran")
            if row["passed"] and name in answered:
                verdicts[name] = judge.ask(number, name, row["data"])

    run_notebooks(nursery, folder, list(answered), seconds, heard)
    feedback = dict.fromkeys(answered, "it did not finish")
    try:
        for name, verdict in verdicts.items():
            feedback[name] = verdict.result(2 * seconds * len(verdicts) + 60)
    except TimeoutError:
        raise MinicompileError("judging the answers took too long") from None
    told("judged")
    return feedback | failures


# ------------------------------------------------------------------------------------------- reports


def as_csv(reports: Sequence[Report]) -> str:
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


def as_html(reports: Sequence[Report]) -> str:
    """A page with a table for each notebook."""
    from minicompile.show.html import STYLE, box, page, table, text

    def rows(report: Report) -> list[list[str]]:
        return [
            [
                f'<span style="color:{"#15803d" if g.earned else "#b91c1c"}">{text(g.exercise)}</span>',
                f"{g.earned}/{g.points}",
                text(g.feedback),
            ]
            for g in report.grades
        ]

    head = ("exercise", "points", "feedback")
    boxes = (
        box(
            report.notebook,
            report.problem or f"lesson {report.lesson}, {report.earned} of {report.points} points",
            table(head, rows(report)),
        )
        for report in reports
    )
    return page("Grades", STYLE + "".join(boxes))


# -------------------------------------------------------------------------------- the command line


def add_arguments(to: Any) -> None:
    """The arguments of `minicompile grade`."""
    to.add_argument("notebooks", nargs="+", help="notebooks, or folders of them (a class)")
    to.add_argument(
        "--exercise", action="append", default=[], help="grade only this one (repeatable)"
    )
    to.add_argument("--seconds", type=float, default=SECONDS, help="longest time a cell may take")
    to.add_argument("--jobs", type=int, default=2, help="notebooks at a time (default 2)")
    to.add_argument("--csv", help="write a table here, a row a notebook (a folder alone prints it)")
    to.add_argument("--html", help="write a page here")


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
    began = time.monotonic()
    print(f"grading {notebooks}: every answer in a kernel of its own ...", file=sys.stderr)

    def one(helpers: Helpers, pair: tuple[str, Path]) -> Report:
        def told(line: str) -> None:
            seconds = time.monotonic() - began
            print(f"  {seconds:5.1f} s  {pair[0]}: {line}", file=sys.stderr, flush=True)

        done = grade(pair[1], chosen.exercise, chosen.seconds, told, helpers)
        report = Report(pair[0], done.lesson, done.grades, done.problem)
        print(report, flush=True)
        return report

    with Helpers() as helpers, concurrent.futures.ThreadPoolExecutor(max(1, chosen.jobs)) as pool:
        reports = list(pool.map(functools.partial(one, helpers), named))
    written = ((chosen.csv, as_csv), (chosen.html, as_html))
    for where, writer in written:
        if where:
            Path(where).write_text(writer(reports), encoding="utf-8")
    if any(map(Path.is_dir, map(Path, chosen.notebooks))) and not chosen.csv:
        print(as_csv(reports), end="")
    return 0 if all(r.grades and r.earned == r.points for r in reports) else 1
