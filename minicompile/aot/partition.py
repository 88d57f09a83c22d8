"""Split a joint graph into forward and backward: which forward values are kept, which computed again?

"default" keeps every forward value that the backward reads. "min_cut" keeps the cheapest set of
values from which the rest can be recomputed: a minimum cut of a network in which each value is an
edge as wide as its bytes. Edges from the source say "this is never recomputed", edges to the sink
"the backward reads this".

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). The real compiler:
torch/_functorch/partitioners.py (min_cut_rematerialization_partition).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.layout import hint
from minicompile.aot.maxflow import UNLIMITED, FlowNetwork
from minicompile.aot.result import Partition, SavedValue
from minicompile.aot.views import (
    alias_root,
    is_pointwise,
    is_random,
    is_size,
    is_symbolic,
    is_view,
    results_of,
)
from minicompile.ops.graph import Graph, origins_of, output_node, placeholders

aten = torch.ops.aten

LOOPS = {
    aten.sum,
    aten.prod,
    aten.mean,
    aten.amax,
    aten.amin,
    aten.any,
    aten.all,
    aten.argmax,
    aten.argmin,
    aten.var_mean,
    aten.cat,
    aten.clone,
    aten.index,
    aten.gather,
    aten.flip,
    aten.full,
    aten.constant_pad_nd,
    aten.select_scatter,
    aten.slice_scatter,
    aten.sym_size,
    torch.ops.prims.iota,
    torch.ops.prims.convert_element_type,
}
"""Operators besides views and pointwise ones that become loops of our own, which fusion can merge
with others.
"""


def is_heavy(node: fx.Node) -> bool:
    """A library call, or as much work: convolutions, matrix products, sorts, scatters, scans."""
    target = node.target
    if not isinstance(target, OpOverload) or is_view(node):
        return False
    return target.overloadpacket not in LOOPS and not is_pointwise(target)


SHRINKING = 4
"""An operator whose result is this many times smaller than what it reads (a reduction) is worth keeping."""
DISTANCE_BIAS = 1.1
"""Per step that a value lies before the backward: values made late are preferred, they are
recomputed from less.
"""
FAR = 100
WRITE_AND_READ = 2
"""Keeping a value that fusion would never have written costs a write and a read."""


@dataclass
class Split:
    """Forward and backward graphs, and how many values pass between them."""

    forward: Graph
    backward: Graph
    partition: Partition
    saved: int
    saved_sizes: int


def partition(joint: Graph, primals: int, mutated: tuple[int, ...], method: str) -> Split:
    """Split the joint graph, whose output is ((forward results...), (gradients...))."""
    gm = joint.gm
    copy_mutated_inputs(gm, [placeholders(gm.graph)[i] for i in mutated])
    parts = JointParts(gm, primals)
    saved, reasons = min_cut(parts) if method == "min_cut" else save_all(parts)
    naive = saved if method == "default" else save_all(parts)[0]
    saved_tensors = [node for node in parts.nodes if node in saved]
    sizes = parts.sizes_read_by_backward(saved)
    forward_nodes, forward = extract(
        joint, "forward", parts.primals, [*parts.results, *saved_tensors, *sizes], parts.primals
    )
    backward_nodes, backward = extract(
        joint,
        "backward",
        [*saved_tensors, *sizes, *parts.tangents],
        parts.gradients,
        parts.tangents,
    )
    recomputed = [
        node.name
        for node in parts.nodes
        if node in forward_nodes
        and node in backward_nodes
        and isinstance(node.target, OpOverload)
        and not is_view(node)
    ]
    report = Partition(
        tuple(
            SavedValue(n.name, None if is_symbolic(n) else bytes_of(n), reasons[n])
            for n in saved_tensors
        ),
        tuple(recomputed),
        sum(bytes_of(n) for n in saved_tensors),
        sum(bytes_of(n) for n in naive),
        method,
    )
    return Split(forward, backward, report, len(saved_tensors) + len(sizes), len(sizes))


def copy_mutated_inputs(gm: fx.GraphModule, inputs: Iterable[fx.Node]) -> None:
    """Inputs written to in place hold something else by the time the backward runs: let it read a copy.

    A copy that the backward turns out not to read is removed again by the forward's clean-up.
    """
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    for node in inputs:
        with gm.graph.inserting_before(first):
            copied = gm.graph.call_function(aten.clone.default, (node,))
        copied.meta.update(node.meta, phase="forward")
        for user in list(node.users):
            if user is not copied:
                user.replace_input_with(node, copied)


class JointParts:
    """A joint graph's nodes by role."""

    def __init__(self, gm: fx.GraphModule, primals: int) -> None:
        self.nodes = [node for node in gm.graph.nodes if node.op != "output"]
        inputs = placeholders(gm.graph)
        self.primals, self.tangents = inputs[:primals], inputs[primals:]
        results, gradients = results_of(gm.graph)
        self.results: list[Any] = list(results)
        self.gradients: list[Any] = list(gradients)
        self.after_tangents = set(self.tangents)
        """What only the backward can compute."""
        for node in self.nodes:
            if any(used in self.after_tangents for used in node.all_input_nodes):
                self.after_tangents.add(node)
        self.needed_by_backward = ancestors(self.gradients)
        self.needed_by_forward = ancestors(self.results)

    def read_by_backward(self, node: fx.Node) -> list[fx.Node]:
        return [u for u in node.users if u in self.after_tangents and u in self.needed_by_backward]

    def sizes_read_by_backward(self, saved: set[fx.Node]) -> list[fx.Node]:
        """Symbolic sizes that the backward graph uses, directly or through what it recomputes."""
        used = ancestors(self.gradients, stop=lambda node: node in saved or is_size(node))
        return [node for node in self.nodes if node in used and is_size(node)]


