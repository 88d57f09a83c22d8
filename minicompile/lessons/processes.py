"""The processes of grading: a runner with a kernel for each answer, and a judge that has no answer.

    grader --pipe--> runner (pytest, nbval) --> kernel: set-up, answer, probe --> a file of data
      |  <--rows, data---+         nursery --forks--^
      +--stdin--> judge: the checks, the reference answers, the data --stdout--> verdicts

The nursery and the judge import torch once for all that a command grades, at the same time. Kernels get a
copy of this package, read-only, without checks and solutions beside it, and folders of their own for
everything that is written (`lessons/nursery.py`, `lessons/confine.py`). The judge reads neither start-up
files nor the environment of the user, and never runs an answer; it judges one while the next runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import minicompile
from minicompile.errors import MinicompileError
from minicompile.lessons.confine import readable
from minicompile.lessons.outline import notebooks_folder
from minicompile.options import child_environment

KEPT = (
    "PATH LANG LC_ALL LD_LIBRARY_PATH VIRTUAL_ENV CC CXX OMP_NUM_THREADS SYSTEMROOT CUDA_HOME".split()  # noqa: SIM905
)
"""Variables that the processes of grading inherit."""

CACHED = ("HOME", "XDG_CACHE_HOME", "MINICOMPILE_CACHE_DIR")
"""Variables by which the judge finds kernels that were compiled before."""

PYTEST = "import sys; sys.modules['rfc3987_syntax'] = None; import pytest; sys.exit(pytest.main())"
"""Starts pytest; without this jsonschema takes 1.5 s to compile a grammar that notebooks never use."""

BRANCH_ENDED = 70
"""pytest's exit code when no kernel can start any more."""

FORGED = "something wrote into the results of grading, perhaps an answer"

Row = dict[str, Any]
Heard = Callable[[Row], None]


def environment_of(folder: Path, **values: str) -> dict[str, str]:
    """The environment of a process of grading: its folders are below `folder`."""
    inherited = child_environment()
    places = {"HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "IPYTHONDIR": "ipython"}
    places["TRITON_HOME"] = "home"  # Triton, imported before, remembers another
    places |= {"JUPYTER_CONFIG_DIR": "jupyter", "JUPYTER_DATA_DIR": "jupyter"}
    places |= {"JUPYTER_RUNTIME_DIR": "jupyter"}
    for name in set(places.values()):
        (folder / name).mkdir(exist_ok=True)
    return {
        **{name: inherited[name] for name in KEPT if name in inherited},
        **{variable: str(folder / name) for variable, name in places.items()},
        "PYTHONHASHSEED": "0",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MINICOMPILE_PROGRESS": "0",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to look for a GPU starts nothing that a fork would lose
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        **values,
    }


def copy_package(library: Path) -> None:
    """Put a read-only copy of the package into a new folder, with checks that hold no exercise."""
    shutil.copytree(Path(minicompile.__file__).parent, library / "minicompile")
    checks = library / "notebooks" / "checks"
    checks.mkdir(parents=True)
    for path in (notebooks_folder() / "checks").glob("lesson_*.py"):
        empty = f'lesson = Lesson("{path.stem[-2:]}")'
        text = f"from minicompile.lessons.exercise import Lesson\n\n{empty}\n"
        (checks / path.name).write_text(text)
    if (saved := notebooks_folder() / "gpu").is_dir():
        shutil.copytree(saved, library / "notebooks" / "gpu")
    change_modes(library, 0o555, 0o444)


def change_modes(folder: Path, folders: int, files: int) -> None:
    for where, _, names in os.walk(folder):
        os.chmod(where, folders)
        for name in names:
            os.chmod(os.path.join(where, name), files)


class Nursery:
    """The process that forks kernels, and its folder: a copy of the package, a folder a notebook."""

    def __init__(self) -> None:
        self.temporary = tempfile.TemporaryDirectory(prefix="minicompile_grade_")
        self.folder = Path(self.temporary.name).resolve()
        self.library = self.folder / "lib"
        copy_package(self.library)
        own = self.notebook_folder("nursery")
        self.printed = own / "printed.txt"
        self.control, theirs = socket.socketpair()
        command = [sys.executable, "-s", "-m", "minicompile.lessons.nursery", str(theirs.fileno())]
        with theirs, open(self.printed, "wb") as printed:
            self.process = subprocess.Popen(
                command, cwd=own, env=self.environment(own), pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True,
            )  # fmt: skip

    def notebook_folder(self, name: str) -> Path:
        """A new folder for what is run of a notebook."""
        folder = self.folder / name
        folder.mkdir()
        return folder

    def environment(self, folder: Path) -> dict[str, str]:
        """The environment of a process that works in a folder."""
        return environment_of(folder, PYTHONPATH=str(self.library))

    def branch(self) -> socket.socket:
        """The end of a new branch that a runner holds. Raises MinicompileError if the nursery has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control, [b"b"], [theirs.fileno()])
            except OSError:
                raise MinicompileError(f"no kernel starts: {self.said()}") from None
        return ours

    def said(self) -> str:
        """The end of what the nursery printed."""
        return self.printed.read_text(encoding="utf-8", errors="replace")[-600:].strip()

    def close(self) -> None:
        """End the nursery and all kernels."""
        self.control.close()
        end(self.process)
        change_modes(self.library, 0o755, 0o644)
        self.temporary.cleanup()


class Judge:
    """The process that compares what answers sent with what checks expect: a line in, a line out."""

    def __init__(self) -> None:
        package = Path(minicompile.__file__).parents[1]
        paths = [str(package), *(path for path in sys.path if path)]
        start = (
            f"import sys; sys.path[:] = {paths!r}; import minicompile.lessons.judge as j; j.main()"
        )
        inherited = child_environment()
        self.place = tempfile.TemporaryDirectory(prefix="minicompile_judge_")
        around = environment_of(
            Path(self.place.name), **{name: inherited[name] for name in CACHED if name in inherited}
        )
        self.printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
        self.process = subprocess.Popen(
            [sys.executable, "-s", "-S", "-c", start], cwd=self.place.name, env=around,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.printed, text=True,
        )  # fmt: skip
        self.lock = threading.Lock()
        self.asked: list[Future[str]] = []
        threading.Thread(target=self.listen, daemon=True).start()

    def ask(self, number: str, exercise: str, sent: str) -> Future[str]:
        """Have an answer judged: "" if it is right, else what is wrong; an error if the judge ended."""
        verdict: Future[str] = Future()
        line = json.dumps({"lesson": number, "exercise": exercise, "sent": sent})
        with self.lock, contextlib.suppress(OSError):
            self.asked.append(verdict)
            assert self.process.stdin is not None
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        return verdict

    def listen(self) -> None:
        """Give each verdict to who asked, in order."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.lock:
                verdict = self.asked.pop(0)
            verdict.set_result(json.loads(line))
        self.process.wait()
        self.printed.seek(0)
        said = self.printed.read()[-600:].decode(errors="replace").strip()
        while True:
            with self.lock:
                if not self.asked:
                    return
                verdict = self.asked.pop(0)
            verdict.set_exception(MinicompileError(f"the judge has ended: {said}"))

    def close(self) -> None:
        """End the judge."""
        self.process.kill()
        self.process.wait()
        self.place.cleanup()


class Helpers:
    """The nursery and the judge, which all notebooks of a command share; they start when one is needed."""

    def __init__(self) -> None:
        self.lock, self.count = threading.Lock(), 0
        self.started: tuple[Nursery, Judge] | None = None

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, *_: object) -> None:
        for helper in self.started or ():
            helper.close()

    def start(self) -> tuple[Nursery, Judge, Path]:
        """The nursery, the judge, and a new folder for a notebook."""
        with self.lock:
            if self.started is None or self.started[0].process.poll() is not None:
                self.__exit__()
                self.started = Nursery(), Judge()
            nursery, judge = self.started
            self.count += 1
            return nursery, judge, nursery.notebook_folder(str(self.count))


