"""Split a joint graph into forward and backward: which forward values are kept, which computed again?

"default" keeps every forward value that the backward reads. "min_cut" keeps the cheapest set of
values from which the rest can be recomputed: a minimum cut of a network in which each value is an
edge as wide as its bytes. Edges from the source say "this is never recomputed", edges to the sink
"the backward reads this".

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). The real compiler:
torch/_functorch/partitioners.py (min_cut_rematerialization_partition).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.layout import hint, size_expr
from minicompile.aot.maxflow import UNLIMITED, FlowNetwork
from minicompile.aot.result import Partition, RuntimeMetadata, SavedValue
from minicompile.aot.views import (
    alias_root,
    aten_ops,
    is_pointwise,
    is_random,
    is_size,
    is_symbolic,
    is_view,
    results_of,
)
from minicompile.ops.graph import Graph, origins_of, output_node, placeholders
from minicompile.shapes.nodes import SizeNodes

aten = torch.ops.aten
prims = torch.ops.prims

LOOPS = {prims.iota, prims.convert_element_type} | aten_ops(
    "sum prod mean amax amin any all argmax argmin var_mean cat clone index index_select "
    "embedding gather flip full constant_pad_nd select_scatter slice_scatter sym_size"
)
"""Operators besides views and pointwise ones that become loops of our own, which fusion can merge
with others.
"""

SHRINKING = 4
"""An operator whose result is this many times smaller than what it reads (a reduction) is worth keeping."""
DISTANCE_BIAS = 1.1
"""Per step that a value lies before the backward: values made late are preferred, they are
recomputed from less.
"""
FAR = 100
WRITE_AND_READ = 2
"""Keeping a value that fusion would never have written costs a write and a read."""

Saved = dict[fx.Node, str]
"""Values to keep, and the reason for each."""


def partition(
    joint: Graph, primals: int, metadata: RuntimeMetadata, method: str
) -> tuple[Graph, Graph, Partition]:
    """(forward, backward, report) of a joint graph with output ((forward results...), (gradients...)).

    How many values pass between the two goes into `metadata`.
    """
    inputs = placeholders(joint.gm.graph)
    changed = {*metadata.mutated_inputs, *(spec.base for spec in metadata.relaid)}
    copy_mutated_inputs(joint.gm, [inputs[i] for i in sorted(changed)])
    parts = JointParts(joint.gm, primals)
    naive = save_all(parts)
    reasons = min_cut(parts) if method == "min_cut" else naive
    saved = [node for node in parts.nodes if node in reasons]
    sizes = parts.sizes_read_by_backward(reasons)
    sizes += parts.sizes_of_shapes([*saved, *sizes, *parts.tangents], joint.gm.graph)
    metadata.saved, metadata.saved_sizes = len(saved) + len(sizes), len(sizes)
    drawn = [n for n in joint.nodes if is_random(n) and n.meta.get("phase") != "backward"]
    outputs = [*parts.results, *saved, *sizes]
    forward = extract(joint, "forward", parts.primals, outputs, drawn)
    backward = extract(joint, "backward", [*saved, *sizes, *parts.tangents], parts.gradients)
    calls = [
        {node.name for node in half.nodes if isinstance(node.target, OpOverload)}
        for half in (forward, backward)
    ]
    twice = set.intersection(*calls)
    again = [node for node in parts.nodes if node.name in twice and not is_view(node)]
    report = Partition(
        tuple(saved_value(node, reasons[node]) for node in saved),
        tuple(node.name for node in again),
        sum(map(bytes_of, saved)),
        sum(map(bytes_of, naive)),
        method,
        {node.name: origins_of(node) for node in (*saved, *again)},
    )
    return forward, backward, report


def saved_value(node: fx.Node, reason: str) -> SavedValue:
    size = None if is_symbolic(node) else bytes_of(node)
    return SavedValue(node.name, size, reason, is_input=node.op == "placeholder")


def copy_mutated_inputs(gm: fx.GraphModule, inputs: Iterable[fx.Node]) -> None:
    """Inputs written to in place hold something else by the time the backward runs: let it read a copy.

    A copy that the backward turns out not to read is removed again by the forward's clean-up.
    """
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    for node in inputs:
        with gm.graph.inserting_before(first):
            copied = gm.graph.call_function(aten.clone.default, (node,))
        copied.meta.update(node.meta, phase="forward")
        for user in set(node.users) - {copied}:
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

    def is_backward(self, node: fx.Node) -> bool:
        """As autograd ran it: after the tangents, or in the backward phase for nothing else."""
        return node in self.after_tangents or (
            node.meta.get("phase") == "backward" and node not in self.needed_by_forward
        )

    def can_be_kept(self, node: fx.Node) -> bool:
        """Does the backward need this forward value?"""
        return (
            node in self.needed_by_backward
            and node not in self.after_tangents
            and not is_size(node)
        )

    def read_by_backward(self, node: fx.Node) -> bool:
        return node in self.gradients or any(
            user in self.after_tangents and user in self.needed_by_backward for user in node.users
        )

    def sizes_read_by_backward(self, saved: Collection[fx.Node]) -> list[fx.Node]:
        """Sizes and numbers that the backward graph uses, directly or through what it recomputes."""

        def given(node: fx.Node) -> bool:
            return is_size(node) and size_expr(node.meta["val"]).is_Symbol

        used = ancestors(self.gradients, stop=lambda node: node in saved or given(node))
        return [node for node in self.nodes if node in used and given(node)]

    def sizes_of_shapes(self, inputs: Sequence[fx.Node], graph: fx.Graph) -> list[fx.Node]:
        """New nodes for the symbols in the backward's shapes that aren't the size of an input of it."""
        used = ancestors(self.gradients, stop=lambda node: node in inputs)
        known = set().union(*map(size_expressions, inputs))
        symbols = set().union(*(e.free_symbols for node in used for e in size_expressions(node)))
        sizes = SizeNodes(graph)
        for node in self.primals:
            sizes.add_input(node, node.meta["val"])
        with graph.inserting_before(self.primals[-1].next):
            missing = sorted(symbols - known, key=str)
            made = [sizes.argument(symbol, sizes.env, self.primals[-1].meta) for symbol in missing]
        self.nodes = [node for node in graph.nodes if node.op != "output"]
        return made


def size_expressions(node: fx.Node) -> set[sympy.Expr]:
    """The sizes in a node's value, symbolic or not."""
    value = node.meta.get("val")
    sizes = (value,) if isinstance(value, torch.SymInt) else getattr(value, "shape", ())
    return {sympy.sympify(size_expr(size)) for size in sizes}


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
    return value.element_size() * math.prod(map(hint, value.shape))


