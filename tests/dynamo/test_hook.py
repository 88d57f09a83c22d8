"""The frame hook keeps its promises on every CPython that is present."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from minicompile.dynamo import hook, native
from minicompile.errors import Unsupported
from tests.dynamo.test_bytecode import ROOT, VERSIONS, find_python


@pytest.mark.parametrize("version", VERSIONS)
def test_hooked_calls_survive(version: str) -> None:
    """Recursion, exceptions, threads, generators, fall back to eager; nothing leaks."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    if native.compiler() is None:
        pytest.skip("no C compiler here")
    script = Path(__file__).with_name("hook_checks.py")
    done = subprocess.run(
        [python, "-X", "faulthandler", str(script), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Unsupported, match="C compiler"):
        hook.frame_hook.__wrapped__()
