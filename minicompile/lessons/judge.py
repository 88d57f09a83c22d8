"""The judge compares what an answer sent with what the checks expect. It runs no answer.

Checks run with the reference answers of `notebooks/solutions`, and `Run.seen` gives what the answer sent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minicompile.lessons.exercise import Exercise, Run, Wrong, checks, receiving
from minicompile.lessons.notebook import cells_of, execute, pristine

MOST_BYTES = 2**28
"""Most bytes that one exercise may send."""


def verdict(exercise: Exercise, reference: dict[str, Any], sent: str) -> str:
    """ "" if the data that an answer sent are right, else input, expected and got."""
    try:
        visible, hidden_ones = [list(half) for half in json.loads(sent)]
    except (ValueError, TypeError, RecursionError) as error:
        return f"{exercise.name}: expected two lists of data, got {error}"
    for hidden, received in enumerate((visible, hidden_ones)):
        run = Run(exercise.cases(bool(hidden)), receiving(received))
        try:
            exercise.judged(run, reference, bool(hidden))
        except Wrong as wrong:
            return str(wrong)
        if run.count != len(received):
            return f"{exercise.name}: expected {run.count} values, got {len(received)}"
    return ""


def left_in(path: Path) -> str:
    """The text that an answer left, "" if there is none: no link is followed, no pipe read."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def judged(number: str, name: str, folder: Path) -> str:
    """ "" for a right answer, else what is wrong, of an answer that ran in this folder."""
    if told := left_in(folder / "failed.txt"):
        return told[:2000]
    if not (sent := left_in(folder / "answer.json")):
        return "it did not finish"
    setup, reference = cells_of(pristine(number), name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in (*setup, reference):
        execute(cell.source, f"<{cell['id']}>", namespace)
    return verdict(checks(number).exercises[name], namespace, sent)
