"""What the rooms print of a program, as one text."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import minicompile as mc
from minicompile.codegen.generate import make_plans
from minicompile.options import Options
from minicompile.pipeline_result import Trace
from minicompile.scheduling.schedule import schedule
from minicompile.shapes.expr import bounds, simplify_index
from tests.dynamo.helpers import explained
from tests.dynamo.program_table import names, run
from tests.expected.programs import ROWS
from tests.fuzz.loops import generate
from tests.shapes.test_simplify import Problem
from tests.torch_versions import release

PAGES: dict[str, Callable[[], str]] = {}
LATE = ("plans", "kernels", "wrapper")
"""The stages that differ between languages."""


def path(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.txt")


def traced(name: str, language: str) -> Trace:
    """Trace a program with the core alone. Nothing is built: there is no such C++ compiler."""
    function, inputs, dynamic, chosen = ROWS[name]
    options = {"plugins": "none", "verify": True, "cpp_compiler": "none", **chosen}
    compiled = mc.compile(
        function, dynamic=dynamic, options={**options, "device_codegen": language}
    )
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mc.trace(compiled, *inputs)


PLACE = re.compile(r"[\w/.]*programs\.py:\d+ in \w+: ")


def pages(name: str) -> str:
    """Return the page of a program. Lines of source have no number: rows may be added above."""
    return PLACE.sub("", "\n".join([*parts(name), ""]))


def parts(name: str) -> Iterator[str]:
    for language in ("cpp", "triton"):
        trace = traced(name, language)
        if language == "cpp":
            yield from early(trace)
        for which, graph in trace.graphs.items():
            for stage in LATE if language == "cpp" else LATE[:-1]:  # Triton's wrapper says the same
                found = getattr(graph, stage)
                texts = found if isinstance(found, list) else [found]
                yield from (f"==== {which}.{stage}, {language}", *map(str, texts))


def early(trace: Trace) -> Iterator[str]:
    yield from ("==== capture", str(trace.capture), "==== aot", str(trace.aot))
    for graph, stages in trace.graphs.items():
        yield from (f"==== {graph}.loops", str(stages.loops))
        yield from (f"==== {graph}.schedule", str(stages.schedule))


for _name in ROWS:
    PAGES[_name] = partial(pages, _name)


def captured(name: str, compiled: Any) -> str:
    """Return what capture made of a program of dynamo's tables: breaks, and the last version's guards."""
    told = explained(compiled)
    lines = [f"==== {name}: {told.graph_count} graphs, {told.op_count} operations"]
    lines += [f"  {stop.kind} {stop.id}" for stop in told.breaks]
    for capture in told.captures[-1:]:
        lines += [f"  {guard.expression}" for guard in capture.guards]
        lines += [f"  {text}" for text in (*capture.side_effects, *capture.inlined)]
        lines += [f"  returns {capture.result}"]
    return PLACE.sub("", "\n".join([*lines, ""]))


def captures() -> str:
    """Return the same of every eighth program, each after a plain run that fills Python's own caches."""
    found, whole = list[str](), partial(mc.compile, backend="eager")
    for table, name in names()[::8]:
        run(table, name, lambda function: function)
        found.append(captured(name, run(table, name, whole)[1]))
    return "".join(found)


def indices() -> str:
    """What random indices are simplified to, and the bounds that are derived."""
    lines = list[str]()
    for seed in range(250):
        problem = Problem(seed)
        shown = simplify_index(problem.expr, problem.ranges), bounds(problem.expr, problem.ranges)
        lines.append(f"{seed}: {problem.expr} -> {shown[0]}, within {shown[1]}")
    return "\n".join([*lines, ""])


def loops() -> str:
    """How random loops are scheduled, and the kernels of some."""
    lines, options = list[str](), Options(plugins="none")
    for seed in range(40):
        found = schedule(generate(seed, 4 + seed % 9).build(), options)
        lines += [f"==== {seed}", str(found)]
        if seed % 4 == 0:
            for plan in make_plans(found, options).values():
                lines.append(str(plan))
    return "\n".join([*lines, ""])


OF_VERSIONS = (3, 11), (2, 13)
"""The Python and torch of the pages of programs: capture and graphs show both."""

AS_WRITTEN = (sys.version_info[:2], release(torch.__version__)) == OF_VERSIONS
ANYWHERE = {"indices": indices, "loops": loops}
PAGES |= {**ANYWHERE, "captures": captures}
