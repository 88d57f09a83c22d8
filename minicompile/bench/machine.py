"""Where and with what something was measured, for those who read the numbers later."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

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
