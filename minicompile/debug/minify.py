"""`mc.minify(fn, args)`, `minicompile minify SCRIPT`: the smallest graph that still fails in the same way.

    Minified := name, verdict, failure, tries, steps: [Step], before and program: Program
    Step     := reduction, and how much is left after it

The program is one of the graphs that were captured; a capture that is wrong itself is for `mc.bisect`.
Reductions propose smaller programs, each tried whole: compiled, run and compared. What fails in the same way
is kept, until no proposal does. A reduction is a rule like others:

    @reduction("twice the same")
    def once(program: Program) -> Iterator[Program | None]: ...

The real compiler: torch/_functorch/fx_minifier.py. Zeller, Hildebrandt: Simplifying and Isolating
Failure-Inducing Input (2002).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from minicompile import api, compat
from minicompile.debug import script
from minicompile.debug.bisect import NOTHING, attempt
from minicompile.debug.copies import Copier
from minicompile.debug.program import Program, TensorSpec, spec_of
from minicompile.debug.variant import Case, Run, Variant
from minicompile.dynamo.dispatch import Backend, plain_backend
from minicompile.dynamo.result import Capture
from minicompile.errors import MinicompileError
from minicompile.ops.display import Shown, aligned, count_text
from minicompile.ops.graph import copied, placeholders
from minicompile.ops.registry import Registry
from minicompile.options import Options

Proposals = Iterator[Program | None]
reduction: Registry[Callable[[Program], Proposals]] = Registry(
    "reduction", "name, in order -> proposes smaller programs (None: not possible)"
)
MOST_TRIES = 400


def halves(count: int) -> Iterator[int]:
    """How many of `count` to leave away: half, a quarter..., one."""
    while count > 1:
        yield (count := count // 2)


# -- reductions


@reduction("fewer calls")
def fewer_calls(program: Program) -> Proposals:
    for number in range(len(program.calls)) if len(program.calls) > 1 else ():
        calls = program.calls[:number] + program.calls[number + 1 :]
        yield program.with_graph(program.graph.gm.graph, calls)


@reduction("one output")
def one_output(program: Program) -> Proposals:
    kept = program.operations
    for node in reversed(program.outputs) if len(program.outputs) > 1 else ():
        yield program.part(kept, [node])
    for count in halves(len(program.outputs)):
        yield program.part(kept, program.outputs[count:])
        yield program.part(kept, program.outputs[:-count])


@reduction("cut the end")
def cut_the_end(program: Program) -> Proposals:
    kept = program.operations
    for count in halves(len(kept)):
        yield program.part(kept[:-count])


@reduction("cut the beginning")
def cut_the_beginning(program: Program) -> Proposals:
    kept = program.operations
    for count in halves(len(kept)):
        yield program.part(kept[count:])


@reduction("leave out an operation")
def leave_out(program: Program) -> Proposals:
    kept = program.operations
    for node in reversed(kept):
        others = [other for other in kept if other is not node]
        mine = layout(program.values[0].get(node))
        for source in node.all_input_nodes:
            if mine and mine == layout(program.values[0].get(source)):
                yield program.edited(partial(bypass, node, source))
        if others:
            yield program.part(others)


def layout(value: Any) -> tuple[Any, ...]:
    """Shape and type of a tensor; nothing of anything else."""
    return (value.shape, value.dtype) if isinstance(value, TensorSpec) else ()


def bypass(node: fx.Node, source: fx.Node, graph: fx.Graph, new: Mapping[fx.Node, fx.Node]) -> None:
    """In a copied graph, read one value instead of another."""
    new[node].replace_all_uses_with(new[source])
    graph.erase_node(new[node])


@reduction("leave out inputs")
def unused_inputs(program: Program) -> Proposals:
    if any(not node.users for node in placeholders(program.graph.gm.graph)):
        yield program.part(program.operations, program.outputs)


@reduction("an input twice")
def input_twice(program: Program) -> Proposals:
    nodes = placeholders(program.graph.gm.graph)
    for number, node in enumerate(nodes):
        for other in range(number):
            pairs = [(args[number], args[other]) for args in program.calls]
            if all(layout(one) and layout(one) == layout(two) for one, two in pairs):
                merged = program.edited(partial(bypass, node, nodes[other]))
                calls = tuple(args[:number] + args[number + 1 :] for args in program.calls)
                yield merged.with_graph(merged.graph.gm.graph, calls)


@reduction("no gradients")
def no_gradients(program: Program) -> Proposals:
    everything = range(len(program.calls[0]))
    for chosen in ([*everything], *([number] for number in everything)):
        yield changed(program, lambda value: replace(value, requires_grad=False), chosen)


@reduction("smaller sizes")
def smaller_sizes(program: Program) -> Proposals:
    tensors = [value for args in program.calls for value in args if isinstance(value, TensorSpec)]
    for old in sorted({size for t in tensors for size in t.shape if size > 1}, reverse=True):
        for new in sorted({1, 2, 3, old // 2, old - 1} & set(range(1, old))):
            resized = changed(program, partial(TensorSpec.sized, old=old, new=new))
            yield resized.edited(partial(resize, old, new))
            yield resized


def resize(old: int, new: int, graph: fx.Graph, nodes: object) -> None:
    """Numbers in the graph that may be a size."""

    def changed_number(value: Any) -> Any:
        return new if type(value) is int and value == old else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, changed_number)
        node.kwargs = fx.node.map_aggregate(node.kwargs, changed_number)


@reduction("any values")
def any_values(program: Program) -> Proposals:
    everything = range(len(program.calls[0]))
    for chosen in ([*everything], *([number] for number in everything)):
        yield changed(program, lambda value: replace(value, value=None), chosen)


def changed(
    program: Program,
    change: Callable[[TensorSpec], TensorSpec],
    chosen: Sequence[int] | None = None,
) -> Program:
    """With other tensors as arguments, or only those of some numbers."""
    calls = tuple(
        tuple(
            change(x) if isinstance(x, TensorSpec) and (chosen is None or n in chosen) else x
            for n, x in enumerate(args)
        )
        for args in program.calls
    )
    return program.with_graph(program.graph.gm.graph, calls)


# -- the search


@dataclass(frozen=True)
class Step:
    """A reduction that was possible."""

    reduction: str
    size: tuple[int, ...]

    def cells(self) -> tuple[str, ...]:
        calls, operations, _, _, inputs, elements, *_ = self.size
        counts = (count_text(operations, "operation"), count_text(inputs, "input"))
        return (self.reduction, *counts, count_text(elements, "element"), count_text(calls, "call"))


@dataclass
class Minified(Shown):
    """What is left of a program."""

    name: str
    verdict: str = ""
    failure: str = ""
    """Of what is left."""
    before: Program | None = None
    program: Program | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    tries: int = 0
    path: Path | None = None
    """Where the script was written."""

    @property
    def operations(self) -> int:
        """How many are left, without those that only unpack results."""
        return self.program.size[1] if self.program is not None else 0

    @property
    def script(self) -> str:
        """A Python file that fails in the same way."""
        return "" if self.program is None else self.program.script(self.failure, self.settings)

    @property
    def facts(self) -> list[tuple[str, str]]:
        rows = [("fails", self.failure)]
        if self.program is not None:
            rows += [
                (f"argument {n}", value.text(n) if isinstance(value, TensorSpec) else repr(value))
                for args in self.program.calls
                for n, value in enumerate(args)
            ]
        rows.append(("script", str(self.path or "")))
        return [(name, fact) for name, fact in rows if fact]

    @property
    def graph(self) -> str:
        return "" if self.program is None else str(self.program.shown())

    def __str__(self) -> str:
        lines = [f"minified {self.name}: {self.verdict}"]
        lines += [f"  {name}: {fact}" for name, fact in self.facts]
        lines += [f"    {line}" for line in self.graph.splitlines()]
        if self.steps:
            lines.append(f"  {self.tries} tries, {count_text(len(self.steps), 'step')}:")
            lines += [f"    {line}" for line in aligned([s.cells() for s in self.steps], left=1)]
        return "\n".join(lines)


def kind(failure: str) -> str:
    """What must stay the same: the exception, or in what values are wrong and whether they are numbers."""
    parts = re.sub(r"\S*/\S*", "", failure).split(": ")  # without paths
    if parts[0].startswith("internal error"):
        return ": ".join(parts[:2])
    return parts[0] + " (no number)" * failure.endswith(("inf", "nan"))


class Shrinking:
    """Apply reductions while what they propose still fails."""

    def __init__(self, program: Program, failure_of: Callable[[Program], str]) -> None:
        self.program, self.failure_of = program, failure_of
        self.failure = failure_of(program)
        self.kind = kind(self.failure)
        self.tries, self.steps = 1, list[Step]()
        self.tried: set[str] = set()

    def run(self) -> None:
        """Begin anew after each success of a later rule: it may make earlier ones possible again."""
        while self.failure and any(self.applied(name) for name in reduction):
            pass

    def applied(self, name: str) -> bool:
        for proposal in reduction[name](self.program):
            if proposal is not None and self.fails(proposal):
                self.program = proposal
                self.steps.append(Step(name, proposal.size))
                return True
        return False

    def fails(self, proposal: Program) -> bool:
        if proposal.size >= self.program.size or proposal.key in self.tried:
            return False
        if self.tries >= MOST_TRIES:
            return False
        self.tried.add(proposal.key)
        self.tries += 1
        failure = self.failure_of(proposal)
        if failed := bool(failure) and kind(failure) == self.kind:
            self.failure = failure
        return failed


def failure_of(program: Program, settings: Mapping[str, Any]) -> str:
    """How a program fails if it is compiled; "" where it doesn't, or fails in eager too."""
    with contextlib.redirect_stderr(io.StringIO()):  # a GraphModule prints what it raises
        try:
            program.graph.gm.graph.lint()
            case = case_of(program.graph.gm, program.arguments(), settings)
            return "" if attempt(case, NOTHING).failure else attempt(case).failure
        except Exception:  # eager's own
            return ""


