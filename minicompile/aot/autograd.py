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
    functional = Graph(functionalize(traced, metadata, mode), name, "functionalization")
    full = run_passes("full", functional, mode, records)
    core = Graph(lower_to("core", full.gm, mode, name), name, "decomposition to Core ATen")
    lowered = Graph(lower_to("prims", core.gm, mode, name), name, "decomposition to prims")
    prims = run_passes("prims", lowered, mode, records)
    levels = {"full": full, "core": core, "prims": prims}
    if not metadata.trains:
        return AotResult(prims, None, None, None, metadata, levels, records)
    inputs = len(fakes) + len(metadata.memories)
    forward, backward, split = partition(prims, inputs, metadata, options.partitioner)
    run_passes("forward", forward, mode, records)
    run_passes("backward", backward, mode, records)
    return AotResult(forward, backward, prims, split, metadata, levels, records)


def fake_mode_of(graph: Graph, fakes: list[Any], shape_env: Any) -> Any:
    """The mode that the captured fakes belong to."""
    for value in (*fakes, *compat.tree_leaves([node.meta.get("val") for node in graph.nodes])):
        if isinstance(value, compat.FakeTensor):
            return value.fake_mode
    return compat.fake_mode(symbolic=shape_env is not None)
