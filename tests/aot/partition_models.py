"""Bytes kept for backward, by our partitioner and by torch.compile's, on the same joint graphs.

A value counts by the memory it keeps alive: all views of one tensor count as that tensor, once. Parameters
and other inputs exist anyway, and are counted apart.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from minicompile.aot.autograd import ahead_of_time
from minicompile.aot.partition import bytes_of, is_heavy
from minicompile.aot.result import AotResult
from minicompile.api import backends, reset
from minicompile.api import compile as compile_
from minicompile.dynamo.result import Capture
from minicompile.ops.graph import Graph, output_node, placeholders
from minicompile.ops.nodes import alias_root, is_view
from minicompile.ops.registry import scoped
from minicompile.options import Options
from minicompile.pipeline import aot_eager


def capture_of(target: Any, *args: Any, **kwargs: Any) -> Capture:
    """The one graph that a call of a function or module is captured as."""
    found: list[Capture] = []

    with scoped():

        @backends("keep")
        def keep(options: Any) -> Any:
            def compile_with(capture: Capture) -> Any:
                found.append(capture)
                return aot_eager(capture, options)

            return compile_with

        compile_(target, backend="keep", fullgraph=True, dynamic=False)(*args, **kwargs)
    reset()
    (capture,) = found
    return capture


def result_of(capture: Capture, options: Options | None = None) -> AotResult:
    options = options or Options()
    return ahead_of_time(
        capture.graph, capture.fakes, options, training=True, shape_env=capture.shape_env
    )


@dataclass(frozen=True)
class Kept:
    """What a partition keeps for backward and computes again."""

    values: int
    inputs: int
    """Bytes of inputs."""
    bytes: int
    """Bytes of everything else."""
    heavy: Counter[str]
    """Heavy operators that run again in backward."""
    light: int
    """Other operators that do, without views."""


def kept(joint: Graph, saved: Iterable[str], twice: Collection[str]) -> Kept:
    """Measure a partition: names of the values kept, names of the operators in both halves."""
    by_name = {node.name: node for node in joint.nodes}
    memory = {root: bytes_of(root) for root in map(alias_root, map(by_name.__getitem__, saved))}
    inputs = sum(size for root, size in memory.items() if root.op == "placeholder")
    again = [by_name[name] for name in twice if not is_view(by_name[name])]
    heavy = Counter(str(node.target) for node in again if is_heavy(node))
    total = sum(memory.values())
    return Kept(len(memory), inputs, total - inputs, heavy, len(again) - heavy.total())


def calls(graph: fx.Graph) -> set[str]:
    return {n.name for n in graph.nodes if n.op == "call_function" and hasattr(n.target, "_schema")}


def ours(result: AotResult) -> Kept:
    assert result.joint is not None and result.backward is not None
    halves = result.forward.gm.graph, result.backward.gm.graph
    saved = [node.name for node in placeholders(halves[1])][: result.metadata.saved]
    return kept(result.joint, saved, calls(halves[0]) & calls(halves[1]))


def torch_joint(joint: Graph, primals: int) -> tuple[fx.GraphModule, dict[str, str], int]:
    """Our joint graph as torch's partitioner wants it; names there -> here; how many results it has."""
    graph, copies, names = fx.Graph(), {}, {}
    for index, node in enumerate(joint.nodes):
        if node.op == "output":
            continue
        made = graph.node_copy(node, copies.__getitem__)
        if node.op == "placeholder":
            made.target = (
                f"primals_{index + 1}" if index < primals else f"tangents_{index - primals + 1}"
            )
            made.name = made.target
        if node.meta.get("phase") == "backward":
            made.meta["partitioner_tag"] = "is_backward"
        copies[node], names[made.name] = made, node.name
    results, gradients = output_node(joint.gm.graph).args[0]
    flat = [*results, *gradients]
    end = graph.output(tuple(copies[v] if isinstance(v, fx.Node) else v for v in flat))
    end.meta["desc"] = [None] * len(flat)
    return fx.GraphModule(joint.gm, graph), names, len(results)


def theirs(joint: Graph, fakes: list[Any]) -> Kept:
    """What torch.compile's partitioner keeps of our joint graph."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    gm, names, results = torch_joint(joint, len(fakes))
    parameters = [i for i, fake in enumerate(fakes) if isinstance(fake, torch.nn.Parameter)]
    forward, backward = min_cut_rematerialization_partition(
        gm, None, num_fwd_outputs=results, static_lifetime_input_indices=parameters
    )
    saved = [n.name for n in backward.graph.nodes if n.op == "placeholder"]
    saved = [names[name] for name in saved if not name.startswith("tangents")]
    twice = calls(forward.graph) & calls(backward.graph)
    return kept(joint, saved, {names[name] for name in twice if name in names})


# Checkpoint regions


class Block(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.p = p

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p, self.training)


class Blocks(nn.Module):
    def __init__(self, p, checkpointed):
        super().__init__()
        self.blocks = nn.ModuleList(Block(p) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.sum()


region = functools.partial(checkpoint, use_reentrant=False)
attention = F.scaled_dot_product_attention

REGIONS = {
    "two equal regions": lambda x, w: (
        region(lambda t: (t @ w).exp().sin(), x) + region(lambda t: (t @ w).exp().sin(), x)
    ),
    "the same outside": lambda x, w: (x @ w).exp() * region(lambda t: (t @ w).exp().sin(), x),
    "copies its input": lambda x, w: region(lambda t: t.clone().sin() @ w, x).exp(),
    "gives its input": lambda x, w: region(lambda t: (t, t @ w), x)[0] * x * w,
    "gives a view": lambda x, w: region(lambda t: (t @ w).exp().t(), x).sin(),
    "splits": lambda x, w: region(lambda t: (t @ w).exp().chunk(2, 1)[0], x).sin(),
    "one in another": lambda x, w: region(lambda t: region(lambda s: (s @ w).sin(), t).exp(), x),
    "attention": lambda x, w: region(lambda t: attention(t[None], (t @ w)[None], t[None]), x),
    "several drops": lambda x, w: region(
        lambda t: F.dropout(F.dropout(t @ w, 0.5) @ w, 0.5).sin(), x
    ).exp(),
    "noise": lambda x, w: region(lambda t: (t @ w + torch.rand_like(t)).sin(), x).exp(),
    "writes inside": lambda x, w: region(lambda t: (t @ w).sin().mul_(2).sin(), x),
}
