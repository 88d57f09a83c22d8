"""Runs the C text of an answer's kernel again: in a new process, on inputs that the answer has never seen.

    judge --text, inputs--> process: confined, compiler, the kernel --the bytes of its result--> judge

The process imports no torch and holds no expected value: whatever the text does, it can only give bytes.
"""

from __future__ import annotations

import base64
import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from minicompile.errors import MinicompileError
from minicompile.lessons.confine import confine, readable
from minicompile.lessons.notebook import notebooks_folder
from minicompile.options import child_environment

SECONDS = 60
"""Longest time for compiling and running."""

COMPILER = "-shared -fPIC -O1 -march=native -fopenmp -w kernel.c -o kernel.so -lm".split()  # noqa: SIM905


def result_of(text: str, name: str, inputs: Sequence[bytes], size: int) -> bytes:
    """What function `name` of a C text writes behind its inputs. Raises MinicompileError with the reason."""
    with tempfile.TemporaryDirectory(prefix="minicompile_rerun_") as folder:
        task = {
            "text": text,
            "name": name,
            "inputs": [base64.b64encode(data).decode() for data in inputs],
            "size": size,
            "readable": readable(notebooks_folder().resolve()),
        }
        around = child_environment(TMPDIR=folder, PYTHONPATH=str(Path(__file__).parents[2]))
        try:
            done = subprocess.run(
                [sys.executable, "-s", "-m", "minicompile.lessons.rerun"],
                input=json.dumps(task), capture_output=True,
                text=True, cwd=folder, env=around, timeout=SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise MinicompileError(f"no result in {SECONDS} seconds") from None
        if done.returncode or not done.stdout:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise MinicompileError(f"no result: {last[0][:200]}")
        return base64.b64decode(done.stdout)


def main() -> None:
    """Compile and run the task on standard input; write the result."""
    task = json.load(sys.stdin)
    confine(task["readable"], [str(Path.cwd())], SECONDS)
    Path("kernel.c").write_text(task["text"], encoding="utf-8")
    subprocess.run(["cc", *COMPILER], check=True, stdout=sys.stderr)
    function = getattr(ctypes.CDLL("./kernel.so"), task["name"])
    buffers = [ctypes.create_string_buffer(base64.b64decode(data)) for data in task["inputs"]]
    result = ctypes.create_string_buffer(task["size"])
    function(*buffers, result)
    print(base64.b64encode(result.raw[: task["size"]]).decode())


if __name__ == "__main__":
    main()
