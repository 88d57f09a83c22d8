"""Starts the C compiler on generated source, loads the library, and keeps it on disk.

Kernels are built by `start_build`, which starts the compiler and returns at once; our own small extensions of
Python by `load_extension`. A finished library is kept under a key made of everything that determines it
(ops/toolchain.py), in a folder that belongs to the user alone (ops/cache.py). Files appear by rename, and end
in a seal: processes share the cache, and one may be killed at any moment. What isn't sealed is built again,
never loaded.
The real compiler: torch/_inductor/codecache.py (CppCodeCache).
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from minicompile.errors import BackendError, RejectedKernel
from minicompile.ops.cache import Cache, digest
from minicompile.ops.toolchain import find_compiler
from minicompile.options import Options, child_environment

ERROR_LINES = 12
WORK = "minicompile_build_"
"""How names of folders start in which compilers work, among the temporary files."""

Loaded = TypeVar("Loaded")


MOST_MAPPINGS = 61_000
"""Memory mappings that libraries may bring a process to. Linux allows 65,530: threads, allocators and other
libraries need some too, and a process that gets none for its next allocation ends."""


class Library:
    """A loaded file, which is unloaded with the last object that refers to this one.

    Raises OSError where it can't be loaded, and BackendError where the process has too many memory mappings.
    """

    def __init__(self, path: Path) -> None:
        if mappings() > MOST_MAPPINGS:
            gc.collect()  # dropped functions that the collector hasn't met
            if mappings() > MOST_MAPPINGS:
                raise BackendError("the process has nearly as many memory mappings as Linux allows")
        self.path, self.handle = path, _ctypes.dlopen(str(path), ctypes.DEFAULT_MODE)
        weakref.finalize(self, _ctypes.dlclose, self.handle).atexit = False


def mappings() -> int:
    """How many memory mappings this process has; 0 where the system doesn't say."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


class Module:
    """Loaded libraries; `module.name` is the C function `name`."""

    def __init__(self, libraries: Sequence[Library]) -> None:
        self.libraries = libraries

    def address(self, name: str) -> int:
        """Where a C function is, while this module lives."""
        for library in self.libraries:
            with contextlib.suppress(OSError):
                return _ctypes.dlsym(library.handle, name)
        raise AttributeError(f"no C function {name!r}")

    def __getattr__(self, name: str) -> Any:
        function: Any = ctypes.CFUNCTYPE(ctypes.c_int64)(self.address(name))
        function.module = self  # its code stays loaded
        return function


@dataclass(frozen=True)
class Pending:
    """Compilers at work, one for each source that the cache doesn't have."""

    jobs: Sequence[_Job]

    def result(self) -> Module:
        """Wait and load, once. Raises BackendError with the compiler's first complaints."""
        return Module([job.finish(Library) for job in self.jobs])


def start_build(source: str | Sequence[str], options: Options) -> Pending:
    """Start compiling one source, or several side by side. Raises BackendError without a compiler."""
    sources = [source] if isinstance(source, str) else source
    return Pending([_Job(text, options) for text in sources])


@functools.cache
def start_extension(source: Path) -> _Job | None:
    """Start compiling `<name>.c` for `load_extension`, unless that was done before."""
    include = sysconfig.get_path("include")
    lookup = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    try:
        return _Job(source.read_text(), Options(cpp_flags=(f"-I{include}", *lookup)), sys.version)
    except (BackendError, OSError):
        return None


@functools.cache
def load_extension(source: Path) -> ModuleType | None:
    """The module `minicompile_<name>` of `<name>.c`; None without a compiler or Python's headers."""

    def load(path: Path) -> ModuleType:
        loader = ExtensionFileLoader(f"minicompile_{source.stem}", str(path))
        module = module_from_spec(ModuleSpec(loader.name, loader, origin=str(path)))
        loader.exec_module(module)
        return module

    job = start_extension(source)
    try:
        return None if job is None else job.finish(load)
    except (BackendError, OSError):
        return None


class _Job:
    """One source on its way to a library. Dropped unfinished, it takes its compiler and folder along."""

    def __init__(self, source: str, options: Options, *facts: str) -> None:
        self.compiler, self.source = find_compiler(options), source
        self.cache = Cache(options, "cpp", ".so")
        self.key = digest(source, *self.compiler.identity, *facts)
        self.process: subprocess.Popen[str] | None = None
        if self.cache.file(self.key) is None:
            self._start()

    def _start(self) -> subprocess.Popen[str]:
        """Start the compiler, in a process group that can be ended as one. Raises BackendError."""
        try:
            work = Path(tempfile.mkdtemp(prefix=WORK))
            self.discard = weakref.finalize(self, _discard, os.getpid(), work, processes := [])
            self.built, text = work / f"{self.key}.so", work / f"{self.key}.c"
            text.write_text(self.source)
            command = [*self.compiler.command, *self.compiler.flags, str(text)]
            command += ["-o", str(self.built), "-lm"]
            pipes: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
            place = child_environment(TMPDIR=str(work))
            self.process = subprocess.Popen(command, env=place, process_group=0, **pipes)
        except OSError as error:
            raise BackendError(f"kernels can't be compiled: {error}") from error
        processes.append(self.process)
        return self.process

    def finish(self, load: Callable[[Path], Loaded]) -> Loaded:
        """Wait for the compiler, keep what it made, load it. Raises BackendError."""
        if self.process is None:
            with contextlib.suppress(OSError, ImportError):  # a library that it needs may be gone
                if (library := self.cache.file(self.key)) is not None:
                    return load(library)
        process = self.process or self._start()
        _, complaints = process.communicate()
        if process.returncode != 0 or not self.built.exists():
            self.discard.detach()
            first = "\n".join(complaints.splitlines()[:ERROR_LINES])
            raise RejectedKernel(
                f"{' '.join(self.compiler.command)} could not compile the kernels "
                f"(source kept in {self.built.with_suffix('.c')}):\n{first}"
            )
        try:
            with contextlib.suppress(OSError, ImportError):  # a folder may forbid programs
                self.cache.put(self.key, self.built.read_bytes())
                if (library := self.cache.file(self.key)) is not None:
                    return load(library)
            return load(self.built)  # once loaded, a library needs its file no more
        except (OSError, ImportError) as error:
            raise BackendError(f"the compiled kernels can't be loaded: {error}") from error
        finally:
            self.discard()


def _discard(owner: int, work: Path, processes: Sequence[subprocess.Popen[str]]) -> None:
    """End what still works in a folder, and delete it."""
    if os.getpid() != owner:  # a fork has no part in it
        return
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        with process:  # closes its pipe and waits
            pass
    shutil.rmtree(work, ignore_errors=True)
