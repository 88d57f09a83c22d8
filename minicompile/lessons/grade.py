"""Grading: a learner's answers laid over the pristine lesson, run by nbval, an exercise at a time.

    learner's notebook --answer cells only--> per exercise: set-up, answer, check  --nbval--> Grade

Only the source of answer cells is taken from the learner: what was deleted, edited or printed elsewhere
counts for nothing. Answer cells are found by the name in their metadata, which survives splitting and
copying, then by id; the parts of a split cell are joined. Each exercise has a kernel of its own, so that one
that exits, loops or floods costs its own points. An answer that reaches for the checks themselves is refused
by `refusal`: a guard against shortcuts, not a sandbox; grade strangers' notebooks where nothing can be lost.
"""

from __future__ import annotations

import ast
import builtins
import concurrent.futures
import csv
import importlib
import io
import json
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from minicompile.errors import MinicompileError
from minicompile.lessons.exercise import Exercise, checks, forbidden_uses, notebooks_folder
from minicompile.ops.display import Shown, aligned, count_text
from minicompile.options import child_environment
from minicompile.pipeline_result import page

SECONDS = 120
"""Longest time that a cell of an exercise may take."""

REACHING = frozenset(
    """get_ipython builtins __builtins__ exec compile globals locals vars setattr delattr __import__ __dict__
    _exit modules _getframe settrace setprofile gc ctypes nbval unittest mock monkeypatch importlib
    exercise lessons checks check In Out sys __globals__ __subclasses__ __self__ __wrapped__ __setattr__
    f_back f_globals f_locals f_builtins tb_frame gi_frame""".split()  # noqa: SIM905 (a table of words)
)
"""Names by which an answer would reach outside itself."""

HARMLESS = frozenset(("compile", "modules", "check"))
"""Of these only the plain name is refused: `torch.compile` and `model.modules()` are other things."""


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


def need(module: str) -> Any:
    """Import something the extra `lessons` brings. Raises MinicompileError that says so."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MinicompileError(f"{error}; pip install 'minicompile[lessons]' brings it") from error


def tags(cell: Any) -> list[str]:
    """The tags of a cell."""
    found: list[str] = cell.metadata.get("tags", [])
    return found


def exercise_of(cell: Any) -> str:
    """The exercise that a cell belongs to: "ex2" for cells called "ex2-...", else ""."""
    found = re.match(r"(ex\w+?)-", str(cell.metadata.get("name", "")))
    return found[1] if found else ""


def read(path: Path) -> Any:
    """A notebook. Raises MinicompileError if the file is none."""
    nbformat = need("nbformat")
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:  # json, schema, encoding: any of them means this
        reason = str(error).strip().split("\n")[0][:200]
        raise MinicompileError(f"not a readable notebook ({reason})") from error
    return notebook


def lesson_of(path: Path, notebook: Any) -> str:
    """The number of a notebook's lesson, from its metadata or its name. Raises MinicompileError."""
    told = notebook.metadata.get("minicompile", {})
    number = told.get("lesson", "") if isinstance(told, dict) else ""
    if not re.fullmatch(r"\d\d", str(number)):
        number = found[0] if (found := re.match(r"\d\d", path.name)) else ""
    if not number:
        raise MinicompileError("its name does not begin with a lesson's number, such as 03")
    return str(number)


def pristine(number: str) -> Any:
    """The lesson as it was built, with what right answers print. Raises MinicompileError."""
    found = sorted((notebooks_folder() / "solutions").glob(f"{number}_*.ipynb"))
    if not found:
        raise MinicompileError(f"no lesson {number} in {notebooks_folder() / 'solutions'}")
    return read(found[0])


def answer_from(cell: Any, learner: Any) -> tuple[str, str]:
    """The learner's text for an answer cell, and a remark if it was put together."""
    name = cell.metadata.get("name")
    code = [given for given in learner.cells if given.cell_type == "code"]
    parts = [given for given in code if given.metadata.get("name") == name]
    parts = parts or [given for given in code if given.get("id") == cell["id"]]
    remark = f" (joined from {len(parts)} cells)" if len(parts) > 1 else ""
    return "\n".join(part.source for part in parts), remark