def case_of(
    target: torch.nn.Module, calls: Sequence[Sequence[Any]], settings: Mapping[str, Any]
) -> Case:
    return Case.of(api.compile(target, **settings), calls)


def shrunk(
    name: str, programs: Iterable[Program], settings: Mapping[str, Any], verdict: str
) -> Minified:
    """The first of the programs that fails, made small."""
    result = Minified(name, verdict, settings=settings)
    for program in programs:
        search = Shrinking(program, lambda program: failure_of(program, settings))
        result.tries += search.tries
        if not search.failure:
            continue
        search.run()
        result.before, result.program, result.failure = program, search.program, search.failure
        result.steps, result.tries = search.steps, result.tries + search.tries - 1
        before, after = program.size[1], search.program.size[1]
        result.verdict = f"{count_text(before, 'operation')} became {after}"
        if search.tries >= MOST_TRIES:
            result.verdict += f", after {MOST_TRIES} tries: it may get smaller yet"
        break
    return result


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
    usual = Options()
    differing = {
        f.name: value
        for f in dataclasses.fields(options)
        if (value := getattr(options, f.name)) != getattr(usual, f.name)
    }
    return {
        **({"options": differing} if differing else {}),
        **({} if dynamic is None else {"dynamic": dynamic}),
    }


def captured_programs(case: Case) -> Iterator[Program]:
    """Each captured graph with the arguments of its calls."""
    calls: dict[int, tuple[fx.GraphModule, list[list[Any]]]] = {}

    def keep(gm: fx.GraphModule, fakes: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            calls.setdefault(id(gm), (gm, []))[1].append(Copier()(list(inputs)))
            return compat.graph_function(gm)(*inputs)

        return run

    run = Run(replace(case, check=None), Variant(partial(api.compile, backend=keep)))
    if run.error is not None:
        raise run.error
    for gm, arguments in calls.values():
        with contextlib.suppress(TypeError):
            yield Program.of(gm, arguments, case.name)


def captured(capture: Capture, options: Options, why: str) -> str:
    """A captured graph as a script; tensors that are gone by now have values of ours.

    Raises TypeError for arguments that no program can have.
    """
    args = []
    for one in capture.inputs:
        real = one.real() if one.real is not None else None
        if isinstance(one.fake, torch.Tensor):
            args.append(TensorSpec.like(real if real is not None else one.fake))
        else:
            args.append(one.fake.node.hint if hasattr(one.fake, "node") else spec_of(one.fake))
    program = Program(copied(capture.graph), (tuple(args),))
    return program.script(why, changed_settings(options, None))


# -- a script


class Stop(BaseException):
    """Carries the result out of a script, past its handlers."""


def minify_script(path: Path, arguments: Sequence[str]) -> Minified:
    """Run a script until a graph that it compiles fails, and make that small.

    Raises MinicompileError where none does.
    """
    real = api.backends["inductor"]

    def searching(options: Options) -> Backend:
        def compile(capture: Capture) -> Any:
            run, tried = plain_backend(capture), list[bool]()

            def call(inputs: list[Any]) -> Any:
                if not tried:
                    tried.append(True)
                    with api.backends.scoped():
                        api.backends("inductor")(real)
                        search(capture, Copier()(list(inputs)), options)
                return run(inputs)

            return call

        return compile

    def search(capture: Capture, inputs: list[Any], options: Options) -> None:
        try:
            program = Program.of(capture.graph.gm, [inputs], capture.name)
        except TypeError:
            return
        result = shrunk(capture.name, [program], changed_settings(options, None), "")
        if result.program is not None:
            raise Stop(result)

    with api.backends.scoped():
        api.backends("inductor")(searching)
        try:
            code = script.execute(path.absolute(), [str(path), *arguments])
        except Stop as stop:
            result: Minified = stop.args[0]
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


def failing(program: torch.nn.Module, calls: Sequence[Sequence[Any]], **settings: Any) -> int:
    """The exit code of a minified script: says whether it fails, and how."""
    failure = attempt(case_of(program, calls, settings)).failure
    print(failure or "it doesn't fail")
    return int(bool(failure))