def ancestors(outputs: Iterable[Any], stop: Any = lambda node: False) -> set[fx.Node]:
    """The nodes that the outputs are computed from, themselves included; not past nodes where `stop`."""
    found: set[fx.Node] = set()
    waiting = [value for value in outputs if isinstance(value, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            if not stop(node):
                waiting.extend(node.all_input_nodes)
    return found


def bytes_of(node: fx.Node) -> int:
    """Size of a tensor value, for the sizes at hand; 0 for anything else."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    count = value.element_size()
    for size in value.shape:
        count *= hint(size)
    return count


def is_constant(node: fx.Node) -> bool:
    """Made from nothing but numbers: never worth keeping."""
    return node.op == "get_attr" or (
        node.op == "call_function" and not node.all_input_nodes and not is_random(node)
    )


# Keep everything ---------------------------------------------------------------------------------


def save_all(parts: JointParts) -> tuple[set[fx.Node], dict[fx.Node, str]]:
    """Keep what the backward phase reads of the forward phase; of a view, the value it shows."""
    saved: dict[fx.Node, str] = {}
    backward = [n for n in parts.nodes if n in parts.needed_by_backward and is_backward(n, parts)]
    for node in backward:
        for used in node.all_input_nodes:
            if not is_backward(used, parts) and not is_size(used):
                root = alias_root(used)
                if not is_constant(root):
                    saved.setdefault(root, f"read by {node.name} in the backward pass")
    for value in parts.gradients:
        if isinstance(value, fx.Node) and not is_backward(value, parts) and not is_constant(value):
            saved.setdefault(alias_root(value), "a gradient by itself")
    return set(saved), saved


def is_backward(node: fx.Node, parts: JointParts) -> bool:
    return node in parts.after_tangents or (
        node.meta.get("phase") == "backward" and node not in parts.needed_by_forward
    )


# Minimum cut -------------------------------------------------------------------------------------


def min_cut(parts: JointParts) -> tuple[set[fx.Node], dict[fx.Node, str]]:
    """The cheapest set of values to keep, with the reason for each."""
    candidates = [
        n
        for n in parts.nodes
        if n in parts.needed_by_backward and n not in parts.after_tangents and not is_size(n)
    ]
    distance = distances(parts)
    materialized: dict[fx.Node, bool] = {}
    network = FlowNetwork()
    bans: dict[fx.Node, str] = {}
    for node in candidates:
        reason = why_not_recomputed(node, parts, materialized)
        if reason:
            bans[node] = reason
            network.add_edge("source", (node, "in"), UNLIMITED)
        if parts.read_by_backward(node) or node in parts.gradients:
            network.add_edge((node, "out"), "sink", UNLIMITED)
        network.add_edge((node, "in"), (node, "out"), weight(node, distance[node]))
        for user in node.users:
            if (
                user in parts.needed_by_backward
                and user not in parts.after_tangents
                and not is_size(user)
            ):
                network.add_edge((node, "out"), (user, "in"), UNLIMITED)
    _, side = network.minimum_cut("source", "sink")
    saved = {node for node in candidates if (node, "in") in side and (node, "out") not in side}
    reasons = {node: bans.get(node) or cheaper_reason(node) for node in saved}
    return saved, reasons


def distances(parts: JointParts) -> dict[fx.Node, int]:
    """Steps from each value to the first thing that the backward computes of it."""
    distance: dict[fx.Node, int] = {}
    for node in reversed(parts.nodes):
        steps = [distance[user] + 1 for user in node.users if user in distance]
        distance[node] = 0 if node in parts.after_tangents else min(steps, default=FAR)
    return distance


def why_not_recomputed(node: fx.Node, parts: JointParts, materialized: dict[fx.Node, bool]) -> str:
    """The reason why a value can't or shouldn't be computed again in the backward; "" if it may be."""
    if node.op == "placeholder":
        return "an input of the graph"
    if node.op == "get_attr" or is_constant(node):
        return ""
    if node.target is operator.getitem:
        whole = node.args[0]
        assert isinstance(whole, fx.Node)
        return "" if is_view(node) else why_not_recomputed(whole, parts, materialized)
    if is_random(node):
        return "random: a second call would draw other numbers"
    if is_view(node):
        return ""
    if is_heavy(node):
        return f"{node.target} is expensive to compute again"
    if node.target is aten.clone.default and node.all_input_nodes[0].op == "placeholder":
        return "the old contents of an input that is written to"
    read = sum(bytes_of(used) for used in node.all_input_nodes)
    if isinstance(node.meta["val"], torch.Tensor) and bytes_of(node) * SHRINKING < read:
        return f"small result ({bytes_of(node)} bytes) of much input ({read} bytes)"
    if read_by_heavy(node, parts, materialized):
        return "the backward needs it in memory for a library call"
    return ""


def read_by_heavy(node: fx.Node, parts: JointParts, known: dict[fx.Node, bool]) -> bool:
    """Does an expensive backward operator read the value, perhaps through views?"""
    if node not in known:
        known[node] = any(
            (user in parts.after_tangents and is_heavy(user))
            or (is_view(user) and read_by_heavy(user, parts, known))
            for user in node.users
        )
    return known[node]


def weight(node: fx.Node, distance: int) -> int:
    """What keeping a value costs: its bytes, more if it is far from its use or would not be
    written otherwise.
    """
    if is_view(node) or not isinstance(node.meta["val"], torch.Tensor):
        return UNLIMITED
    cost = bytes_of(node) * DISTANCE_BIAS ** max(min(distance, FAR), 1)
    around = (node, *node.users)
    in_memory = node.op == "placeholder" or any(is_heavy(one) for one in around)
    return max(int(cost) * (1 if in_memory else WRITE_AND_READ), 1)


def cheaper_reason(node: fx.Node) -> str:
    read = sum(bytes_of(used) for used in node.all_input_nodes)
    return f"cheaper to keep ({bytes_of(node)} bytes) than the values it is computed from ({read} bytes)"


# Extracting the halves ---------------------------------------------------------------------------


def extract(
    joint: Graph, name: str, inputs: list[fx.Node], outputs: list[Any], required: list[fx.Node]
) -> tuple[set[fx.Node], Graph]:
    """The part of the joint graph that computes `outputs` from `inputs`; also the old nodes in it."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = new.placeholder(node.name)
        copies[node].meta.update(node.meta)
    inside = ancestors(outputs, stop=lambda node: node in copies) - set(inputs)
    for node in joint.gm.graph.nodes:
        if node in inside:
            if node.op == "placeholder":
                raise AssertionError(f"{name} graph reads {node.name}, which it does not get")
            copies[node] = new.node_copy(node, copies.__getitem__)
    result = new.output(
        tuple(copies[value] if isinstance(value, fx.Node) else value for value in outputs)
    )
    result.meta["origins"] = origins_of(output_node(joint.gm.graph))
    gm = compat.graph_module(joint.gm, new, name)
    return inside, Graph(gm, name, "partition")