def bytes_read(node: fx.Node) -> int:
    return sum(map(bytes_of, node.all_input_nodes))


def is_constant(node: fx.Node) -> bool:
    """Made from nothing but numbers: never worth keeping."""
    return node.op == "get_attr" or (
        node.op == "call_function" and not node.all_input_nodes and not is_random(node)
    )


def is_heavy(node: fx.Node) -> bool:
    """A library call, or as much work: convolutions, matrix products, sorts, scatters, scans."""
    target = node.target
    if not isinstance(target, OpOverload) or is_view(node):
        return False
    return target.overloadpacket not in LOOPS and not is_pointwise(target)


# Keep everything ---------------------------------------------------------------------------------


def save_all(parts: JointParts) -> Saved:
    """Keep what the backward phase reads of the forward phase; of a view, the value it shows."""
    saved: Saved = {}
    for node in parts.nodes:
        if node in parts.needed_by_backward and parts.is_backward(node):
            for used in node.all_input_nodes:
                saved.setdefault(alias_root(used), f"read by {node.name} in the backward pass")
    for value in parts.gradients:
        if isinstance(value, fx.Node):
            saved.setdefault(alias_root(value), "a gradient by itself")

    def worth_keeping(node: fx.Node) -> bool:
        return not (is_size(node) or is_constant(node) or parts.is_backward(node))

    return {node: reason for node, reason in saved.items() if worth_keeping(node)}


