"""Builds small C extensions at their first use, and keeps them in the cache folder.

Without a C compiler or Python's headers `load` gives None, and callers do without.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

from minicompile.options import default_c_compiler, default_cache_dir


@functools.cache
def load(name: str) -> ModuleType | None:
    """The extension `minicompile_<name>` from `dynamo/<name>.c`, built if it isn't yet."""
    source = Path(__file__).with_name(f"{name}.c")
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    try:
        key = hashlib.sha256(source.read_bytes() + suffix.encode()).hexdigest()[:16]
        target = Path(default_cache_dir()) / "native" / key / f"minicompile_{name}{suffix}"
        if not target.exists():
            build(source, target)
        loader = ExtensionFileLoader(f"minicompile_{name}", str(target))
        module = module_from_spec(ModuleSpec(loader.name, loader, origin=str(target)))
        loader.exec_module(module)
        return module
    except (OSError, ImportError, subprocess.SubprocessError):
        return None


def compiler() -> str | None:
    """`CC`, cc, gcc or clang, whichever is there first."""
    names = [*default_c_compiler().split()[:1], "cc", "gcc", "clang"]
    return next(filter(None, map(shutil.which, names)), None)


def build(source: Path, target: Path) -> None:
    """Compile one C file. Raises OSError or SubprocessError."""
    program = compiler()
    if program is None:
        raise FileNotFoundError("no C compiler")
    flags = ["-O2", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
    if sys.platform == "darwin":
        flags += ["-undefined", "dynamic_lookup"]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [program, *flags, str(source), "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        os.replace(made, target)  # whole or not at all, also with several processes
