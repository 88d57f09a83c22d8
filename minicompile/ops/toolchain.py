"""Finds the C compiler for CPU kernels, and the flags to call it with (build.py calls it).

The real compiler: torch/_inductor/cpp_builder.py.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from minicompile.errors import BackendError
from minicompile.options import Options

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


@dataclass(frozen=True)
class Compiler:
    """A C compiler: the command, its version text, the flags to call it with."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]

    @property
    def identity(self) -> list[str]:
        """All that a library depends on besides its source."""
        return [*self.command, self.version, *self.flags, processor_features()]


def find_compiler(options: Options) -> Compiler:
    """The chosen compiler, which may be a command with arguments ("ccache g++"), else g++, clang++ or cc.

    Raises BackendError that says what to install.
    """
    command = _command(options.cpp_compiler)
    if command is None:
        named = f"; {options.cpp_compiler!r} was not found" if options.cpp_compiler else ""
        raise BackendError(
            "minicompile needs a C++ compiler for CPU kernels: install g++ (apt-get install g++, "
            "conda install gxx, xcode-select --install) or set CXX to one" + named
        )
    version = compiler_version(command)
    own = GCC_FLAGS if "Free Software Foundation" in version else ()
    flags = (*BASE_FLAGS, *own, *machine_flags(), openmp_flag(version), *options.cpp_flags)
    return Compiler(command, version, flags)


def _command(chosen: str) -> tuple[str, ...] | None:
    """The first of the possible commands whose program exists, with its path."""
    for name in [chosen] if chosen else ["g++", "clang++", "cc"]:
        program, *arguments = name.split()
        path = shutil.which(program)
        if path is not None:
            return (os.path.abspath(path), *arguments)
    return None


@functools.cache
def compiler_version(command: tuple[str, ...]) -> str:
    """What `--version` prints. Raises BackendError if it doesn't run."""
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
    wanted = ("flags", "Features", "model name", "CPU part", "vendor_id")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def machine_flags() -> tuple[str, ...]:
    """Code for this processor; on x86 with vectors as wide as it has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ("-mcpu=native",)
    width = 512 if "avx512f" in processor_features() else 256
    return ("-march=native", f"-mprefer-vector-width={width}")


def openmp_flag(version: str) -> str:
    """Threads and `simd`; of clang, `simd` alone. A process should have one set of threads, torch's, which
    `torch.set_num_threads` counts: those are GNU's, which gcc calls and clang doesn't."""
    return "-fopenmp-simd" if "clang" in version else "-fopenmp"
