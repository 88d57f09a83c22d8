"""Processes that share a cache folder may be killed at any moment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="looks for processes in /proc")
def test_ten_processes_killed_at_random_leave_a_sound_cache() -> None:
    """`python -m tests.runtime.killing --seconds 600` does more of it."""
    command = [sys.executable, "-m", "tests.runtime.killing", "--seconds", "10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in ("a compiler at work", "a file about to appear"):
        assert f" at {stage}" in done.stdout, done.stdout
