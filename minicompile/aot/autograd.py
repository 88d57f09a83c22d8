"""Ahead-of-time autograd: the room's table of contents.

The real compiler: torch/_functorch/aot_autograd.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from minicompile import compat
from minicompile.aot.functionalize import functionalize
from minicompile.aot.joint import trace
from minicompile.aot.layout import geometry, same_value
from minicompile.aot.levels import LevelGraph, lower_to, verify
from minicompile.aot.partition import partition
from minicompile.aot.passes import known_passes
from minicompile.aot.result import AotResult
from minicompile.ops.graph import Graph, PassRecord, copied, output_node
from minicompile.ops.nodes import is_tensor, results_of
from minicompile.options import Options
from minicompile.passes.manager import check_names, run_passes
from minicompile.passes.patterns import Replacement

aten = torch.ops.aten


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
    mode = fake_mode_of(graph, fakes, shape_env)
    records: list[PassRecord] = []
    known = known_passes()
    check_names(options, known)

    def run(stage: str, given: Graph) -> Graph:
        chosen = [entry for entry in known if entry.runs(stage, options)]
        if stage == "pre_grad" and chosen:
            given = copied(given)
        run_passes(chosen, given, mode, records)
        late = stage in ("prims", "post_grad")  # no level follows that would expand replacements
        if late and any(isinstance(node.target, Replacement) for node in given.nodes):
            given.gm = lower_to("prims", given, mode).gm
        return given

    graph = run("pre_grad", graph)
    traced, metadata = trace(graph.gm, fakes, mode, training=training)
    name = metadata.graph_name
    recorded = Graph(traced, name, "recording")
    functional = functionalize(traced, metadata, mode, options.assert_indirect_indexing)
    full = LevelGraph(functional, name, "functionalization")
    run("joint", full)
    core = lower_to("core", full, mode)
    prims = lower_to("prims", core, mode)
    run("prims", prims)
    levels = {graph.level: graph for graph in (full, core, prims)}
    if options.verify:
        for level in levels.values():
            verify(level)
    if not metadata.trains:
        forward = run("post_grad", copied(prims))
        keep_strides(recorded, forward)
        return AotResult(forward, None, None, None, metadata, levels, records, graph, recorded)
    inputs = [*fakes, *metadata.memories]
    forward, backward, split = partition(prims, inputs, metadata, options, continues)
    run("post_grad", forward)
    run("post_grad", backward)
    keep_strides(recorded, forward)
    return AotResult(forward, backward, prims, split, metadata, levels, records, graph, recorded)


def keep_strides(recorded: Graph, forward: Graph) -> None:
    """Give results the strides they were recorded with where those lead to no element (dimensions of size 1,
    tensors without elements): passes and decompositions don't look at these, but callers may."""
    wanted, _ = results_of(recorded.gm.graph)
    made = output_node(forward.gm.graph)
    results: list[Any] = list(results_of(forward.gm.graph))
    for i, (node, eager) in enumerate(zip(results, wanted)):
        if not isinstance(node, fx.Node) or not is_tensor(node) or not isinstance(eager, fx.Node):
            continue
        value, like = node.meta["val"], eager.meta["val"]
        (*_, offset), (sizes, strides, _) = geometry(value), geometry(like)
        plain = all(isinstance(n, int) for n in (*sizes, *strides, offset))
        if plain and value.stride() != like.stride() and same_value(value, like):
            with forward.gm.graph.inserting_before(made):
                place = (node, list(sizes), list(strides), offset)
                results[i] = forward.gm.graph.call_function(aten.as_strided.default, place)
            results[i].meta.update(node.meta, val=like)
    made.update_arg(0, tuple(results))


def fake_mode_of(graph: Graph, fakes: list[Any], shape_env: Any) -> Any:
    """The mode that the captured fakes belong to."""
    for value in (*fakes, *compat.tree_leaves([node.meta.get("val") for node in graph.nodes])):
        if isinstance(value, compat.FakeTensor):
            return value.fake_mode
    return compat.fake_mode(symbolic=shape_env is not None)
