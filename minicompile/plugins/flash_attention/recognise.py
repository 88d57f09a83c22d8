"""Written-out attention in a captured graph becomes one operator, whatever is done to its scores elementwise.

    s = q @ k.transpose(-2, -1) * scale           from a product for each batch and head,
    s = torch.where(j > i, -torch.inf, s)         steps that are elementwise and write to nothing,
    out = torch.softmax(s, -1) @ v                to a softmax of rows that is multiplied

The operator's score function is the text of the steps. What they read besides is computed in the kernel, too,
where it comes from positions or, element by element, from tensors; those are handed in, as is what something
writes to later. They get no gradient. Kernels keep scores in float32 from the product to the softmax.

Dao et al., FlashAttention (2022); Dong et al., FlexAttention (2024). The real compiler has no such pass: its
users call torch.nn.attention.flex_attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn import functional as F

from minicompile import compat
from minicompile.lowering.context import layout_of
from minicompile.ops.dtypes import LOOP_DTYPES, TENSOR_CORES
from minicompile.ops.graph import Rewrite, call_text, target_name
from minicompile.ops.nodes import is_pointwise
from minicompile.passes.manager import graph_pass
from minicompile.plugins.flash_attention.operators import FlashAttention, function_of
from minicompile.plugins.flash_attention.score import scores_of
from minicompile.plugins.replacing import TORCH, Match, may_write, replace_nodes

LEAST_HEAD, MOST_HEAD = 16, 128
MADE = {"arange", "ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "tril", "triu"}
"""Functions that make a tensor of numbers, or leave a triangle of it."""
VIEWS = {"getitem", "unsqueeze", "squeeze", "view", "reshape", "expand", "transpose", "permute"}
CASTS = {"to", "float", "bool", "long", "int", "type_as", "contiguous", "half", "bfloat16"}
PYTHON = {"truediv": "div", "and_": "bitwise_and", "or_": "bitwise_or", "invert": "bitwise_not"}
"""Operators of Python that ATen calls otherwise."""


def name_of(node: fx.Node) -> str:
    """Return `softmax` for torch.softmax, F.softmax and the method; "" for a call of another library."""
    target = node.target
    if isinstance(target, OpOverload | OpOverloadPacket):
        ours = str(target).startswith("aten.")
    else:
        ours = str(getattr(target, "__module__", "torch")).partition(".")[0] in (*TORCH, "builtins")
    name = target_name(target).rpartition(".")[2]
    return PYTHON.get(name, name) if ours and node.op.startswith("call") else ""


def value(node: Any) -> Any:
    """Return the fake tensor of a node; None for anything else."""
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    return found if isinstance(found, Tensor) else None


def shape(node: Any) -> tuple[Any, ...]:
    return () if value(node) is None else tuple(value(node).shape)


def is_product(node: fx.Node) -> bool:
    """Is a call a matrix product for each batch and head?"""
    plain = name_of(node) == "matmul" and len(node.args) == 2 and not node.kwargs
    return plain and all(len(shape(x)) == 4 for x in (*node.args, node))


def is_cast(node: fx.Node) -> bool:
    """Does a call change the precision at most?"""
    return name_of(node) in CASTS and value(node).dtype.is_floating_point


def is_elementwise(node: fx.Node) -> bool:
    """Is each element of the result a function of elements of the operands, and nothing written to?"""
    name = name_of(node)
    packet = getattr(torch.ops.aten, name, None)
    if name in CASTS or packet is None or name.endswith("_") or "out" in node.kwargs:
        return name in CASTS
    return any(is_pointwise(getattr(packet, overload)) for overload in packet.overloads())


def is_computable(node: fx.Node) -> bool:
    """Can a kernel compute a value for each score anew?"""
    places = node.args[1] if name_of(node) == "getitem" else ()
    places = places if isinstance(places, tuple) else (places,)
    plain = all(p is None or p is ... or isinstance(p, slice | int) for p in places)
    return is_elementwise(node) or (plain and name_of(node) in MADE | VIEWS)


def is_idle(node: fx.Node) -> bool:
    """Is a call, which nothing reads, a cast or dropout that gave its argument back?"""
    writes = any((*node.args[3:], node.kwargs.get("inplace")))
    known = name_of(node) in {"dropout", *CASTS} and not writes and not node.users
    return known and value(node) is value(node.args[0])


def softmax_before(node: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return the softmax of rows that a product's operand is, and the casts between."""
    steps: list[fx.Node] = []
    while value(node) is not None and is_cast(node):
        steps.append(node)
        node = node.args[0]
    if value(node) is None or name_of(node) != "softmax":
        return None
    dims = [*node.args[1:2], *(node.kwargs[k] for k in ("dim",) if k in node.kwargs)]
    plain = set(node.kwargs) <= {"dim", "dtype", "_stacklevel"} and len(node.args) <= 2
    return (node, steps) if plain and dims in ([-1], [len(shape(node)) - 1]) else None


