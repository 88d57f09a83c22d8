"""Written-out attention becomes one operator, whatever is done to its scores element by element.

    s = q @ k.transpose(-2, -1) * scale                 the products
    s = 20 * torch.tanh(s / 20) + slopes * (j - i)      what changes them: the operator's `score`
    s = s.masked_fill(j > i, -torch.inf)
    out = torch.softmax(s, -1) @ v

From the softmax back to the product every step must be elementwise, in place or not, but that batch and heads
may be grouped otherwise on the way (attention_products.py knows how products are written). What a step reads
besides is computed in the kernel, too, where it comes from positions or, element by element, from tensors;
those are handed in, as is what something writes to later. They get no gradient. Kernels keep scores in
float32 from the product to the softmax.

Dao et al., FlashAttention (2022); Dong et al., FlexAttention (2024). The real compiler has no such pass: its
users call torch.nn.attention.flex_attention.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from minicompile import compat
from minicompile.aot.layout import empty_like_layout
from minicompile.aot.passes.attention_products import (
    MATMUL,
    Product,
    Sides,
    is_weighted,
    name_of,
    product_of,
    queries_and_keys,
    regroups,
    same_rows,
    sides,
    value,
)
from minicompile.aot.passes.patterns import replace_nodes, trace_function, with_gradients
from minicompile.aot.passes.writes import Writes
from minicompile.errors import MinicompileError
from minicompile.ops.attention import ATTENTION, ATTENTION_BACKWARD, FlashAttention, function_of
from minicompile.ops.dtypes import LOOP_DTYPES, TENSOR_CORES
from minicompile.ops.graph import Graph, Rewrite, call_text, origins_of, target_name
from minicompile.ops.nodes import is_pointwise, is_view
from minicompile.passes.manager import graph_pass
from minicompile.passes.patterns import Match

LEAST_HEAD, MOST_HEAD = 16, 128
MADE = {"arange", "ones", "zeros", "full", "ones_like", "zeros_like", "full_like"}
"""What makes a tensor of numbers, and (TRIANGLES) leaves a triangle of it."""
LINEAR = {"matmul", "mm", "bmm", "einsum", "softmax", "mul", "div", "masked_fill", "where"}
LINEAR |= {"imul", "itruediv", "mul_", "div_", "masked_fill_"}
"""Steps of scores that the library may know, with masks by position."""
MOST_TRIED = 2**28
"""Positions."""
TRIANGLES = {"tril", "triu"}
MOVES = {"getitem", "unsqueeze", "squeeze", "view", "reshape", "expand", "transpose", "permute"}
CASTS = {"to", "float", "bool", "long", "int", "type_as", "contiguous", "half", "bfloat16"}
IN_PLACE = {"iadd", "isub", "imul", "itruediv", "add_", "sub_", "mul_", "div_", "masked_fill_"}
FORGET = {"add", "sub", "mul", "div", "masked_fill", "where"}
"""What they give is in memory of its own, and autograd keeps none of it. So with products."""
LOWERED = ("full", "iota", "clone", "convert_element_type")  # of prims


def is_owned(node: Any) -> bool:
    """Is what a node gives in memory that nothing but its one reader sees, autograd neither?"""
    if not isinstance(node, fx.Node) or len(node.users) > 1 or "out" in node.kwargs:
        return False
    if regroups(node) or name_of(node) in IN_PLACE:
        return is_owned(node.args[0])
    return product_of(node) is not None or name_of(node) in FORGET


def written_over(node: fx.Node) -> fx.Node | None:
    """What a step in place writes over, if it could as well give a tensor of its own. Not for `s *= s`:
    autograd keeps the factor."""
    if name_of(node) not in IN_PLACE:
        return None
    first, *others = (*node.args, *node.kwargs.values())
    alone = isinstance(first, fx.Node) and first not in others and is_owned(first)
    return first if alone else None  # type: ignore[return-value]


def is_cast(node: fx.Node) -> bool:
    """Does a call change the precision at most?"""
    return name_of(node) in CASTS and value(node).dtype.is_floating_point


def elementwise(node: fx.Node) -> bool:
    """Is each element of the result a function of elements of the operands, and nothing written to?"""
    name = name_of(node)
    if name in CASTS:
        return True
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name.endswith("_") or "out" in node.kwargs:
        return False
    return any(is_pointwise(getattr(packet, overload)) for overload in packet.overloads())


def computable(node: fx.Node) -> bool:
    """Can a kernel compute it for each score anew?"""
    name = name_of(node)
    if name == "getitem":
        places = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if not all(p is None or p is ... or isinstance(p, slice | int) for p in places):
            return False
    return elementwise(node) or name in MADE | TRIANGLES | MOVES


def softmax_before(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The softmax of rows that a product's first operand is, and the steps between: casts and regrouping."""
    steps: list[fx.Node] = []
    while is_cast(node) or regroups(node):
        steps.append(node)
        node = node.all_input_nodes[0]
    if name_of(node) != "softmax" or value(node).dim() not in MATMUL:
        return None
    dims = [*node.args[1:2], *(node.kwargs[k] for k in ("dim",) if k in node.kwargs)]
    known = set(node.kwargs) <= {"dim", "dtype", "_stacklevel"} and len(node.args) <= 2
    return (node, steps) if known and dims in ([-1], [value(node).dim() - 1]) else None


