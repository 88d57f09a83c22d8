"""`python -m notebooks.mutants`: every exercise accepts its reference answer and rejects the wrong ones.

For each exercise of the chosen lessons: set-up, answer and check, in one process a lesson. The reference
passes, visible and hidden; the released stub is not answered; each cell tagged "wrong" is rejected, with a
message that states input, expected and got. `kind=` of such a cell says what it stands for: "misconception",
"visible-only" (the visible check passes, the hidden one does not) or "built-in" (it calls the rule that it
should implement); every exercise has at least one of each. `says=` is a piece of its message. The answers
of exercises that implement a rule change the compiled lesson model, with the built-in rule taken away.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minicompile.lessons.exercise import (
    Lesson,
    NotAnswered,
    Run,
    Wrong,
    checks,
    lesson_in,
    receiving,
)
from minicompile.lessons.guard import refusal
from minicompile.lessons.notebook import checks_text, execute, exercise_of, tags
from minicompile.lessons.probe import probe_of
from minicompile.options import child_environment
from notebooks.build import (
    KERNEL_ENVIRONMENT,
    MARKERS,
    find_folder,
    read_source,
    without_answer,
)

KINDS = ("misconception", "visible-only", "built-in")

PLUGGED = ("implement", "real")
"""Levels of exercises whose answers become part of the compiler."""


class Trial:
    """One exercise, checked as grading does: the probe of an answer, then the judge with the reference."""

    def __init__(self, lesson: Lesson, name: str, cells: Sequence[Any], reference: str) -> None:
        self.exercise, self.cells = lesson.exercises[name], cells
        text = probe_of(checks_text(lesson.number), name)
        self.probe = lesson_in(text, f"probe_{lesson.number}_{name}").exercises[name]
        self.reference = self.names(reference)

    def names(self, answer: str) -> dict[str, Any]:
        """What set-up and an answer define."""
        namespace: dict[str, Any] = {"__name__": "__main__"}
        with contextlib.redirect_stdout(io.StringIO()):
            for cell in self.cells:
                execute(cell.source, f"<{cell['id']}>", namespace)
            execute(answer, f"<{self.exercise.name}-answer>", namespace)
        return namespace

    def attempt(self, answer: str) -> tuple[str, list[str]]:
        """ "pass" or what the check says; what the answer changed in the compiler."""
        changes: list[str] = []
        if reason := refusal(answer, self.cells, self.exercise):
            return f"visible: {reason}", changes
        namespace = self.names(answer)
        for hidden in (False, True):
            with contextlib.redirect_stdout(io.StringIO()):
                sent = json.loads(json.dumps(self.probe.sent(namespace, hidden)))
            judging = Run(self.exercise.cases(hidden), receiving(sent))
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    self.exercise.judged(judging, self.reference, hidden)
            except NotAnswered:
                return "not answered", changes
            except Wrong as wrong:
                return f"{'hidden' if hidden else 'visible'}: {wrong}", changes
            if judging.count != len(sent):
                return (
                    f"the probe sent {len(sent)} data, {judging.count} were judged",
                    changes,
                )
            changes += judging.changes
        return "pass", changes


def faults(source: Path, only: str = "") -> Iterator[str]:
    """A line for everything about a lesson's exercises that is not as it must be."""
    lesson = checks(source.stem[:2])
    cells = [cell for cell in read_source(source).cells if cell.cell_type == "code"]
    for name in lesson.exercises:
        if only and name != only:
            continue
        own = [c for c in cells if exercise_of(c) == name]
        setup = [c for c in cells if "setup" in tags(c) and exercise_of(c) in ("", name)]
        answers = [c for c in own if "answer" in tags(c)]
        wrong = [c for c in own if "wrong" in tags(c)]
        if len(answers) != 1 or not any("nbval-check-output" in tags(c) for c in own):
            yield f"{name}: needs one answer cell and a check cell"
            continue
        whole = answers[0].source
        reference = MARKERS.sub("", whole)
        trial = Trial(lesson, name, setup, reference)
        said, changes = trial.attempt(reference)
        if said != "pass":
            yield f"{name}: the reference answer is rejected: {said}"
        if lesson.exercises[name].level in PLUGGED and not changes:
            yield f"{name}: the check does not show that the answer changed what was compiled"
        said, _ = trial.attempt(without_answer(whole))
        if said != "not answered":
            yield f"{name}: the released cell should be `not answered`, but: {said}"
        for cell in wrong:
            said, _ = trial.attempt(cell.source)
            title = cell.metadata.get("name")
            kind, says = cell.metadata.get("kind"), cell.metadata.get("says", "")
            if said in ("pass", "not answered"):
                yield f"{title}: {said}"
            elif not re.search(r"\S.*: expected .+, got .+", said, re.DOTALL):
                yield f"{title}: the message lacks input, expected or got: {said}"
            elif not says or says not in said:
                yield f"{title}: should say {says!r}, says {said!r}"
            elif kind == "visible-only" and not said.startswith("hidden"):
                yield f"{title}: should pass the visible check: {said}"
        missing = set(KINDS) - {c.metadata.get("kind") for c in wrong}
        for kind in sorted(missing):
            yield f"{name}: has no wrong answer of kind {kind!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the named lessons, or all; exit code 1 if anything is not as it must be."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="lessons by number, such as 03 (default: all)")
    parser.add_argument("--only", default="", help="one exercise, such as ex2")
    chosen = parser.parse_args(arguments)
    sources = sorted((find_folder(Path.cwd()) / "src").glob("*.py"))
    wanted = [s for s in sources if not chosen.names or s.stem.startswith(tuple(chosen.names))]
    if len(wanted) == 1:
        found = list(faults(wanted[0], chosen.only))
        for line in found:
            print(f"{wanted[0].stem[:2]} {line}")
        return 1 if found else 0
    failed = False
    for source in wanted:
        command = [
            sys.executable,
            "-m",
            "notebooks.mutants",
            source.stem[:2],
            "--only",
            chosen.only,
        ]
        done = subprocess.run(command, check=False, env=child_environment(**KERNEL_ENVIRONMENT))
        print(f"{source.stem}: {'as it must be' if done.returncode == 0 else 'NOT as it must be'}")
        failed |= done.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
