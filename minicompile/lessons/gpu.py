"""Cells that need a GPU: they run where there is one; elsewhere they show what was saved on a named one.

A result is text, kept in `notebooks/gpu/NAME.json` with the source hash of the function that made it, the
GPU and the versions. A result that another version of the function made is refused, so a stale one fails
the build. `python -m notebooks.gpu` makes them all, on a machine with a GPU.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from minicompile.errors import MinicompileError
from minicompile.lessons.notebook import notebooks_folder
from minicompile.ops.display import Shown
from minicompile.show.html import shows
from minicompile.show.html import text as escaped


@dataclass(frozen=True)
class GpuResult(Shown):
    """What a cell printed on a GPU: its text, and where it was made; `saved` if not just now."""

    name: str
    source: str
    text: str
    made_on: str
    saved: bool = True

    def __str__(self) -> str:
        how = "a saved result, made by `python -m notebooks.gpu`" if self.saved else "made just now"
        return f"{self.text}\n({how} on {self.made_on})"


@shows(GpuResult)
def result_view(result: GpuResult) -> str:
    return f'<pre style="font-family:monospace">{escaped(result)}</pre>'


def on_gpu(name: str) -> Callable[[Callable[[], str]], GpuResult]:
    """Decorator: run the function on the GPU, or give its saved result. `name`: lesson and topic, "14-tiles".

    Raises MinicompileError where there is neither a GPU nor a saved result of this very function.
    """

    def result(function: Callable[[], str]) -> GpuResult:
        source = source_hash(inspect.getsource(function))
        if torch.cuda.is_available():
            return GpuResult(name, source, function(), machine(), saved=False)
        return load(name, source)

    return result


def source_hash(text: str) -> str:
    """What tells one version of a function from another: its text, decorator included."""
    return hashlib.sha256(textwrap.dedent(text).strip().encode()).hexdigest()[:16]


def machine() -> str:
    """The GPU and the versions that a result depends on."""
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


def load(name: str, source: str, folder: Path | None = None) -> GpuResult:
    """A saved result. Raises MinicompileError if there is none, or it is of another function."""
    path = (folder or notebooks_folder() / "gpu") / f"{name}.json"
    if not path.exists():
        raise MinicompileError(
            f"no GPU here, and no saved result {path.name}: run python -m notebooks.gpu where there is one"
        )
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["source"] != source:
        raise MinicompileError(
            f"{path.name} was made by another version of this cell: run python -m notebooks.gpu"
        )
    return GpuResult(name, source, saved["text"], saved["made_on"])


def save(result: GpuResult, folder: Path) -> None:
    """Write a result that was made just now."""
    folder.mkdir(parents=True, exist_ok=True)
    keep = {"source": result.source, "made_on": result.made_on, "text": result.text}
    path = folder / f"{result.name}.json"
    path.write_text(json.dumps(keep, indent=1) + "\n", encoding="utf-8")
