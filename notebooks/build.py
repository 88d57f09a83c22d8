"""`python -m notebooks.build`: notebooks from their text sources, executed.

    notebooks/src/NAME.py (jupytext's percent format) -> notebooks/NAME.ipynb

The same source gives the same bytes: cells are called by name or by place, execution times are left out, the
hash seed is fixed. A cell tagged "varies" (its output has times in it) is executed and keeps no output. The
notebook records what it was made with; `--check` builds again and compares: bytes on the same versions and
kind of processor, otherwise sources only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import platform
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minicompile.errors import MinicompileError
from minicompile.options import environment

VARIES = "varies"
"""Tag of cells whose output differs from run to run."""

LARGEST = 1_000_000
"""Most bytes of a notebook."""

TIMEOUT_SECONDS = 900
"""Longest time a cell may take."""

LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"}

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


def read_source(source: Path) -> Any:
    """The notebook that a text source describes, not executed."""
    jupytext = need("jupytext")
    notebook = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        name = cell.metadata.get("name") or f"cell-{number:03d}"
        cell["id"] = re.sub(r"[^\w-]", "-", name)[:64]
    ids = Counter(cell["id"] for cell in notebook.cells)
    repeated = sorted(name for name, count in ids.items() if count > 1)
    if repeated:
        raise MinicompileError(f"{source.name}: several cells are called {', '.join(repeated)}")
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": LANGUAGE,
        STAMP: stamp(source.read_text(encoding="utf-8")),
    }
    return notebook


def need(module: str) -> Any:
    """Import something the extra `lessons` brings. Raises MinicompileError that says so."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MinicompileError(f"{error}; pip install 'minicompile[lessons]' brings it") from error


def execute(notebook: Any, source: Path) -> None:
    """Run every cell in a fresh kernel. Raises MinicompileError with the cell that failed."""
    client = need("nbclient")
    package = str(Path(__file__).parent.parent)
    with environment(
        PYTHONHASHSEED="0",
        PYTHONPATH=package,
        PYDEVD_DISABLE_FILE_VALIDATION="1",
        MINICOMPILE_PROGRESS="0",
    ):
        where = {"metadata": {"path": str(source.parent.parent)}}
        runner = client.NotebookClient(
            notebook, timeout=TIMEOUT_SECONDS, kernel_name="python3", resources=where
        )
        try:
            runner.execute()
        except client.exceptions.CellExecutionError as error:
            raise MinicompileError(f"{source.name}: a cell failed:\n{error}") from error


def tidy(notebook: Any) -> None:
    """Take out what differs between two runs."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = LANGUAGE
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.outputs = [] if VARIES in cell.metadata.get("tags", []) else joined(cell.outputs)
        for output in cell.outputs:
            output.get("metadata", {}).pop("execution", None)


def joined(outputs: Sequence[Any]) -> list[Any]:
    """Printed text in one piece: where it was cut depends on timing."""
    out: list[Any] = []
    for output in outputs:
        if output.output_type == "stream" and out and out[-1].get("name") == output.name:
            out[-1].text += output.text
        else:
            out.append(output)
    return out


def build(source: Path) -> str:
    """The notebook's text, executed. Raises MinicompileError if a cell fails or the notebook is too large."""
    nbformat = need("nbformat")
    notebook = read_source(source)
    execute(notebook, source)
    tidy(notebook)
    nbformat.validate(notebook)
    text: str = nbformat.writes(notebook) + "\n"
    size = len(text.encode())
    if size > LARGEST:
        raise MinicompileError(
            f"{source.stem}.ipynb would have {size:,} bytes, allowed {LARGEST:,}"
        )
    return text


def why_stale(source: Path, target: Path) -> str:
    """One sentence if the saved notebook is not what its source gives, else ""."""
    if not target.exists():
        return f"{target.name} has not been built"
    saved_text = target.read_text(encoding="utf-8")
    saved = json.loads(saved_text)["metadata"].get(STAMP, {})
    here = stamp(source.read_text(encoding="utf-8"))
    if saved.get("source") != here["source"]:
        return f"{target.name} was built from another version of {source.name}"
    rebuilt = build(source)
    if saved == here and rebuilt != saved_text:
        return f"{target.name} is not what {source.name} gives: {difference(saved_text, rebuilt)}"
    return ""


def difference(saved: str, rebuilt: str) -> str:
    """The first line that differs, both ways."""
    pairs = itertools.zip_longest(saved.split("\n"), rebuilt.split("\n"), fillvalue="(nothing)")
    number, (ours, theirs) = next(
        (i, pair) for i, pair in enumerate(pairs, 1) if pair[0] != pair[1]
    )
    return f"line {number}: saved {ours.strip()[:120]!r}, rebuilt {theirs.strip()[:120]!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Build (or check) the named lessons, or all."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.build", description=__doc__)
    which = "lessons by the start of their name, such as 00 (default: all)"
    parser.add_argument("names", nargs="*", help=which)
    check = "build, compare with what is saved, write nothing"
    parser.add_argument("--check", action="store_true", help=check)
    chosen = parser.parse_args(arguments)
    try:
        folder = find_folder(Path.cwd())
        sources = sorted((folder / "src").glob("*.py"))
        wanted = [s for s in sources if not chosen.names or s.stem.startswith(tuple(chosen.names))]
        if not wanted:
            known = ", ".join(source.stem for source in sources)
            raise MinicompileError(f"no lesson is called so; there are {known}")
        stale = [build_or_check(s, folder / f"{s.stem}.ipynb", chosen.check) for s in wanted]
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
    text = build(source)
    target.write_text(text, encoding="utf-8")
    print(f"{target.name}: {len(text.encode()):,} bytes")
    return False


if __name__ == "__main__":
    sys.exit(main())
