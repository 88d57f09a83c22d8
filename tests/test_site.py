"""The site shows no answer and leads to files that exist; what GitHub reads is well-formed and true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from minicompile.versions import TESTED

ROOT = Path(__file__).parent.parent
GENERATOR = ROOT / "docs/site"
LESSONS = sorted(path.name for path in (ROOT / "notebooks").glob("[0-9]*.ipynb"))
WORKFLOWS = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted((ROOT / ".github/workflows").glob("*.yml"))
}


@pytest.fixture(scope="module")
def generator() -> Any:
    """A function that imports a module of the generator."""
    sys.path.insert(0, str(GENERATOR))
    yield import_module
    sys.path.remove(str(GENERATOR))


@pytest.fixture(scope="module")
def site(generator: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pages = generator("pages")
    glossary = pages.read_glossary(ROOT / "notebooks")
    return pages.Site(tmp_path_factory.mktemp("site"), glossary)


def text_of(notebook: Path) -> str:
    """Sources and outputs of a notebook's cells, outputs as a browser shows them."""
    import html

    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    shown = ["".join(cell["source"]) for cell in cells]
    for output in (output for cell in cells for output in cell.get("outputs", [])):
        shown.append("".join(output.get("text", "")))
        parts = output.get("data", {}).values()
        shown += [re.sub(r"<[^>]*>", "", "".join(p)) for p in parts if isinstance(p, str | list)]
    return html.unescape("\n".join(shown))


@pytest.mark.long
@pytest.mark.parametrize("name", LESSONS)
def test_a_lessons_page_has_pictures_and_no_answer(generator: Any, site: Any, name: str):
    shown_answers = generator("check").shown_answers
    source = ROOT / "notebooks/src" / name.replace(".ipynb", ".py")
    assert shown_answers(source, text_of(ROOT / "notebooks/solutions" / name)), "they would be seen"
    generator("pages").lesson(name, site)
    page = site.folder / "lessons" / name
    assert shown_answers(source, text_of(page)) == set()
    built = page.read_text(encoding="utf-8")
    assert built.count("text/html") > 5 and "YOUR CODE HERE" in built
    assert "no answer yet" in built


def test_documents_lead_to_files_that_exist(generator: Any, site: Any):
    pages = generator("pages")
    for file, page in pages.PAGES.items():
        if page.startswith("docs/"):
            pages.document(file, site)  # an AssertionError names a link without a file
    pages.glossary(site)
    assert all((ROOT / file).exists() for file in site.sources)


def test_an_address_is_said_alike_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = project["urls"]["Repository"]
    owner, name = stated.split("/")[-2:]
    for path in (ROOT / "notebooks/src").glob("*.py"):
        assert re.findall(r'git\+(https://[^"\']+)', path.read_text(encoding="utf-8")) == [stated]
    assert stated in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sites = set(re.findall(r"https://[\w.]+\.github\.io/[\w-]+/", readme))
    assert sites == {f"https://{owner.lower()}.github.io/{name}/"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_are_well_formed(name: str):
    pytest.importorskip("check_jsonschema", reason="the extra `site` is not installed")
    check = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.github-workflows",
    ]
    done = subprocess.run(
        [*check, f"{ROOT}/.github/workflows/{name}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_workflows_run_make_targets_and_files_that_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "\n".join(WORKFLOWS.values())
    targets = set(re.findall(r"run: make (\w+)", text))
    assert {"test", "compat", "site", "look"} <= targets
    assert all(re.search(rf"^{target}:", makefile, flags=re.M) for target in targets)
    assert all((ROOT / file).exists() for file in re.findall(r"cp (docs/\S+)", text))


def test_workflows_take_the_pythons_and_torches_that_are_supported():
    tests, torch, python = WORKFLOWS["tests.yml"], TESTED["torch"], TESTED["Python"]
    taken = re.findall(r"torch==(\d+)\.(\d+)", tests)
    assert {tuple(map(int, release)) for release in taken} == {torch.first, torch.last}
    [pythons] = re.findall(r"python: \[(.*)\]", tests)
    first, last = python.first[1], python.last[1]
    assert pythons == ", ".join(f'"3.{minor}"' for minor in range(first, last + 1))
