"""The judge: a process that compares what answers sent with what the checks expect. It runs no answer.

It reads a task from its standard input and writes `{"ex1": "", "ex2": "ex2: ... expected 3, got 4"}`. Checks
run with the reference answers of `notebooks/solutions`, and `Run.seen` gives what an answer sent.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import sys
from collections.abc import Sequence
from typing import Any

from minicompile.errors import MinicompileError
from minicompile.lessons import wire
from minicompile.lessons.exercise import Exercise, Judging, Wrong, checks
from minicompile.lessons.notebook import cells_of, pristine


def names_of(cells: Sequence[Any]) -> dict[str, Any]:
    """What cells define when they run one after the other."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells:
        name = f"<{cell['id']}>"
        text = cell.source
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), namespace)
    return namespace


def verdict(exercise: Exercise, reference: dict[str, Any], sent: str) -> str:
    """ "" if the data that an answer sent are right, else input, expected and got."""
    try:
        halves = wire.from_text(sent)
    except (MinicompileError, RecursionError) as error:
        return f"{exercise.name}: expected data, got {error}"
    if len(halves) != 2 or not all(isinstance(half, list) for half in halves):
        return f"{exercise.name}: expected two lists of data, got {len(halves)} items"
    for hidden, received in enumerate(halves):
        run = Judging(exercise.cases(bool(hidden)), received=received)
        try:
            exercise.judged(run, reference, bool(hidden))
        except Wrong as wrong:
            return str(wrong)
        if run.count != len(received):
            return f"{exercise.name}: expected {run.count} values, got {len(received)}"
    return ""


def main() -> None:
    """Judge the task on standard input."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what checks and compilers print is no verdict
    task = json.load(sys.stdin)
    lesson, notebook = checks(task["lesson"]), pristine(task["lesson"])
    verdicts = {}
    with contextlib.redirect_stdout(sys.stderr):
        for name, sent in task["received"].items():
            setup, reference = cells_of(notebook, name)
            names = names_of([*setup, reference])
            verdicts[name] = verdict(lesson.exercises[name], names, sent)
    with open(answer, "w", encoding="utf-8") as out:
        json.dump(verdicts, out)
