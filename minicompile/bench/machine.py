"""The circumstances of a measurement, for later readers; tables."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minicompile.ops.display import aligned

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
    installed = importlib.metadata.distributions()
    return {d.name: d.version for d in installed if d.name in VERSIONS} | {
        "torch": torch.__version__
    }


def commit() -> str:
    """Of the repository that this package lies in, "+" behind it if files differ; "" where there is none."""
    describe = ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    command = ["git", "-C", str(Path(__file__).parent), *describe]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def processor() -> str:
    """The CPU's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as aligned text: the first column to the left, the others to the right."""
    rules = ["-" * max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(aligned([head, rules, *rows]))
