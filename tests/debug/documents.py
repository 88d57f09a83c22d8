"""The shell commands of the reference documents, and what runs them."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from minicompile.dynamo import dispatch

SCRIPT = Path(__file__).with_name("watched_script.py")

RENAMED = {
    "TORCH_LOGS": "MINICOMPILE_LOGS",
    "TORCH_COMPILE_DEBUG": "MINICOMPILE_COMPILE_DEBUG",
    "/tmp/torchinductor_$USER": "/tmp/minicompile_$USER",
    " joint.py": " model__0__joint_0.py",
    " backward.py": " model__0__backward_0.py",
}
"""Our names for the documents'. The last two stand there for a joint and a backward graph's file."""


def ours(command: str) -> str:
    """A document's command with our names."""
    for theirs, name in RENAMED.items():
        command = command.replace(theirs, name)
    return command


def python(command: str, patch: pytest.MonkeyPatch, script: Path = SCRIPT) -> str:
    """What `NAME="value" python script.py arguments` prints: run here, which is quicker than a fresh process.

    The environment is read when a function is compiled, and functions are counted from 0 again.
    """
    words = shlex.split(command)
    at = words.index("python")
    for word in words[:at]:
        patch.setenv(*word.split("=", 1))
    assert words[at + 1] == "script.py"
    patch.setattr(sys, "argv", [str(script), *words[at + 2 :]])
    patch.setattr(dispatch, "_frames", itertools.count())
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def bash(command: str, folder: Path, variables: dict[str, str]) -> str:
    """What a command prints; grep that finds nothing and diff that finds something are no failures."""
    here = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    here |= {"PYTHONPATH": str(SCRIPT.parents[2])}
    environment = {**os.environ, **here, **variables}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout + done.stderr
