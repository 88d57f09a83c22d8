"""The command line lists commands, explains options, shows the cache, answers mistakes briefly."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minicompile.__main__ import COMMANDS, main
from minicompile.debug.listings import option_docs
from minicompile.errors import MinicompileError, OptionError, Unsupported
from minicompile.options import Options
from tests.imports import trees

ROOT = Path(__file__).parent.parent


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_options_lists_every_option_with_its_meaning(capsys: pytest.CaptureFixture[str]):
    assert main(["options"]) == 0
    out = capsys.readouterr().out
    for field in dataclasses.fields(Options):
        assert f"{field.name} = " in out
    for doc in option_docs().values():
        assert doc.splitlines()[0].strip() in out


def test_the_list_of_errors_is_up_to_date(capsys: pytest.CaptureFixture[str]):
    assert main(["errors"]) == 0
    listed = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == listed, "minicompile errors > docs/errors.md"


def errors_below(kind: type[MinicompileError]) -> list[type[MinicompileError]]:
    return [kind, *(below for sub in kind.__subclasses__() for below in errors_below(sub))]


def test_every_error_has_an_id_of_its_own_a_cause_and_a_cure():
    public = [
        kind for kind in errors_below(MinicompileError) if kind.__module__ == "minicompile.errors"
    ]
    assert (
        len({kind.id for kind in public}) == len(public) == len({kind.cure for kind in public}) == 8
    )
    for kind in public:
        assert kind.__doc__ and kind.id.startswith("MC-") and kind.cure.endswith(".")
    for message in (Unsupported("no way"), OptionError("no way")):
        assert str(message) == "no way" and message.id == type(message).id
    assert Unsupported("no way", id="print").id == "print"


CARRIERS = {
    "api._Traced": "a finished trace, out of a call that need not run",
    "debug.variant.CheckFailed": "the failed check of a user; it becomes the failure of a try",
    "debug.bisect.Flaky": "two answers to one question; it becomes the verdict",
    "dynamo.breaks.FrameCut": "out of the interpreter, where a capture ends",
    "plugins.guard_snapshot.facts.NotCoveredError": "a guard that is evaluated on every call",
    "lessons.exercise.Wrong": "a wrong answer: what check cells raise",
    "plugins.graph_cache.store.NoText": "a graph that is not kept on disk",
}


def test_what_a_user_can_meet_derives_from_one_base():
    """All others carry something to a handler inside the package; what, is said here."""
    found = set()
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(
                isinstance(base, ast.Name) and hasattr(builtins, base.id)
                and issubclass(getattr(builtins, base.id), BaseException)
                for base in node.bases
            ):  # fmt: skip
                found.add(f"{module.removeprefix('minicompile.')}.{node.name}")
    ours = {f"errors.{kind.__name__}" for kind in errors_below(MinicompileError)}
    assert found - ours == set(CARRIERS)


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


def test_a_cache_folder_that_holds_the_working_folder_is_not_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert main(["cache", "--clear"]) == 1
    assert (tmp_path / "work").exists()
    assert "not cleared" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="pipes close differently on Windows")
def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m minicompile options | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
