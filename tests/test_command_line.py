"""The command line lists commands, explains options, shows the cache, answers mistakes briefly."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minicompile.__main__ import COMMANDS, main, option_docs
from minicompile.options import Options


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_an_unknown_command_names_the_known_ones(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["optoins"])
    assert stop.value.code == 2
    assert "options" in capsys.readouterr().err


def test_options_lists_every_option_with_its_meaning(capsys: pytest.CaptureFixture[str]):
    assert main(["options"]) == 0
    out = capsys.readouterr().out
    for field in dataclasses.fields(Options):
        assert f"{field.name} = " in out
    for doc in option_docs().values():
        assert doc.splitlines()[0].strip() in out


@pytest.mark.skipif(
    importlib.util.find_spec("minicompile.pipeline") is None, reason="the pipeline is not there yet"
)
def test_rules_lists_registries_and_what_they_hold(capsys: pytest.CaptureFixture[str]):
    assert main(["rules"]) == 0
    out = capsys.readouterr().out
    for name in ("lowering", "decomposition", "fusion", "bytecode", "plan"):
        assert re.search(rf"^{name} +[1-9]\d* rules", out, flags=re.M), name
    assert main(["rules", "fusion"]) == 0
    assert capsys.readouterr().out.split() == ["policy"]
    assert main(["rules", "fussion"]) == 1
    assert "known: " in capsys.readouterr().err


def test_cache_is_shown_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "cache"
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "kernel.so").write_bytes(b"x" * 2**20)
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(folder))
    assert main(["cache"]) == 0
    assert f"{folder}: 1 files, 1.0 MiB" in capsys.readouterr().out
    assert folder.exists()
    assert main(["cache", "--clear"]) == 0
    assert not folder.exists()
    assert main(["cache", "--clear"]) == 0


def test_a_cache_is_cleared_by_several_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    for place in range(200):
        (tmp_path / "cache" / "cpp" / f"{place}").mkdir(parents=True)
        (tmp_path / "cache" / "cpp" / f"{place}" / "kernel.so").touch()
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(main, [["cache", "--clear"]] * 8)] == [0] * 8
    assert not (tmp_path / "cache").exists()


def test_a_cache_folder_that_holds_the_working_folder_is_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert main(["cache", "--clear"]) == 1
    assert (tmp_path / "work").exists()
    assert "not cleared" in capsys.readouterr().err


def test_our_errors_are_one_sentence_and_an_exit_code():
    done = subprocess.run(
        [sys.executable, "-m", "minicompile", "demo", "--steps", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "minicompile demo: --steps and --threads must be at least 1"


@pytest.mark.skipif(os.name == "nt", reason="pipes close differently on Windows")
def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m minicompile options | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
