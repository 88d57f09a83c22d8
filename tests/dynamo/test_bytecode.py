"""One normalised instruction stream, and one machine, for every CPython that is present."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minicompile.dynamo import opcodes  # noqa: F401 registers what the instructions do

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13")


def find_python(version: str) -> str | None:
    """An interpreter of that version: this one, one on PATH, or one that pyenv installed."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    for found in sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")):
        return str(found)
    return shutil.which(f"python{version}")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_machine_runs_programs_as_cpython_does(version: str) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    script = Path(__file__).with_name("machine_programs.py")
    done = subprocess.run(
        [python, str(script), str(ROOT)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
