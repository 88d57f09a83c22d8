"""The probe of a check: the check's source without what it expects.

    check                                              probe
    def doubled(run, double):                          def doubled(run, double):
        for number in run.cases:                           for number in run.cases:
            expected = 2 * number                              run.seen(double(number))
            run.expect(double(number), expected, ...)

An answer's process runs the probe alone, so that it never holds an expected value or a verdict. What is left
are the inputs, the compiler's calls and each value that goes over as data: the first argument of `run.expect`
and `run.close`, both texts of `run.changed`, and whatever stands in `run.seen(...)`. Calls of `expects(...)`
in tables of cases become None. A statement that then serves nothing is dropped. A check must send in
statements and assignments, below loops and conditions that are statements too (`make mutants` tells).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

COMPARED = ("expect", "close", "all_close", "rerun")
"""Methods of `Run` whose first argument goes over as data, and whose others do not."""

JUDGED = ("that", "near", "same")
"""Methods of which nothing goes over: they judge what `run.seen` gave."""

GROWING = ("append", "extend", "add", "update", "clear")
"""Methods that serve nothing if nobody reads the container."""


def probe_of(source: str, exercise: str) -> str:
    """The text of a module that holds the probe of one exercise, and what the probe needs."""
    module = ast.parse(source)
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and any(a.arg == "run" for a in node.args.args):
            WithoutVerdicts(bool(checked_by(node))).visit(node)
            while unread := names_unread(node):
                before = ast.dump(node)
                WithoutUnread(unread).visit(node)
                if ast.dump(node) == before:
                    break
            node.returns = None
    module = WithoutExpected().visit(module)
    module.body = [n for n in module.body if checked_by(n) in ("", exercise)]
    return ast.unparse(ast.fix_missing_locations(reachable(module, exercise)))


def checked_by(node: ast.stmt) -> str:
    """The exercise of a function under `@lesson.exercise("ex1", ...)`, else ""."""
    for decorator in getattr(node, "decorator_list", ()):
        match decorator:
            case ast.Call(ast.Attribute(ast.Name("lesson"), "exercise"), [ast.Constant(name), *_]):
                return str(name)
    return ""


class WithoutExpected(ast.NodeTransformer):
    """Expected values in tables become None."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "expects":
            return ast.Constant(None)
        return self.generic_visit(node)


def sends(node: ast.AST) -> bool:
    """Is it a call of `run.seen`, or of a part of the check, which gets `run`?"""
    match node:
        case ast.Call(func=ast.Attribute(ast.Name("run"), "seen")):
            return True
        case ast.Call(args=args):
            return any(isinstance(value, ast.Name) and value.id == "run" for value in args)
    return False


def sent_in(*nodes: ast.AST) -> list[ast.stmt]:
    """The outermost sending calls of code, each a statement, in order."""
    calls: list[ast.stmt] = []
    for node in nodes:
        calls += [ast.Expr(node)] if sends(node) else sent_in(*ast.iter_child_nodes(node))  # type: ignore[arg-type]
    return calls


class Pruner(ast.NodeTransformer):
    """Replaces statements from the inside out. An empty block goes, but for what its head sends."""

    depth = 0

    def left_of(self, node: ast.stmt) -> list[ast.stmt]:
        """What stands for a statement."""
        raise NotImplementedError

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.ClassDef):
            return node
        self.depth += isinstance(node, ast.FunctionDef)
        self.generic_visit(node)
        self.depth -= isinstance(node, ast.FunctionDef)
        if getattr(node, "body", None) == []:
            needed = isinstance(node, ast.FunctionDef | ast.ExceptHandler)
            if not needed and not getattr(node, "orelse", []):
                return sent_in(node)
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
        return self.left_of(node) if isinstance(node, ast.stmt) and self.depth else node


