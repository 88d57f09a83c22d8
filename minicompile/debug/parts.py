"""The part of a captured graph without which a program is right: for failures that only the program can tell.

    Part := graph: the number of a captured graph; first, end: of its operations

A script's exit code, or a check of a function's result, says nothing about a graph alone. So the program runs
whole, and of one graph a part is compiled, all else is torch's in eager; the part is halved while it fails.
A script in a process of its own gets its part by `MINICOMPILE_BISECT`, like a setting (debug/gates.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import fx

from minicompile import api, compat
from minicompile.debug.accuracy import Copier
from minicompile.debug.bisect import least
from minicompile.debug.program import Program, subgraph
from minicompile.dynamo.dispatch import Backend
from minicompile.options import Options


@dataclass(frozen=True)
class Part:
    graph: int = -1
    """No graph: nothing is compiled."""
    first: int = 0
    end: int = 0

    @classmethod
    def parse(cls, text: str) -> Part | None:
        found = re.fullmatch(r"graph (-?\d+) from (\d+) to (\d+)", text)
        return cls(*map(int, found.groups())) if found else None

    def __str__(self) -> str:
        return f"graph {self.graph} from {self.first} to {self.end}"


class Partly:
    """A backend that compiles one part."""

    def __init__(self, part: Part, settings: Mapping[str, Any]) -> None:
        self.part, self.settings = part, settings
        self.counts: list[int] = []
        """Operations of each graph."""
        self.program: Program | None = None
        """The part, as it was called first."""

    def __call__(self, gm: fx.GraphModule, fakes: Any) -> Callable[..., Any]:
        operations = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
        self.counts.append(len(operations))
        chosen = operations[self.part.first : self.part.end]
        if len(self.counts) - 1 != self.part.graph or not chosen:
            return compat.graph_function(gm)
        inner, inputs, outputs = cut(gm, chosen)
        compiled = api.compile(inner, **self.settings)

        def run(*args: Any) -> Any:
            def call(given: list[Any]) -> Any:
                if self.program is None:
                    self.remember(inner, given)
                return compiled(*given)

            return Around(gm, chosen, inputs, outputs, call).run(*args)

        return run

    def remember(self, inner: fx.GraphModule, given: list[Any]) -> None:
        try:
            self.program = Program.of(inner, [Copier()(given)], "part")
        except TypeError:  # an argument that no script can make
            self.program = None


def cut(
    gm: fx.GraphModule, chosen: list[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """Operations that follow each other as a graph of their own, what it reads, and what is read of it."""
    inside = set(chosen)
    inputs = list(dict.fromkeys(u for n in chosen for u in n.all_input_nodes if u not in inside))
    outputs = [node for node in chosen if not inside.issuperset(node.users)]
    return fx.GraphModule(gm, subgraph(inputs, chosen, outputs)), inputs, outputs


class Around(fx.Interpreter):
    """Runs a graph in eager but for a part, which is called at its first operation."""

    def __init__(
        self,
        gm: fx.GraphModule,
        chosen: list[fx.Node],
        inputs: list[fx.Node],
        outputs: list[fx.Node],
        call: Callable[[list[Any]], Any],
    ) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.chosen, self.inputs, self.outputs, self.call = chosen, inputs, outputs, call
        self.made: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n not in self.chosen:
            return super().run_node(n)
        if n is self.chosen[0]:
            found = self.call([self.env[node] for node in self.inputs])
            self.made = dict(zip(self.outputs, found, strict=True))
        return self.made.get(n)


class Attempt(NamedTuple):
    """How a program failed with a part compiled, operations of each graph, and the part as it was called."""

    failure: str
    counts: list[int]
    found: Program | str | None


@dataclass
class PartSearch:
    """Halve the part."""

    attempt: Callable[[Part], Attempt]
    known: dict[Part, Attempt] = field(default_factory=dict)

    def ask(self, part: Part) -> Attempt:
        if part not in self.known:
            self.known[part] = self.attempt(part)
        return self.known[part]

    def fails(self, part: Part) -> bool:
        return bool(self.ask(part).failure)

    def run(self) -> Part | None:
        """The smallest part found; None where no graph alone makes it fail."""
        for graph, count in enumerate(self.ask(Part()).counts):
            if self.fails(Part(graph, 0, count)):
                end = least(0, count, lambda n: self.fails(Part(graph, 0, n)))  # noqa: B023
                size = least(0, end, lambda n: self.fails(Part(graph, end - n, end)))  # noqa: B023
                return Part(graph, end - size, end)
        return None


REAL = "inductor of parts"
"""What compiles a part where "inductor" is replaced."""


def backend_of(told: str, folder: str, real: api.BackendMaker) -> api.BackendMaker:
    """In a script: what takes the place of the backend "inductor". It reports after each graph."""
    part = Part.parse(told)
    assert part is not None
    made, file = Partly(part, {"backend": REAL}), Path(folder) / REPORT
    api.backends(REAL)(real)

    def write() -> None:
        script = made.program.script(f"the part of a script: {part}", {}) if made.program else ""
        file.write_text(json.dumps([made.counts, script]), encoding="utf-8")

    def compile(gm: fx.GraphModule, fakes: Any) -> Callable[..., Any]:
        run = made(gm, fakes)
        write()

        def call(*args: Any) -> Any:
            found = run(*args)
            if made.program is not None:
                write()
            return found

        return call

    def maker(options: Options) -> Backend:
        made.settings = {"backend": REAL, "options": options}
        return api.callable_backend(compile)

    return maker


REPORT = "part.json"


def report(folder: Path) -> tuple[list[int], str]:
    """What a script told: operations of each graph, and the part as a script."""
    file = folder / REPORT
    counts, script = json.loads(file.read_text(encoding="utf-8")) if file.exists() else ([], "")
    return counts, script
