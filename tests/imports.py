"""The import graph of the package, read from its source: nothing is imported to draw it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minicompile"
BESIDE = ("plugins", "show", "debug", "lessons", "exporting", "bench", "custom")
"""Folders of the package that don't belong to the core."""


@dataclass(frozen=True)
class Import:
    """One import: what `importer` takes, as a dotted name (module, or module and name), and how.

    `inside` is True in a function body: it runs when called. `typing_only` is True under TYPE_CHECKING: it
    never runs, though it still says that one module knows of another.
    """

    importer: str
    target: str
    line: int
    inside: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """`minicompile.ops.graph` for minicompile/ops/graph.py."""
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def core_files() -> tuple[Path, ...]:
    """Return the Python files of the core, by their paths in the package."""
    files = (path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))
    return tuple(file for file in files if file.parts[0] not in BESIDE)


@cache
def trees(package: Path = PACKAGE) -> dict[str, ast.Module]:
    """Every module's syntax tree, by its dotted name."""
    return {
        module_name(path, package): ast.parse(path.read_text(encoding="utf-8"), str(path))
        for path in sorted(package.rglob("*.py"))
    }


def is_type_checking(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:` or `if typing.TYPE_CHECKING:`"""
    test = node.test if isinstance(node, ast.If) else None
    name = test.id if isinstance(test, ast.Name) else getattr(test, "attr", "")
    return name == "TYPE_CHECKING"


def statements(
    tree: ast.AST, inside: bool = False, typing_only: bool = False
) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Every node below `tree`, with whether it is in a function and whether it is under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        yield node, inside, typing_only
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if is_type_checking(node):
            assert isinstance(node, ast.If)
            yield from statements(ast.Module(node.body, []), inside, True)
            yield from statements(ast.Module(node.orelse, []), inside, typing_only)
        else:
            yield from statements(node, inside or function, typing_only)


def absolute(node: ast.ImportFrom, importer: str, is_package: bool) -> str:
    """The module of a `from` import, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = importer.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def imports_of(module: str, tree: ast.Module, known: frozenset[str] = frozenset()) -> list[Import]:
    """All imports of a module. `from a import b` is an import of `a.b`."""
    is_package = any(name.startswith(module + ".") for name in known)
    found: list[Import] = []
    for node, inside, typing_only in statements(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = absolute(node, module, is_package)
            targets = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [Import(module, target, node.lineno, inside, typing_only) for target in targets]
    return found


@cache
def all_imports(package: Path = PACKAGE) -> list[Import]:
    """Every import of every module of the package."""
    modules = trees(package)
    known = frozenset(modules)
    return [found for name, tree in modules.items() for found in imports_of(name, tree, known)]


def aliases(module: str, tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted name that it was imported as, anywhere in the module."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or root] = root
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str | None:
    """`torch.fx._pytree` for the expression `fx._pytree` after `from torch import fx`; None if not a path."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return None if base is None else f"{base}.{node.attr}"
    return None


def dotted_uses(module: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every imported name that the module uses or imports, as a dotted path, with its line."""
    names = aliases(module, tree)
    for found in imports_of(module, tree):
        yield found.target, found.line
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path = dotted(node, names)
            if path is not None:
                yield path, node.lineno
