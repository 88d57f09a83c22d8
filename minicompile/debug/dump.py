"""The debug folder: every stage of each compilation in a file, as it is made.

`options.trace` (`MINICOMPILE_COMPILE_DEBUG=1`) writes into `options.debug_dir`. `[n/k]` is the compilation:
the k-th of function n.

| file | what |
| --- | --- |
| fx_graph_readable.py, fx_graph_transformed.py | the captured graph, and after pre-grad passes |
| model__n__joint_k.py | forward and backward in one, as FX prints graphs |
| model__n__forward_k.py, model__n__forward_transformed_k.py | the forward before and after post-grad passes |
| ir_model__n__forward_k.txt, ir_pre_fusion_.., ir_post_fusion_.. | loops, and their bodies around fusion |
| output_code.py | kernels and wrappers |
| trace.jsonl | one line per event, below |

An error of the compiler's own is reported whether or not anything is asked for: `error_<digest>/` in the same
folder has these files as far as the compilation came, and

| file | what |
| --- | --- |
| error.txt | the exception with its traceback |
| versions.txt | minicompile, torch, Triton, Python, the system, the options |
| repro.py | the captured graph as a script: `minicompile minify` makes it smaller |

The same for the backward. Files without n and k hold one section after the other. Where `options.trace` is
off, the channels aot_joint_graph, aot_graphs, post_grad_graphs, ir_pre_fusion, ir_post_fusion and output_code
of `MINICOMPILE_LOGS` still write their files.

A line of trace.jsonl is `{"compilation": "0/1", "function", "kind", "graph", "files", "seconds", "took"}`,
with `failures` of guards at a start, and id, reason and line of a break.

A folder is one process's: what an earlier process left, by its trace.jsonl, is deleted first, so that the
files fit together. Processes that run at the same time need folders of their own.
The real compiler: torch/_inductor/debug.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from minicompile import __version__
from minicompile.compat import triton_api
from minicompile.debug import stages
from minicompile.debug.logs import levels
from minicompile.ops.events import CALLED, Event, Failure, observer
from minicompile.options import Options

SHARED = ("fx_graph_readable.py", "fx_graph_transformed.py", "output_code.py")
"""Files of all compilations."""


def files(event: Event) -> Iterator[tuple[str, str, Callable[[Any], str], Any]]:
    """(log channels that ask for it too, file name, what gives its text, of what) for each file."""
    made, of, whole = event.subject, event.of, event.graph
    name = f"model__{of.frame}__{{}}_{of.version}".format
    match event.kind:
        case "capture":
            yield "", SHARED[0], str, made.graph
        case "aot":
            yield "", SHARED[1], str, made.captured
            if made.joint is not None:
                yield "aot_joint_graph", f"{name('joint')}.py", stages.fx_text, made.joint
            for graph in ("forward", "backward"):
                if (split := stages.partitioned(made, graph)) is not None:
                    file, after = f"{name(graph)}.py", f"{name(f'{graph}_transformed')}.py"
                    yield "aot_graphs post_grad_graphs", file, stages.fx_text, split
                    yield "post_grad_graphs", after, stages.fx_text, getattr(made, graph)
        case "loops":
            yield "", f"ir_{name(whole)}.txt", str, made
        case "schedule":
            before, after = (f"ir_{when}_fusion_{name(whole)}.txt" for when in ("pre", "post"))
            yield "ir_pre_fusion", before, stages.pre_fusion, made
            yield "ir_post_fusion", after, stages.post_fusion, made
        case "graph":
            yield "output_code", SHARED[2], stages.output_code, made


def facts(event: Event) -> dict[str, Any]:
    """What trace.jsonl has of an event, apart from its files."""
    made = event.subject
    line: dict[str, Any] = {"compilation": str(event.of)[1:-1], "function": event.of.name}
    line |= {"kind": event.kind, "graph": event.graph, "seconds": event.seconds, "took": event.took}
    if event.kind == "start":
        line["failures"] = list(map(str, made))
    elif event.kind == "break":
        line |= {"id": made.id, "reason": made.reason, "line": str(made.user_line or "")}
    return line


class Folder:
    """Where one process writes. Raises OSError if it can't."""

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # the user's code is in it
        self.path, self.known, journal = path, set[str](), path / "trace.jsonl"
        for line in journal.read_text("utf-8").splitlines() if journal.exists() else ():
            with contextlib.suppress(ValueError):  # a process was killed while it wrote
                for name in json.loads(line)["files"]:
                    (path / Path(name).name).unlink(missing_ok=True)
        journal.unlink(missing_ok=True)

    def write(self, name: str, text: str) -> None:
        with (self.path / name).open("a" if name in self.known else "w", encoding="utf-8") as file:
            file.write(text.rstrip("\n") + "\n")
        self.known.add(name)


