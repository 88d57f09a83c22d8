"""`mc.minify(fn, args)`, `minicompile minify SCRIPT`: the smallest graph that still fails in the same way.

    Minified := name, verdict, failure, tries, program: GraphCall

The program is one of the graphs that were captured, with the arguments of one call; a capture that is wrong
itself, or that needs several calls to fail, is for `mc.bisect`. Reductions propose smaller programs, each
tried whole: compiled, run and compared. What fails in the same way is kept, until no proposal does. A
reduction is a rule like others:

    @reduction("twice the same")
    def once(program: GraphCall) -> Iterator[GraphCall | None]: ...

The real compiler: torch/_functorch/fx_minifier.py. Zeller, Hildebrandt: Simplifying and Isolating
Failure-Inducing Input (2002).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from minicompile import api
from minicompile.debug import script
from minicompile.debug.bisect import NOTHING, attempt
from minicompile.debug.program import GraphCall, TensorSpec, spec_of, text
from minicompile.debug.program_copies import Copier
from minicompile.debug.variant import Case, VariantRun
from minicompile.dynamo.dispatch import Backend, plain_backend
from minicompile.dynamo.result import Capture
from minicompile.errors import MinicompileError
from minicompile.ops.display import Shown, count_text
from minicompile.ops.graph import copied
from minicompile.ops.registry import Registry
from minicompile.options import Options

Proposals = Iterator[GraphCall | None]
reduction: Registry[Callable[[GraphCall], Proposals]] = Registry(
    "reduction", "name, in order -> proposes smaller programs (None: not possible)"
)
MOST_TRIES = 400


# -- reductions


@reduction("fewer operations")
def fewer_operations(program: GraphCall) -> Proposals:
    """Leave out a half of them, a quarter..., one; what is left reads recorded values instead."""
    operations, count = program.operations, len(program.operations)
    while count > 1:
        count = (count + 1) // 2
        for end in range(len(operations), 0, -count):
            left = operations[max(end - count, 0) : end]
            yield program.part([node for node in operations if node not in left])


@reduction("one output")
def one_output(program: GraphCall) -> Proposals:
    for node in program.outputs:
        yield program.part(program.operations, [node])


def changed(program: GraphCall, change: Callable[[TensorSpec], TensorSpec]) -> Proposals:
    """With other tensors as arguments: all of them, then each alone."""
    args = [change(x) if isinstance(x, TensorSpec) else x for x in program.args]
    graph = program.graph.gm.graph
    yield program.with_graph(graph, tuple(args))
    for number, new in enumerate(args):
        yield program.with_graph(graph, (*program.args[:number], new, *program.args[number + 1 :]))


@reduction("no gradients")
def no_gradients(program: GraphCall) -> Proposals:
    yield from changed(program, lambda value: replace(value, requires_grad=False))


@reduction("any values")
def any_values(program: GraphCall) -> Proposals:
    yield from changed(program, lambda value: replace(value, value=None))


# -- the search


@dataclass
class Minified(Shown):
    """What is left of a program."""

    name: str
    verdict: str = ""
    failure: str = ""
    """Of what is left."""
    program: GraphCall | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    tries: int = 0
    path: Path | None = None
    """Where the script was written."""

    @property
    def operations(self) -> int:
        """How many are left, without those that only unpack results."""
        return self.program.size[0] if self.program is not None else 0

    @property
    def script(self) -> str:
        """A Python file that fails in the same way."""
        return "" if self.program is None else self.program.script(self.failure, self.settings)

    @property
    def facts(self) -> list[tuple[str, str]]:
        args = self.program.args if self.program is not None else ()
        rows = [("fails", self.failure)]
        rows += [(f"argument {number}", text(number, value)) for number, value in enumerate(args)]
        rows.append(("script", str(self.path or "")))
        return [(name, fact) for name, fact in rows if fact]

    @property
    def graph(self) -> str:
        return "" if self.program is None else str(self.program.graph)

    def __str__(self) -> str:
        lines = [f"minified {self.name}: {self.verdict}"]
        lines += [f"  {name}: {fact}" for name, fact in self.facts]
        lines += [f"    {line}" for line in self.graph.splitlines()]
        return "\n".join(lines)


def kind(failure: str) -> str:
    """What must stay the same: the exception, or that values are wrong."""
    parts = re.sub(r"\S*/\S*", "", failure).split(": ")  # without paths
    return ": ".join(parts[: 2 if parts[0].startswith("internal error") else 1])


def failure_of(program: GraphCall, settings: Mapping[str, Any]) -> str:
    """How a program fails if it is compiled; "" where it doesn't, or fails in eager too."""
    with contextlib.redirect_stderr(io.StringIO()):  # a GraphModule prints what it raises
        try:
            program.graph.gm.graph.lint()
            case = Case.of(api.compile(program.graph.gm, **settings), [program.arguments()])
            return "" if attempt(case, NOTHING).failure else attempt(case).failure
        except Exception:  # eager's own
            return ""


def shrunk(
    name: str, programs: Iterable[GraphCall], settings: Mapping[str, Any], verdict: str
) -> Minified:
    """The first of the programs that fails, made small."""
    for program in programs:
        if failure := failure_of(program, settings):
            result = Minified(name, "", failure, program, settings)
            tried: set[str] = set()
            while result.tries < MOST_TRIES and smaller(result, tried):
                pass  # a success may make earlier reductions possible again
            count = count_text(program.size[0], "operation")
            result.verdict = f"{count} became {result.operations}, after {result.tries} tries"
            return result
    return Minified(name, verdict)