def steps_from_products(node: fx.Node, size: tuple[Any, ...], seen: dict[fx.Node, bool]) -> bool:
    """Note in `seen` which nodes' values come from a product of that size; say whether this one's does."""
    if node not in seen:
        whole = shape(node) == size
        seen[node] = whole and is_product(node)
        if whole and not seen[node] and is_elementwise(node):
            seen[node] = any([steps_from_products(x, size, seen) for x in node.all_input_nodes])  # noqa: C419
    return seen[node]


class EarlierWrites:
    """The calls before a node that may write, and the memory that each may write to."""

    def __init__(self, end: fx.Node) -> None:
        nodes = [node for node in end.graph.nodes if node < end]
        self.outside = memory(n for n in nodes if not n.op.startswith("call"))
        self.calls = [(n, self.homes(n.all_input_nodes)) for n in nodes if may_write(n)]

    def homes(self, nodes: Iterable[fx.Node]) -> set[int]:
        """Return the memory that values lie in. What is the caller's may be one piece, -1."""
        homes = memory(nodes)
        return homes if homes.isdisjoint(self.outside) else homes | {-1}

    def spare(self, node: fx.Node) -> bool:
        """Is a value the same if it is computed at the end?"""
        homes = self.homes([node, *node.all_input_nodes])
        return all(call < node or homes.isdisjoint(written) for call, written in self.calls)


def memory(nodes: Iterable[fx.Node]) -> set[int]:
    """Return the storages of values."""
    return {compat.storage_id(value(node)) for node in nodes if value(node) is not None}


class ScoreText:
    """The steps from a product to a softmax as the text of a function, and the tensors that it reads."""

    def __init__(self, product: fx.Node, scores: fx.Node, steps: set[fx.Node]) -> None:
        self.graph, self.steps, self.others = fx.Graph(), steps, list[fx.Node]()
        self.writes = EarlierWrites(scores)
        self.last = self.graph.placeholder("x0")
        """The last input."""
        self.copies = {product: self.last}
        self.text = source(self.graph, self.graph.call_method("float", (self.copy(scores),)))

    def copy(self, node: fx.Node) -> fx.Node:
        if node not in self.copies:
            here = node in self.steps or (is_computable(node) and self.writes.spare(node))
            if here and all(value(x) is not None for x in node.all_input_nodes):
                self.copies[node] = self.graph.node_copy(node, self.copy)
            else:
                self.others.append(node)
                with self.graph.inserting_after(self.last):
                    self.last = self.graph.placeholder(f"x{len(self.others)}")
                self.copies[node] = self.last
        return self.copies[node]


def source(graph: fx.Graph, result: fx.Node) -> str:
    """Return a graph of calls as the text of a function."""
    inputs = ", ".join(node.name for node in graph.nodes if node.op == "placeholder")
    calls = [f"    {n.name} = {call_text(n)}" for n in graph.nodes if n.op.startswith("call")]
    return "\n".join([f"def score({inputs}):", *calls, f"    return {result.name}"])