class Dump:
    """The observer that writes."""

    def __init__(self) -> None:
        self.begun: dict[int, list[Event]] = {}
        """What the compilations that go on have made."""
        self.folders: dict[tuple[int, str], Folder | None] = {}
        self.lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        of, options = event.of, event.of.options
        if event.kind == "error":
            event.subject.advice.extend(report(event.subject, self.begun.get(id(of), ())))
        elif event.kind == "done":
            self.begun.pop(id(of), None)
        elif event.kind not in CALLED:
            self.begun.setdefault(id(of), []).append(event)
        if not (options.trace or options.logs):
            return
        asked, wanted = levels(options.logs), dict[str, str]()
        for names, name, written, shown in files(event):
            if options.trace or not asked.keys().isdisjoint(names.split()):
                title = f"# {of} {of.name} {event.graph}".rstrip() + "\n"
                wanted[name] = title * (name in SHARED) + written(shown)
        if not (wanted or options.trace):
            return
        key = os.getpid(), options.debug_dir  # a forked process has a folder of its own
        line = {**facts(event), "files": [*wanted]}
        with self.lock:
            if key not in self.folders:
                self.folders[key] = None  # if it can't be made, that is told once
                self.folders[key] = Folder(Path(options.debug_dir))
            if (folder := self.folders[key]) is not None:
                for name, text in {"trace.jsonl": json.dumps(line), **wanted}.items():
                    folder.write(name, text)


def report(failure: Failure, made: Sequence[Event]) -> list[str]:
    """Write the folder about an error; gives what to tell the user."""
    from minicompile.debug.minify import captured  # which compiles: it needs all that is here

    error, advice = failure.error, list[str]()
    texts = {"error.txt": "".join(traceback.format_exception(error))}
    capture = next((event.subject for event in made if event.kind == "capture"), None)
    if capture is not None:
        with contextlib.suppress(TypeError):  # an argument that no script can make
            texts["repro.py"] = captured(capture, made[0].of.options, failure.told())
    for event in made:
        for _, name, written, shown in files(event):
            with contextlib.suppress(Exception):  # an error may have left it half done
                texts[name] = texts.get(name, "") + written(shown) + "\n"
    digest = hashlib.sha256(f"{error!r}{texts.get('repro.py')}".encode()).hexdigest()[:12]
    options = made[0].of.options if made else Options()
    folder = Path(options.debug_dir) / f"error_{digest}"
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the user's code is in it
    folder.mkdir(exist_ok=True)
    texts["versions.txt"] = f"{versions()}\n{options}\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    advice.append(f"  report: {folder}")
    if "repro.py" in texts:
        advice.append(f"  to make it small: python -m minicompile minify {folder / 'repro.py'}")
    return advice


def versions() -> str:
    """What decides how a program is compiled, apart from it."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"minicompile {__version__}\ntorch {torch.__version__}\nTriton {triton_api.triton_identity()}\n"
        f"Python {sys.version}\n{platform.platform()}\n{gpu}"
    )


observer("dump")(Dump())