def carriers(node: fx.Node, size: Sequence[Any], seen: dict[fx.Node, bool]) -> bool:
    """Notes in `seen` which nodes' values come from a product; says whether this one's does."""
    if node not in seen:
        whole = isinstance(value(node), Tensor) and same_rows(value(node), size)
        seen[node] = whole and product_of(node) is not None
        if whole and not seen[node] and (elementwise(node) or regroups(node)):
            seen[node] = any([carriers(x, size, seen) for x in node.all_input_nodes])  # noqa: C419
        elif whole and (first := written_over(node)) is not None:
            seen[node] = carriers(first, size, seen)
            for other in node.all_input_nodes:
                carriers(other, size, seen)
    return seen[node]


class ScoreGraph:
    """The steps from a product to a softmax as a function's text, and the tensors that it reads."""

    def __init__(
        self, product: Product, scores: fx.Node, changed: set[fx.Node], writes: Writes, at: Sides
    ) -> None:
        self.graph, self.changed, self.others = fx.Graph(), changed, list[fx.Node]()
        self.writes = writes
        self.last = self.graph.placeholder("x0")
        """The last input."""
        first = self.regrouped(self.last, at.pairs, tuple(value(product.node).shape))
        self.copies = dict[fx.Node, fx.Node]()
        self.copies[product.node] = product.scores(first, self.copy)
        self.result = self.copy(scores)
        size = tuple(value(scores).shape)
        self.result = self.regrouped(self.result, size[:-2], (*at.pairs, *size[-2:]))

    def regrouped(self, node: fx.Node, outer: tuple[int, ...], size: tuple[int, ...]) -> fx.Node:
        """Scores whose batch and heads are `outer`, as those of another size."""
        if outer == size[:-2]:
            return node
        if (1, *outer) == size[:-2]:
            return self.graph.call_method("unsqueeze", (node, 0))
        if outer == (1, *size[:-2]):
            return self.graph.call_method("squeeze", (node, 0))
        return self.graph.call_method("view", (node, *size))

    def copy(self, node: fx.Node) -> fx.Node:
        if node not in self.copies:
            here = node in self.changed or (computable(node) and self.writes.spare(node))
            if here and all(isinstance(value(x), Tensor) for x in node.all_input_nodes):
                made = self.copied(node)
            else:
                self.others.append(node)
                with self.graph.inserting_after(self.last):
                    made = self.last = self.graph.placeholder(f"x{len(self.others)}")
            self.copies[node] = made
        return self.copies[node]

    def copied(self, node: fx.Node) -> fx.Node:
        """The call, of these values. For a tensor of its own, if it is in place: what would be rounded to the
        scores' precision is rounded first."""
        if (name := name_of(node)) not in IN_PLACE:
            return self.graph.node_copy(node, self.copy)
        known = value(node).dtype

        def operand(x: fx.Node) -> fx.Node:
            other, found = value(x), self.copy(x)
            rounds = other.dtype.is_floating_point and other.dtype is not known and other.dim()
            return self.graph.call_method("to", (found, known)) if rounds else found

        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        if name.endswith("_"):
            return self.graph.call_method(name[:-1], args, kwargs)
        return self.graph.call_function(getattr(operator, name[1:]), args, kwargs)

    def text(self) -> str:
        return source(list(self.graph.nodes), self.result)


def source(nodes: Sequence[fx.Node], result: fx.Node) -> str:
    """A graph of calls as the text of a function."""
    inputs = ", ".join(node.name for node in nodes if node.op == "placeholder")
    calls = [f"    {n.name} = {call_text(n)}" for n in nodes if n.op.startswith("call")]
    return "\n".join([f"def score({inputs}):", *calls, f"    return {result.name}.float()"])


