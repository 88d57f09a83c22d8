"""`python alone.py LESSON.ipynb`: execute a lesson where the repository is not."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main(file: Path) -> int:
    """Execute every cell; 1 if one raised."""
    notebook, start = nbformat.read(file, as_version=4), time.monotonic()
    where = {"metadata": {"path": str(file.parent)}}
    NotebookClient(
        notebook, kernel_name="python3", timeout=900, allow_errors=True, resources=where
    ).execute()
    outputs = [(cell.id, out) for cell in notebook.cells for out in cell.get("outputs", [])]
    errors = [
        f"{name}: {out.ename}: {out.evalue}" for name, out in outputs if out.output_type == "error"
    ]
    pictures = sum("text/html" in out.get("data", {}) for _, out in outputs)
    print(*errors, sep="\n", end="\n" * bool(errors))
    print(
        f"{file.name}: {len(outputs)} outputs, {pictures} pictures, {time.monotonic() - start:.0f} s"
    )
    return 1 if errors or not pictures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
