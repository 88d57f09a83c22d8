"""What the rooms print of a program, as one text."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

import minicompile as mc
from minicompile.pipeline_result import Trace
from tests.expected.programs import ROWS

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
            for stage in LATE:
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
