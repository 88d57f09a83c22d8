"""The processes of grading: a runner with a kernel for each answer, then a judge that has no answer.

    grader --pipe--> runner (pytest, nbval) --> kernel: set-up, answer, probe --> a file of data
      |  <--rows, data---+     all of them end here
      +--stdin--> judge: the checks, the reference answers, the data --stdout--> verdicts

The runner and its kernels get a copy of this package, read-only, and folders of their own for everything that
is written. The copy has neither checks nor solutions beside it. The judge starts when every process of the
runner has ended, reads neither start-up files nor the environment of the user, and never runs an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import minicompile
from minicompile.errors import MinicompileError
from minicompile.lessons.exercise import notebooks_folder
from minicompile.options import child_environment

KEPT = (
    "PATH LANG LC_ALL LD_LIBRARY_PATH VIRTUAL_ENV CC CXX OMP_NUM_THREADS SYSTEMROOT CUDA_HOME".split()  # noqa: SIM905
)
"""Variables that the processes of grading inherit."""

CACHED = ("HOME", "XDG_CACHE_HOME", "MINICOMPILE_CACHE_DIR")
"""Variables by which the judge finds kernels that were compiled before."""

FORGED = "something wrote into the results of grading, perhaps an answer"

Row = dict[str, Any]
Told = Callable[[str], None]


def environment_of(folder: Path, **values: str) -> dict[str, str]:
    """The environment of a process of grading: its folders are below `folder`."""
    inherited = child_environment()
    places = {"HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "IPYTHONDIR": "ipython"}
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
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        **values,
    }


@contextlib.contextmanager
def workplace(number: str) -> Iterator[Path]:
    """A folder for one graded notebook, with a read-only copy of the package in `lib`."""
    with tempfile.TemporaryDirectory(prefix="minicompile_grade_") as name:
        library = Path(name).resolve() / "lib"
        package = Path(minicompile.__file__).parent
        shutil.copytree(package, library / "minicompile")
        checks = library / "notebooks" / "checks"
        checks.mkdir(parents=True)
        text = f'from minicompile.lessons.exercise import Lesson\n\nlesson = Lesson("{number}")\n'
        (checks / f"lesson_{number}.py").write_text(text)
        if (saved := notebooks_folder() / "gpu").is_dir():
            shutil.copytree(saved, library / "notebooks" / "gpu")
        change_modes(library, 0o555, 0o444)
        try:
            yield Path(name).resolve()
        finally:
            change_modes(library, 0o755, 0o644)


def change_modes(folder: Path, folders: int, files: int) -> None:
    for where, _, names in os.walk(folder):
        os.chmod(where, folders)
        for name in names:
            os.chmod(os.path.join(where, name), files)


def run_notebooks(folder: Path, names: Sequence[str], seconds: float, told: Told) -> list[Row]:
    """Run `folder/ex1/ex1.ipynb` and so on under nbval: a row for each cell, with the data that were sent.

    Rows come through a pipe that no kernel inherits. Raises MinicompileError if the runner was ended.
    """
    (folder / "pytest.ini").write_text("[pytest]\n")
    plugins = "-p nbval -p minicompile.lessons.nbval_plugin -p no:cacheprovider"
    how = f"-q {plugins} --nbval-lax --nbval-current-env --nbval-cell-timeout={seconds}"
    where = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder)]
    reader, writer = os.pipe()
    command = [sys.executable, "-s", "-m", "pytest", *how.split(), *where]
    command += [f"--grading-results={writer}"]
    command += [str(folder / name / f"{name}.ipynb") for name in names]
    around = environment_of(
        folder, PYTHONPATH=str(folder / "lib"), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"
    )
    with open(folder / "runner.txt", "w+b") as printed:
        process = subprocess.Popen(
            command, cwd=folder, env=around, pass_fds=[writer], stdin=subprocess.DEVNULL,
            stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        os.close(writer)
        try:
            rows = rows_from(reader, time.monotonic() + 3 * seconds * len(names) + 60, told)
        finally:
            os.close(reader)
            end(process)
        printed.seek(0)
        said = printed.read()[-600:].decode(errors="replace")
    if process.returncode < 0 and rows is not None:
        raise MinicompileError("the grading process was ended from outside, perhaps by an answer")
    if rows is None:
        raise MinicompileError("grading took too long")
    if not rows:
        raise MinicompileError(f"nbval did not run: {said}")
    return rows


def rows_from(reader: int, deadline: float, told: Told) -> list[Row] | None:
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
            rows += map(row_of, lines)
            for row in rows[-len(lines) :] if lines else ():
                if row["last"]:
                    told(f"{row['notebook']} ran")


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


def judge(number: str, received: Mapping[str, str], seconds: float) -> dict[str, str]:
    """By exercise, "" for a right answer, else what is wrong; `received` is what each kernel sent."""
    if not received:
        return {}
    package = Path(minicompile.__file__).parents[1]
    paths = [str(package), *(path for path in sys.path if path)]
    start = f"import sys; sys.path[:] = {paths!r}; import minicompile.lessons.judge as j; j.main()"
    task = json.dumps({"lesson": number, "received": dict(received)})
    with tempfile.TemporaryDirectory(prefix="minicompile_judge_") as place:
        inherited = child_environment()
        around = environment_of(
            Path(place), **{name: inherited[name] for name in CACHED if name in inherited}
        )
        try:
            done = subprocess.run(
                [sys.executable, "-s", "-S", "-c", start], input=task, capture_output=True, text=True,
                cwd=place, env=around, timeout=2 * seconds * len(received) + 60,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise MinicompileError("judging the answers took too long") from None
    if done.returncode:
        raise MinicompileError(f"the judge failed: {done.stderr[-600:]}")
    verdicts: dict[str, str] = json.loads(done.stdout)
    return verdicts
