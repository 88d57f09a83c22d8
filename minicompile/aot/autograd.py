"""Ahead-of-time autograd: the room's table of contents.

The real compiler: torch/_functorch/aot_autograd.py.
"""

from __future__ import annotations

from typing import Any

from minicompile import compat
from minicompile.aot import passes  # noqa: F401  registers the built-in passes and patterns
from minicompile.aot.decompose import lower_to
from minicompile.aot.functionalize import functionalize
from minicompile.aot.joint import trace
from minicompile.aot.levels import LevelGraph, verify
from minicompile.aot.partition import partition
from minicompile.aot.result import AotResult
from minicompile.ops.graph import Graph, PassRecord
from minicompile.options import Options
from minicompile.passes.manager import run_passes


def ahead_of_time(
    graph: Graph, fakes: list[Any], options: Options, *, training: bool, shape_env: Any = None
) -> AotResult:
    """Functional ATen graphs of a captured graph: forward, and backward when `training`.

    `fakes` are the values of the placeholders (FakeTensors of one mode, SymInts). Raises Unsupported.
    """
    mode = fake_mode_of(graph, fakes, shape_env)
    records: list[PassRecord] = []
    traced, metadata = trace(graph.gm, fakes, mode, training=training)
    name = metadata.graph_name
    full = LevelGraph(functionalize(traced, metadata, mode), name, "functionalization")
    run_passes("full", full, mode, records)
    core = lower_to("core", full, mode)
    prims = lower_to("prims", core, mode)
    run_passes("prims", prims, mode, records)
    levels = {graph.level: graph for graph in (full, core, prims)}
    if options.verify:
        for level in levels.values():
            verify(level)
    if not metadata.trains:
        return AotResult(prims, None, None, None, metadata, levels, records)
    forward, backward, split = partition(prims, fakes, metadata, options)
    run_passes("forward", forward, mode, records)
    run_passes("backward", backward, mode, records)
    return AotResult(forward, backward, prims, split, metadata, levels, records)


def fake_mode_of(graph: Graph, fakes: list[Any], shape_env: Any) -> Any:
    """The mode that the captured fakes belong to."""
    for value in (*fakes, *compat.tree_leaves([node.meta.get("val") for node in graph.nodes])):
        if isinstance(value, compat.FakeTensor):
            return value.fake_mode
    return compat.fake_mode(symbolic=shape_env is not None)
