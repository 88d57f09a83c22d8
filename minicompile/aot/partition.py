"""Split a joint graph into forward and backward: which forward values are kept, which computed again?

"default" keeps every forward value that the backward reads. "min_cut" keeps the cheapest set of
values from which the rest can be recomputed: a minimum cut of a network in which each value is an
edge as wide as its bytes. Edges from the source say "this is never recomputed", edges to the sink
"the backward reads this". A memory budget forbids recomputation of as many values as fit into it.

Inside a `torch.utils.checkpoint` region everything is recomputed, whatever the method; only random numbers
(or what the cut finds cheaper: a dropout's mask) are kept, so that both passes see the same ones.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). The real compiler:
torch/_functorch/partitioners.py (min_cut_rematerialization_partition).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.layout import hint, size_expr
from minicompile.aot.maxflow import UNLIMITED, FlowNetwork
from minicompile.aot.result import Partition, RecomputedValue, RuntimeMetadata, SavedValue
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
from minicompile.options import Options
from minicompile.shapes.nodes import SizeNodes

aten = torch.ops.aten
prims = torch.ops.prims

REDUCTIONS = aten_ops("sum prod mean amax amin any all argmax argmin var_mean")

LOOPS = (
    REDUCTIONS
    | {prims.iota, prims.convert_element_type}
    | aten_ops(
        "cat clone index index_select embedding gather flip full constant_pad_nd select_scatter "
        "slice_scatter sym_size"
    )
)
"""Operators besides views and pointwise ones that become loops of our own, which fusion can merge
with others.
"""

SHRINKING = 4
"""The result of a reduction that is this many times smaller than what it reads is worth keeping."""
DISTANCE_BIAS = 1.1
"""Per step that a value lies before the backward: values made late are preferred, they are
recomputed from less.
"""
FAR = 100
WRITE_AND_READ = 2
"""Keeping a value that fusion would never have written costs a write and a read."""

ONE_BYTE = 1 << 20
"""Width of a byte, if cuts of equally many bytes are told apart by their number of values."""
PRODUCTS = aten_ops("mm bmm addmm baddbmm")

Saved = dict[fx.Node, str]
"""Values to keep, and the reason for each."""


def partition(
    joint: Graph, fakes: Sequence[Any], metadata: RuntimeMetadata, options: Options
) -> tuple[Graph, Graph, Partition]:
    """(forward, backward, report) of a joint graph with output ((forward results...), (gradients...)).

    `fakes` are the values of its first inputs as captured. How many values pass between the two goes into
    `metadata`.
    """
    inputs = placeholders(joint.gm.graph)
    copy_mutated_inputs(joint.gm, [inputs[i] for i in metadata.mutated_inputs])
    parts = JointParts(joint.gm, fakes)
    naive = save_all(parts)
    method, budget = options.partitioner, options.memory_budget
    if method == "default":
        reasons = naive
    else:
        reasons = min_cut(parts) if budget is None else within_budget(parts, naive, budget)
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

    def recomputed(node: fx.Node) -> RecomputedValue:
        from_saved = ancestors([node], stop=lambda used: used in reasons)
        names = [kept.name for kept in saved if kept in from_saved]
        some = ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
        why = "checkpoint region" if node in parts.inside else "cheaper to compute again"
        if budget is not None and why.startswith("cheaper"):
            why = f"beyond the memory budget of {budget}"
        size = size_of(node) if node in naive else 0
        return RecomputedValue(
            node.name, size, f"{why}: {flops(node)} FLOPs, from {some or 'numbers'}"
        )

    report = Partition(
        tuple(
            SavedValue(node.name, size_of(node), reasons[node], node.op == "placeholder")
            for node in saved
        ),
        tuple(map(recomputed, again)),
        sum(map(bytes_of, saved)),
        sum(map(bytes_of, naive)),
        method,
        {node.name: origins_of(node) for node in (*saved, *again)},
    )
    return forward, backward, report


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

    def __init__(self, gm: fx.GraphModule, fakes: Sequence[Any]) -> None:
        self.nodes = [node for node in gm.graph.nodes if node.op != "output"]
        inputs = placeholders(gm.graph)
        self.primals, self.tangents = inputs[: len(fakes)], inputs[len(fakes) :]
        self.parameters = {
            node for node, fake in zip(inputs, fakes) if isinstance(fake, torch.nn.Parameter)
        }
        """They live as long as the model: keeping one costs nothing."""
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
        self.leaving: set[fx.Node] = set()
        """Values made in a checkpoint region and read outside of it."""
        self.inside: set[fx.Node] = set()
        """Other values made in such regions, and what the backward makes of them before it has a tangent.
        Random numbers and what is read off them (a dropout's mask) don't count.
        """
        self.find_regions()

    def find_regions(self) -> None:
        made = [node for node in self.nodes if node.meta.get("region") is not None]
        for node in reversed(made):
            for user in node.users:
                part = is_view(user) or user.target is operator.getitem
                other = user.meta.get("region") != node.meta["region"] and not self.is_backward(
                    user
                )
                if other or (part and user in self.leaving):
                    self.leaving.add(node)
        for node in self.nodes if made else ():
            mine = node.meta.get("region") is not None and node not in self.leaving
            derived = self.is_backward(node) and not self.inside.isdisjoint(node.all_input_nodes)
            drawn = any(map(is_random, (node, *node.all_input_nodes)))
            if (mine or derived) and not drawn and node not in self.after_tangents:
                self.inside.add(node)

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


def elements(node: fx.Node) -> int:
    """How many a tensor value has, for the sizes at hand; 0 for anything else."""
    value = node.meta.get("val")
    return math.prod(map(hint, value.shape)) if isinstance(value, torch.Tensor) else 0


def bytes_of(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.element_size() * elements(node) if isinstance(value, torch.Tensor) else 0


def size_of(node: fx.Node) -> int | None:
    return None if is_symbolic(node) else bytes_of(node)


def elements_read(node: fx.Node) -> int:
    """By an operator; an expanded view shows some of them more than once."""
    return sum(min(elements(x), elements(alias_root(x))) for x in node.all_input_nodes)


def flops(node: fx.Node) -> int:
    """Floating-point operations of a call: two for each multiplication in matrix products, convolutions and
    attention, else one for each element read or written, whichever are more.
    """
    packet = getattr(node.target, "overloadpacket", None)
    if is_view(node) or packet is None:
        return 0
    shapes = [list(map(hint, getattr(x.meta["val"], "shape", ()))) for x in node.all_input_nodes]
    if packet in PRODUCTS:
        return 2 * elements(node) * shapes[-1][-2]
    if packet is aten.convolution:
        return 2 * elements(node) * math.prod(shapes[1][1:])
    if "scaled_dot_product" in str(packet):
        return 4 * math.prod(shapes[0]) * shapes[1][-2]
    return max(elements(node), elements_read(node))


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
    """Keep what the backward phase reads of the forward phase; of a view, the value it shows; of a value
    inside a checkpoint region, what it is computed from.
    """
    saved: Saved = {}
    waiting = [
        (used, f"read by {node.name} in the backward pass")
        for node in parts.nodes
        if node in parts.needed_by_backward and parts.is_backward(node)
        for used in node.all_input_nodes
    ]
    waiting += [(v, "a gradient by itself") for v in parts.gradients if isinstance(v, fx.Node)]
    for used, reason in waiting:
        node = alias_root(used)
        if node in saved or is_size(node) or is_constant(node) or parts.is_backward(node):
            continue
        if node in parts.inside:
            waiting += [
                (one, f"{node.name} is computed again from it") for one in node.all_input_nodes
            ]
        else:
            saved[node] = reason
    return saved


# Minimum cut -------------------------------------------------------------------------------------


class Cut:
    """The network of the values that could be kept, each as wide as what keeping it costs."""

    def __init__(self, parts: JointParts, bans: Saved, weight: Callable[[fx.Node], int]) -> None:
        self.network, self.bans, self.width = FlowNetwork(), bans, 0
        for node, ban in bans.items():
            if ban:
                self.network.add_edge("source", (node, "in"), UNLIMITED)
            if parts.read_by_backward(node):
                self.network.add_edge((node, "out"), "sink", UNLIMITED)
            can_be_saved = isinstance(node.meta["val"], torch.Tensor) and not is_view(node)
            width = weight(node) if can_be_saved and node not in parts.inside else UNLIMITED
            self.network.add_edge((node, "in"), (node, "out"), width)
            for user in filter(bans.__contains__, node.users):
                self.network.add_edge((node, "out"), (user, "in"), UNLIMITED)
        self.widen()

    def widen(self) -> None:
        """Find the minimum cut, anew after a ban."""
        more, self.side = self.network.minimum_cut("source", "sink")
        self.width += more

    def ban(self, node: fx.Node, reason: str, limit: float) -> None:
        """Don't recompute `node` either, unless the cut would get wider than `limit`."""
        before = self.network.capacity[:], self.width, self.side
        self.network.add_edge("source", (node, "in"), UNLIMITED)
        self.widen()
        if self.width <= limit:
            self.bans[node] = reason
        else:
            self.network.capacity, self.width, self.side = before
            self.network.capacity += [0, 0]  # the new edge

    def saved(self) -> Saved:
        crossing = (n for n in self.bans if (n, "in") in self.side and (n, "out") not in self.side)
        return {node: self.bans[node] or cheaper_reason(node) for node in crossing}


def min_cut(parts: JointParts) -> Saved:
    """The cheapest set of values to keep."""
    distance = distances(parts)
    in_memory = read_by_library_calls(parts)

    def weight(node: fx.Node) -> int:
        """A value's bytes, more if it is far from its use or would not be written otherwise."""
        if node in parts.parameters:
            return 1
        cost = bytes_of(node) * DISTANCE_BIAS ** max(min(distance[node], FAR), 1)
        written = node.op == "placeholder" or any(map(is_heavy, (node, *node.users)))
        return max(int(cost) * (1 if written else WRITE_AND_READ), 1)

    candidates = filter(parts.can_be_kept, parts.nodes)
    bans = {node: why_not_recomputed(node, parts, in_memory) for node in candidates}
    return Cut(parts, bans, weight).saved()


def within_budget(parts: JointParts, naive: Saved, budget: float) -> Saved:
    """Between the fewest bytes that do (budget 0) and those of `naive` (budget 1), not counting inputs.

    A knapsack: of the values of `naive`, those that take the most work per byte to compute again are kept
    first, each one that fits. More budget never keeps fewer bytes: where two budgets first differ, the
    smaller one found the value too large.
    """

    def bytes_kept(node: fx.Node) -> int:
        return 0 if node.op == "placeholder" else bytes_of(node)

    def work_per_byte(node: fx.Node) -> float:
        between = ancestors([node], stop=lambda used: used in naive and used is not node)
        work = sum(flops(used) for used in between if used is node or used not in naive)
        return work / max(bytes_of(node), 1)

    if budget == 1:
        return naive
    candidates = filter(parts.can_be_kept, parts.nodes)
    bans = {node: why_never_recomputed(node) for node in candidates}
    cut = Cut(parts, bans, lambda node: bytes_kept(node) * ONE_BYTE + 1)
    least, most = cut.width // ONE_BYTE, sum(map(bytes_kept, naive))
    limit = (least + budget * (most - least) + 1) * ONE_BYTE - 1
    for node in sorted(naive, key=work_per_byte, reverse=True):
        if not bans[node]:
            reason = f"fits into the memory budget: {work_per_byte(node):.1f} FLOPs per byte"
            cut.ban(node, reason, limit)
    return cut.saved()


def distances(parts: JointParts) -> dict[fx.Node, int]:
    """Steps from each value to the first thing that the backward computes of it."""
    distance: dict[fx.Node, int] = {}
    for node in reversed(parts.nodes):
        steps = [distance[user] + 1 for user in node.users if user in distance]
        distance[node] = 0 if node in parts.after_tangents else min(steps, default=FAR)
    return distance


def why_never_recomputed(node: fx.Node) -> str:
    """The reason why a value can't be computed again in the backward; "" if it can."""
    if node.op == "placeholder":
        return "an input of the graph"
    if is_random(node) or any(
        map(is_random, node.all_input_nodes * (node.target is operator.getitem))
    ):
        return "random: a second call would draw other numbers"
    if node.target is aten.clone.default and node.all_input_nodes[0].op == "placeholder":
        return "the old contents of an input that is written to"
    return ""


def why_not_recomputed(node: fx.Node, parts: JointParts, in_memory: set[fx.Node]) -> str:
    """The reason why a value can't or shouldn't be computed again in the backward; "" if it may be."""
    never = why_never_recomputed(node)
    if never or node in parts.inside or is_constant(node) or is_view(node):
        return never
    if node in parts.leaving:
        return "it leaves a checkpoint region"
    if node.target is operator.getitem:
        return why_not_recomputed(node.all_input_nodes[0], parts, in_memory)
    if is_heavy(node):
        return f"{node.target} is expensive to compute again"
    shrinks = elements(node) * SHRINKING < elements_read(node)
    if shrinks and getattr(node.target, "overloadpacket", None) in REDUCTIONS:
        return f"small result ({elements(node)} elements) of much input ({elements_read(node)})"
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


def cheaper_reason(node: fx.Node) -> str:
    read = sum(map(bytes_of, map(alias_root, node.all_input_nodes)))
    return f"keeping its {bytes_of(node)} bytes is the cheapest (it is computed from {read})"


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
    ends = [node for node in outputs if isinstance(node, fx.Node)]
    late = set() if name == "forward" else {n for n in inside if n.meta.get("phase") == "forward"}
    for end in (*(n for n in joint.nodes if n in inside and n not in late), *ends):
        waiting = [end]  # recomputed values are made just before they are read
        while waiting:
            node = waiting[-1]
            missing = [used for used in node.all_input_nodes if used not in copies]
            if missing and node not in copies:
                waiting += missing
                continue
            waiting.pop()
            if node.op == "placeholder" and node not in copies:
                raise AssertionError(f"{name} graph reads {node.name}, which it does not get")
            if node not in copies:
                copies[node] = new.node_copy(node, copies.__getitem__)
    result = new.output(
        tuple(copies[value] if isinstance(value, fx.Node) else value for value in outputs)
    )
    result.meta["origins"] = origins_of(output_node(joint.gm.graph))
    return Graph(compat.graph_module(joint.gm, new, name), name, "partition")
