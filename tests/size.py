"""`make size`: tokens of Python by folder, against what CI allows and what the architecture aims at.

A token is one of Python's own tokenizer; comments, docstrings, blank lines and indentation don't count. Text
of kernels in a string counts as the one string that it is. C and JavaScript are counted in lines, apart. The
last lines show by the same rule what the installed torch has.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minicompile.bench.prices import tokens_of
from tests.imports import PACKAGE, ROOT, core_files

TESTS = ROOT / "tests"
TORCH = ("torch/_dynamo", "torch/_functorch", "torch/_inductor")


@dataclass(frozen=True)
class Budget:
    """What CI allows, and what is aimed at, in tokens. The first only ever falls, until it is the second."""

    allowed: int
    aim: int


BUDGETS = {
    "core": Budget(190_000, 190_000),
    "package": Budget(350_000, 350_000),
    "tests": Budget(413_000, 410_000),
}


@dataclass(frozen=True)
class Size:
    """Tokens and lines of a Python file, or of several."""

    tokens: int = 0
    lines: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.tokens + other.tokens, self.lines + other.lines)

    def __str__(self) -> str:
        return f"{self.tokens:>10,} {self.lines:>8,}"


def size_of(path: Path) -> Size:
    source = path.read_text(encoding="utf-8")
    return Size(tokens_of(source), len(source.splitlines()))


@functools.cache
def sizes(root: Path) -> dict[Path, Size]:
    """Return the size of every Python file under `root`, by its path there."""
    return {path.relative_to(root): size_of(path) for path in sorted(root.rglob("*.py"))}


def part(path: Path) -> str:
    """Return the folder that a file of the package is listed under; a plug-in is one of its own."""
    depth = 2 if path.parts[0] == "plugins" else 1
    return "/".join(path.parts[:-1][:depth]) or "front door"


def totals() -> dict[str, Size]:
    """Return the size of what BUDGETS names."""
    package = sizes(PACKAGE)
    core = (package[file] for file in core_files())
    return {
        "core": sum(core, Size()),
        "package": sum(package.values(), Size()),
        "tests": sum(sizes(TESTS).values(), Size()),
    }


def report(torch_folders: Sequence[str] = TORCH) -> str:
    """Return the table as text, with what the installed torch has in `torch_folders`."""
    folders: dict[str, Size] = {}
    for path, size in sizes(PACKAGE).items():
        folders[part(path)] = folders.get(part(path), Size()) + size
    rows = ["    tokens    lines"]
    rows += [
        f"{folders[name]}  {name}" for name in sorted(folders, key=lambda n: (n.count("/"), n))
    ]
    for name, size in totals().items():
        budget = BUDGETS[name]
        rows.append(f"{size}  {name} (at most {budget.allowed:,}; aim {budget.aim:,})")
    for suffix in (".c", ".h", ".js", ".css"):
        texts = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob(f"*{suffix}"))]
        if texts:
            lines = sum(len(text.splitlines()) for text in texts)
            rows.append(f"{'':>10} {lines:>8,}  {suffix[1:]} in the package")
    spec = importlib.util.find_spec("torch")
    for folder in torch_folders if spec is not None and spec.origin is not None else ():
        size = sum(sizes(Path(spec.origin).parents[1] / folder).values(), Size())  # type: ignore[union-attr, arg-type]
        rows.append(f"{size}  {folder}, installed")
    return "\n".join(rows)


def main() -> int:
    """Print the table. Returns 1 if there is more than CI allows."""
    print(report())
    return int(any(size.tokens > BUDGETS[name].allowed for name, size in totals().items()))


if __name__ == "__main__":
    sys.exit(main())