def slope_of(score: str, examples: Sequence[Tensor], mode: Any) -> str:
    """The text of the gradient by the first argument, which a gradient more goes into."""
    both = with_gradients(function_of(score), len(examples), [0])
    traced = trace_function(both, [*examples, examples[0]], mode, "post_grad")
    check(traced.calls)
    graph, found = traced.results[0].graph, traced.results[1]
    needed = {found}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return source([n for n in graph.nodes if n.op == "placeholder" or n in needed], found)


def check(calls: Sequence[fx.Node]) -> None:
    """Raises MinicompileError unless every step can be computed element by element."""
    for node in calls:
        name = target_name(node.target).split(".")
        if not (is_pointwise(node.target) or is_view(node) or name[1] in LOWERED):
            raise MinicompileError(f"{target_name(node.target)} isn't elementwise")


def attention_at(second: Product, mode: Any) -> tuple[Match, str, str, Sides] | str:
    """The attention that ends in a product, its score and slope; or why there is none."""
    node = second.node
    before = softmax_before(second.left)
    if before is None:
        second, before = second.swapped(), softmax_before(second.right)
    if before is None or not is_weighted(second):
        return "no softmax of rows times values"
    softmax, between = before
    seen: dict[fx.Node, bool] = {}
    scores: fx.Node = softmax.args[0]  # type: ignore[assignment]
    if not carriers(scores, value(softmax).shape, seen):
        return "no product of queries and keys"
    changed = {step for step, yes in seen.items() if yes}
    products = [found for step in changed if (found := product_of(step)) is not None]
    if len(products) != 1:
        return "scores come from several products"
    if (first := queries_and_keys(products[0])) is None:
        return "scores have no row for each query"
    if value(scores).dtype not in TENSOR_CORES:
        return f"scores in {value(scores).dtype}"
    changed.remove(first.node)
    at = sides(first, second, [tuple(value(x).shape[:-2]) for x in (softmax, scores)])
    alone = {step for step in changed if name_of(step) in IN_PLACE}
    graph = ScoreGraph(first, scores, changed, Writes(node, alone), at)
    arguments = (first.left, first.right, second.right, *graph.others)
    if (why := refusal(arguments, node, at)) is not None:
        return why
    inside = {node, softmax, *between, *changed, first.node}
    moved = {first.node, *changed}
    for step in sorted(graph.copies):  # `ones_like(s)` reads s, too
        if not inside.isdisjoint(step.all_input_nodes):
            inside.add(step)
        if not moved.isdisjoint(step.all_input_nodes) and name_of(step) not in MADE:
            moved.add(step)
    if any(name_of(step) in MOVES for step in moved - changed):
        return "scores read other scores"
    inside |= {u for n in inside - {node} for u in n.users if not u.users and name_of(u) in CASTS}
    score = graph.text()
    with mode:
        size = (*at.pairs, *value(scores).shape[-2:])
        fakes = [torch.empty(size, device=value(scores).device)]
    fakes += [empty_like_layout(mode, value(other)) for other in graph.others]
    try:
        slope = slope_of(score, fakes, mode)
    except Exception as error:  # whatever its operators raise
        return f"its scores can't be traced: {type(error).__name__}: {error}"
    return Match((node,), arguments, tuple(sorted(inside))), score, slope, at


def refusal(arguments: Sequence[fx.Node], node: fx.Node, at: Sides) -> str | None:
    """Why the template can't have it."""
    values = [*map(value, arguments), value(node)]
    if not all(isinstance(x, Tensor) for x in values):
        return "scores read what is no tensor"
    if any(not isinstance(size, int) for x in values for size in (*x.shape, *x.stride())):
        return "sizes vary"
    q, k, v, *others, out = values
    sizes = [[x.shape[i] for i in way] for x, way in ((q, at.q), (k, at.k), (v, at.v))]
    outer = [size[:-2] for size in sizes]
    if not outer[0] == outer[1] == list(at.inner) or outer[2] != list(at.outer):
        return "queries, keys and values differ in batch or heads"
    if any(0 in x.shape for x in (q, k, v)):
        return "nothing to look at"
    if len({size[-1] for size in sizes}) > 1 or not LEAST_HEAD <= sizes[0][-1] <= MOST_HEAD:
        return "heads of another size"
    if sizes[1][-2] != sizes[2][-2]:
        return "keys and values differ in number"
    if out.dtype not in TENSOR_CORES or not q.dtype == k.dtype == v.dtype == out.dtype:
        return f"in {out.dtype}"
    if out.requires_grad and any(x.requires_grad for x in others):
        return "what scores read wants a gradient"
    if any(x.device != q.device or x.dtype not in LOOP_DTYPES for x in others):
        return "scores read what kernels can't"
    return None


