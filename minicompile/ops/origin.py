"""Provenance: which line of user code an object came from.

One `Origin` is one node of the captured torch-level graph. Every later object (ATen node, buffer, loop
body value, scheduler node, kernel line) carries a frozenset of them, so a kernel line can be followed back
to Python. The real compiler keeps the same facts in `node.meta["stack_trace"]` and `ir.IRNode.origins`.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass


@functools.cache
def short_file(file: str) -> str:
    """A file's name without what differs between machines and runs: its path below `sys.path`.

    Notebook cells, whose files are named after the process that made them, are all called `<cell>`.
    """
    name = os.path.basename(file)
    if "ipykernel_" in file or name.startswith("<ipython-input"):
        return "<cell>"
    if not os.path.isabs(file):
        return file
    folders = {os.path.abspath(entry) for entry in (*sys.path, os.getcwd())}
    above = [f for f in folders if file.startswith(f.rstrip(os.sep) + os.sep)]
    return os.path.relpath(file, max(above, key=len)).replace(os.sep, "/") if above else name


@dataclass(frozen=True, order=True)
class SourceLine:
    """A line of user code: file, 1-based line number and the function it is in."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The line's code, stripped; empty if the file can't be read."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def place(self) -> str:
        """`model.py:12`: the same on every machine."""
        return f"{short_file(self.file)}:{self.line}"

    def __str__(self) -> str:
        code = self.text
        return f"{self.place} in {self.function}" + (f": {code}" if code else "")


@dataclass(frozen=True, order=True)
class Origin:
    """One torch-level operation as the user wrote it.

    `node` is its name in the captured graph, `target` what was called (`torch.relu`), `stack` the
    user's lines from the outermost frame to the innermost, `module` the path of the nn.Module it
    ran in ("" if none).
    """

    node: str
    target: str
    stack: tuple[SourceLine, ...]
    module: str = ""

    @property
    def line(self) -> SourceLine | None:
        """The innermost user line."""
        return self.stack[-1] if self.stack else None

    def __str__(self) -> str:
        return f"{self.node} ({self.target})" + (f" at {self.line}" if self.stack else "")


Origins = frozenset[Origin]
NO_ORIGINS: Origins = frozenset()


def union(groups: Iterable[Origins]) -> Origins:
    """The origins of something made from several things."""
    return NO_ORIGINS.union(*groups)


def source_lines(origins: Origins) -> tuple[SourceLine, ...]:
    """The distinct innermost user lines, sorted."""
    return tuple(sorted({origin.line for origin in origins if origin.line is not None}))
