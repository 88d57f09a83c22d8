"""docs/ is true of the code: files exist, have as many tokens as said, and define what is named."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest

import minicompile
from minicompile.bench.prices import tokens_of
from notebooks.names import is_path, path_exists

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minicompile"
READING = (ROOT / "docs" / "reading-order.md").read_text(encoding="utf-8")
EVENINGS = re.findall(r"^\| (\d+) \| (.*?) \| ([\d,]+) \|", READING, flags=re.M)
CORE = "dynamo aot lowering scheduling codegen runtime ops shapes passes compat"


def files_of(evening: str) -> list[Path]:
    """The files of `ops/{graph,nodes}.py`, `shapes/*.py`."""
    found = []
    for form in re.findall(r"`([^`]+\.py)`", evening):
        names = re.search(r"\{(.*?)\}", form)
        forms = [form.replace(names[0], n) for n in names[1].split(",")] if names else [form]
        for each in forms:
            files = sorted(PACKAGE.glob(each))
            assert files, f"evening without file: {each}"
            found += files
    return found


def test_the_evenings_are_the_whole_core_each_file_once():
    read = [file for _, files, _ in EVENINGS for file in files_of(files)]
    assert len(read) == len(set(read))
    inside = {file for room in CORE.split() for file in (PACKAGE / room).rglob("*.py")}
    openings = {file for file in inside if file.name == "__init__.py"}
    assert (inside - openings) | {*PACKAGE.glob("*.py")} == {*read} - openings


def test_an_evening_has_as_many_tokens_as_said():
    far = []
    for number, files, told in EVENINGS:
        tokens = sum(tokens_of(file.read_text(encoding="utf-8")) for file in files_of(files))
        if abs(tokens - int(told.replace(",", ""))) > 0.1 * tokens:
            far.append((number, told, tokens))
    assert far == []
    [total] = re.findall(r"about ([\d,]+) tokens of Python in (\d+) evenings", READING)
    sums = sum(int(told.replace(",", "")) for _, _, told in EVENINGS)
    assert abs(sums - int(total[0].replace(",", ""))) < 1000 and int(total[1]) == len(EVENINGS)


def test_the_page_on_extending_has_every_extension_point():
    tree = ast.parse((PACKAGE / "extension.py").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    rows = [row for row in (ast.get_docstring(tree) or "").splitlines() if row.startswith("| ")]
    assert len(rows) > 25 and all(row in page for row in rows)
    told = set(re.findall(r"\w+", "\n".join(row.split(" | ")[0] for row in rows)))
    names = {
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    helpers = {"Plugin", "add_plugin", "FusionPolicy", "Verdict", "Registry", "known_passes"}
    assert names - told - {
        "Any",
        "RULES_OF_TOOLS",
        "tool",
        "available",
        "load",
        "import_module",
    } == helpers | {"scoped", "without"}


def paths_in(page: Path) -> list[str]:
    """What a page writes as a path of Python or of a folder: `dynamo/guards.py`, `minicompile/aot/`."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    return re.findall(r"`((?:[\w.]+/)+(?:[\w]+\.\w+)?)(?::\w+)?`", text)


@pytest.mark.parametrize(
    "page", [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), ROOT / "notebooks" / "README.md"],
    ids=lambda page: page.name,
)  # fmt: skip
def test_paths_in_the_documents_exist(page: Path):
    if page.name == "CHANGELOG.md":
        pytest.skip("a history")
    named = [path for path in paths_in(page) if "NN" not in path and not (ROOT / path).exists()]
    missing = [path for path in named if is_path(path) and not path_exists(path, ROOT)]
    assert missing == []


def test_walks_lead_through_functions_that_exist():
    steps = set(re.findall(r"`([\w/]+\.py):(\w+)`", READING))
    assert len(steps) > 30
    missing = []
    for file, name in steps:
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        defined = {getattr(node, "name", None) for node in ast.walk(tree)}
        missing += [f"{file}:{name}"] if name not in defined else []
    assert missing == []


def test_one_version_is_said_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    # "Unreleased" may stand before it.
    [newest, *_] = re.findall(r"^## (\d\S+)", changes, flags=re.M)
    assert newest == version == minicompile.__version__


def test_the_readme_and_contributing_name_files_and_commands_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in re.findall(r"(?:^|`)make (\w+)", text + readme, flags=re.M):
        assert re.search(rf"^{command}:", makefile, flags=re.M), command
    for path in re.findall(r"`((?:minicompile|tests|notebooks)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_lessons_say_which_torch_and_python_made_their_saved_outputs():
    text = " ".join((ROOT / "notebooks" / "README.md").read_text(encoding="utf-8").split())
    [(torch, python)] = re.findall(r"made by PyTorch ([\d.]+\d) on Python ([\d.]+\d) ", text)
    for path in (ROOT / "notebooks").glob("**/[0-9]*.ipynb"):
        stamp = json.loads(path.read_text(encoding="utf-8"))["metadata"]["minicompile"]
        assert (stamp["torch"], stamp["python"]) == (torch, python), path.name
