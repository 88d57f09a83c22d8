"""`mc.minify(fn, args)`, `minicompile minify SCRIPT`: the smallest graph that still fails in the same way.

    Minified := name, verdict, failure, tries, steps: [Step], before and program: Program
    Step     := reduction, and how much is left after it

First the program is made a graph of its own: one that was captured from it or, if it is the capture that is
wrong, all that torch did in eager. Then reductions propose smaller ones, each tried whole: compiled, run and
compared. What fails in the same way is kept, until no proposal does. A reduction is a rule like others:

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
from minicompile.debug.accuracy import Copier, name_of
from minicompile.debug.bisect import BROKEN, PLAIN, Trial, run_script
from minicompile.debug.parts import Attempt, Part, Partly, PartSearch, report
from minicompile.debug.program import Given, Program, given, taped
from minicompile.dynamo.dispatch import Backend, plain_backend
from minicompile.dynamo.module import original_of
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
    return (value.shape, value.dtype) if isinstance(value, Given) else ()


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
                made = program.edited(partial(bypass, node, nodes[other]))
                calls = tuple(args[:number] + args[number + 1 :] for args in program.calls)
                yield made.with_graph(made.graph.gm.graph, calls)


@reduction("no gradients")
def no_gradients(program: Program) -> Proposals:
    everything = range(len(program.calls[0]))
    for chosen in ([*everything], *([number] for number in everything)):
        yield changed(program, lambda value: replace(value, requires_grad=False), chosen)


@reduction("smaller sizes")
def smaller_sizes(program: Program) -> Proposals:
    tensors = [value for args in program.calls for value in args if isinstance(value, Given)]
    for old in sorted({size for t in tensors for size in t.shape if size > 1}, reverse=True):
        for new in sorted({1, 2, 3, old // 2, old - 1} & set(range(1, old))):
            made = changed(program, partial(Given.sized, old=old, new=new))
            yield made.edited(partial(resize, old, new))
            yield made


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
    program: Program, change: Callable[[Given], Given], chosen: Sequence[int] | None = None
) -> Program:
    """With other tensors as arguments, or only those of some numbers."""
    calls = tuple(
        tuple(
            change(x) if isinstance(x, Given) and (chosen is None or n in chosen) else x
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
        told = (count_text(operations, "operation"), count_text(inputs, "input"))
        return (self.reduction, *told, count_text(elements, "element"), count_text(calls, "call"))


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
    text: str = ""
    """The script, where only another process knows the program."""
    path: Path | None = None
    """Where the script was written."""

    @property
    def operations(self) -> int:
        """How many are left, without those that only unpack results."""
        return self.program.size[1] if self.program is not None else 0

    @property
    def script(self) -> str:
        """A Python file that fails in the same way."""
        if self.program is None:
            return self.text
        return self.program.script(self.failure, self.settings)

    @property
    def facts(self) -> list[tuple[str, str]]:
        rows = [("fails", self.failure)]
        if self.program is not None:
            rows += [
                (f"argument {n}", value.text(n) if isinstance(value, Given) else repr(value))
                for args in self.program.calls
                for n, value in enumerate(args)
            ]
        rows.append(("script", str(self.path or "")))
        return [(name, fact) for name, fact in rows if fact]

    @property
    def graph(self) -> str:
        return self.text if self.program is None else str(self.program.shown())

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
        self.known: set[str] = set()

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
        if proposal.size >= self.program.size or proposal.key in self.known:
            return False
        if self.tries >= MOST_TRIES:
            return False
        self.known.add(proposal.key)
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
            trial = trial_of(program.graph.gm, program.arguments(), settings)
            return "" if trial(PLAIN).failure else trial().failure
        except Exception:  # eager's own
            return ""


def trial_of(
    target: torch.nn.Module, calls: Sequence[Sequence[Any]], settings: Mapping[str, Any]
) -> Trial:
    args, *more = calls
    return Trial(api.compile(target, **settings), args, more=more)


def shrunk(
    name: str, programs: Iterable[Program], settings: Mapping[str, Any], verdict: str
) -> Minified:
    """The first of the programs that fails, made small."""
    result = Minified(name, verdict, settings=settings)
    for program in programs:
        search = Shrinking(program, lambda made: failure_of(made, settings))
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
    options, dynamic = api.settings_of(target)
    plain, trial = original_of(target), Trial(target, args, check, kwargs, more)
    name, settings = name_of(plain), changed_settings(options, dynamic)
    if trial(PLAIN).failure:
        return Minified(name, "it fails in eager already: the compiler has no part in it")
    if not (failure := trial().failure):
        return Minified(name, "it never fails")
    verdict = f"no graph of it fails by itself: {failure}"
    found = shrunk(
        name, programs(plain, (args, *more), dict(kwargs or {}), name), settings, verdict
    )
    if found.program is None:

        def attempt(part: Part) -> Attempt:
            made = Partly(part, settings)
            run = trial.measured(lambda target: api.compile(target, backend=made), "part")
            return Attempt(trial.failure(run), made.counts, made.program)

        if (part := part_of(name, attempt)).failure:
            part.settings, found = settings, part
    if script is not None and found.program is not None:
        found.path = Path(script)
        found.path.write_text(found.script, encoding="utf-8")
    return found


def changed_settings(options: Options, dynamic: bool | None) -> dict[str, Any]:
    """What `mc.compile` is to be given, apart from its defaults."""
    usual = Options()
    told = {
        f.name: value
        for f in dataclasses.fields(options)
        if (value := getattr(options, f.name)) != getattr(usual, f.name)
    }
    return {
        **({"options": told} if told else {}),
        **({} if dynamic is None else {"dynamic": dynamic}),
    }


def programs(
    target: Any, calls: Sequence[Sequence[Any]], kwargs: Mapping[str, Any], name: str
) -> Iterator[Program]:
    """Each captured graph with the arguments of its calls, then all that is done in eager."""
    yield from captured_programs(target, calls, kwargs, name)
    if (whole := taped(*copies(target, calls, kwargs), name)) is not None:
        yield whole


def copies(
    target: Any, calls: Sequence[Sequence[Any]], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """A function and all that it is called with, sharing what they share."""
    copier = Copier()
    return copier(target), copier(list(calls)), copier(dict(kwargs))


def captured_programs(
    target: Any, calls: Sequence[Sequence[Any]], kwargs: Mapping[str, Any], name: str
) -> Iterator[Program]:
    """Each captured graph with the arguments of its calls."""
    plain, given, named = copies(target, calls, kwargs)
    found: dict[int, tuple[fx.GraphModule, list[list[Any]]]] = {}

    def keep(gm: fx.GraphModule, fakes: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            found.setdefault(id(gm), (gm, []))[1].append(Copier()(list(inputs)))
            return compat.graph_function(gm)(*inputs)

        return run

    compiled = api.compile(plain, backend=keep)
    for args in given:
        compiled(*args, **named)
    for gm, arguments in found.values():
        with contextlib.suppress(TypeError):
            yield Program.of(gm, arguments, name)


def captured(capture: Capture, options: Options, why: str) -> str:
    """A captured graph as a script; tensors that are gone by now have values of ours.

    Raises TypeError for arguments that no program can have.
    """
    args = []
    for one in capture.inputs:
        real = one.real() if one.real is not None else None
        if isinstance(one.fake, torch.Tensor):
            args.append(Given.like(real if real is not None else one.fake))
        else:
            args.append(one.fake.node.hint if hasattr(one.fake, "node") else given(one.fake))
    program = Program(copied(capture.graph), (tuple(args),))
    return program.script(why, changed_settings(options, None))


# -- a script


class Found(BaseException):
    """Carries what was found out of a script, past its handlers."""


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
        found = shrunk(capture.name, [program], changed_settings(options, None), "")
        if found.program is not None:
            raise Found(found)

    with api.backends.scoped():
        api.backends("inductor")(searching)
        try:
            code = script.execute(path.absolute(), [str(path), *arguments])
        except Found as stop:
            made: Minified = stop.args[0]
            return made
    command, nothing = [str(path), *arguments], f"nothing in {path} to make smaller"
    if code:
        raise MinicompileError(f"{nothing}: it exits with {code} in eager too")
    if not run_script(command, str(BROKEN), report)[0]:
        raise MinicompileError(f"{nothing}: it never fails")

    def attempt(part: Part) -> Attempt:
        failure, reported = run_script(command, str(part), report)
        return Attempt(failure, *reported)

    return part_of(path.name, attempt)


def part_of(name: str, attempt: Callable[[Part], Attempt]) -> Minified:
    """Where no graph fails by itself: the part that must be compiled for the whole to fail."""
    search, result = PartSearch(attempt), Minified(name)
    part = search.run()
    if part is None:
        result.verdict = "no graph of it is enough to make it fail"
        return result
    result.failure, _, found = search.ask(part)
    result.program = found if isinstance(found, Program) else None
    result.text = found if isinstance(found, str) else ""
    result.verdict = (
        f"fails if only operations {part.first} to {part.end} of graph {part.graph} are compiled"
    )
    result.tries = len(search.known)
    return result


def add_arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument("--out", metavar="FILE", type=Path, default=Path("minified.py"))
    script.add_script(to, "a Python file in which something compiled fails")


def run(chosen: argparse.Namespace) -> int:
    """The command: 0 if a program that fails was written."""
    found = minify_script(script.script_of(chosen), chosen.arguments)
    found.path = chosen.out if found.script else None
    if found.script:
        chosen.out.write_text(found.script, encoding="utf-8")
    print(found)
    return int(not found.script)


def failing(program: torch.nn.Module, calls: Sequence[Sequence[Any]], **settings: Any) -> int:
    """The exit code of a minified script: says whether it fails, and how."""
    failure = trial_of(program, calls, settings)().failure
    print(failure or "it doesn't fail")
    return int(bool(failure))
