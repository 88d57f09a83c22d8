"""`minicompile trace SCRIPT`: the script runs as it would, and all that it compiled is written down."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from minicompile.__main__ import main
from minicompile.ops.events import observer
from tests.show.test_views import parsed

PROGRAM = """
import os, sys
import torch
import minicompile as mc
import beside

def f(x):
    y = x.sin() + 1
    print("between")
    return y.cos() * 2

os.chdir("/")
mc.compile(f)(torch.ones(3))
mc.compile(lambda x: x + 1)(torch.ones(3))
print(beside.NAME, __name__, sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("NAME = 'imported'")
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def folders(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir() if path.is_dir())


def test_each_compilation_gets_a_folder_and_a_row(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observers, before = dict(observer), (list(sys.argv), list(sys.path))
    assert main(["trace", "program.py", "--out", "seen", "--steps", "3", "--out=mine"]) == 0
    told = capsys.readouterr()
    assert told.out == "between\nimported __main__ ['--steps', '3', '--out=mine']\n"
    out = script.parent / "seen"
    assert told.err == f"3 compilations; see {out / 'index.html'}\n"
    assert folders(out) == ["01_f", "02_f_resumed", "03_lambda"]
    index = (out / "index.html").read_text()
    parsed(index)
    for folder in folders(out):
        assert f'<a href="{folder}/index.html">' in index
        assert (out / folder / "index.html").is_file()
    cells = re.sub("<[^>]*>", "|", index)
    assert re.search(r"\|\[\d+/0\]\|+f\|+compiled, \d+\.\d\d s\|", cells)
    assert "print" in index and "program.py:9" in index, "the break, and its line"
    assert "y.cos() * 2" in (out / "02_f_resumed" / "index.html").read_text()
    assert dict(observer) == observers and (sys.argv, sys.path) == before


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('sorry')", 1, "sorry"),
    ],
)
def test_what_was_compiled_is_written_however_the_script_ends(
    script: Path, end: str, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(PROGRAM + end)
    assert main(["trace", "--out", "seen", "program.py"]) == code
    error = capsys.readouterr().err
    assert told in error
    assert len(folders(script.parent / "seen")) == 3


def test_a_frame_that_runs_in_eager_says_why(script: Path) -> None:
    script.write_text(
        "import minicompile as mc, torch\n"
        "def f(x):\n    yield x + 1\n"
        "print(list(mc.compile(f)(torch.ones(3))))\n"
    )
    assert main(["trace", "program.py", "--out", "seen"]) == 0
    index = (script.parent / "seen" / "index.html").read_text()
    assert "runs in eager" in index and "a generator function is compiled directly" in index


def test_a_script_that_compiles_nothing_is_told_so(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("print('nothing')")
    assert main(["trace", "program.py", "--out", "seen"]) == 0
    told = "nothing was compiled: no function that mc.compile returned was called"
    assert told in capsys.readouterr().err
    assert told in (script.parent / "seen" / "index.html").read_text()
