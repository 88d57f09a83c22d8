"""`python -m notebooks.build`: lessons from their text sources, executed.

    notebooks/src/NAME.py (jupytext's percent format)
        -> notebooks/solutions/NAME.ipynb   executed, with the reference answers
        -> notebooks/NAME.ipynb             what a learner opens: without answers, without outputs

Tags of cells: "setup" (what exercises need), "answer" (its part between `### BEGIN SOLUTION` and `### END
SOLUTION` is taken out), "nbval-check-output" (a check), "wrong" (an answer that must be rejected: only in
the source, for `python -m notebooks.mutants`), "varies" (its output has times in it and is not kept).

The same source gives the same bytes: cells are called by name or by place, execution times are left out, the
hash seed is fixed. A notebook records what it was made with. `--check` compares the sources with what is
saved; `--validate` also executes every lesson under nbval. What a learner opens must run to its last cell,
with nothing answered; a solution's outputs must be those that are saved: all of them on the same versions
and kind of processor, otherwise those of check cells. `--changed` passes over a lesson whose text, checks and
rooms (the folders of the package that they import) are as they were when it was validated last:
solutions/validated.json has a hash of each.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import multiprocessing
import platform
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from minicompile.errors import MinicompileError
from minicompile.lessons.exercise import VERDICT, Verdict
from minicompile.lessons.notebook import exercise_of, need, tags
from minicompile.ops.toolchain import processor_features
from minicompile.options import child_environment, environment

VARIES = "varies"
"""Tag of cells whose output differs from run to run."""

LARGEST = 1_000_000
"""Most bytes of a notebook."""

TIMEOUT_SECONDS = 900
"""Longest time a cell may take."""

LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"}

SOLUTION = re.compile(
    r"^(?P<indent>[ \t]*)### BEGIN SOLUTION\n.*?^[ \t]*### END SOLUTION[^\n]*\n", re.S | re.M
)
MARKERS = re.compile(r"^[ \t]*### (BEGIN|END) SOLUTION[^\n]*(\n|\Z)", re.M)
ANSI = re.compile(r"\x1b\[\d*m")
CHECK = re.compile(r"^check\(", re.M)

KERNEL_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": str(Path(__file__).parent.parent),
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}

ROOM = re.compile(rb"\bminicompile\.([a-z]+)\b")
VALIDATED = Path("solutions", "validated.json")

STAMP = "minicompile"
"""Where a notebook's metadata says what it was made with."""


def find_folder(start: Path) -> Path:
    """The `notebooks` folder above `start`. Raises MinicompileError if there is none."""
    for folder in (start, *start.parents):
        if (folder / "notebooks" / "src").is_dir():
            return folder / "notebooks"
    raise MinicompileError("no folder notebooks/src here or above: run this inside the repository")


def stamp(source: Path) -> dict[str, str]:
    """The number of a lesson, and what its outputs depend on."""
    import torch

    text = source.read_bytes()
    # compilers order instructions for the processor's model
    model = hashlib.sha256(processor_features().encode()).hexdigest()[:8]
    return {
        "lesson": source.stem[:2],
        "source": hashlib.sha256(text).hexdigest()[:16],
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {model}",
    }


def read_source(source: Path) -> Any:
    """The notebook that a text source describes, not executed."""
    jupytext = need("jupytext")
    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        name = cell.metadata.get("name") or f"cell-{number:03d}"
        cell["id"] = re.sub(r"[^\w-]", "-", name)[:64]
    ids = Counter(cell["id"] for cell in notebook.cells)
    repeated = sorted(name for name, count in ids.items() if count > 1)
    if repeated:
        raise MinicompileError(f"{source.name}: several cells are called {', '.join(repeated)}")
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": LANGUAGE,
        STAMP: stamp(source),
    }
    return notebook


def execute(notebook: Any, source: Path) -> None:
    """Run every cell in a fresh kernel. Raises MinicompileError with the cell that failed."""
    client = need("nbclient")
    with environment(**KERNEL_ENVIRONMENT):
        where = {"metadata": {"path": str(source.parent.parent)}}
        runner = client.NotebookClient(
            notebook, timeout=TIMEOUT_SECONDS, kernel_name="python3", resources=where
        )
        try:
            runner.execute()
        except client.exceptions.CellExecutionError as error:
            raise MinicompileError(f"{source.name}: a cell failed:\n{error}") from error


def is_check(cell: Any) -> bool:
    """Whether a cell is the check of an exercise."""
    return cell.cell_type == "code" and bool(exercise_of(cell) and CHECK.search(cell.source))


def not_passed(notebook: Any) -> str:
    """Of an executed solution: the check cells whose output is not a verdict that the answer passed."""
    failed = []
    for cell in notebook.cells:
        if is_check(cell):
            found = [output["data"] for output in cell.outputs if VERDICT in output.get("data", {})]
            if [data[VERDICT]["passed"] for data in found] != [True]:
                said = [data["text/plain"] for data in found]
                failed.append(f"{cell['id']}: {' '.join(said) or 'no verdict'}")
    return "\n".join(failed)


