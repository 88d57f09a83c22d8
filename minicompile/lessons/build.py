"""`python -m minicompile.lessons.build`: notebooks from their text sources, executed.

    notebooks/src/NAME.py (jupytext's percent format) -> notebooks/NAME.ipynb

The same source gives the same bytes: cells are called by name or by place, execution times are left out, the
hash seed is fixed. A cell tagged "varies" (its output has times in it) is executed and keeps no output. The
notebook records what it was made with; `--check` builds again and compares: bytes on the same versions and
kind of processor, otherwise sources only.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minicompile.errors import MinicompileError
from minicompile.options import environment

VARIES = "varies"
"""Tag of cells whose output differs from run to run."""

LARGEST = 1_000_000
"""Most bytes of a notebook."""

STAMP = "minicompile"
"""Where a notebook's metadata says what it was made with."""


def find_folder(start: Path) -> Path:
    """The `notebooks` folder above `start`. Raises MinicompileError if there is none."""
    for folder in (start, *start.parents):
        if (folder / "notebooks" / "src").is_dir():
            return folder / "notebooks"
    raise MinicompileError("no folder notebooks/src here or above: run this inside the repository")


def stamp(source: str) -> dict[str, str]:
    """What the outputs of a notebook depend on."""
    import torch

    return {
        "source": hashlib.sha256(source.encode()).hexdigest()[:16],
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def cell_id(cell: Any, number: int) -> str:
    """The cell's name if it has one, else its place."""
    name = cell.metadata.get("name")
    return re.sub(r"[^\w-]", "-", name)[:64] if name else f"cell-{number:03d}"


def read_source(source: Path) -> Any:
    """The notebook that a text source describes, not executed."""
    jupytext = need("jupytext")
    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell["id"] = cell_id(cell, number)
    ids = [cell["id"] for cell in notebook.cells]
    repeated = sorted({name for name in ids if ids.count(name) > 1})
    if repeated:
        raise MinicompileError(f"{source.name}: several cells are called {', '.join(repeated)}")
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
        STAMP: stamp(source.read_text(encoding="utf-8")),
    }
    return notebook


def need(module: str) -> Any:
    """Import something the extra `lessons` brings. Raises MinicompileError that says so."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MinicompileError(f"{error}; pip install 'minicompile[lessons]' brings it") from error


def execute(notebook: Any, folder: Path, timeout: int) -> None:
    """Run every cell in a fresh kernel. Raises MinicompileError with the cell that failed."""
    client = need("nbclient")
    package = str(Path(__file__).parent.parent.parent)
    with environment(PYTHONHASHSEED="0", PYTHONPATH=package, PYDEVD_DISABLE_FILE_VALIDATION="1"):
        runner = client.NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            runner.execute()
        except client.exceptions.CellExecutionError as error:
            raise MinicompileError(f"a cell failed:\n{error}") from error


def tidy(notebook: Any) -> None:
    """Take out what differs between two runs."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {
        key: notebook.metadata["language_info"][key]
        for key in ("name", "file_extension", "mimetype")
    }
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code" and VARIES in cell.metadata.get("tags", []):
            cell.outputs = []
        for output in cell.get("outputs", []):
            output.get("metadata", {}).pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)


def joined(outputs: Sequence[Any]) -> list[Any]:
    """Printed text in one piece: where it was cut depends on timing."""
    out: list[Any] = []
    for output in outputs:
        stream = output.output_type == "stream"
        if stream and out and out[-1].get("name") == output.name:
            out[-1].text += output.text
        else:
            out.append(output)
    return out


def build(source: Path, timeout: int = 900) -> str:
    """The notebook's text, executed. Raises MinicompileError if a cell fails or the notebook is too large."""
    nbformat = need("nbformat")
    notebook = read_source(source)
    execute(notebook, source.parent.parent, timeout)
    tidy(notebook)
    nbformat.validate(notebook)
    text: str = nbformat.writes(notebook) + "\n"
    if len(text.encode()) > LARGEST:
        raise MinicompileError(
            f"{source.stem}.ipynb would have {len(text.encode()):,} bytes, allowed {LARGEST:,}"
        )
    return text


def why_stale(source: Path, target: Path, timeout: int = 900) -> str:
    """One sentence if the saved notebook is not what its source gives, else ""."""
    import json

    if not target.exists():
        return f"{target.name} has not been built"
    saved_text = target.read_text(encoding="utf-8")
    saved = json.loads(saved_text)["metadata"].get(STAMP, {})
    here = stamp(source.read_text(encoding="utf-8"))
    if saved.get("source") != here["source"]:
        return f"{target.name} was built from another version of {source.name}"
    rebuilt = build(source, timeout)
    if saved == here and rebuilt != saved_text:
        return f"{target.name} is not what {source.name} gives: {difference(saved_text, rebuilt)}"
    return ""


def difference(saved: str, rebuilt: str) -> str:
    """The first line that differs, both ways."""
    ours, theirs = saved.splitlines(), rebuilt.splitlines()
    for number, (a, b) in enumerate(zip(ours, theirs), 1):
        if a != b:
            return f"line {number}: saved {a.strip()[:120]!r}, rebuilt {b.strip()[:120]!r}"
    return f"saved {len(ours)} lines, rebuilt {len(theirs)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build (or check) the named lessons, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m minicompile.lessons.build", description=__doc__
    )
    parser.add_argument(
        "names", nargs="*", help="lessons by the start of their name, such as 00 (default: all)"
    )
    parser.add_argument(
        "--check", action="store_true", help="build, compare with what is saved, write nothing"
    )
    chosen = parser.parse_args(arguments)
    try:
        folder = find_folder(Path.cwd())
        sources = sorted((folder / "src").glob("*.py"))
        wanted = [s for s in sources if not chosen.names or s.stem.startswith(tuple(chosen.names))]
        if not wanted:
            raise MinicompileError(
                f"no lesson is called so; there are {', '.join(s.stem for s in sources)}"
            )
        stale = [
            build_or_check(source, folder / f"{source.stem}.ipynb", chosen.check)
            for source in wanted
        ]
    except MinicompileError as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if any(stale) else 0


def build_or_check(source: Path, target: Path, check: bool) -> bool:
    """Do one lesson and say what was done; True if it was found stale."""
    if check:
        sentence = why_stale(source, target)
        print(sentence or f"{target.name} is up to date")
        return bool(sentence)
    try:
        text = build(source)
    except MinicompileError as error:
        raise MinicompileError(f"{source.name}: {error}") from error
    target.write_text(text, encoding="utf-8")
    print(f"{target.name}: {len(text.encode()):,} bytes")
    return False


if __name__ == "__main__":
    sys.exit(main())
