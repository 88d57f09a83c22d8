"""The processes of grading, as the grader sees them: it asks for an answer's verdict and waits.

    grader --a socket for each answer--> nursery: has imported torch and the compiler, and nothing else
                                            +-- fork --> keeper of an answer: judges the data that it sent
                                                            +-- fork --> set-up, answer and probe, confined

See `lessons/nursery.py` for the other side. The nursery reads neither start-up files nor the environment of
the user.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import minicompile
from minicompile.errors import MinicompileError
from minicompile.lessons.confine import readable
from minicompile.lessons.notebook import notebook_of, notebooks_folder
from minicompile.options import child_environment

KEPT = (
    "PATH LANG LC_ALL LD_LIBRARY_PATH VIRTUAL_ENV CC CXX OMP_NUM_THREADS SYSTEMROOT CUDA_HOME".split()  # noqa: SIM905
)
"""Variables that the processes of grading inherit."""

CACHED = ("HOME", "XDG_CACHE_HOME", "MINICOMPILE_CACHE_DIR")
"""Variables by which judging finds kernels that were compiled before."""

PLACES = {"HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache", "IPYTHONDIR": "ipython"}
PLACES |= {"TRITON_HOME": "home", "JUPYTER_CONFIG_DIR": "jupyter", "JUPYTER_DATA_DIR": "jupyter"}
"""Variables that name a folder, and the folder's name."""

ENDED = "its process was ended from outside, perhaps by an answer"


def environment_of(folder: Path, **values: str) -> dict[str, str]:
    """The environment of a process of grading: its folders are below `folder`."""
    inherited = child_environment()
    for name in PLACES.values():
        (folder / name).mkdir(exist_ok=True)
    return {
        **{name: inherited[name] for name in KEPT if name in inherited},
        **{variable: str(folder / name) for variable, name in PLACES.items()},
        "PYTHONHASHSEED": "0",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to look for a GPU starts nothing that a fork would lose
        **values,
    }


class Nursery:
    """The process that forks a keeper for each answer, and the folder of all that they write."""

    def __init__(self) -> None:
        self.temporary = tempfile.TemporaryDirectory(prefix="minicompile_grade_")
        self.folder = Path(self.temporary.name).resolve()
        self.printed = self.folder / "printed.txt"
        self.control, theirs = socket.socketpair()
        inherited = child_environment()
        cached = {name: inherited[name] for name in CACHED if name in inherited}
        package = Path(minicompile.__file__).parents[1]
        paths = [str(package), *(path for path in sys.path if path)]
        start = f"import sys; sys.path[:] = {paths!r}; import minicompile.lessons.nursery as n; "
        start += f"n.main({theirs.fileno()})"
        with theirs, open(self.printed, "wb") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-c", start], cwd=self.folder,
                env=environment_of(self.folder, **cached), pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        """End the nursery and all that it started."""
        self.control.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.temporary.cleanup()

    def verdict(self, number: str, name: str, cells: list[str], seconds: float) -> str:
        """Run cells that answer an exercise and judge what they send: "" or what is wrong.

        Raises MinicompileError if no process starts any more.
        """
        folder = Path(tempfile.mkdtemp(prefix=f"{name}_", dir=self.folder))
        (folder / f"{name}.ipynb").write_text(notebook_of(cells), encoding="utf-8")
        order: dict[str, Any] = {"lesson": number, "exercise": name, "folder": str(folder)}
        order["readable"] = readable(notebooks_folder().resolve())
        order["seconds"] = seconds
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                socket.send_fds(self.control, [b"1"], [theirs.fileno()])
                theirs.close()
                with ours.makefile("rw", encoding="utf-8") as lines:
                    lines.write(f"{json.dumps(order)}\n")
                    lines.flush()
                    said = lines.readline()
            except OSError:
                said = ""
        if not said and self.process.poll() is not None:
            told = self.printed.read_text(encoding="utf-8", errors="replace")[-600:].strip()
            raise MinicompileError(f"no answer can be run: {told}")
        return str(json.loads(said)) if said else ENDED
