"""Ahead-of-time autograd: calls the stages of this folder in order.

The real compiler: torch/_functorch/aot_autograd.py.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from minicompile import compat
from minicompile.aot.decompositions import decomposition
from minicompile.aot.functionalize import functionalize
from minicompile.aot.joint import trace
from minicompile.aot.layout import stride_order
from minicompile.aot.levels import LevelGraph, lower_to, verify
from minicompile.aot.missing import sufficient
from minicompile.aot.partition import partition
from minicompile.aot.passes import known_passes
from minicompile.aot.result import AotResult, Tangent
from minicompile.ops import plugins
from minicompile.ops.graph import Graph, PassRecord, copied, placeholders
from minicompile.ops.nodes import bytes_of
from minicompile.options import Options
from minicompile.passes.manager import check_names, run_passes
from minicompile.passes.replacements import Replacement


def ahead_of_time(
    graph: Graph,
    fakes: list[Any],
    options: Options,
    *,
    training: bool,
    shape_env: Any = None,
    continues: bool = False,
) -> AotResult:
    """Functional ATen graphs of a captured graph: forward, and backward when `training`.

    `fakes` are the values of the placeholders (FakeTensors of one mode, SymInts). `continues`: the function
    goes on after the graph. Raises Unsupported, or
    OptionError for unknown names in `options.disable_passes` and for patterns that can't be.
    """
    compat.require("differentiation")
    mode = fake_mode_of(graph, fakes, shape_env)
    records: list[PassRecord] = []
    selected = known_passes(options.plugins)
    check_names(options, known_passes())
    rules = plugins.rules(decomposition, options.plugins)

    def run(stage: str, given: Graph) -> Graph:
        chosen = [entry for entry in selected if entry.runs(stage, options)]
        if stage == "pre_grad" and chosen:
            given = copied(given)
        run_passes(chosen, given, mode, records)
        late = stage in ("prims", "post_grad")  # no level follows that would expand replacements
        if late and any(isinstance(node.target, Replacement) for node in given.nodes):
            given.gm = lower_to("prims", given, mode, rules).gm
        return given

    graph = run("pre_grad", graph)
    traced, metadata = trace(graph.gm, fakes, mode, training=training)
    if metadata.trains:
        compat.require("training")
    name = metadata.graph_name
    recorded = Graph(traced, name, "recording")
    functional = functionalize(traced, metadata, mode)
    full = LevelGraph(functional, name, "functionalization")
    run("joint", full)
    core = lower_to("core", full, mode, rules)
    prims = lower_to("prims", core, mode, rules)
    run("prims", prims)
    levels = {graph.level: graph for graph in (full, core, prims)}
    if options.verify:
        for level in levels.values():
            verify(level, rules=rules)
    if not metadata.trains:
        forward = run("post_grad", copied(prims))
        return AotResult(forward, None, None, None, metadata, levels, records, graph, recorded)
    forward, backward, split = partition(prims, fakes, metadata, options, continues)
    run("post_grad", forward)
    run("post_grad", backward)
    inputs = placeholders(backward.gm.graph)[metadata.saved :]
    metadata.tangents = tuple(map(tangent_of, inputs))
    metadata.sufficient = sufficient(backward, metadata.saved)
    return AotResult(forward, backward, prims, split, metadata, levels, records, graph, recorded)


def tangent_of(node: fx.Node) -> Tangent:
    """How the backward graph takes a gradient of a result."""
    value = node.meta["val"]
    return Tangent(value.dtype, value.device, tuple(stride_order(value)), bytes_of(node))


def fake_mode_of(graph: Graph, fakes: list[Any], shape_env: Any) -> Any:
    """The mode that the captured fakes belong to."""
    for value in (*fakes, *compat.tree_leaves([node.meta.get("val") for node in graph.nodes])):
        if isinstance(value, compat.FakeTensor):
            return value.fake_mode
    return compat.fake_mode(symbolic=shape_env is not None)