# Minimum cut -------------------------------------------------------------------------------------


def min_cut(parts: JointParts) -> Saved:
    """The cheapest set of values to keep."""
    candidates = list(filter(parts.can_be_kept, parts.nodes))
    distance = distances(parts)
    in_memory = read_by_library_calls(parts)
    network = FlowNetwork()
    bans: dict[fx.Node, str] = {}
    for node in candidates:
        bans[node] = why_not_recomputed(node, in_memory)
        if bans[node]:
            network.add_edge("source", (node, "in"), UNLIMITED)
        if parts.read_by_backward(node):
            network.add_edge((node, "out"), "sink", UNLIMITED)
        network.add_edge((node, "in"), (node, "out"), weight(node, distance[node]))
        for user in filter(parts.can_be_kept, node.users):
            network.add_edge((node, "out"), (user, "in"), UNLIMITED)
    side = network.minimum_cut("source", "sink")[1]
    saved = [node for node in candidates if (node, "in") in side and (node, "out") not in side]
    return {node: bans[node] or cheaper_reason(node) for node in saved}


def distances(parts: JointParts) -> dict[fx.Node, int]:
    """Steps from each value to the first thing that the backward computes of it."""
    distance: dict[fx.Node, int] = {}
    for node in reversed(parts.nodes):
        steps = [distance[user] + 1 for user in node.users if user in distance]
        distance[node] = 0 if node in parts.after_tangents else min(steps, default=FAR)
    return distance


def why_not_recomputed(node: fx.Node, in_memory: set[fx.Node]) -> str:
    """The reason why a value can't or shouldn't be computed again in the backward; "" if it may be."""
    if node.op == "placeholder":
        return "an input of the graph"
    if is_constant(node) or is_view(node):
        return ""
    if node.target is operator.getitem:
        return why_not_recomputed(node.all_input_nodes[0], in_memory)
    if is_random(node):
        return "random: a second call would draw other numbers"
    if is_heavy(node):
        return f"{node.target} is expensive to compute again"
    if node.target is aten.clone.default and node.all_input_nodes[0].op == "placeholder":
        return "the old contents of an input that is written to"
    read = bytes_read(node)
    if isinstance(node.meta["val"], torch.Tensor) and bytes_of(node) * SHRINKING < read:
        return f"small result ({bytes_of(node)} bytes) of much input ({read} bytes)"
    if node in in_memory:
        return "the backward needs it in memory for a library call"
    return ""


def read_by_library_calls(parts: JointParts) -> set[fx.Node]:
    """Values that an expensive backward operator reads, perhaps through views."""
    found: set[fx.Node] = set()
    for node in reversed(parts.nodes):
        for user in node.users:
            heavy = user in parts.after_tangents and is_heavy(user)
            if heavy or (user in found and is_view(user)):
                found.add(node)
    return found


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
    read = f"the values it is computed from ({bytes_read(node)} bytes)"
    return f"cheaper to keep ({bytes_of(node)} bytes) than {read}"


# Extracting the halves ---------------------------------------------------------------------------


def extract(
    joint: Graph,
    name: str,
    inputs: list[fx.Node],
    outputs: list[Any],
    also: Sequence[fx.Node] = (),
) -> Graph:
    """The part of the joint graph that computes `outputs`, and `also` others, from `inputs`."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = new.placeholder(node.name)
        copies[node].meta.update(node.meta)
    inside = ancestors([*outputs, *also], stop=lambda node: node in copies) - set(inputs)
    for node in joint.nodes:
        if node in inside:
            if node.op == "placeholder":
                raise AssertionError(f"{name} graph reads {node.name}, which it does not get")
            copies[node] = new.node_copy(node, copies.__getitem__)
    result = new.output(
        tuple(copies[value] if isinstance(value, fx.Node) else value for value in outputs)
    )
    result.meta["origins"] = origins_of(output_node(joint.gm.graph))
    return Graph(compat.graph_module(joint.gm, new, name), name, "partition")
