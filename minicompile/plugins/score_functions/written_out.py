"""`flex_attention(q, k, v, score_mod, block_mask)` is captured as the operations that define it.

    scores = q @ k.transpose(-2, -1) * scale
    scores = score_mod(scores, b, h, i, j)                  b, h, i, j: positions, one for each score
    scores = torch.where(mask_mod(b, h, i, j), scores, -inf)
    out = softmax(scores) @ v                               0 where all scores of a row are -inf

torch calls the two functions with single numbers, under vmap. We call them once with tensors of
[batch, heads, queries, keys]. Both give the same if a function computes element by element and looks up
single elements of other tensors. `is_elementwise` checks each operation, and others end the graph.
Of a BlockMask `mask_mod` alone is used: its blocks say where scores needn't be computed.
Dong et al., FlexAttention (2024). The real compiler: torch/_higher_order_ops/flex_attention.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import flex_attention as flex

from minicompile.compat import tree_leaves
from minicompile.dynamo.builtins import means
from minicompile.dynamo.world import World, call_rules
from minicompile.ops.graph import target_name
from minicompile.ops.nodes import is_pointwise


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Compute flex_attention. Arguments and results are those of torch's function."""
    batch, heads, rows, _ = query.shape
    columns = key.shape[2]
    groups = heads // key.shape[1]
    lengths = (rows, columns) if block_mask is None else tuple(block_mask.seq_lengths)
    if (groups != 1 and not enable_gqa) or lengths != (rows, columns):
        raise ValueError("flex_attention: heads or lengths do not fit")
    if groups != 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    scores = (query.to(dtype) @ key.to(dtype).transpose(-2, -1)) * scale
    b = torch.arange(batch, device=query.device)[:, None, None, None]
    h = torch.arange(heads, device=query.device)[:, None, None]
    i = torch.arange(rows, device=query.device)[:, None]
    j = torch.arange(columns, device=query.device)
    if score_mod is not None:
        scores = for_each_score(score_mod, (scores, b, h, i, j))
        scores = scores if scores.is_floating_point() else scores.to(dtype)
    if block_mask is not None:
        keep = for_each_score(block_mask.mask_mod, (b, h, i, j))
        scores = torch.where(keep, scores, -math.inf)
    if score_mod is None and block_mask is None:
        weights = torch.softmax(scores, -1)
    else:  # rows without a score get weights of 0, and gradients of 0
        empty = (scores == -math.inf).all(-1, keepdim=True)
        safe = torch.where(empty, 0.0, scores)
        weights = torch.where(empty, 0.0, torch.softmax(safe, -1))
    out = weights.to(query.dtype) @ value.to(query.dtype)
    order = sorted(range(4), key=query.stride, reverse=True)
    if order != [0, 1, 2, 3]:  # the result lies as the queries do
        out = out.permute(order).contiguous().permute([order.index(n) for n in range(4)])
    if return_aux is not None:
        lse = torch.logsumexp(scores, -1) if return_aux.lse else None
        return out, flex.AuxOutput(lse, scores.amax(-1) if return_aux.max_scores else None)
    return (out, torch.logsumexp(scores, -1)) if return_lse else out


def for_each_score(function: Callable[..., Tensor], given: tuple[Tensor, ...]) -> Tensor:
    """Call a function that torch would call with the numbers of each score."""
    return function(*given)


@means(for_each_score)
def checked(world: World, function: Any, given: tuple[Tensor, ...]) -> Any:
    """Record the call, and refuse it if one of its operations isn't elementwise.

    It is called with single numbers first, as torch calls it: a function that asks for shapes differs then.
    """
    given = world.deep(given)
    numbers = tuple(world.torch_call(Tensor.new_zeros, (x, 1), {}) for x in given)
    _, alone = calls_in(world, function, numbers)
    result, nodes = calls_in(world, function, given)
    if [*map(constants, alone)] != [*map(constants, nodes)]:
        refuse(world, "a function asks for the shape of what it is given")
    own = {world.recorder.node_of(x) for x in given}
    for node in nodes:
        if not own.isdisjoint(node.all_input_nodes):
            own.add(node)
            if not is_elementwise(node, own):
                refuse(world, f"{target_name(node.target)} is not elementwise")
    if not isinstance(result, Tensor) or (
        result.dim() and world.recorder.node_of(result) not in own
    ):
        refuse(world, "a result is no number for each score")
    return result


def calls_in(world: World, function: Any, args: tuple[Tensor, ...]) -> tuple[Any, list[fx.Node]]:
    """Call a function; return its result and the calls that are recorded meanwhile."""
    before = {*world.recorder.graph.nodes}
    result = world.call(function, args, {})
    return result, [n for n in world.recorder.graph.nodes if n not in before and "call" in n.op]


def constants(node: fx.Node) -> list[str]:
    """What is called, and with which arguments that are no values of the graph."""
    leaves = tree_leaves((node.target, node.args, node.kwargs))
    return [repr(leaf) for leaf in leaves if not isinstance(leaf, fx.Node)]


def is_elementwise(node: fx.Node, own: set[fx.Node]) -> bool:
    """Does a call treat each score's numbers alone? `own`: values that are one for each score."""
    name = target_name(node.target).rpartition(".")[2]
    others = [x.meta["val"] for x in node.all_input_nodes if x not in own]
    if name == "getitem":
        table, places = node.args
        places = places if isinstance(places, tuple | list) else (places,)  # type: ignore[assignment]
        single = all(type(p) is int or isinstance(p, fx.Node) for p in places)  # type: ignore[union-attr]
        tensors = [p.meta["val"] for p in places if isinstance(p, fx.Node)]  # type: ignore[union-attr]
        single &= all(isinstance(x, Tensor) and x.dtype != torch.bool for x in tensors)
        whole = table not in own and len(places) == others[0].dim()  # type: ignore[arg-type]
        return single and whole and all(x.dim() == 0 for x in others[1:])
    if any(x.dim() or x.dtype == torch.float64 for x in others if isinstance(x, Tensor)):
        return False
    if name in ("max", "min") and not isinstance(node.args[1:] and node.args[1], fx.Node):
        return False
    writes = name.endswith("_") and name not in PYTHON
    packet = getattr(torch.ops.aten, PYTHON.get(name, name), None)
    if packet is None or writes or "out" in node.kwargs:
        return name in OTHERS
    return name in OTHERS or any(is_pointwise(getattr(packet, o)) for o in packet.overloads())


PYTHON = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}
PYTHON |= {"and_": "bitwise_and", "or_": "bitwise_or", "invert": "bitwise_not"}
"""Operators of Python that ATen calls otherwise."""
OTHERS = {"zeros_like", "ones_like", "full_like", "to", "float", "bool", "int", "long"}
OTHERS |= {"floordiv", "mod", "floor_divide", "remainder"}


def refuse(world: World, why: str) -> None:
    what = f"flex_attention: {why}"
    world.unsupported("function-transform", what, "compute each score from its own numbers")


@call_rules("torch.nn.attention.flex_attention.flex_attention")
def capture(world: World, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        refuse(world, "autocast is on")
    return world.call(attention, args, kwargs)
