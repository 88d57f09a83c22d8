"""docs/ is true of the code: files exist, are as long as said, and define what is named."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import minicompile

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minicompile"
READING = (ROOT / "docs" / "reading-order.md").read_text(encoding="utf-8")
STOPS = re.findall(r"^\| \[`(\S+)`\]\(\.\./minicompile/(\S+)\) \| (\d+) \|", READING, flags=re.M)


def test_an_evening_is_as_long_as_said():
    assert len(STOPS) == READING.count("](../minicompile/") > 15
    assert all(shown == path for shown, path, _ in STOPS)
    lines = [len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) for _, path, _ in STOPS]
    [told] = re.findall(r"^About ([\d,]+) lines", READING, flags=re.M)
    assert abs(sum(lines) - int(told.replace(",", ""))) <= 0.1 * sum(lines)
    far = [
        (path, count, told)
        for (_, path, told), count in zip(STOPS, lines, strict=True)
        if abs(count - int(told)) > max(0.25 * count, 20)
    ]
    assert far == []


def test_walks_lead_through_functions_that_exist():
    steps = set(re.findall(r"`([\w/]+\.py):(\w+)`", READING))
    assert len(steps) > 30
    missing = []
    for file, name in steps:
        tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
        defined = {getattr(node, "name", None) for node in ast.walk(tree)}
        missing += [f"{file}:{name}"] if name not in defined else []
    assert missing == []


def test_links_inside_the_documents_lead_somewhere():
    for page in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_one_version_is_said_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "version"
    ]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changes, flags=re.M)[0] == version == minicompile.__version__


def test_contributing_names_files_and_commands_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in re.findall(r"^\| `make (\w+)`", text, flags=re.M):
        assert re.search(rf"^{command}:", makefile, flags=re.M), command
    for path in re.findall(r"`((?:minicompile|tests|notebooks)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path


def test_hooks_run_what_make_lint_runs():
    """With the tools of the environment: nothing is fetched."""
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"repo: (\S+)", text) == ["local"]
    lint = makefile.partition("\nlint:")[2].partition("\n\n")[0]
    commands = {line.partition("-m ")[2].removesuffix(" .") for line in lint.strip().splitlines()}
    assert set(re.findall(r"entry: python -m ([^,]+),", text)) == commands


def test_the_lessons_say_which_torch_and_python_made_their_saved_outputs():
    text = " ".join((ROOT / "notebooks" / "README.md").read_text(encoding="utf-8").split())
    [(torch, python)] = re.findall(r"made by PyTorch ([\d.]+\d) on Python ([\d.]+\d) ", text)
    for path in (ROOT / "notebooks").glob("**/[0-9]*.ipynb"):
        stamp = json.loads(path.read_text(encoding="utf-8"))["metadata"]["minicompile"]
        assert (stamp["torch"], stamp["python"]) == (torch, python), path.name
