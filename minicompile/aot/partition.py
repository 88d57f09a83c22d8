"""Split a joint graph into forward and backward: which forward values are kept, which computed again?

"default" keeps every forward value that the backward reads. "min_cut" keeps the cheapest set of
values from which the rest can be recomputed: a minimum cut of a network in which each value is an
edge as wide as its bytes. Edges from the source say "this is never recomputed", edges to the sink
"the backward reads this".

Inside a `torch.utils.checkpoint` region all is recomputed but random numbers, or the mask made of them.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). The real compiler:
torch/_functorch/partitioners.py (min_cut_rematerialization_partition).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.maxflow import UNLIMITED, FlowNetwork
from minicompile.aot.result import ForwardValue, Partition, RuntimeMetadata
from minicompile.ops.gates import allowed
from minicompile.ops.graph import Graph, origins_of, output_node, placeholders
from minicompile.ops.nodes import (
    alias_root,
    aten_ops,
    bytes_of,
    has_effect,
    is_kept_copy,
    is_pointwise,
    is_random,
    is_size,
    is_symbolic,
    is_tensor,
    is_view,
    results_of,
)
from minicompile.ops.philox import PHILOX
from minicompile.ops.plugins import rules
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.shapes.symnode import SizeNodes, size_expr

aten = torch.ops.aten
prims = torch.ops.prims

REDUCTIONS = aten_ops("sum prod mean amax amin any all argmax argmin var_mean")

LOOPS = {prims.iota, prims.convert_element_type, PHILOX.overloadpacket, *REDUCTIONS} | aten_ops(
    "cat clone index index_select embedding gather flip full constant_pad_nd select_scatter "
    "slice_scatter sym_size"
)
"""Operators besides views and pointwise ones that fusion can merge with others."""
ONE_BYTE = 1 << 40
"""Width of a byte in a cut. Of two with equal bytes the later one is less wide, while it is forward."""

Saved = dict[fx.Node, str]
"""Values to keep, and the reason for each."""

partitioner: Registry[Callable[[JointParts, Saved, Options], Saved | None]] = Registry(
    "partitioner", "name -> another choice of what the forward saves, or None"
)
"""(the joint graph's nodes, what "default" would save, options) -> what is saved."""


def partition(
    joint: Graph,
    fakes: Sequence[Any],
    metadata: RuntimeMetadata,
    options: Options,
    continues: bool = False,
) -> tuple[Graph, Graph, Partition]:
    """(forward, backward, report) of a joint graph with output ((forward results...), (gradients...)).

    `fakes` are its first inputs. How many values pass between the two goes into `metadata`. `continues`:
    Python code runs after this graph and may overwrite its inputs or results. Nothing is then computed again
    from these: eager would not have kept them.
    """
    inputs = placeholders(joint.gm.graph)
    copy_mutated_inputs(joint.gm, [inputs[i] for i in metadata.mutated_inputs])
    parts = JointParts(joint.gm, fakes, continues)
    naive, method = save_all(parts), options.partitioner
    if method == "min_cut" and not allowed(
        "partitioner", joint.name, partial(", ".join, (n.name for n in naive)), lambda: report
    ):
        method = "default"
    reasons: Saved | None = naive if method == "default" else None
    for choose in rules(partitioner, options.plugins).values():
        reasons = choose(parts, naive, options) if reasons is None else reasons
    reasons = min_cut(parts) if reasons is None else reasons
    saved = [node for node in parts.nodes if node in reasons]
    sizes = parts.sizes_read_by_backward(reasons)
    sizes += parts.sizes_of_shapes([*saved, *sizes, *parts.tangents], joint.gm.graph)
    metadata.saved, metadata.saved_sizes = len(saved) + len(sizes), len(sizes)
    acting = [node for node in joint.nodes if has_effect(node) and node.op == "call_function"]
    drawn = [node for node in acting if node.meta.get("phase") != "backward"]
    outputs = [*parts.results, *saved, *sizes]
    forward = extract(joint, "forward", parts.primals, outputs, drawn)
    backward = extract(joint, "backward", [*saved, *sizes, *parts.tangents], parts.gradients)
    names = ({n.name for n in half.nodes if does_work(n)} for half in (forward, backward))
    twice = set.intersection(*names)
    again = [node for node in parts.nodes if node.name in twice]

    def recomputed(node: fx.Node) -> ForwardValue:
        from_saved = ancestors([node], stop=lambda used: used in reasons)
        names = [kept.name for kept in saved if kept in from_saved] or ["numbers"]
        why = "checkpoint region" if node in parts.inside else "cheaper than keeping it"
        why = "a constant" if is_constant(node) else why
        size = size_of(node) if node in naive else 0
        return ForwardValue(node.name, size, f"{why}: from {', '.join(names)}")

    report = Partition(
        tuple(ForwardValue(n.name, size_of(n), reasons[n], n.op == "placeholder") for n in saved),
        tuple(map(recomputed, again)),
        sum(map(bytes_of, set(saved) - set(parts.primals))),
        sum(map(bytes_of, naive.keys() - set(parts.primals))),
        method,
        {node.name: origins_of(node) for node in (*saved, *again)},
    )
    return forward, backward, report


def copy_mutated_inputs(gm: fx.GraphModule, inputs: Iterable[fx.Node]) -> None:
    """Inputs written to in place hold something else by the time the backward runs: let it read a copy (if it
    does not, the forward's clean-up removes it)."""
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    for node in inputs:
        with gm.graph.inserting_before(first):
            copied = gm.graph.call_function(aten.clone.default, (node,))
        copied.meta.update(node.meta, phase="forward", old_contents=True)
        for user in set(node.users) - {copied}:
            user.replace_input_with(node, copied)


class JointParts:
    """A joint graph's nodes by role."""

    def __init__(self, gm: fx.GraphModule, fakes: Sequence[Any], continues: bool) -> None:
        self.nodes = [node for node in gm.graph.nodes if node.op != "output"]
        inputs = placeholders(gm.graph)
        self.primals, self.tangents = inputs[: len(fakes)], inputs[len(fakes) :]
        is_parameter = [isinstance(fake, torch.nn.Parameter) for fake in fakes]
        self.parameters = set(compress(inputs, is_parameter))
        """They live as long as the model: keeping one costs nothing."""
        self.results, self.gradients = map(list, results_of(gm.graph))
        self.given = {alias_root(n) for n in self.results if isinstance(n, fx.Node)}
        """Inputs, and what the results lie in: others may write to them."""
        self.given.update(self.primals)
        self.overwritten = self.given if continues else set()
        """Inputs and results that Python code may write to before the backward runs."""
        self.needed_by_forward = ancestors(self.results)
        self.after_tangents = set(self.tangents)
        """What only the backward can compute, from tangents or random numbers that it draws itself."""
        for node in self.nodes:
            drawn = is_random(node) and self.is_backward(node)
            if drawn or any(used in self.after_tangents for used in node.all_input_nodes):
                self.after_tangents.add(node)
        self.needed_by_backward = ancestors(self.gradients)
        needed = [node for node in self.nodes if node in self.needed_by_backward]
        after = [node for node in needed if node in self.after_tangents]
        self.read_by_backward = {*self.gradients, *chain(*(n.all_input_nodes for n in after))}
        self.candidates = [n for n in needed if n not in self.after_tangents and not is_size(n)]
        """What could be kept: forward values that the backward needs."""
        self.leaving: set[fx.Node] = set()
        """Values made in a checkpoint region and read outside of it."""
        self.inside: set[fx.Node] = set()
        """Others, and what the backward makes of them without a tangent; not random numbers or a mask."""
        made = [node for node in self.nodes if node.meta.get("region") is not None]
        for node in reversed(made):
            for user in node.users:
                same = self.is_backward(user) or user.meta.get("region") == node.meta["region"]
                if not same or (user in self.leaving and not does_work(user)):
                    self.leaving.add(node)
        for node in self.candidates if made else ():
            mine = node.meta.get("region") is not None and call_of(node) not in self.leaving
            derived = self.is_backward(node) and not self.inside.isdisjoint(node.all_input_nodes)
            drawn = any(map(is_random, (node, *node.all_input_nodes)))
            if (mine or derived) and (node.target is PHILOX or not drawn):
                self.inside.add(node)

    def is_backward(self, node: fx.Node) -> bool:
        """As autograd ran it: after the tangents, or in the backward phase for nothing else."""
        return node in self.after_tangents or (
            node.meta.get("phase") == "backward" and node not in self.needed_by_forward
        )

    def sizes_read_by_backward(self, saved: Iterable[fx.Node]) -> list[fx.Node]:
        """Sizes and numbers that the backward graph uses, directly or through what it recomputes."""
        given = {
            node
            for node in filter(is_size, self.nodes)
            if node.op == "placeholder" or size_expr(node.meta["val"]).is_Symbol
        }
        used = ancestors(self.gradients, stop=given.union(saved).__contains__)
        return [node for node in self.nodes if node in used & given]

    def sizes_of_shapes(self, inputs: Sequence[fx.Node], graph: fx.Graph) -> list[fx.Node]:
        """New nodes for the symbols in the backward's shapes that aren't the size of an input of it."""
        used = ancestors(self.gradients, stop=set(inputs).__contains__)
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


def size_of(node: fx.Node) -> int | None:
    return None if is_symbolic(node) else bytes_of(node)


def call_of(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def packet_of(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def does_work(node: fx.Node) -> bool:
    """An operator that isn't a view."""
    return isinstance(node.target, OpOverload) and not is_view(node)


def is_constant(node: fx.Node) -> bool:
    """Made from nothing but numbers and sizes: never worth keeping."""
    from_sizes = all(map(is_size, node.all_input_nodes))
    return from_sizes and not (node.op == "placeholder" or is_size(node) or is_random(node))


def is_heavy(node: fx.Node) -> bool:
    """A library call, or as much work: convolutions, matrix products, sorts, scatters, scans."""
    return does_work(node) and not (packet_of(node) in LOOPS or is_pointwise(node.target))


def save_all(parts: JointParts) -> Saved:
    """Keep what the backward phase reads of the forward phase; of a view, the value it shows; of a value
    inside a checkpoint region, what it is computed from."""
    saved: Saved = {}
    waiting = [
        (used, f"read by {node.name} in the backward pass")
        for node in parts.nodes
        if node in parts.needed_by_backward and parts.is_backward(node) and not is_size(node)
        for used in node.all_input_nodes
    ]
    waiting += [(v, "a gradient by itself") for v in parts.gradients if isinstance(v, fx.Node)]
    for used, reason in waiting:
        node = alias_root(used)
        if node in saved or is_size(node) or is_constant(node) or parts.is_backward(node):
            continue
        if node in parts.inside:
            why = f"{node.name} is computed again from it"
            waiting += [(one, why) for one in node.all_input_nodes]
        else:
            saved[node] = reason
    return saved


class Cut:
    """The network of the values that could be kept, each as wide as its bytes. Those in `free` have none;
    those in `extra` count as such a part of their bytes more."""

    def __init__(
        self,
        parts: JointParts,
        bans: Saved,
        free: Collection[fx.Node],
        extra: Mapping[fx.Node, float],
    ) -> None:
        self.network, self.bans = FlowNetwork(), bans
        for index, (node, ban) in enumerate(bans.items()):
            if ban:
                self.network.add_edge("source", (node, "in"), UNLIMITED)
            if node in parts.read_by_backward:
                self.network.add_edge((node, "out"), "sink", UNLIMITED)
            rank = len(bans) * (1 + parts.is_backward(node)) - index
            size = 0 if node in free else bytes_of(node)
            width = size * int(ONE_BYTE * (1 + extra.get(node, 0))) + rank
            if node in parts.inside or is_view(node) or not is_tensor(node):
                width = UNLIMITED
            self.network.add_edge((node, "in"), (node, "out"), width)
            for user in filter(bans.__contains__, node.users):
                self.network.add_edge((node, "out"), (user, "in"), UNLIMITED)
        self.width, self.side = self.network.minimum_cut("source", "sink")

    def saved(self) -> Saved:
        crossing = (n for n in self.bans if (n, "in") in self.side and (n, "out") not in self.side)
        return {node: self.bans[node] or "cheaper than what it is made of" for node in crossing}


def min_cut(parts: JointParts) -> Saved:
    """The fewest bytes that spare the backward random, expensive and reducing operators; of two values about
    as large, one that is in memory anyway: an input or a result, else what a library call writes or reads or
    what is read again after one."""
    in_memory = read_by_library_calls(parts)
    bans = {node: why_not_recomputed(node, parts, in_memory) for node in parts.candidates}
    passing = read_again(parts)

    def extra(node: fx.Node) -> float:
        """Inputs and results last until the backward; others last a while, or are written for it alone."""
        if node in parts.given or not does_work(node):
            return 0
        there = node in passing or is_heavy(node) or any(map(is_heavy, node.users))
        return 1 / 1024 if there else 1 / 256

    more = {node: extra(node) for node in parts.candidates}
    return Cut(parts, bans, parts.parameters, more).saved()


def why_never_recomputed(node: fx.Node, parts: JointParts) -> str:
    """The reason why a value can't be computed again in the backward; "" if it can."""
    if node.op == "placeholder":
        return "an input of the graph"
    if is_random(call_of(node)):
        return "random: a second call would draw other numbers"
    if "old_contents" in node.meta:
        return "the old contents of an input that is written to"
    if is_view(node) or is_size(node) or node in parts.inside or parts.is_backward(node):
        return ""
    if not parts.overwritten.isdisjoint(map(alias_root, node.all_input_nodes)):
        return "it reads what later code may write to"
    return ""


def why_not_recomputed(node: fx.Node, parts: JointParts, in_memory: set[fx.Node]) -> str:
    """The reason why a value can't or shouldn't be computed again in the backward; "" if it may be."""
    never = why_never_recomputed(node, parts)
    if never or node in parts.inside or is_constant(node) or is_view(node):
        return never
    if is_kept_copy(node, parts.given):
        return "a copy of what may be written to before the backward"
    if call_of(node) in parts.leaving:
        return "it leaves a checkpoint region"
    if is_heavy(call_of(node)):
        return f"{call_of(node).target} is expensive to compute again"
    if packet_of(node) in REDUCTIONS:
        return "a reduction: a small result of much input"
    if node.target is PHILOX and node.meta["val"].device.type == "cpu":
        return "random numbers take a CPU longer than reading a mask"
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


def read_again(parts: JointParts) -> set[fx.Node]:
    """Values that the forward reads again after a library call that depends on them: residual streams."""
    forward = [node for node in parts.nodes if node in parts.needed_by_forward]
    bits = {node: 1 << place for place, node in enumerate(filter(is_heavy, forward))}
    before, after = dict[fx.Node, int](), dict[fx.Node, int]()
    """Of each value the library calls that it depends on, and those that depend on it."""
    for node in forward:
        before[node] = bits.get(node, 0)
        for used in node.all_input_nodes:
            before[node] |= before[used]
    found = set[fx.Node]()
    for node in reversed(forward):
        users = [user for user in node.users if user in before]
        after[node] = 0
        for user in users:
            after[node] |= bits.get(user, 0) | after[user]
        if any(before[u] & after[node] or (u in found and is_view(u)) for u in users):
            found.add(node)
    return found


def extract(
    joint: Graph, name: str, inputs: list[fx.Node], outputs: list[Any], also: Sequence[fx.Node] = ()
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
            node = waiting.pop()
            missing = [used for used in node.all_input_nodes if used not in copies]
            if node.op == "placeholder" and node not in copies:
                raise AssertionError(f"{name} graph reads {node.name}, which it does not get")
            if missing and node not in copies:
                waiting += [node, *missing]
            elif node not in copies:
                copies[node] = new.node_copy(node, copies.__getitem__)
    result = new.output(fx.map_arg(tuple(outputs), copies.__getitem__))
    result.meta["origins"] = origins_of(output_node(joint.gm.graph))
    return Graph(compat.graph_module(joint.gm, new, name), name, "partition")
