"""`%load_ext minicompile`: cell magics that show what the compiler makes of the call at the end of a cell.

A cell's last line is a call, `f(x)`. All before it runs once, as in any cell, and its names stay; function
and arguments of the call are evaluated once; the call itself is traced and not run. What is shown is also the
cell's value, `Out[n]`.
"""

from __future__ import annotations

import ast
import re
import shlex
from typing import Any

from IPython.core.error import UsageError

from minicompile import api
from minicompile.errors import MinicompileError
from minicompile.ops.display import Several
from minicompile.pipeline_result import COMPILED, Trace

STAGES = ("capture", "aot", *COMPILED)
CUT = re.compile(r"^# ---\s*$", re.M)


def parsed(line: str) -> tuple[list[str], bool, dict[str, Any]]:
    """Words, whether it is about the backward, and options: `kernels --backward --inline=never`."""
    words, options = [], {}
    for word in shlex.split(line):
        name, given, value = word.removeprefix("--").partition("=")
        if given:
            try:
                options[name] = ast.literal_eval(value)
            except (ValueError, SyntaxError):  # a plain word
                options[name] = value
        else:
            words.append(word)
    backward = "--backward" in words
    return [word for word in words if word != "--backward"], backward, options


class Magics:
    """The magics of a shell; the help of each is its docstring: `%%stages?`."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        for magic in (self.stages, self.kernel, self.compile_diff):
            shell.register_magic_function(magic, "cell")

    def stages(self, line: str, cell: str) -> Any:
        """Show what the call at the end of the cell becomes: every stage, linked, or those that are named.

        %%stages [capture] [aot] [loops] [schedule] [plans] [kernels] [wrapper] [--backward] [--option=value]

        The cell runs once, but for its last line, a call f(x): that is traced, not run. --backward shows the
        stages of the backward graph; options are those of mc.compile: --inline=never --dynamic=True
        """
        names, backward, options = parsed(line)
        for name in names:
            if name not in STAGES:
                raise UsageError(f"there is no stage {name!r}; known: {', '.join(STAGES)}")
        traced = self.trace(self.call(cell), options)
        graph = "backward" if backward else "forward"
        if backward and "backward" not in traced.graphs:
            raise UsageError("there is no backward graph: nothing in the call requires grad")
        found = [traced.stages.get(name) or getattr(traced.graph(graph), name) for name in names]
        return found[0] if len(found) == 1 else Several(found) if found else traced

    def kernel(self, line: str, cell: str) -> Any:
        """Show the kernels that are generated for the call at the end of the cell.

        %%kernel [--backward] [--option=value]

        The cell runs once, but for its last line, a call f(x): that is traced, not run.
        """
        return self.stages(f"kernels {line}", cell)

    def compile_diff(self, line: str, cell: str) -> Any:
        """Show what differs between two versions of a cell, or between two sets of options.

        %%compile_diff [--option=value]

        A line `# ---` separates two versions: each runs once, in order, but for its last line, a call f(x),
        which is traced, not run. Options (--fusion=False) are those of the second version; a cell
        without `# ---` runs once, and its call is traced without and with them.
        """
        words, _, options = parsed(line)
        versions = CUT.split(cell)
        if words or len(versions) > 2 or (len(versions) < 2 and not options):
            raise UsageError(
                "give two versions with a line '# ---' between them, or --option=value"
            )
        calls = [self.call(version) for version in versions]
        first, second = self.trace(calls[0], {}), self.trace(calls[-1], options)
        return first.diff(second)

    def trace(self, call: tuple[tuple[Any, ...], dict[str, Any]], options: dict[str, Any]) -> Trace:
        """The trace of an evaluated call."""
        (target, *args), kwargs = call
        dynamic = options.pop("dynamic", None)
        try:
            if options or dynamic is not None:
                target = api.compile(target, dynamic=dynamic, options=options)
            return api.trace(target, *args, **kwargs)
        except MinicompileError as error:
            raise UsageError(str(error)) from error

    def call(self, cell: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run a cell up to its last line; function and arguments of the call there."""
        shell = self.shell
        code = shell.transform_cell(cell)
        module = ast.parse(code)
        last = (
            module.body[-1].value if module.body and isinstance(module.body[-1], ast.Expr) else None
        )
        if not isinstance(last, ast.Call):
            raise UsageError("the cell must end with a call, f(x): what is traced")
        name = shell.compile.cache(code, shell.execution_count)
        exec(shell.compile(ast.Module(module.body[:-1], []), name, "exec"), shell.user_ns)
        gather = ast.parse("lambda *args, **kwargs: (args, kwargs)", mode="eval").body
        call = ast.Call(gather, [last.func, *last.args], last.keywords)
        whole = ast.fix_missing_locations(ast.Expression(ast.copy_location(call, last)))
        found: tuple[tuple[Any, ...], dict[str, Any]] = eval(
            shell.compile(whole, name, "eval"), shell.user_ns
        )
        return found
