"""The operator levels of whole models, and the library calls that are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import minicompile as mc
from minicompile.aot.levels import verify
from minicompile.aot.result import AotResult
from minicompile.api import backends
from minicompile.errors import VerifyError
from minicompile.lessons.levels import family
from minicompile.pipeline import aot_eager
from minicompile.pipeline_result import Trace
from tests.corridor.zoo import ZOO
from tests.dynamo.architecture_zoo import ALL

MODELS: dict[str, Callable[[], Any]] = {**ZOO, **{name: each.make for name, each in ALL.items()}}


def ahead_of_time_of(make: Callable[[], Any]) -> list[AotResult]:
    """What AOT makes of a model's training, one result for each graph."""
    seen: list[AotResult] = []
    with mc.scoped():

        @backends("levels")
        def backend(options: Any) -> Any:
            def compile_capture(capture: Any) -> Any:
                trace = Trace.watching(capture)
                call = aot_eager(capture, options)
                assert trace.aot is not None
                seen.append(trace.aot)
                return call

            return compile_capture

        torch.manual_seed(0)
        model, inputs = make()
        mc.compile(model.train(), backend="levels")(**inputs)
    return seen


def check(make: Callable[[], Any]) -> tuple[Counter[str], list[str]]:
    """Library calls of the graphs at "prims", and operators that a level can't hold or have no family."""
    externs: Counter[str] = Counter()
    wrong: list[str] = []
    for result in ahead_of_time_of(make):
        prims = result.level("prims")
        externs.update(
            str(op) for _, op in prims.calls if family(prims, op) in ("library", "extern")
        )
        for graph in result.levels.values():
            try:
                verify(graph)
            except VerifyError as error:
                wrong.append(str(error))
            wrong += [str(op) for _, op in graph.calls if family(graph, op) == "extern"]
    return externs, wrong
