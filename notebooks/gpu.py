"""`python -m notebooks.gpu`: run the lessons' GPU cells on a machine with a GPU, and keep what they print.

Each function under `@on_gpu("14-tiles")` in `notebooks/src/NN_*.py` gives text; it is written to
`notebooks/gpu/14-tiles.json` with the hash of the function, the GPU and the versions. A notebook built
without a GPU shows that text. A lesson's GPU cells are tagged "gpu" and use what its "setup" cells define:
only these are executed, as plain Python, so that neither Jupyter nor jupytext is needed here.
"""

from __future__ import annotations

import argparse
import ast
import linecache
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minicompile.errors import MinicompileError
from minicompile.lessons.gpu import GpuResult, save, source_hash

HEAD = re.compile(r"^# %%(?P<rest>.*)$", re.MULTILINE)
DECORATOR = "on_gpu"


@dataclass(frozen=True)
class Cell:
    """A code cell of a source: its name, its tags, its text."""

    name: str
    tags: tuple[str, ...]
    text: str


def code_cells(source: Path) -> list[Cell]:
    """The code cells of a text source, read without jupytext."""
    text = source.read_text(encoding="utf-8")
    heads = list(HEAD.finditer(text))
    ends = [head.start() for head in heads[1:]] + [len(text)]
    found = []
    for number, (head, end) in enumerate(zip(heads, ends, strict=True)):
        rest = head["rest"]
        if "[markdown]" in rest:
            continue
        name = re.search(r'name="([^"]*)"', rest)
        tags = re.search(r"tags=(\[[^\]]*\])", rest)
        found.append(
            Cell(
                name[1] if name else f"cell-{number:03d}",
                tuple(ast.literal_eval(tags[1])) if tags else (),
                text[head.end() : end].strip("\n"),
            )
        )
    return found


def gpu_functions(source: Path) -> dict[str, str]:
    """The hash of each GPU function of a source, by the name of its result; nothing is executed."""
    found: dict[str, str] = {}
    for cell in code_cells(source):
        if "wrong" in cell.tags or DECORATOR not in cell.text:
            continue
        for node in ast.parse(cell.text).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                match decorator:
                    case ast.Call(func=ast.Name(id="on_gpu"), args=[ast.Constant(value=str(name))]):
                        lines = cell.text.splitlines()[decorator.lineno - 1 : node.end_lineno]
                        found[name] = source_hash("\n".join(lines))
    return found


def run(source: Path) -> Iterator[GpuResult]:
    """Execute a lesson's setup and GPU cells: the results that they made on the GPU of this machine.

    Raises MinicompileError for one that used no memory of the GPU: it has launched nothing there.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells(source):
        if not {"setup", "gpu"} & set(cell.tags):
            continue
        filename = f"<{source.stem} {cell.name}>"
        # functions look for their own source
        lines = cell.text.splitlines(keepends=True)
        linecache.cache[filename] = (len(cell.text), None, lines, filename)
        torch.cuda.reset_peak_memory_stats()
        known = set(map(id, namespace.values()))
        exec(compile(cell.text, filename, "exec"), namespace)
        made = [v for v in namespace.values() if isinstance(v, GpuResult) and id(v) not in known]
        if made and not torch.cuda.max_memory_allocated():
            raise MinicompileError(f"{filename} used no memory of the GPU")
        yield from made


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the results of the named lessons, or of all that have GPU cells."""
    parser = argparse.ArgumentParser(prog="python -m notebooks.gpu", description=__doc__)
    here = Path(__file__).parent
    parser.add_argument("names", nargs="*", help="lessons by number, such as 14 (default: all)")
    where = "folder to write to (default: notebooks/gpu)"
    parser.add_argument("--out", type=Path, default=here / "gpu", help=where)
    chosen = parser.parse_args(arguments)
    sources = [s for s in sorted((here / "src").glob("*.py")) if gpu_functions(s)]
    wanted = [s for s in sources if not chosen.names or s.stem.startswith(tuple(chosen.names))]
    if not wanted:
        known = ", ".join(source.stem for source in sources)
        print(f"no such lesson has GPU cells; there are {known}", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("torch sees no GPU here: run this on a machine that has one", file=sys.stderr)
        return 1
    for source in wanted:
        for result in run(source):
            save(result, chosen.out)
            print(f"{result.name}\n{result}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
