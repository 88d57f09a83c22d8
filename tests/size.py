"""`make size`: lines of Python and C by room, against the budget. Exit code 1 if it is exceeded.

The budget counts every line. Beside it stand the lines on which a token begins (no blanks, no comments, a
docstring once). The package is over its budget: `*_DEBT` says by how much at most; it is to be paid back,
and a rise needs a reason in its commit.
"""

from __future__ import annotations

import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "minicompile"
ROOMS = ("dynamo", "aot", "lowering", "scheduling", "codegen", "runtime")
ROOM_BUDGET = 20_000
PACKAGE_BUDGET = 26_000
ROOM_DEBT = 16_731
PACKAGE_DEBT = 37_484
"""Lines over budget that are owed."""
LONG_FILE = 600

SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


@dataclass(frozen=True)
class Size:
    """Lines of a file or of several: all, and those on which a token begins."""

    lines: int = 0
    code: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.lines + other.lines, self.code + other.code)

    def __str__(self) -> str:
        return f"{self.lines:>7,} {self.code:>7,}"


def size_of(source: str) -> Size:
    """Both counts of one Python file."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))[:-1]
    begun = {token.start[0] for token in tokens if token.type not in SILENT}
    return Size(len(source.splitlines()), len(begun))


def size_of_c(source: str) -> Size:
    """Both counts of one C or C++ file, whose comments stand on lines of their own."""
    lines = [line.strip() for line in source.splitlines()]
    return Size(len(lines), sum(1 for x in lines if x and not x.startswith(("//", "/*", "*"))))


def sizes() -> dict[Path, Size]:
    """Every Python and C file of the package, by its path inside it."""
    counters = {".py": size_of, ".c": size_of_c, ".h": size_of_c}
    files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in counters)
    return {
        path.relative_to(PACKAGE): counters[path.suffix](path.read_text(encoding="utf-8"))
        for path in files
    }


def totals(found: dict[Path, Size]) -> tuple[Size, Size]:
    """The compiler rooms, and the whole package."""
    rooms = (size for path, size in found.items() if path.parts[0] in ROOMS)
    return sum(rooms, Size()), sum(found.values(), Size())


def against(size: Size, budget: int) -> str:
    """The budget, and by how much it is exceeded."""
    over = size.lines - budget
    return f"budget {budget:,} lines" + (f", over by {over:,}" if over > 0 else "")


def report(found: dict[Path, Size]) -> str:
    """A line for each folder, the two budgets, and files long enough to want splitting."""
    folders: dict[str, Size] = {}
    for path, size in found.items():
        folder = path.parts[0] if len(path.parts) > 1 else "(top level)"
        folders[folder] = folders.get(folder, Size()) + size
    rooms, package = totals(found)
    lines = ["  lines    code"]
    lines += [
        f"{size}  {folder}" for folder, size in sorted(folders.items(), key=lambda i: -i[1].lines)
    ]
    lines += [f"{rooms}  compiler rooms ({against(rooms, ROOM_BUDGET)})"]
    lines += [f"{package}  whole package ({against(package, PACKAGE_BUDGET)})"]
    lines += [
        f"{size}  {path} is over {LONG_FILE} lines"
        for path, size in found.items()
        if size.lines > LONG_FILE
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    everything = sizes()
    print(report(everything))
    rooms, package = totals(everything)
    sys.exit(rooms.lines > ROOM_BUDGET or package.lines > PACKAGE_BUDGET)
