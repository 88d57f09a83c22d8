"""The probe of a check: the check's source without what it expects.

    check                                              probe
    def doubled(run, double):                          def doubled(run, double):
        for number in run.cases:                           for number in run.cases:
            expected = 2 * number                              run.seen(double(number))
            run.expect(double(number), expected, ...)

An answer's kernel runs the probe alone, so that it never holds an expected value or a verdict. What is left
are the inputs, the compiler's calls and each value that goes over as data: the first argument of `run.expect`
and `run.close`, both texts of `run.changed`, and whatever stands in `run.seen(...)`. Calls of `expects(...)`
in tables of cases become None. A statement that then serves nothing is dropped.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

COMPARED = ("expect", "close", "all_close", "rerun")
"""Methods of `Run` whose first argument goes over as data, and whose others do not."""

JUDGED = ("that", "near", "same")
"""Methods of which nothing goes over: they judge what `run.seen` gave."""

GROWING = ("append", "extend", "add", "update", "clear")
"""Methods that serve nothing if nobody reads the container."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def probe_of(source: str, exercise: str) -> str:
    """The text of a module that holds the probe of one exercise, and what the probe needs."""
    module = ast.parse(source)
    for function in [n for n in module.body if isinstance(n, Function) and takes_run(n)]:
        is_check = bool(checked_by(function))
        refuse_hidden_sends(function)
        original = Counter(names_read(function))
        function.body = without_verdicts(function.body, is_check) or [ast.Pass()]
        drop_unread(function, original)
        function.returns = None
    module = WithoutExpected().visit(module)
    module.body = [n for n in module.body if checked_by(n) in ("", exercise)]
    return ast.unparse(ast.fix_missing_locations(reachable(module, exercise)))


def takes_run(function: Function) -> bool:
    """Is it a check, or a part of one?"""
    return any(argument.arg == "run" for argument in function.args.args)


def checked_by(node: ast.stmt) -> str:
    """The exercise of a function under `@lesson.exercise("ex1", ...)`, else ""."""
    for decorator in node.decorator_list if isinstance(node, Function) else ():
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "lesson.exercise":
            name = decorator.args[0]
            assert isinstance(name, ast.Constant)
            return str(name.value)
    return ""


class WithoutExpected(ast.NodeTransformer):
    """Expected values in tables become None, and docstrings go."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "expects":
            return ast.Constant(None)
        return self.generic_visit(node)


def method_of_run(node: ast.AST) -> str:
    """ "close" for a call of `run.close`, else ""."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="run"), attr=name)):
            return name
    return ""


def sends(node: ast.AST) -> bool:
    """Does a piece of code, or a part of a check that it calls, send data?"""
    return any(
        method_of_run(part) in ("seen", "changed", *COMPARED)
        or (isinstance(part, ast.Call) and gets_run(part))
        for part in ast.walk(node)
    )


def gets_run(call: ast.Call) -> bool:
    """Is `run` among the arguments of a call?"""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(isinstance(value, ast.Name) and value.id == "run" for value in values)


def refuse_hidden_sends(function: Function) -> None:
    """Raises SyntaxError where a check sends data inside an expression that may do so often, or never.

    A probe is made of statements: of such an expression the loop or the condition would be lost.
    """
    inside = (ast.comprehension, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)
    for node in ast.walk(function):
        if isinstance(node, (*inside, ast.Lambda, ast.IfExp, ast.BoolOp)) and sends(node):
            line = getattr(node, "lineno", function.lineno)
            raise SyntaxError(f"line {line}: write a loop or an if around what a check sends")


def sent_in(nodes: Sequence[ast.AST]) -> list[ast.stmt]:
    """The outermost sending calls of expressions, each a statement, in order."""
    found: list[ast.stmt] = []
    for node in nodes:
        if isinstance(node, ast.Call) and (method_of_run(node) == "seen" or gets_run(node)):
            found.append(ast.Expr(node))
        else:
            found += sent_in(list(ast.iter_child_nodes(node)))
    return found


def without_verdicts(body: Sequence[ast.stmt], is_check: bool) -> list[ast.stmt]:
    """Statements of a check, with only what is sent left of each comparison."""
    kept: list[ast.stmt] = []
    for statement in body:
        kept += without_verdict(statement, is_check)
    return kept


