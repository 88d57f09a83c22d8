"""Bring a functional graph down a level: call the rule of each operator that has one, copy the other nodes.

Rules are traced on the node's fakes, so only what a rule does costs time. Each result keeps the
dtype and strides of the operator it replaces, so everything after it may be copied unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile.aot.decompositions import rule_for
from minicompile.aot.explicit import PrimsTracer
from minicompile.aot.layout import conform
from minicompile.aot.result import Level
from minicompile.aot.tracer import Tracer
from minicompile.aot.views import results_of
from minicompile.ops.graph import origins_of


def lower_to(level: Level, gm: fx.GraphModule, mode: Any, name: str) -> fx.GraphModule:
    """A new graph with the operators of `level` ("core" or "prims")."""
    kind = PrimsTracer if level == "prims" else Tracer
    tracer = kind(mode, rules=lambda op: rule_for(op, level))
    values: dict[fx.Node, Any] = {}
    with torch.no_grad(), tracer.active():
        for node in gm.graph.nodes:
            tracer.origins, tracer.phase = origins_of(node), node.meta.get("phase")
            if node.op == "placeholder":
                meta = {key: value for key, value in node.meta.items() if key != "val"}
                values[node] = tracer.placeholder(node.name, node.meta["val"], meta)
            elif node.op == "get_attr":
                name = str(node.target)
                values[node] = tracer.attribute(name, getattr(gm, name), node.meta["val"])
            elif node.op == "call_function":
                values[node] = lower_node(node, values, tracer, level)
        results = fx.map_arg(results_of(gm.graph), values.__getitem__)
        return tracer.finish(results, name)


def lower_node(node: fx.Node, values: dict[fx.Node, Any], tracer: Tracer, level: Level) -> Any:
    if not isinstance(node.target, OpOverload):
        whole = node.args[0]
        if isinstance(node.meta["val"], torch.SymInt) or not isinstance(whole, fx.Node):
            return node.meta["val"]  # sizes become nodes again where they are used
        return values[whole][node.args[1]]
    if isinstance(node.meta["val"], torch.SymInt):
        return node.meta["val"]
    rule = rule_for(node.target, level)
    if rule is not None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        result = rule(*args, **kwargs)
        if result is not NotImplemented:
            return conform(node.target, result, node.meta["val"])
    return tracer.copy(node, values.__getitem__)