def attention_at(node: fx.Node, mode: Any, library: bool) -> tuple[Match, Any] | str:
    """Return the attention that ends in a product, and what computes it; or why there is none."""
    weights, values = node.args
    before = softmax_before(weights)
    if before is None:
        return "no softmax of rows times values"
    softmax, casts = before
    scores: Any = softmax.args[0]
    seen: dict[fx.Node, bool] = {}
    if not steps_from_products(scores, shape(softmax), seen):
        return "no product of queries and keys"
    steps = {step for step, yes in seen.items() if yes}
    first, *more = filter(is_product, steps)
    if more:
        return "scores come from several products"
    score = ScoreText(first, scores, steps - {first})
    arguments: Any = (*first.args, values, *score.others)
    operands = [*map(value, arguments)]
    if (why := refusal(*operands, value(scores), value(node))) is not None:
        return why
    inside = {node, softmax, *casts, *steps}
    for step in sorted(score.copies):  # `ones_like(s)` reads s, too
        if not inside.isdisjoint(step.all_input_nodes):
            inside.add(step)
    inside.update(u for n in inside - {node} for u in n.users if is_idle(u))
    try:
        others = [layout_of(other) for other in operands[3:]]
        known = scores_of(score.text, shape(first), others, layout_of(value(node)), training=True)
        if library and known.library is not None:
            call = partial(call_library, score.text, *known.library)
        elif library and value(node).device.type == "cpu":
            return "the library has no such scores"
        elif not LEAST_HEAD <= shape(node)[-1] <= MOST_HEAD:
            return "heads of another size"
        else:
            call = partial(call_operator, score.text)
        with mode:
            call(*operands)
    except Exception as error:  # whatever its operators raise
        return f"its scores aren't elementwise: {type(error).__name__}: {error}"
    return Match((node,), arguments, tuple(sorted(inside))), call


def refusal(q: Any, k: Any, v: Any, *more: Any) -> str | None:
    """Return why nothing computes attention of operands, where keys are transposed. `more`: tensors that
    scores read, the scores, the result."""
    *others, scores, out = more
    if any(x is None for x in (q, k, v, *others)):
        return "scores read what is no tensor"
    if any(not isinstance(n, int) for x in (q, k, v, *others) for n in (*x.shape, *x.stride())):
        return "sizes vary"
    if any(0 in x.shape for x in (q, k, v)):
        return "nothing to look at"
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        return "queries, keys and values differ in batch or heads"
    if q.shape[-1] != v.shape[-1]:
        return "queries and values differ in elements"
    if scores.dtype not in TENSOR_CORES:
        return f"scores in {scores.dtype}"
    if out.dtype not in TENSOR_CORES or not q.dtype == k.dtype == v.dtype == out.dtype:
        return f"in {out.dtype}"
    if out.requires_grad and any(x.requires_grad for x in others):
        return "what scores read wants a gradient"
    if any(x.device != q.device or x.dtype not in LOOP_DTYPES for x in others):
        return "scores read what kernels can't"
    return None


def call_operator(score: str, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Any:
    """Compute what a match does, by kernels of ours."""
    return FlashAttention.apply(score, q, k.mT, v, *others)


def call_library(
    score: str,
    scale: float,
    masked: bool,
    causal: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *others: Tensor,
) -> Tensor:
    """Compute what a match does, by the library. Its mask: scores where products are 0."""
    nothing = q.new_zeros(1, 1, q.shape[-2], k.shape[-1], dtype=torch.float32)
    mask = function_of(score)(nothing, *others) if masked else None
    return F.scaled_dot_product_attention(q, k.mT, v, mask, is_causal=causal, scale=scale)


def recognise(gm: fx.GraphModule, mode: Any, library: bool) -> list[Rewrite] | str:
    """Replace every attention; else say why the last one was left. `library`: it gets what it knows, and on a
    CPU there are no kernels of ours."""
    rewrites, why = list[Rewrite](), "no attention"
    for node in filter(is_product, list(gm.graph.nodes)):
        found = attention_at(node, mode, library)
        if isinstance(found, str):
            why = found
            continue
        rewrite = replace_nodes("flash_attention", gm, mode, *found, "pre_grad")
        if rewrite is None:
            why = "others read what lies between, or write to it"
        else:
            rewrites.append(rewrite)
    return rewrites or why


graph_pass("flash_attention", stage="pre_grad", order=50)(partial(recognise, library=True))
graph_pass(
    "flash_attention_template", stage="pre_grad", order=40, switch=("device_codegen", "triton")
)(partial(recognise, library=False))
