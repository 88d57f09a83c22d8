"""The judge: a process that compares what answers sent with what the checks expect. It runs no answer.

It reads a task a line from its standard input, and writes a text a line: "" for a right answer, else such as
"ex2: ... expected 3, got 4". Checks run with the reference answers of `notebooks/solutions`, and `Run.seen`
gives what an answer sent.
"""

from __future__ import annotations

import contextlib
import functools
import json
import linecache
import os
import sys
from collections.abc import Sequence
from typing import Any

from minicompile.errors import MinicompileError
from minicompile.lessons import wire
from minicompile.lessons.confine import guard_self
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
    """Judge the tasks on standard input."""
    guard_self()
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what checks and compilers print is no verdict
    lessons = functools.cache(checks)
    for line in sys.stdin:
        task = json.loads(line)
        number, name = task["lesson"], task["exercise"]
        with contextlib.redirect_stdout(sys.stderr):
            setup, reference = cells_of(pristine(number), name)
            names = names_of([*setup, reference])
            said = verdict(lessons(number).exercises[name], names, task["sent"])
        print(json.dumps(said), file=answer, flush=True)