def call_operator(
    score: str, slope: str, at: Sides, q: Tensor, k: Tensor, v: Tensor, *others: Tensor
) -> Any:
    """What stands for a match."""
    made = FlashAttention.apply(*at.operands(q, k, v), score, slope, *others)
    return at.result(made)


def call_library(scale: float, causal: bool, at: Sides, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What stands for a match that the library knows."""
    q, k, v = at.operands(q, k, v)
    return at.result(F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale))


def library_form(match: Match, score: str, at: Sides) -> tuple[float, bool] | None:
    """Scale and causality, where scores are but scaled, and masked by position: the library is faster then.

    A step that multiplies or chooses is tried on all positions, with two numbers.
    """
    steps = {name_of(node) for node in match.nodes if not is_cast(node)}
    q, k = map(value, match.arguments[:2])
    rows, columns = q.shape[at.q[-2]], k.shape[at.k[-2]]
    if any("rounding_mode" in node.kwargs for node in match.nodes):
        return None
    if not steps <= LINEAR or len(match.arguments) > 3 or rows * columns > MOST_TRIED:
        return None
    with compat.no_dispatch_modes(), torch.no_grad():
        ones = torch.ones(1, 1, rows, columns, device=q.device)
        once, twice = (function_of(score)(n * ones) for n in (1, 2))
        scale = once[0, 0, -1, 0].item()
        if not math.isfinite(scale) or scale == 0:
            return None
        for masked in (False, True):
            wanted = scale * ones
            if masked:
                wanted = wanted.masked_fill(ones.triu(1) != 0, -torch.inf)
            if torch.equal(once, wanted) and torch.equal(twice, 2 * wanted):
                return scale, masked
    return None


def flash_attention(
    gm: fx.GraphModule, mode: Any, devices: set[str], library: bool
) -> list[Rewrite] | str:
    """Says why not for the last one it left. `library`: it takes what it knows."""
    done, why = list[Rewrite](), "no attention"
    for node in list(gm.graph.nodes):
        product = product_of(node)
        if product is None or value(node).device.type not in devices:
            continue
        found = attention_at(product, mode)
        if isinstance(found, str):
            why = found
            continue
        match, score, slope, at = found
        call = partial(call_operator, score, slope, at)
        if library and (form := library_form(match, score, at)) is not None:
            call = partial(call_library, *form, at)
        made = replace_nodes("flash_attention", gm, mode, match, call, "pre_grad")
        if made is None:
            why = "others read what lies between, or write to it"
        else:
            done.append(made)
    return done or why


graph_pass("flash_attention", stage="pre_grad", order=40, option="fuse_attention")(
    partial(flash_attention, devices={"cuda"}, library=True)
)
graph_pass("attention_template", stage="pre_grad", order=40, option="fuse_attention=template")(
    partial(flash_attention, devices={"cpu", "cuda"}, library=False)
)


@graph_pass("attention_scores", stage="post_grad", order=90)
def trace_scores(gm: fx.GraphModule, mode: Any) -> int:
    """`meta["scores"]` of each of our operators: its functions as a graph, for the kernels."""
    done = 0
    for node in gm.graph.nodes:
        if node.target not in (ATTENTION, ATTENTION_BACKWARD):
            continue
        backward = node.target is ATTENTION_BACKWARD
        q, k = (node.args[i].meta["val"] for i in ((1, 2) if backward else (0, 1)))
        others, score, *slope = node.args[7:] if backward else node.args[3:]
        with mode:
            products = torch.empty((*q.shape[:3], k.shape[2]), device=q.device)
        examples = [products, *(other.meta["val"] for other in others)]

        def both(*given: Tensor, texts: Any = (score, *slope), n: int = len(examples)) -> Any:
            values = [function_of(texts[0])(*given[:n])]
            return values + [function_of(text)(*given) for text in texts[1:]]

        traced = trace_function(both, examples + [products] * backward, mode, "post_grad")
        graph = traced.results[0].graph if traced.results else traced.parameters[0].graph
        for step in graph.nodes:
            step.meta["origins"] = origins_of(node)
        node.meta["scores"] = Graph(
            compat.graph_module(torch.nn.Module(), graph, "scores"), "scores", "tracing"
        )
        done += 1
    return done
