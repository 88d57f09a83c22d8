"""Cells that need a GPU show what was saved on one, and never what another cell printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minicompile.errors import MinicompileError
from minicompile.lessons.gpu import GpuResult, load, save
from minicompile.ops.display import to_html
from notebooks.gpu import code_cells, gpu_functions

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
MADE = GpuResult("99-speed", "abc", "3.1 TB/s", "Toy GPU, torch 9, Triton 9", saved=False)


def test_a_saved_result_says_where_it_was_made(tmp_path: Path):
    save(MADE, tmp_path / "gpu")
    found = load("99-speed", "abc", tmp_path / "gpu")
    assert str(found).startswith("3.1 TB/s\n(a saved result, ")
    assert "Toy GPU, torch 9, Triton 9" in str(found)
    assert "Toy GPU" in to_html(found) and "3.1 TB/s" in to_html(found)
    assert "made just now" in str(MADE)


def test_the_result_of_another_version_of_the_cell_is_refused(tmp_path: Path):
    save(MADE, tmp_path)
    with pytest.raises(MinicompileError, match=r"another version .* run python -m notebooks\.gpu"):
        load("99-speed", "another", tmp_path)


def lessons_results() -> dict[str, str]:
    """The hash of every GPU cell of every lesson."""
    sources = sorted((NOTEBOOKS / "src").glob("*.py"))
    return {name: made for source in sources for name, made in gpu_functions(source).items()}


def test_every_saved_result_is_of_a_cell_as_it_stands_and_every_cell_has_one():
    saved = {
        path.stem: json.loads(path.read_text())["source"]
        for path in sorted((NOTEBOOKS / "gpu").glob("*.json"))
    }
    assert saved == lessons_results(), "run python -m notebooks.gpu on a machine with a GPU"


def test_gpu_cells_carry_their_tag():
    for source in sorted((NOTEBOOKS / "src").glob("*.py")):
        for cell in code_cells(source):
            if "@on_gpu(" in cell.text and "wrong" not in cell.tags:
                assert "gpu" in cell.tags, f"{source.name}: {cell.name}"
