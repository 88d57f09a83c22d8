"""`minicompile lessons`: the notebooks outside the repository."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from minicompile.__main__ import main
from minicompile.errors import MinicompileError
from minicompile.lessons import notebook

LESSONS = Path(__file__).parents[2] / "notebooks"


def test_lessons_are_copied_and_a_learners_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    mine = tmp_path / "my lessons" / "05_writes_without_writing.ipynb"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert main(["lessons", str(mine.parent)]) == 0
    assert sorted(p.name for p in mine.parent.iterdir()) == sorted(
        p.name for p in LESSONS.glob("[0-9]*.ipynb")
    )
    assert mine.read_text() == "mine"
    said = capsys.readouterr().out
    assert f"{mine} is there already" in said
    assert "jupyter lab '" in said  # the folder's name has a space


def test_the_lessons_of_a_wheel_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alone = tmp_path / "site-packages" / "minicompile" / "lessons" / "notebook.py"
    monkeypatch.setattr(notebook, "__file__", str(alone))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(MinicompileError, match="install minicompile again"):
        notebook.notebooks_folder()
    there = tmp_path / "share" / "minicompile" / "notebooks"
    (there / "checks").mkdir(parents=True)
    assert notebook.notebooks_folder() == there