def without_verdict(node: ast.stmt, is_check: bool) -> list[ast.stmt]:
    match node:
        case ast.Expr(value=ast.Constant()):  # a docstring
            return []
        case ast.Expr(value=ast.Call() as call) if method_of_run(call) in COMPARED:
            seen = ast.Attribute(ast.Name("run", ast.Load()), "seen", ast.Load())
            got, *others = call.args
            assert not sent_in([got]), f"line {node.lineno}: what is compared is seen anyhow"
            return [*sent_in(others), ast.Expr(ast.Call(seen, [got], []))]
        case ast.Expr(value=ast.Call() as call) if method_of_run(call) in JUDGED:
            return sent_in(call.args)
        case ast.Expr(value=ast.Call(func=func)) if "run.changes" in ast.unparse(func):
            return []
        case ast.Raise(exc=ast.Call(func=ast.Name(id="Wrong"))):
            return []
        case ast.Assert():
            return []
        case ast.Return(value=ast.expr() as value) if is_check and not sends(value):
            return [ast.Return(None)]
        case ast.FunctionDef():
            node.body = without_verdicts(node.body, False) or [ast.Pass()]
        case ast.If():
            node.body = without_verdicts(node.body, is_check)
            node.orelse = without_verdicts(node.orelse, is_check)
        case ast.For() | ast.While() | ast.With():
            node.body = without_verdicts(node.body, is_check)
        case ast.Try():
            node.body = without_verdicts(node.body, is_check)
            for handler in node.handlers:
                handler.body = without_verdicts(handler.body, is_check) or [ast.Pass()]
    return [node]


# ------------------------------------------------------------------------- statements that serve nothing


def names_read(node: ast.AST) -> Iterator[str]:
    """Names that code reads, but for a variable that is read to change itself."""
    match node:
        case ast.Assign(targets=[ast.Name(id=own)]) | ast.AugAssign(target=ast.Name(id=own)):
            yield from (name for name in names_read(node.value) if name != own)
            return
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(), attr=method)) as call):
            if method in GROWING:
                for argument in call.args:
                    yield from names_read(argument)
                return
        case ast.Name(id=name, ctx=ast.Load()):
            yield name
    for child in ast.iter_child_nodes(node):
        yield from names_read(child)


def drop_unread(function: Function, original: Counter[str]) -> None:
    """Take out, until nothing changes, what only served comparisons."""
    local = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)} - {"run"}
    while True:
        before = ast.dump(function)
        read = set(names_read(function))
        unread = {name for name in local - read if original[name]} | own_only(function, local, read)
        function.body = served(function.body, unread) or [ast.Pass()]
        if ast.dump(function) == before:
            return


def own_only(function: Function, local: set[str], read: set[str]) -> set[str]:
    """Variables of the function that grow or change, and are never read otherwise."""
    assigned = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and not is_load(n)}
    return {name for name in assigned & local if name not in read}


def is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def targets(node: ast.stmt) -> set[str] | None:
    """The plain variables that an assignment sets; None for any other statement or target."""
    match node:
        case ast.Assign(targets=places):
            pass
        case ast.AnnAssign(target=place, value=ast.expr()) | ast.AugAssign(target=place):
            places = [place]
        case _:
            return None
    plain = (ast.Name, ast.Tuple, ast.List, ast.Starred, ast.Store, ast.Load)
    parts = [part for place in places for part in ast.walk(place)]
    if not all(isinstance(part, plain) for part in parts):
        return None
    return {part.id for part in parts if isinstance(part, ast.Name)}


def served(body: Sequence[ast.stmt], unread: set[str]) -> list[ast.stmt]:
    """Statements but for those that only set variables that nobody reads."""
    kept: list[ast.stmt] = []
    for node in body:
        names = targets(node)
        if names is not None and names <= unread:
            if sends(node):
                kept += sent_in([node]) or [node]
            continue
        match node:
            case ast.FunctionDef(name=name, decorator_list=[]) if name in unread:
                continue
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method))):
                if name in unread and method in GROWING:
                    kept += sent_in([node])
                    continue
            case ast.FunctionDef() | ast.For() | ast.While() | ast.With() | ast.If() | ast.Try():
                node.body = served(node.body, unread)
                if isinstance(node, ast.If | ast.Try):
                    node.orelse = served(node.orelse, unread)
                if not node.body and not getattr(node, "orelse", []):
                    if isinstance(node, ast.FunctionDef):
                        node.body = [ast.Pass()]
                    else:
                        kept += sent_in([h for h in heads(node) if sends(h)])
                        continue
                node.body = node.body or [ast.Pass()]
        kept.append(node)
    return kept


def heads(node: ast.stmt) -> list[ast.AST]:
    """The expressions in front of a block."""
    match node:
        case ast.If(test=test) | ast.While(test=test):
            return [test]
        case ast.For(iter=iterated):
            return [iterated]
    return []


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
            return targets(node) or set()
    return set()


if __name__ == "__main__":
    from minicompile.lessons.notebook import checks_text

    print(probe_of(checks_text(sys.argv[1]), sys.argv[2]))
