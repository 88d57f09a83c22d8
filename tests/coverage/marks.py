"""Marks which lines of the core a process executes, and the processes that it starts.

When a module of the core is imported, a mark is put before each of its statements: `__lines__[N] = 1`. N
numbers the lines of all files of the core, one after the other; `__lines__` is memory in a file that several
processes share. (A tracer would not do: while Python traces, the frame hook leaves functions alone, and
nothing is compiled.) A statement of several lines counts as its first one.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import importlib.machinery
import itertools
import mmap
import sys
import types
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from tests.imports import PACKAGE, core_files

VARIABLE = "MINICOMPILE_MARKS"
"""The environment variable that names the file of marks."""

CAPTURED = {"Context", "Unrecorded", "call_module", "calling"}
"""Classes and functions of dynamo that are captured as a user's are: marks would break the graph."""


@functools.cache
def first_lines() -> dict[Path, int]:
    """Return the number of line 0 of each file of the core, and for `Path()` the number after the last."""
    lengths = (len((PACKAGE / file).read_bytes().splitlines()) + 1 for file in core_files())
    return dict(zip((*core_files(), Path()), itertools.accumulate(lengths, initial=0)))


def core_digest() -> str:
    """Return a digest of the core's text: the numbers of lines hold for this text alone."""
    texts = b"\0".join((PACKAGE / file).read_bytes() for file in core_files())
    return hashlib.sha256(texts).hexdigest()


def blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements of a tree, but for those of CAPTURED."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(tree, name, None), list):
            yield block
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in CAPTURED):
            yield from blocks(node)


def is_marked(statement: ast.stmt) -> bool:
    """May a mark stand before it? Not before docstrings, declarations, imports from the future."""
    match statement:
        case ast.Expr(ast.Constant(str())) | ast.ImportFrom(module="__future__"):
            return False
    return not isinstance(statement, ast.Global | ast.Nonlocal)


def marked(source: bytes, first: int) -> ast.Module:
    """Return the tree of a file with a mark before each statement; `first` is the number of line 0."""
    tree = ast.parse(source)
    for block in [*blocks(tree)]:
        for statement in filter(is_marked, [*block]):
            mark = ast.parse(f"__lines__[{first + statement.lineno}] = 1").body[0]
            for node in ast.walk(mark):
                ast.copy_location(node, statement)
            block.insert(block.index(statement), mark)
    return tree


class MarkingLoader(importlib.machinery.SourceFileLoader):
    """Loads a module of the core with marks, and leaves no bytecode on the disk."""

    def get_code(self, fullname: str) -> types.CodeType:
        first = first_lines()[Path(self.path).relative_to(PACKAGE)]
        tree = marked(self.get_data(self.path), first)
        return compile(tree, self.path, "exec", dont_inherit=True)


class MarkingFinder(MetaPathFinder):
    """Finds modules as Python does, and has those of the core loaded with marks."""

    def __init__(self) -> None:
        self.files = {str(PACKAGE / file) for file in core_files()}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] != PACKAGE.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin in self.files:
            spec.loader = MarkingLoader(fullname, spec.origin)
        return spec


def put_marks(file: str) -> mmap.mmap:
    """Let modules that are imported from now on mark in `file` what is executed. Returns its memory."""
    with open(file, "r+b") as opened:
        lines = mmap.mmap(opened.fileno(), 0)
    vars(builtins)["__lines__"] = (
        lines  # also where `python -m` runs a module in a namespace of its own
    )
    sys.meta_path.insert(0, MarkingFinder())
    return lines
