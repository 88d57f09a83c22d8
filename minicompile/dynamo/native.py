"""Builds small C extensions at their first use, and keeps them in the cache folder.

Without a C compiler or Python's headers `load` gives None, and callers do the same in Python.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from minicompile.options import default_c_compiler, default_cache_dir


def compiler() -> str | None:
    """`CC`, or the first of cc, gcc, clang that exists."""
    for name in [*default_c_compiler().split()[:1], "cc", "gcc", "clang"]:
        found = shutil.which(name)
        if found:
            return found
    return None


@functools.cache
def load(name: str) -> ModuleType | None:
    """The extension `minicompile_<name>` from `dynamo/<name>.c`, built if it isn't yet."""
    source = Path(__file__).with_name(f"{name}.c")
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    try:
        text = source.read_bytes()
        key = hashlib.sha256(text + suffix.encode()).hexdigest()[:16]
        target = Path(default_cache_dir()) / "native" / key / f"minicompile_{name}{suffix}"
        if not target.exists():
            build(source, target)
        return import_file(f"minicompile_{name}", target)
    except (OSError, ImportError, subprocess.SubprocessError):
        return None


def build(source: Path, target: Path) -> None:
    """Compile one C file. Raises OSError or SubprocessError."""
    command = compiler()
    if command is None:
        raise FileNotFoundError("no C compiler")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        include = sysconfig.get_path("include")
        dynamic = ["-undefined", "dynamic_lookup"] if os.uname().sysname == "Darwin" else []
        arguments = [
            "-O2",
            "-shared",
            "-fPIC",
            f"-I{include}",
            *dynamic,
            str(source),
            "-o",
            str(made),
        ]
        subprocess.run([command, *arguments], check=True, capture_output=True, timeout=120)
        os.replace(made, target)  # whole or not at all, also with several processes


def import_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
