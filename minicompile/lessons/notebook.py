"""Where lessons and checks are; notebooks as grading reads them: as built, and as a learner saved them."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import linecache
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minicompile.errors import MinicompileError


def notebooks_folder() -> Path:
    """Where the lessons are: beside the package in a checkout, in the environment's share/minicompile where a
    wheel was installed. Raises MinicompileError where there are none."""
    places = (Path(__file__).parents[2], Path(sysconfig.get_path("data"), "share", "minicompile"))
    for folder in (place / "notebooks" for place in places):
        if (folder / "checks").is_dir():
            return folder
    where = " and ".join(map(str, places))
    raise MinicompileError(f"no lessons in {where}: install minicompile again, or use its checkout")


def checks_file(number: str) -> Path:
    """Where the checks of lesson `number` ("03") are. Raises MinicompileError for a lesson that has none."""
    path = notebooks_folder() / "checks" / f"lesson_{number}.py"
    if not path.exists():
        numbers = ", ".join(sorted(p.stem[-2:] for p in path.parent.glob("lesson_*.py")))
        raise MinicompileError(f"no checks for lesson {number!r}; there are {numbers}")
    return path


@functools.cache
def checks_text(number: str) -> str:
    """The text of a lesson's checks. Raises MinicompileError for a lesson that has none."""
    return checks_file(number).read_text(encoding="utf-8")


def execute(text: str, name: str, namespace: dict[str, Any]) -> None:
    """Run the text of a cell or file, known to tracebacks by a name."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), namespace)


def need(module: str) -> Any:
    """Import something the extra `lessons` brings. Raises MinicompileError that says so."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MinicompileError(f"{error}; pip install 'minicompile[lessons]' brings it") from error


def tags(cell: Any) -> list[str]:
    """The tags of a cell."""
    named: list[str] = cell.metadata.get("tags", [])
    return named


def exercise_of(cell: Any) -> str:
    """The exercise that a cell belongs to: "ex2" for cells called "ex2-...", else ""."""
    found = re.match(r"(ex\w+?)-", str(cell.metadata.get("name", "")))
    return found[1] if found else ""


def read(path: Path) -> Any:
    """A notebook, each cell's source one text. Raises MinicompileError if the file is none."""
    try:
        notebook = need("nbformat").from_dict(json.loads(path.read_text(encoding="utf-8")))
        if notebook.nbformat != 4:
            raise ValueError("it is not of nbformat 4")
        for cell in notebook.cells:
            cell.source = "".join(cell.source)  # a text, or a list of lines
            if not (isinstance(cell.cell_type, str) and isinstance(cell.metadata, dict)):
                raise ValueError("a cell lacks its type or metadata")
        notebook.metadata.get("minicompile")
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise MinicompileError(f"not a readable notebook ({reason})") from error
    return notebook


def notebook_of(texts: Iterable[str]) -> str:
    """The JSON of a notebook of code cells."""
    nbformat = need("nbformat")
    cells = map(nbformat.v4.new_code_cell, texts)
    return str(nbformat.writes(nbformat.v4.new_notebook(cells=list(cells))))


def lesson_of(path: Path, notebook: Any) -> str:
    """The number of a notebook's lesson, from its metadata or its name. Raises MinicompileError."""
    stamp = notebook.metadata.get("minicompile")
    for name in (f"{stamp.get('lesson')}_" if isinstance(stamp, dict) else "", path.name):
        if re.match(r"\d\d_", name):
            return name[:2]
    raise MinicompileError("its name does not begin with a lesson's number, such as 03")


def pristine(number: str) -> Any:
    """The lesson as it was built, with reference answers. Raises MinicompileError."""
    return lesson_in(notebooks_folder() / "solutions", number)


def released(number: str) -> Any:
    """The lesson as learners get it. Raises MinicompileError."""
    return lesson_in(notebooks_folder(), number)


@functools.cache
def lesson_in(folder: Path, number: str) -> Any:
    found = sorted(folder.glob(f"{number}_*.ipynb"))
    if not found:
        raise MinicompileError(f"no lesson {number} in {folder}")
    return read(found[0])


def cells_of(lesson: Any, exercise: str) -> tuple[list[Any], Any]:
    """The set-up cells of an exercise, and its answer cell."""
    code = [cell for cell in lesson.cells if cell.cell_type == "code"]
    setup = [c for c in code if "setup" in tags(c) and exercise_of(c) in ("", exercise)]
    [answer] = [c for c in code if "answer" in tags(c) and exercise_of(c) == exercise]
    return setup, answer


def answer_from(cell: Any, learner: Any) -> tuple[str, str]:
    """The learner's text for an answer cell, and a remark if it was put together."""
    name = cell.metadata.get("name")
    code = [given for given in learner.cells if given.cell_type == "code"]
    parts = [given for given in code if given.metadata.get("name") == name]
    parts = parts or [given for given in code if given.get("id") == cell["id"]]
    remark = f" (joined from {len(parts)} cells)" if len(parts) > 1 else ""
    return "\n".join(part.source for part in parts), remark


def same_code(one: str, other: str) -> bool:
    """Do two texts say the same, comments and spaces apart?"""
    try:
        return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return one.strip() == other.strip()