def run_notebooks(
    nursery: Nursery, folder: Path, names: Sequence[str], seconds: float, heard: Heard
) -> list[Row]:
    """Run `folder/ex1/ex1.ipynb` and so on under nbval: a row for each cell, with the data that were sent.

    Rows come through a pipe that no kernel inherits. Raises MinicompileError if the runner was ended.
    """
    (folder / "pytest.ini").write_text("[pytest]\n")
    around = nursery.environment(folder) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    shared = "home tmp cache ipython jupyter".split()  # noqa: SIM905
    reader, writer = os.pipe()
    with nursery.branch() as branch:
        how = {
            "results": writer,
            "nursery": branch.fileno(),
            "kernel": {
                "environment": around,
                "readable": readable(nursery.library, notebooks_folder().resolve()),
                "writable": [str(folder / name) for name in shared],
                "seconds": seconds,
            },
        }
        plugins = "-p minicompile.lessons.nbval_plugin -p nbval -p no:cacheprovider"
        options = f"-q {plugins} --nbval-lax --nbval-current-env --nbval-cell-timeout={seconds}"
        where = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder)]
        command = [sys.executable, "-s", "-c", PYTEST, *options.split(), *where]
        command += [f"--grading={json.dumps(how)}"]
        command += [str(folder / name / f"{name}.ipynb") for name in names]
        with open(folder / "runner.txt", "w+b") as printed:
            process = subprocess.Popen(
                command, cwd=folder, env=around, pass_fds=[writer, branch.fileno()],
                stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True,
            )  # fmt: skip
            os.close(writer)
            try:
                late = time.monotonic() + 3 * seconds * len(names) + 60
                rows = rows_from(reader, late, heard)
            finally:
                os.close(reader)
                end(process)
            printed.seek(0)
            said = printed.read()[-600:].decode(errors="replace")
    if rows is None:
        raise MinicompileError("grading took too long")
    if process.returncode < 0 or process.returncode == BRANCH_ENDED:
        raise MinicompileError("the grading process was ended from outside, perhaps by an answer")
    if not rows:
        raise MinicompileError(f"nbval did not run: {said}")
    return rows


def rows_from(reader: int, deadline: float, heard: Heard) -> list[Row] | None:
    """Rows until the runner closes the pipe; None if that is too late.

    Raises MinicompileError where it was not the runner alone that wrote.
    """
    text, rows = b"", list[Row]()
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            piece = os.read(reader, 1 << 20)
            if not piece:
                passed = [(row["notebook"], row["cell"]) for row in rows if row["passed"]]
                if len(set(passed)) < len(passed):
                    raise MinicompileError(FORGED)
                return rows
            *lines, text = (text + piece).split(b"\n") if b"\n" in piece else (text + piece,)
            for row in map(row_of, lines):
                rows.append(row)
                heard(row)


def row_of(line: bytes) -> Row:
    """What the runner said of a cell. Raises MinicompileError where it was not the runner that wrote."""
    kinds = {
        "notebook": str,
        "cell": str,
        "passed": bool,
        "message": str,
        "last": bool,
        "data": str,
    }
    try:
        row = json.loads(line)
        fits = {key: type(value) for key, value in row.items()} == kinds
    except (ValueError, AttributeError):
        fits = False
    if not fits:
        raise MinicompileError(FORGED)
    found: Row = row
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that is done, or kill it and its session."""
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
