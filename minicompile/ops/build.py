"""C source to a loaded library: compiler, flags, disk cache.

Kernels are built by `start_build`, which starts the compiler and returns at once; our own small extensions of
Python by `load_extension`. A finished library is kept under a key made of everything that determines it:
source, flags, compiler version, processor features. Files appear by rename, with a checksum beside them, so
that processes can share the cache and a damaged entry is built again.
The real compiler: torch/_inductor/codecache.py (CppCodeCache), cpp_builder.py.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from minicompile.errors import BackendError
from minicompile.options import Options

BASE_FLAGS = (
    "-x", "c", "-std=gnu11", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    "-fwrapv", "-shared", "-fPIC",
)  # fmt: skip
"""Nothing here may change what NaN and infinities do, or the order of additions."""

ERROR_LINES = 12

Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Compiler:
    """A C compiler that was found, its version text and the flags to call it with."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]


def find_compiler(options: Options) -> Compiler:
    """The chosen compiler, which may be a command with arguments ("ccache g++"), else g++, clang++ or cc.

    Raises BackendError that says what to install.
    """
    names = [options.cpp_compiler] if options.cpp_compiler else ["g++", "clang++", "cc"]
    for name in names:
        program, *arguments = [name] if shutil.which(name) else shlex.split(name) or [name]
        path = shutil.which(program)
        if path is not None:
            command = (path, *arguments)
            flags = (*BASE_FLAGS, *machine_flags(), *openmp_flags(), *options.cpp_flags)
            return Compiler(command, compiler_version(command), flags)
    missing = f"; {options.cpp_compiler!r} was not found" if options.cpp_compiler else ""
    raise BackendError(
        "minicompile needs a C++ compiler for CPU kernels: install g++ (apt-get install g++, "
        "conda install gxx, xcode-select --install) or set CXX to one" + missing
    )


@functools.cache
def compiler_version(command: tuple[str, ...]) -> str:
    """What `--version` prints. Raises BackendError if the program doesn't run."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BackendError(
            f"the C++ compiler {command[0]} does not run ({error}): install g++ or set CXX"
        ) from error
    return done.stdout


@functools.cache
def processor_features() -> str:
    """What `-march=native` depends on: the processor's model and feature flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def machine_flags() -> tuple[str, ...]:
    """Code for this processor; on x86 with vectors as wide as it has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-mcpu=native",)
    width = 512 if "avx512f" in processor_features() else 256
    return ("-march=native", f"-mprefer-vector-width={width}")


def openmp_flags() -> tuple[str, ...]:
    """Threads and `simd`. Apple's clang has no OpenMP library of its own: torch brings one."""
    if sys.platform != "darwin":
        return ("-fopenmp",)
    import torch  # only here: the frame hook is built without it

    folder = Path(torch.__file__).parent / "lib"
    if (folder / "libomp.dylib").exists():
        return ("-Xclang", "-fopenmp", f"-L{folder}", "-lomp", f"-Wl,-rpath,{folder}")
    return ("-fopenmp-simd",)


class Module:
    """Loaded libraries; `module.name` is the C function `name`."""

    def __init__(self, libraries: Sequence[ctypes.CDLL]) -> None:
        self.libraries = libraries

    def __getattr__(self, name: str) -> Any:
        for library in self.libraries:
            try:
                return library[name]
            except AttributeError:
                continue
        files = ", ".join(library._name for library in self.libraries)
        raise AttributeError(f"no C function {name!r} in {files}")


@dataclass(frozen=True)
class Pending:
    """Compilers at work, one for each source that the cache doesn't have."""

    jobs: Sequence[_Job]

    def result(self) -> Module:
        """Wait and load, once. Raises BackendError with the compiler's first complaints."""
        return Module([job.finish(_load) for job in self.jobs])


def start_build(source: str | Sequence[str], options: Options) -> Pending:
    """Start compiling one source, or several side by side. Raises BackendError without a compiler."""
    sources = [source] if isinstance(source, str) else source
    return Pending([_Job(text, options) for text in sources])


@functools.cache
def start_extension(source: Path) -> _Job | None:
    """Start compiling `<name>.c` for `load_extension`, unless that was done before."""
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        return None
    lookup = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    try:
        return _Job(source.read_text(), Options(cpp_flags=(f"-I{include}", *lookup)))
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
    except (BackendError, ImportError, OSError):
        return None


class _Job:
    """One source on its way to a library."""

    def __init__(self, source: str, options: Options) -> None:
        self.source = source
        self.compiler = compiler = find_compiler(options)
        facts = (source, *compiler.command, compiler.version, *compiler.flags, processor_features())
        self.key = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
        self.folder = _usable(options.cache_folder / "cpp") if options.disk_cache else None
        self.process: subprocess.Popen[str] | None = None
        self.work = Path()
        if self._cached() is None:
            self._start()

    def _cached(self) -> Path | None:
        """The library, if it lies in the cache undamaged. (Loading a truncated one would crash.)"""
        if self.folder is None:
            return None
        library = self.folder / f"{self.key}.so"
        try:
            intact = library.with_suffix(".sha256").read_text() == _digest(library)
        except OSError:
            return None
        return library if intact else None

    def _start(self) -> subprocess.Popen[str]:
        self.work = Path(tempfile.mkdtemp(prefix="minicompile_", dir=self.folder))
        text, library = (self.work / f"{self.key}{suffix}" for suffix in (".c", ".so"))
        text.write_text(self.source)
        command = [*self.compiler.command, *self.compiler.flags]
        command += [str(text), "-o", str(library), "-lm"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        return self.process

    def finish(self, load: Callable[[Path], Loaded]) -> Loaded:
        """Wait for the compiler; move source, library and checksum into the cache, the checksum last."""
        library = self._cached() if self.process is None else None
        if library is not None:
            return load(library)
        process = self.process or self._start()  # if it was there a moment ago
        _, complaints = process.communicate()
        built = self.work / f"{self.key}.so"
        if process.returncode != 0 or not built.exists():
            first = "\n".join(complaints.splitlines()[:ERROR_LINES])
            raise BackendError(
                f"{' '.join(self.compiler.command)} could not compile the kernels "
                f"(source kept in {built.with_suffix('.c')}):\n{first}"
            )
        if self.folder is not None:
            built.with_suffix(".sha256").write_text(_digest(built))
            for suffix in (".c", ".so", ".sha256"):
                os.replace(built.with_suffix(suffix), self.folder / f"{self.key}{suffix}")
            built = self.folder / built.name
        loaded = load(built)  # once loaded, a library needs its file no more
        shutil.rmtree(self.work, ignore_errors=True)
        return loaded


def _usable(folder: Path) -> Path | None:
    """The folder, if it can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(f"the compiled kernels can't be loaded: {error}") from error
