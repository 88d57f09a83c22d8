"""Notebooks come from text, the same bytes each time, and stale ones are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minicompile.errors import MinicompileError
from notebooks import build as builder

for module in ("jupytext", "nbclient", "ipykernel"):
    pytest.importorskip(module, reason="the extra `lessons` is not installed")

SOURCE = """# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
# ---
# %% [markdown]
# # A lesson
# %% name="one two"
print("first")
for i in range(100):
    print(i, flush=True)
# %% tags=["varies"]
import time
print(time.time())
# %%
import minicompile
{"a", "b", "c"}
"""


@pytest.fixture
def lesson(tmp_path: Path) -> Path:
    source = tmp_path / "notebooks" / "src" / "00_test.py"
    source.parent.mkdir(parents=True)
    source.write_text(SOURCE)
    return source


def cells(text: str) -> dict[str, Any]:
    return {cell["id"]: cell for cell in json.loads(text)["cells"]}


def test_same_source_same_bytes(lesson: Path):
    first = builder.build(lesson)
    assert first == builder.build(lesson)
    found = cells(first)
    assert list(found) == ["cell-000", "one-two", "cell-002", "cell-003"]
    assert len(found["one-two"]["outputs"]) == 1
    assert found["one-two"]["execution_count"] == 1
    assert found["cell-002"]["outputs"] == []
    assert str(lesson.parent) not in first


def test_check_finds_a_notebook_that_is_not_its_sources(lesson: Path):
    target = lesson.parent.parent / "00_test.ipynb"
    assert "has not been built" in builder.why_stale(lesson, target)
    text = builder.build(lesson)
    target.write_text(text)
    assert builder.why_stale(lesson, target) == ""
    target.write_text(text.replace("first", "forged", 1))
    assert "is not what 00_test.py gives: line" in builder.why_stale(lesson, target)
    lesson.write_text(SOURCE.replace("A lesson", "Another"))
    assert "another version" in builder.why_stale(lesson, target)


def test_a_failing_cell_fails_the_build_and_is_shown(
    lesson: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lesson.write_text(SOURCE + "\n# %%\n1 / 0\n")
    monkeypatch.chdir(lesson.parent)
    assert builder.main([]) == 1
    err = capsys.readouterr().err
    assert "00_test.py" in err
    assert "ZeroDivisionError" in err
    assert not (lesson.parent.parent / "00_test.ipynb").exists()


def test_two_cells_of_one_name_are_refused(lesson: Path):
    lesson.write_text(SOURCE + '\n# %% name="one two"\n1\n')
    with pytest.raises(MinicompileError, match="several cells are called one-two"):
        builder.read_source(lesson)


def test_a_large_notebook_is_refused(lesson: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder, "LARGEST", 100)
    with pytest.raises(MinicompileError, match="allowed 100"):
        builder.build(lesson)


def test_outside_a_repository_or_without_such_a_lesson_there_is_one_sentence(
    lesson: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(lesson.parent)
    assert builder.main(["99"]) == 1
    assert "there are 00_test" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert builder.main([]) == 1
    assert "inside the repository" in capsys.readouterr().err