def tidy(notebook: Any) -> None:
    """Take out what differs between two runs."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = LANGUAGE
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.outputs = [] if VARIES in tags(cell) else joined(cell.outputs)
        if VARIES in tags(cell):
            cell.execution_count = None
        for output in cell.outputs:
            output.get("metadata", {}).pop("execution", None)


def joined(outputs: Sequence[Any]) -> list[Any]:
    """Printed text in one piece: where it was cut depends on timing."""
    out: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and out and out[-1].get("name") == output.name:
            out[-1].text += output.text
        else:
            out.append(output)
    return out


@dataclass(frozen=True)
class Built:
    """Both notebooks of a lesson as text, the seconds of each code cell, and the kernel's peak MiB."""

    solution: str
    release: str
    seconds: tuple[float, ...]
    peak: float

    def __str__(self) -> str:
        fast = sum(s < 2 for s in self.seconds) / max(1, len(self.seconds))
        slowest = max(self.seconds, default=0.0)
        return (
            f"{len(self.solution.encode()):>9,} bytes, {len(self.seconds)} cells in "
            f"{sum(self.seconds):.1f} s, {fast:.0%} below 2 s, slowest {slowest:.1f} s, {self.peak:.0f} MiB"
        )


def build(source: Path) -> Built:
    """A lesson, executed. Raises MinicompileError if a cell fails or the notebook is too large."""
    nbformat = need("nbformat")
    notebook = read_source(source)
    notebook.cells = [cell for cell in notebook.cells if "wrong" not in tags(cell)]
    for cell in notebook.cells:
        cell.source = MARKERS.sub("", cell.source)
    execute(notebook, source)
    if failed := not_passed(notebook):
        raise MinicompileError(f"{source.name}: a reference answer does not pass:\n{failed}")
    seconds = tuple(map(duration, notebook.cells))
    tidy(notebook)
    nbformat.validate(notebook)
    text: str = nbformat.writes(notebook) + "\n"
    if len(text.encode()) > LARGEST:
        size = f"{len(text.encode()):,} bytes, allowed {LARGEST:,}"
        raise MinicompileError(f"{source.stem}.ipynb would have {size}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return Built(text, release(source, text), tuple(filter(None, seconds)), peak)


def duration(cell: Any) -> float:
    """Seconds that a cell took, 0 for text."""
    times = cell.metadata.get("execution", {})
    if "iopub.execute_input" not in times:
        return 0.0
    begin, end = times["iopub.execute_input"], times["shell.execute_reply"]
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


def release(source: Path, solution: str) -> str:
    """The learner's notebook: the solution without answers and outputs."""
    nbformat = need("nbformat")
    notebook = nbformat.reads(solution, as_version=4)
    answers = {cell["id"]: cell.source for cell in read_source(source).cells}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.outputs, cell.execution_count = [], None
        if "answer" in tags(cell):
            cell.source = without_answer(answers[cell["id"]])
    text: str = nbformat.writes(notebook) + "\n"
    return text


def without_answer(text: str) -> str:
    """An answer cell as a learner finds it."""

    def stub(found: re.Match[str]) -> str:
        indent = found["indent"]
        refusal = f"{indent}raise NotImplementedError\n" if indent else ""
        return f"{indent}# YOUR CODE HERE\n{refusal}"

    return SOLUTION.sub(stub, text + "\n").rstrip("\n")


def why_stale(source: Path, folder: Path) -> str:
    """One sentence if the saved notebooks are not made from this source, else ""."""
    solution, released = (
        folder / "solutions" / f"{source.stem}.ipynb",
        folder / f"{source.stem}.ipynb",
    )
    for target in (solution, released):
        if not target.exists():
            return f"{target.relative_to(folder.parent)} has not been built"
    text = solution.read_text(encoding="utf-8")
    here = stamp(source)
    if json.loads(text)["metadata"].get(STAMP, {}).get("source") != here["source"]:
        return f"{solution.name} was built from another version of {source.name}"
    if failed := not_passed(need("nbformat").reads(text, as_version=4)):
        return f"{solution.name} shows a reference answer that does not pass: {failed}"
    given, saved = release(source, text), released.read_text(encoding="utf-8")
    if given != saved:
        return f"{released.name} is not what {source.name} gives: {difference(saved, given)}"
    return ""


def validate(source: Path, folder: Path) -> str:
    """Execute a lesson under nbval, unanswered and with its answers: "" if all is well, else the report.

    One kernel does both: cells above the first answer, then the rest of what a learner opens, as "Run All"
    does (every check says "no answer yet", and the last cell is reached), then the rest of the solution.
    """
    nbformat = need("nbformat")
    solution = nbformat.read(folder / "solutions" / f"{source.stem}.ipynb", as_version=4)
    opened = nbformat.read(folder / f"{source.stem}.ipynb", as_version=4).cells
    places = [place for place, cell in enumerate(opened) if "answer" in tags(cell)]
    first = min(places, default=len(opened))
    for cell in opened[first:]:
        if is_check(cell):
            verdict = Verdict(exercise_of(cell), passed=False, answered=False, says="")
            data = verdict._repr_mimebundle_()
            cell.execution_count = 1
            cell.outputs = [nbformat.v4.new_output("execute_result", data, execution_count=1)]
        cell["id"] = f"unanswered-{cell['id']}"[:64]
    solution.cells[first:first] = opened[first:]
    same = solution.metadata.get(STAMP, {}) == stamp(source)
    around = child_environment(**KERNEL_ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="minicompile_validate_") as place:
        file, settings = Path(place, f"{source.stem}.ipynb"), Path(place, "pytest.ini")
        nbformat.write(solution, file)
        settings.write_text("[pytest]\n")
        how = ["--nbval" if same else "--nbval-lax", f"--nbval-cell-timeout={TIMEOUT_SECONDS}"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *how]
        command += ["-c", str(settings), "--rootdir", place, str(file)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=around)
    return "" if ran.returncode == 0 else ran.stdout[-6000:] + ran.stderr[-2000:]


def fingerprint(source: Path, folder: Path) -> str:
    """Return a hash of a lesson's text, its checks, and the Python of the rooms that these import."""
    files = [source, folder / "checks" / f"lesson_{source.stem[:2]}.py"]
    texts = [file.read_bytes() for file in files if file.exists()]
    for room in sorted(set(ROOM.findall(b"\n".join(texts)))):
        package = folder.parent / "minicompile" / room.decode()
        texts += [file.read_bytes() for file in sorted(package.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def read_validated(folder: Path) -> dict[str, str]:
    """Return the fingerprints that lessons had when they were validated last, by name."""
    file = folder / VALIDATED
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write_validated(sources: Sequence[Path], folder: Path) -> None:
    """Note that these lessons, as they are now, were validated."""
    now = {source.stem: fingerprint(source, folder) for source in sources}
    text = json.dumps(dict(sorted((read_validated(folder) | now).items())), indent=1)
    (folder / VALIDATED).write_text(text + "\n", encoding="utf-8")


def difference(saved: str, rebuilt: str) -> str:
    """The first line that differs, both ways."""
    pairs = itertools.zip_longest(saved.split("\n"), rebuilt.split("\n"), fillvalue="(nothing)")
    number, (ours, theirs) = next(
        (i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1]
    )
    return f"line {number}: saved {ours.strip()[:120]!r}, rebuilt {theirs.strip()[:120]!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check or validate the named lessons, or all."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.build", description=__doc__)
    which = "lessons by the start of their name, such as 00 (default: all)"
    parser.add_argument("names", nargs="*", help=which)
    check = "compare sources with what is saved; execute and write nothing"
    parser.add_argument("--check", action="store_true", help=check)
    validating = "check, then execute the saved solutions under nbval"
    parser.add_argument("--validate", action="store_true", help=validating)
    changed = "only lessons that changed since they were validated, or whose rooms did"
    parser.add_argument("--changed", action="store_true", help=changed)
    parser.add_argument("--jobs", type=int, default=2, help="lessons at a time (default 2)")
    chosen = parser.parse_args(arguments)
    try:
        folder = find_folder(Path.cwd())
        sources = sorted((folder / "src").glob("*.py"))
        wanted = [s for s in sources if not chosen.names or s.stem.startswith(tuple(chosen.names))]
        if not wanted:
            known = ", ".join(source.stem for source in sources)
            raise MinicompileError(f"no lesson is called so; there are {known}")
        if chosen.changed:
            before = read_validated(folder)
            wanted = [s for s in wanted if before.get(s.stem) != fingerprint(s, folder)]
    except MinicompileError as error:
        print(error, file=sys.stderr)
        return 1

    def do(source: Path) -> bool:
        return one(source, folder, chosen.check, chosen.validate)

    with concurrent.futures.ThreadPoolExecutor(max(1, chosen.jobs)) as pool:
        done = list(pool.map(do, wanted))
    if chosen.validate:
        write_validated([source for source, right in zip(wanted, done) if right], folder)
    return 0 if all(done) else 1


def one(source: Path, folder: Path, check: bool, validating: bool) -> bool:
    """Do one lesson and say what was done; False if it failed."""
    try:
        if check or validating:
            sentence = why_stale(source, folder) or (validating and validate(source, folder))
            print(
                sentence or f"{source.stem}: {'validated' if validating else 'up to date'}",
                flush=True,
            )
            return not sentence
        # In a process of its own, so that peak memory is that of this lesson.
        with concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn")
        ) as pool:
            built = pool.submit(build, source).result()
    except MinicompileError as error:
        print(error, file=sys.stderr)
        return False
    (folder / "solutions").mkdir(exist_ok=True)
    (folder / "solutions" / f"{source.stem}.ipynb").write_text(built.solution, encoding="utf-8")
    (folder / f"{source.stem}.ipynb").write_text(built.release, encoding="utf-8")
    print(f"{source.stem}: {built}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
