"""`minicompile trace SCRIPT --out FOLDER ...`: run a script and write down all that it compiles.

FOLDER/index.html       what was compiled, what ran in eager and why
FOLDER/01_name/         a folder for each compilation that reached a graph, as `Trace.save` writes it
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

from minicompile.debug.limit import Limit, Report
from minicompile.dynamo.result import GraphBreak
from minicompile.errors import MinicompileError
from minicompile.ops.display import count_text
from minicompile.ops.events import Compilation, Event, observer
from minicompile.options import child_environment
from minicompile.pipeline_result import Trace


@dataclass
class Compiled:
    """One compilation as it was heard of."""

    of: Compilation
    trace: Trace | None = None
    breaks: list[GraphBreak] = field(default_factory=list)
    result: str = "did not finish"


class TraceRecorder:
    """An observer that keeps a trace of every compilation."""

    def __init__(self) -> None:
        self.made: list[Compiled] = []

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            self.made.append(Compiled(event.of))
        now = next(c for c in reversed(self.made) if c.of == event.of)
        if event.kind == "capture":
            now.trace = Trace.watching(event.subject)
        elif event.kind == "break":
            now.breaks.append(event.subject)
        elif event.kind == "done":
            done = "compiled" if event.subject is not None else "runs in eager"
            now.result = f"{done}, {event.seconds:.2f} s"

    def write(self, folder: Path, script: str) -> Path:
        """All traces and the page over them; gives that page's path."""
        from minicompile.show.html import STYLE, box, page, table, text

        folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for number, compiled in enumerate(self.made, 1):
            name = text(compiled.of.name)
            if compiled.trace is not None:
                inside = f"{number:02}_{re.sub(r'[^A-Za-z0-9]+', '_', compiled.of.name).strip('_')}"
                compiled.trace.save(folder / inside)
                name = f'<a href="{inside}/index.html">{name}</a>'
            breaks = "<br>".join(map(text, compiled.breaks))
            rows.append([text(compiled.of), name, compiled.result, breaks])
        content = table(("", "function", "", "graph breaks"), rows)
        index = folder / "index.html"
        document = page(f"{script} through minicompile", STYLE + box(script, self.told, content))
        index.write_text(document, encoding="utf-8")
        return index

    @property
    def told(self) -> str:
        return count_text(len(self.made), "compilation") if self.made else NOTHING


NOTHING = "nothing was compiled: no function that mc.compile returned was called"


def add_arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("--out", metavar="FOLDER", type=Path, default=Path("minicompile_trace"))
    rest = "--out FOLDER may stand here too, first; all else is the script's own"
    add_script(to, "the Python file to run", rest)


def add_script(to: argparse.ArgumentParser, what: str, rest: str = "the script's own") -> None:
    """The arguments of a command that runs a script: it, and all that comes after it."""
    to.add_argument("script", help=what)
    to.add_argument("arguments", nargs=argparse.REMAINDER, help=rest)


def script_of(chosen: argparse.Namespace) -> Path:
    """The script. Raises MinicompileError if it isn't there."""
    path = Path(chosen.script)
    if not path.is_file():
        raise MinicompileError(f"there is no script {path}")
    return path


def run_limited(
    command: Sequence[str], limit: Limit, timeout: float | None = None
) -> tuple[str, Report]:
    """Run a script in a process of its own under a limit: how it failed, and what it reported."""
    with tempfile.TemporaryDirectory(prefix="minicompile_bisect_") as folder:
        environment = child_environment(
            MINICOMPILE_BISECT=json.dumps(astuple(limit)),
            MINICOMPILE_BISECT_REPORT=folder,
            PYTHONHASHSEED="0",  # sets in the same order
        )
        failure, whole = "", [sys.executable, *command]
        try:
            done = subprocess.run(
                whole, env=environment, capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            failure = f"took over {timeout:g} s"
        else:
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:]
                failure = ": ".join([f"exit code {done.returncode}", *last])
        return failure, Report.read(Path(folder))


def execute(script: Path, argv: list[str]) -> int:
    """Run a script as Python would; gives the exit code."""
    before = sys.argv, sys.path
    sys.argv, sys.path = argv, [str(script.parent), *sys.path[1:]]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path = before
    return 0


def run(chosen: argparse.Namespace) -> int:
    """The command. The script's exit code, 1 if it raised; its traces are written all the same."""
    script, rest = script_of(chosen).absolute(), chosen.arguments
    if rest[:1] == ["--out"]:
        chosen.out, rest = Path(rest[1]), rest[2:]
    recorder, out = TraceRecorder(), chosen.out.absolute()  # the script may change folders
    with observer.scoped():
        observer("trace of a script")(recorder)
        code = execute(script, [chosen.script, *rest])
    index = recorder.write(out, script.name)
    print(f"{recorder.told}; see {index}", file=sys.stderr)
    return code