def bound(tree: ast.AST) -> set[str]:
    """Names that code binds at the level of the module."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(
            node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
        ):
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        if isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        found |= bound(node)
    return found


def imports(tree: ast.AST) -> dict[str, str]:
    """Names that code imports, with what they stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                found[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def refusal(text: str, setup: Sequence[Any], exercise: Exercise) -> str:
    """Why an answer is not run at all, or ""; `setup` are the cells whose names it may not take."""
    if not text:
        return "its cell is missing"
    if "NBVAL_" in text or "PYTEST_VALIDATE" in text:
        return "it holds a marker of nbval"
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return f"line {error.lineno} is not Python: {error.msg}"
    lesson = ast.parse("\n".join(cell.source for cell in setup))
    own, theirs = imports(tree), imports(lesson)
    reserved = bound(lesson)
    for name in sorted(bound(tree) - set(exercise.answers)):
        if hasattr(builtins, name):
            return f"it gives {name}, which is Python's, another meaning"
        if name in reserved and (name not in own or own[name] != theirs.get(name)):
            return f"it gives {name}, which is the lesson's, another meaning"
    outside = reserved | set(own)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            return "it uses global"
        if name := reached_by(node):
            return f"it uses {name}, which reaches outside the answer"
        root, target = changed_by(node)
        if root in outside:
            return f"it changes {target}, which is not its own"
    if used := forbidden_uses(text, exercise):
        return f"{exercise.name}: expected an answer of your own, got a use of {used[0]}"
    return ""


def reached_by(node: ast.AST) -> str:
    """The name in REACHING that a piece of code uses, else ""."""
    match node:
        case ast.Name(id=name):
            return name if name in REACHING else ""
        case ast.Attribute(attr=name):
            return name if name in REACHING - HARMLESS else ""
        case ast.alias(name=name) | ast.ImportFrom(module=str(name)):
            return next((part for part in name.split(".") if part in REACHING - HARMLESS), "")
    return ""


def changed_by(node: ast.AST) -> tuple[str, str]:
    """The variable whose attribute or item a piece of code sets or deletes, and that target."""
    if not isinstance(node, ast.Attribute | ast.Subscript) or isinstance(node.ctx, ast.Load):
        return ("", "")
    root: ast.expr = node
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    return (root.id if isinstance(root, ast.Name) else "", ast.unparse(node))


def task(lesson: Any, exercise: Exercise, learner: Any) -> tuple[Any, str, str]:
    """The notebook that grades one exercise, why the answer is refused ("" if not), and a remark."""
    new = need("nbformat").v4
    code = [cell for cell in lesson.cells if cell.cell_type == "code"]
    setup = [c for c in code if "setup" in tags(c) and exercise_of(c) in ("", exercise.name)]
    own = [cell for cell in code if exercise_of(cell) == exercise.name]
    [answer] = [cell for cell in own if "answer" in tags(cell)]
    [pinned] = [cell for cell in own if "nbval-check-output" in tags(cell)]
    text, remark = answer_from(answer, learner)
    reason = refusal(text, setup, exercise)
    cells = [new.new_code_cell(c.source, id=c["id"]) for c in setup]
    cells.append(new.new_code_cell(text, id=answer["id"]))
    word = secrets.token_hex(8)
    check = new.new_code_cell(f'check("{exercise.name}", graded="{word}")', id=pinned["id"])
    check.outputs = [
        new.new_output("stream", name="stdout", text=f"{exercise.name} pass [{word}]\n")
    ]
    check.execution_count = 1
    check.metadata = {"tags": ["nbval-check-output"], "points": exercise.points}
    notebook = new.new_notebook(cells=[*cells, check])
    return notebook, reason, remark


def grade(path: Path, only: Iterable[str] = (), seconds: float = SECONDS) -> Report:
    """Grade a notebook; the file is only read. `only`: names of exercises (default: all)."""
    number = ""
    try:
        learner = read(path)
        number = lesson_of(path, learner)
        lesson = pristine(number)
        chosen = [e for name, e in checks(number).exercises.items() if not only or name in only]
        return Report(path.name, number, tuple(run(lesson, chosen, learner, seconds)))
    except MinicompileError as error:
        return Report(path.name, number, problem=str(error))


def run(lesson: Any, chosen: Sequence[Exercise], learner: Any, seconds: float) -> list[Grade]:
    """Run the exercises under nbval, each in a notebook and a kernel of its own."""
    nbformat = need("nbformat")
    need("nbval")
    grades: list[Grade] = []
    with tempfile.TemporaryDirectory(prefix="minicompile_grade_") as place:
        folder, remarks = Path(place), {}
        for exercise in chosen:
            notebook, reason, remarks[exercise.name] = task(lesson, exercise, learner)
            if reason:
                remarks[exercise.name] = f"not run: {reason}"
            else:
                nbformat.write(notebook, folder / f"{exercise.name}.ipynb")
        outcomes = outcomes_of(folder, seconds)
        for exercise in chosen:
            remark, rows = remarks[exercise.name], outcomes.get(exercise.name, [])
            failed = [row for row in rows if not row["passed"]]
            finished = any(row["cell"] == f"{exercise.name}-check" for row in rows)
            if remark.startswith("not run"):
                feedback = remark
            elif failed:
                feedback = failed[0]["message"] + remark
            else:
                feedback = f"pass{remark}" if finished else "it did not finish"
            right = finished and not failed
            grades.append(Grade(exercise.name, exercise.points * right, exercise.points, feedback))
    return grades


def outcomes_of(folder: Path, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Run every notebook of a folder under nbval: its cells' outcomes, by notebook."""
    files, results = sorted(folder.glob("*.ipynb")), folder / "results.jsonl"
    if not files:
        return {}
    plugins = "-p nbval -p minicompile.lessons.nbval_plugin -p no:cacheprovider"
    how = f"-q {plugins} --nbval-lax --nbval-current-env --nbval-cell-timeout={seconds}"
    where = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", *how.split(), *where]
    command += [f"--grading-results={results}", *map(str, files)]
    (folder / "pytest.ini").write_text("[pytest]\n")
    around = child_environment(
        PYTHONPATH=str(Path(__file__).parents[2]),  # this minicompile, wherever the cells run
        PYTHONHASHSEED="0",
        MINICOMPILE_PROGRESS="0",
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    limit = 3 * seconds * len(files) + 60
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, cwd=folder, env=around
        )
    except subprocess.TimeoutExpired:
        ran = None
    if ran is not None and not results.exists():
        raise MinicompileError(f"nbval did not run: {(ran.stdout + ran.stderr)[-600:]}")
    found: dict[str, list[dict[str, Any]]] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        row = json.loads(line)
        found.setdefault(row["notebook"], []).append(row)
    return found


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


def as_junit(reports: Sequence[Report]) -> str:
    """JUnit's XML: a suite for each notebook, a case for each exercise, points among its properties."""
    root = ElementTree.Element("testsuites")
    for report in reports:
        suite = ElementTree.SubElement(root, "testsuite", name=report.notebook)
        failures = 0
        for grade in report.grades:
            name = {"classname": f"lesson_{report.lesson}", "name": grade.exercise}
            case = ElementTree.SubElement(suite, "testcase", name)
            held = ElementTree.SubElement(case, "properties")
            for key, value in (("earned", grade.earned), ("points", grade.points)):
                ElementTree.SubElement(held, "property", name=key, value=str(value))
            if grade.earned < grade.points:
                failures += 1
                ElementTree.SubElement(case, "failure", message=printable(grade.feedback))
        if report.problem:
            case = ElementTree.SubElement(suite, "testcase", classname="notebook", name="read")
            ElementTree.SubElement(case, "error", message=printable(report.problem))
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(failures))
        suite.set("errors", str(int(bool(report.problem))))
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(
        root, encoding="unicode"
    )


def printable(text: str) -> str:
    """Text without characters that XML forbids."""
    return "".join(c for c in text if c in "\t\n" or c >= " ")


def as_html(reports: Sequence[Report]) -> str:
    """A page with a table for each notebook."""
    from minicompile.show.html import STYLE, box, table, text

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
    to.add_argument("--junit", help="write JUnit's XML here")


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


def run_command(chosen: Any) -> int:
    """Grade and report; exit code 0 if every notebook has all points."""
    named = [pair for given in chosen.notebooks for pair in found_in(given)]
    notebooks = count_text(len(named), "notebook")
    print(f"grading {notebooks}: every exercise in a kernel of its own ...", file=sys.stderr)

    def one(pair: tuple[str, Path]) -> Report:
        done = grade(pair[1], chosen.exercise, chosen.seconds)
        report = Report(pair[0], done.lesson, done.grades, done.problem)
        print(report, flush=True)
        return report

    with concurrent.futures.ThreadPoolExecutor(max(1, chosen.jobs)) as pool:
        reports = list(pool.map(one, named))
    written = ((chosen.csv, as_csv), (chosen.html, as_html), (chosen.junit, as_junit))
    for where, writer in written:
        if where:
            Path(where).write_text(writer(reports), encoding="utf-8")
    if any(map(Path.is_dir, map(Path, chosen.notebooks))) and not chosen.csv:
        print(as_csv(reports), end="")
    return 0 if all(r.grades and r.earned == r.points for r in reports) else 1