def smaller(result: Minified, tried: set[str]) -> bool:
    """Take the first proposal that fails in the same way; False if there is none."""
    program = result.program
    assert program is not None
    for name in reduction:
        for proposal in reduction[name](program):
            if proposal is None or proposal.size >= program.size or proposal.key in tried:
                continue
            tried.add(proposal.key)
            result.tries += 1
            failure = failure_of(proposal, result.settings)
            if failure and kind(failure) == kind(result.failure):
                result.program, result.failure = proposal, failure
                return True
    return False


# -- a function


def minify(
    target: Any,
    args: Sequence[Any] = (),
    check: Callable[[Any], object] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    more: Sequence[Sequence[Any]] = (),
    script: str | Path | None = None,
) -> Minified:
    """The smallest graph in `target(*args)` that fails as `mc.bisect` understands it; written to `script`.

    With `check` it says whether there is a failure at all; the graph's own is one of values or an exception.
    """
    case = Case.of(target, [args, *more], kwargs, check)
    if attempt(case, NOTHING).failure:
        return Minified(case.name, "it fails in eager already: the compiler has no part in it")
    if not (failure := attempt(case).failure):
        return Minified(case.name, "it never fails")
    verdict = f"no graph of it fails by itself: {failure}; mc.bisect finds the rule that breaks it"
    result = shrunk(
        case.name, captured_programs(case), changed_settings(case.options, case.dynamic), verdict
    )
    if script is not None and result.program is not None:
        result.path = Path(script)
        result.path.write_text(result.script, encoding="utf-8")
    return result


def changed_settings(options: Options, dynamic: bool | None) -> dict[str, Any]:
    """What `mc.compile` is to be given, apart from its defaults."""
    usual = vars(Options())
    differing = {name: value for name, value in vars(options).items() if value != usual[name]}
    settings = {"options": differing or None, "dynamic": dynamic}
    return {name: value for name, value in settings.items() if value is not None}


Calls = list[tuple[Capture, list[Any]]]
"""Captured graphs, with the arguments of their first calls."""


def captured_programs(case: Case) -> Iterator[GraphCall]:
    """Each captured graph with the arguments of its first call."""
    calls: Calls = []
    run = VariantRun(replace(case, check=None), case.by(recording(calls)))
    if run.error is not None:
        raise run.error
    return programs_of(calls)


def recording(calls: Calls) -> Backend:
    """A backend that runs captured graphs as they are, and keeps the arguments of their first calls."""

    def compile(capture: Capture) -> Any:
        run, called = plain_backend(capture), iter([False])

        def call(inputs: list[Any]) -> Any:
            if not next(called, True):
                calls.append((capture, Copier()(list(inputs))))
            return run(inputs)

        return call

    return compile


def programs_of(calls: Calls) -> Iterator[GraphCall]:
    for capture, args in calls:
        with contextlib.suppress(TypeError):  # arguments that no program can have
            yield GraphCall.of(capture.graph.gm, args, capture.name)


def captured(capture: Capture, options: Options, why: str) -> str:
    """A captured graph as a script; tensors have random values.

    Raises TypeError for arguments that no program can have.
    """
    args = []
    for given in capture.inputs:
        real = given.real() if given.real is not None else None
        value = real if real is not None else given.fake
        spec = spec_of(value.node.hint if hasattr(value, "node") else value)
        args.append(replace(spec, value=None) if isinstance(spec, TensorSpec) else spec)
    program = GraphCall(copied(capture.graph), tuple(args))
    return program.script(why, changed_settings(options, None))


# -- a script


def minify_script(path: Path, arguments: Sequence[str]) -> Minified:
    """Run a script, and make the first graph small that fails if it is compiled.

    Raises MinicompileError where none does.
    """
    calls: Calls = []
    with api.backends.scoped():
        api.backends("inductor")(lambda options: recording(calls))
        code = script.execute(path.absolute(), [str(path), *arguments])
    for call in calls:
        settings = changed_settings(call[0].watch.of.options, None)
        result = shrunk(call[0].name, programs_of([call]), settings, "")
        if result.program is not None:
            return result
    why = f"it exits with {code} in eager too" if code else "no graph that it compiles fails"
    raise MinicompileError(f"nothing in {path} to make smaller: {why}")


def add_arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("--out", metavar="FILE", type=Path, default=Path("minified.py"))
    script.add_script(to, "a Python file in which something compiled fails")


def run(chosen: argparse.Namespace) -> int:
    """The command: 0 if a program that fails was written."""
    result = minify_script(script.script_of(chosen), chosen.arguments)
    result.path = chosen.out
    chosen.out.write_text(result.script, encoding="utf-8")
    print(result)
    return 0


def failing(program: torch.nn.Module, args: Sequence[Any], **settings: Any) -> int:
    """The exit code of a minified script: says whether it fails, and how."""
    failure = attempt(Case.of(api.compile(program, **settings), [args])).failure
    print(failure or "it doesn't fail")
    return int(bool(failure))
