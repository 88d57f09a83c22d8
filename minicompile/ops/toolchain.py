"""Finds the C compiler for CPU kernels, and the flags to call it with (build.py calls it).

The real compiler: torch/_inductor/cpp_builder.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minicompile.errors import BackendError
from minicompile.ops.files import read_private, write_private
from minicompile.options import Options, compiler_variables

BASE_FLAGS = (
    "-x", "c", "-std=gnu11", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    "-fwrapv", "-shared", "-fPIC", "-w",
)  # fmt: skip
"""Nothing here may change what NaN and infinities do, or the order of additions."""

GCC_FLAGS = ("-fno-thread-jumps", "-fno-tree-pre", "-fno-ivopts")
"""Jump threading and partial redundancy elimination make branches of `x > 0 ? x : 0` and what compares it:
gcc 12 can't vectorise some, and keeps sums beside others in memory. Its choice of induction variables reaches
one array from another's address, and takes a write to the first for one to the second: scratch rows were read
before they were written. clang doesn't know these flags."""

ON_GNU_THREADS = Path(__file__).with_name("clang_openmp.h")
"""What clang expects of OpenMP, on the threads that torch has."""


@dataclass(frozen=True)
class Compiler:
    """A C compiler, its version text, the flags to call it with, and the programs that the command names:
    path, size, time of change and inode of each. `missing`: why it can't be called."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    programs: tuple[str, ...]
    missing: str = ""

    @property
    def identity(self) -> list[str]:
        """All that a library depends on besides its source. (An inode differs between equal machines.)"""
        programs = [program.rsplit(" ", 1)[0] for program in self.programs]
        system = (platform_name(), processor_features(), compiler_variables())
        return [*self.command, self.version, *programs, *self.flags, *system]

    def prelude(self, source: str) -> str:
        """What stands before a source."""
        wanted = "-Xclang" in self.flags and sys.platform != "darwin" and "omp parallel" in source
        return ON_GNU_THREADS.read_text() if wanted else ""


def find_compiler(options: Options, notes: Path | None = None) -> Compiler:
    """The chosen compiler, which may be a command with arguments ("ccache g++"), else g++, clang++ or cc.

    `notes`: a private folder that remembers what a compiler was. While its program is the same, its version
    isn't asked for again; when it is gone, what it has built can still be found.
    Raises BackendError that says what to install.
    """
    chosen = hashlib.sha256(options.cpp_compiler.encode()).hexdigest()[:16]
    note = notes / f"compiler_{chosen}.json" if notes else None
    noted = _read_note(note)
    command, missing = _command(options.cpp_compiler), ""
    if command is None:
        missing = _missing(options.cpp_compiler)
        if noted is None:
            raise BackendError(missing)
        command, programs, version, _ = noted
    else:
        programs = _programs(command)
        if noted and noted[3] and noted[:2] == (command, programs):
            _versions.setdefault((command, programs), noted[2])
        version = _versions.get((command, programs)) or compiler_version(command)
        _versions[command, programs] = version
        found = (command, programs, version)
        if note is not None and (noted is None or noted[:3] != found):
            write_private(note, json.dumps((*found, _speaks_for_itself(command))).encode())
    own = GCC_FLAGS if "Free Software Foundation" in version else ()
    flags = (*BASE_FLAGS, *own, *machine_flags(), *openmp_flags(version), *options.cpp_flags)
    return Compiler(command, version, flags, programs, missing)


def _missing(chosen: str) -> str:
    named = f"; {chosen!r} was not found" if chosen else ""
    return (
        "minicompile needs a C++ compiler for CPU kernels: install g++ (apt-get install g++, "
        "conda install gxx, xcode-select --install) or set CXX to one" + named
    )


_versions: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
"""What is known of commands and their programs in this process."""
Note = tuple[tuple[str, ...], tuple[str, ...], str, bool]
"""Command, programs, version, and whether the programs tell when the version changes."""


def _read_note(path: Path | None) -> Note | None:
    """What is remembered; None where there is nothing, or nonsense."""
    if path is None:
        return None
    try:
        command, programs, version, lasting = json.loads(read_private(path))
        command, programs = tuple(command), tuple(programs)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    sound = command and all(isinstance(word, str) for word in (*command, *programs, version))
    return (command, programs, version, lasting is True) if sound else None


def _command(chosen: str) -> tuple[str, ...] | None:
    """The first of the possible commands whose program exists, with its path."""
    for name in [chosen] if chosen else ["g++", "clang++", "cc"]:
        words = [name]
        with contextlib.suppress(ValueError):  # a quotation mark that nothing closes
            words = shlex.split(name) or words
        for program, *arguments in ([name], words):
            path = shutil.which(program)
            if path is not None:
                return (os.path.abspath(path), *arguments)
    return None


def _programs(command: Sequence[str]) -> tuple[str, ...]:
    found = []
    for path in map(os.path.realpath, filter(None, map(shutil.which, command))):
        with contextlib.suppress(OSError):
            info = os.stat(path)
            found.append(f"{path} {info.st_size} {info.st_mtime_ns} {info.st_ino}")
    return tuple(found)


def _speaks_for_itself(command: Sequence[str]) -> bool:
    """Is the program the compiler? Scripts, ccache and Xcode's stay the same when what they call changes."""
    path = Path(os.path.realpath(command[0]))
    if len(command) > 1 or sys.platform == "darwin" or not re.search(r"g\+\+|gcc|clang", path.name):
        return False
    try:
        with path.open("rb") as file:
            return file.read(2) != b"#!"
    except OSError:  # may be run, but not read
        return False


def compiler_version(command: Sequence[str]) -> str:
    """What `--version` prints. Raises BackendError if the program doesn't run."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise BackendError(
            f"the C++ compiler {command[0]} does not run ({error}): install g++ or set CXX"
        ) from error
    return done.stdout


@functools.cache
def platform_name() -> str:
    """Operating system, processor, C library."""
    return " ".join((sysconfig.get_platform(), *platform.libc_ver()))


@functools.cache
def processor_features() -> str:
    """What `-march=native` depends on: the processor's model and feature flags."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name", "CPU part", "vendor_id")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def machine_flags() -> tuple[str, ...]:
    """Code for this processor; on x86 with vectors as wide as it has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-mcpu=native",)
    width = 512 if "avx512f" in processor_features() else 256
    return ("-march=native", f"-mprefer-vector-width={width}")


def openmp_flags(version: str) -> tuple[str, ...]:
    """Threads and `simd`. A process should have one set of threads, torch's: `torch.set_num_threads` counts.

    On Linux those are GNU's, which gcc calls; clang calls LLVM's functions, so that it gets them made of
    GNU's (clang_openmp.h), or one thread where torch has none. macOS (not tried): torch brings LLVM's.
    """
    if sys.platform == "darwin":
        import torch  # only here: the frame hook is built without it

        folder = Path(torch.__file__).parent / "lib"
        if (folder / "libomp.dylib").exists():
            return ("-Xclang", "-fopenmp", f"-L{folder}", "-lomp", f"-Wl,-rpath,{folder}")
    elif "clang" not in version:
        return ("-fopenmp",)
    elif hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return ("-Xclang", "-fopenmp", "-Wl,-z,now")
    return ("-fopenmp-simd",)
