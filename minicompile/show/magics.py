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
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Function and arguments; keyword arguments."""

CUT = re.compile(r"^# ---\s*$", re.M)


def parsed(line: str) -> tuple[list[str], dict[str, Any]]:
    """Words and options, which are true where no value is given: `kernels --backward --inline=never`."""
    words, options = [], {}
    for word in shlex.split(line):
        name, _, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            words.append(word)
            continue
        try:
            options[name] = ast.literal_eval(value or "True")
        except (ValueError, SyntaxError):  # a plain word
            options[name] = value
    return words, options


class Magics:
    """The magics of a shell; the help of each is its docstring: `%%stages?`."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        for magic in (self.stages, self.compile_diff):
            shell.register_magic_function(magic, "cell")

    def stages(self, line: str, cell: str) -> Any:
        """Show what the call at the end of the cell becomes: every stage, linked, or those that are named.

        %%stages [capture] [aot] [loops] [schedule] [plans] [kernels] [wrapper] [--backward] [--option=value]

        The cell runs once, but for its last line, a call f(x): that is traced, not run. --backward shows the
        stages of the backward graph; options are those of mc.compile: --inline=never --dynamic=True
        """
        names, options = parsed(line)
        graph = "backward" if options.pop("backward", False) else "forward"
        for name in names:
            if name not in STAGES:
                raise UsageError(f"there is no stage {name!r}; known: {', '.join(STAGES)}")
        traced = self.trace(self.call(*self.parse(cell)), options)
        if graph == "backward" and graph not in traced.graphs:
            raise UsageError("there is no backward graph: nothing in the call requires grad")
        found = [traced.stages.get(name) or getattr(traced.graph(graph), name) for name in names]
        return found[0] if len(found) == 1 else Several(found) if found else traced

    def compile_diff(self, line: str, cell: str) -> Any:
        """Show what differs between two versions of a cell, or between two sets of options.

        %%compile_diff [--option=value]

        A line `# ---` separates two versions: each runs once, in order, but for its last line, a call f(x),
        which is traced, not run. Options (--fusion=False) are those of the second version; a cell
        without `# ---` runs once, and its call is traced without and with them.
        """
        words, options = parsed(line)
        versions = CUT.split(cell)
        if words or len(versions) > 2 or (len(versions) < 2 and not options):
            raise UsageError(
                "give two versions with a line '# ---' between them, or --option=value"
            )
        cells = [self.parse(version) for version in versions]
        calls = [self.call(*cell) for cell in cells]
        return self.trace(calls[0], {}).diff(self.trace(calls[-1], options))

    def trace(self, call: Call, options: dict[str, Any]) -> Trace:
        """The trace of an evaluated call."""
        (target, *args), kwargs = call
        dynamic = options.pop("dynamic", None)
        try:
            if options or dynamic is not None:
                target = api.compile(target, dynamic=dynamic, options=options)
            return api.trace(target, *args, **kwargs)
        except MinicompileError as error:
            raise UsageError(str(error)) from error

    def parse(self, cell: str) -> tuple[ast.Module, ast.Call, str]:
        """A cell but for its last line, the call there, and the cell's file name."""
        code = self.shell.transform_cell(cell)
        module = ast.parse(code)
        last = module.body.pop() if module.body else None
        if not isinstance(last, ast.Expr) or not isinstance(last.value, ast.Call):
            raise UsageError("the cell must end with a call, f(x): what is traced")
        return module, last.value, self.shell.compile.cache(code, self.shell.execution_count)

    def call(self, module: ast.Module, last: ast.Call, name: str) -> Call:
        """Run a cell; function and arguments of the call at its end."""
        shell = self.shell
        exec(shell.compile(module, name, "exec"), shell.user_ns)
        gather = ast.parse("lambda *args, **kwargs: (args, kwargs)", mode="eval").body
        whole = ast.copy_location(ast.Call(gather, [last.func, *last.args], last.keywords), last)
        evaluate = shell.compile(ast.fix_missing_locations(ast.Expression(whole)), name, "eval")
        found: Call = eval(evaluate, shell.user_ns)
        return found
