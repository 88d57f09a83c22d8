"""The circumstances of a measurement, for later readers; fresh processes for what is measured from cold;
tables."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from minicompile.errors import BackendError
from minicompile.ops.display import aligned
from minicompile.options import child_environment

VERSIONS = ("minicompile", "torch", "triton", "transformers", "numpy", "sympy")


def circumstances(device: str) -> dict[str, Any]:
    """Date (UTC), command, commit, machine and versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m minicompile", *sys.argv[1:]]),
        "commit": commit(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "processor": processor(),
            "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        },
        "versions": {"python": platform.python_version(), **versions(), "cuda": torch.version.cuda},
    }


def versions() -> dict[str, str]:
    """Of the packages that matter and are installed."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "torch": torch.__version__}


def commit() -> str:
    """Of the repository that this package lies in, "+" behind it if files differ; "" where there is none."""
    git = ["git", "-C", str(Path(__file__).parent)]
    told = {"capture_output": True, "text": True, "check": True}
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], **told)  # type: ignore[call-overload]
        changed = subprocess.run([*git, "status", "--porcelain"], **told)  # type: ignore[call-overload]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return str(head.stdout).strip() + "+" * bool(changed.stdout.strip())


def processor() -> str:
    """The CPU's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def in_new_python(
    what: str, seconds: int, function: Callable[..., Any], *arguments: object, **environment: str
) -> Any:
    """What a function of a module gives for these arguments, which it gets as text; the result is JSON.

    Raises BackendError that begins with `what` if it fails, with what it printed last, or takes too long.
    """
    name = function.__name__
    run = f"import json, sys; from {function.__module__} import {name}"
    command = [sys.executable, "-c", f"{run}; print(json.dumps({name}(*sys.argv[1:])))"]
    command += map(str, arguments)
    around = child_environment(**environment)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=around)
    except subprocess.TimeoutExpired as error:
        raise BackendError(f"{what} did not finish within {seconds} s") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise BackendError(f"{what} failed in a fresh process: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as aligned text: the first column to the left, the others to the right."""
    rules = ["-" * max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(aligned([head, rules, *rows]))
