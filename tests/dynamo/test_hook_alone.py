"""The hook that sees frames start, without torch, in every Python that is here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from minicompile.dynamo import hook
from tests.dynamo.test_bytecode import ROOT, VERSIONS, find_python


@pytest.mark.parametrize("version", VERSIONS)
def test_the_hook_alone(version: str) -> None:
    python = find_python(version)
    if python is None or hook.load_hook() is None:
        pytest.skip(f"no Python {version} or no C compiler here")
    script = Path(__file__).with_name("hook_programs.py")
    command = [python, str(script), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"\d+", done.stdout)[0]) >= 19