class WithoutVerdicts(Pruner):
    """Of each comparison of a check, only what is sent is left."""

    def __init__(self, is_check: bool) -> None:
        self.is_check = is_check

    def left_of(self, node: ast.stmt) -> list[ast.stmt]:
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Assert():  # a docstring
                return []
            case ast.Expr(ast.Call(ast.Attribute(ast.Name("run") as run, method), args)):
                if method in COMPARED:
                    seen = ast.Attribute(run, "seen", ast.Load())
                    return [*sent_in(*args[1:]), ast.Expr(ast.Call(seen, [args[0]], []))]
                return sent_in(*args) if method in JUDGED else [node]
            case ast.Expr(
                value=ast.Call(func=ast.Attribute(ast.Attribute(ast.Name("run"), "changes")))
            ):
                return []
            case ast.Raise(exc=ast.Call(func=ast.Name("Wrong"))):
                return []
            case ast.Return(value=ast.expr() as value) if self.is_check and self.depth == 1:
                return [node] if sent_in(value) else [ast.Return(None)]
        return [node]


# ------------------------------------------------------------------------- statements that serve nothing


def names_read(node: ast.AST) -> Iterator[str]:
    """Names that code reads, but for a variable that is read to change itself."""
    match node:
        case ast.Assign(targets=[ast.Name(id=own)]) | ast.AugAssign(target=ast.Name(id=own)):
            yield from (name for name in names_read(node.value) if name != own)
            return
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(), method), args)) if method in GROWING:
            for argument in args:
                yield from names_read(argument)
            return
        case ast.Name(id=name, ctx=ast.Load()):
            yield name
    for child in ast.iter_child_nodes(node):
        yield from names_read(child)


def names_unread(function: ast.FunctionDef) -> set[str]:
    """Variables and functions inside of a function that it sets and never reads."""
    inside = [part for part in ast.walk(function) if part is not function]
    own = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    own |= {n.name for n in inside if isinstance(n, ast.FunctionDef) and not n.decorator_list}
    return own - set(names_read(function))


class WithoutUnread(Pruner):
    """Statements go that only set or grow variables that nobody reads."""

    def __init__(self, unread: set[str]) -> None:
        self.unread = unread

    def left_of(self, node: ast.stmt) -> list[ast.stmt]:
        match node:
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), method))) if method in GROWING:
                names = {name}
            case ast.FunctionDef(name=name):
                return [] if name in self.unread else [node]
            case _:
                names = targets(node)
        return sent_in(node) if names and names <= self.unread else [node]


def targets(node: ast.stmt) -> set[str]:
    """The plain variables that an assignment sets; none for any other statement or target."""
    match node:
        case ast.Assign(targets=places):
            pass
        case ast.AnnAssign(target=place, value=ast.expr()) | ast.AugAssign(target=place):
            places = [place]
        case _:
            return set()
    plain = (ast.Name, ast.Tuple, ast.List, ast.Starred, ast.Store, ast.Load)
    parts = [part for place in places for part in ast.walk(place)]
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return names if all(isinstance(part, plain) for part in parts) else set()


def reachable(module: ast.Module, exercise: str) -> ast.Module:
    """Of a module, the check of an exercise and what it uses; statements that are no definition stay."""
    defines: dict[str, list[ast.stmt]] = {}
    wanted: list[ast.stmt] = []
    for node in module.body:
        for name in defined(node):
            defines.setdefault(name, []).append(node)
        if checked_by(node) == exercise or not defined(node):
            wanted.append(node)
    kept: set[int] = set()
    while wanted:
        node = wanted.pop()
        if id(node) in kept:
            continue
        kept.add(id(node))
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                wanted += defines.get(part.id, [])
    future = ast.parse("from __future__ import annotations").body
    return ast.Module([*future, *(n for n in module.body if id(n) in kept)], [])


def defined(node: ast.stmt) -> set[str]:
    """The names that a statement of a module defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return {(alias.asname or alias.name).split(".")[0] for alias in aliases}
        case ast.Assign() | ast.AnnAssign():
            return targets(node)
    return set()
