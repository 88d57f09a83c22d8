"""Cross-entropy of a linear layer in chunks of rows, so that all logits never lie in memory.

    loss = F.cross_entropy(F.linear(x, weight), target)

For each chunk of rows: logits, their losses, and at once their gradients by x and weight, for a loss whose
gradient is 1. What the forward saves are those two, as large as x and weight; the backward scales them. Eager
keeps several tensors as large as all logits. The arithmetic is the same: three matrix products.

Off where it would save little, and where somebody else reads the logits. The sums over chunks are rounded
differently from those of one product.

Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models (2024); Hsu et al., Liger Kernel
(2024). The real compiler: torch/_inductor/fx_passes/auto_chunker/.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from minicompile import compat
from minicompile.ops.graph import Rewrite, origins_of, statement, target_name
from minicompile.ops.nodes import bytes_of
from minicompile.passes.manager import graph_pass
from minicompile.plugins.replacing import may_write

LEAST_BYTES = 2**26
"""Of all logits, from which on chunks pay."""
CHUNKS, LEAST_ROWS = 4, 256
"""Most chunks, and fewest rows in one: products of fewer are slow."""
ROWS = {"view", "reshape", "flatten", "contiguous", "float"}
"""Methods after which the last dimension is still the vocabulary, and rows follow each other as before."""
LABELS = {torch.int64, torch.uint8}
"""Eager takes no others; real numbers would be likelihoods."""
VECTOR = 8
"""Elements of 16 bytes: tensor cores are faster where each row of logits is whole vectors."""
PRECISE = {torch.float32, torch.float64, torch.bfloat16}
"""Gradients wait for their scale as sums over rows: float16 could overflow."""


class ChunkedLoss(torch.autograd.Function):
    """The mean or sum of the losses of rows. The forward computes gradients, the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, size: int,
        dtype: torch.dtype, ignore: int, mean: bool,
    ) -> Tensor:  # fmt: skip
        wide, classes = torch.promote_types(dtype, torch.float32), len(weight)
        if isinstance(classes, int) and runs_on_tensor_cores(weight):
            more = -classes % VECTOR  # whole vectors in rows of logits
            weight = F.pad(weight, (0, 0, 0, more))
            bias = None if bias is None else F.pad(bias, (0, more))
        by_x = []
        by_weight = weight.new_zeros(weight.shape, dtype=wide)
        by_bias = None if bias is None else bias.new_zeros(bias.shape, dtype=wide)
        nothing = x.new_zeros((), dtype=wide).expand(len(x), classes)
        total = F.nll_loss(nothing, target, ignore_index=ignore, reduction="sum")  # checks classes
        for rows, labels in zip(x.split(size), target.split(size)):
            logits = F.linear(rows, weight, bias).to(wide)
            if len(weight) != classes:
                columns = torch.arange(len(weight), device=x.device)
                logits = torch.where(columns < classes, logits, -torch.inf)
            losses, down = losses_and_slopes(logits, labels, ignore)
            total = total + losses
            by_bias = None if by_bias is None else by_bias + down.sum(0)
            down = down.to(x.dtype)
            by_x.append(down @ weight)
            by_weight = add_product(by_weight, down.t(), rows)
        count = (target != ignore).sum() if mean else None
        by_bias = None if by_bias is None else by_bias[:classes]
        ctx.save_for_backward(torch.cat(by_x), by_weight[:classes], by_bias, count)
        return (total if count is None else total / count).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        by_x, by_weight, by_bias, count = ctx.saved_tensors
        scale = gradient.to(by_weight.dtype)
        scale = scale if count is None else scale / count.clamp(min=1)
        scaled = ((g * scale).to(by_x.dtype) for g in (by_x, by_weight))
        return *scaled, None if by_bias is None else (by_bias * scale).to(by_x.dtype), *[None] * 5


def runs_on_tensor_cores(value: Tensor) -> bool:
    return value.device.type == "cuda" and value.dtype is torch.bfloat16


def losses_and_slopes(logits: Tensor, labels: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """The sum of the losses of rows, and its gradient by the logits. Rows labelled `ignore` don't count."""
    logs = torch.log_softmax(logits, -1)
    classes = torch.arange(logits.shape[1], device=logits.device)
    right, counts = classes == labels.unsqueeze(1), labels != ignore
    losses = torch.where(counts, -torch.where(right, logs, 0).sum(1), 0)
    slopes = (logs.exp() - right.to(logs.dtype)) * counts.unsqueeze(1).to(logs.dtype)
    return losses.sum(), slopes


@functools.cache
def adds_products_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Can a product of half types be added to a float32 matrix in place, without rounding it?"""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    with compat.no_dispatch_modes(), contextlib.suppress(RuntimeError, TypeError):
        total, factor = (torch.ones(16, 16, device=device, dtype=d) for d in (torch.float32, dtype))
        torch.addmm(total, factor, factor, torch.float32, out=total)  # type: ignore[call-overload]
        return bool((total == 17).all())
    return False


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, not rounded in between."""
    if total.dtype is a.dtype:
        return torch.addmm(total, a, b)
    if adds_products_in_float32(a.device, a.dtype):
        return torch.addmm(total, a, b, out_dtype=total.dtype)  # type: ignore[call-overload, no-any-return]
    return total + (a @ b).to(total.dtype)


def chunked_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, low: torch.dtype, *more: Any
) -> Tensor:
    """The loss of operands in a dtype, as autocast has it. Without gradients nothing reads those that the
    forward computes, and they are dead code."""
    cast = (None if value is None else value.to(low) for value in (x, weight, bias))
    found: Tensor = ChunkedLoss.apply(*cast, target, *more)
    return found


def arguments(node: fx.Node) -> dict[str, Any]:
    """Those of a call of F.cross_entropy by name."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    return dict(zip((*names, "label_smoothing"), node.args)) | node.kwargs


def keeps_rows(node: fx.Node, classes: Any) -> bool:
    """Has the call's result the operand's rows, or some of them in order?"""
    if node.meta["val"].shape[-1:] != (classes,) or len(node.all_input_nodes) != 1:
        return False
    if node.op == "call_function" and target_name(node.target) == "operator.getitem":
        place: Any = node.args[1]
        place = place if isinstance(place, tuple) else (place,)
        whole = place[-1] == slice(None) or (
            ... not in place and len(place) < node.meta["val"].dim()
        )
        return whole and all(part is ... or isinstance(part, slice) for part in place)
    return node.op == "call_method" and node.target in ROWS


def readers(node: fx.Node) -> int:
    """Users whose results count; `float()` of float32 gives back its operand, and its call is idle."""
    return sum(bool(user.users) or user.target not in ROWS for user in node.users)


@graph_pass("chunked_loss", stage="pre_grad", order=20)
def chunk_losses(gm: fx.GraphModule, mode: Any) -> list[Rewrite] | str:
    """Says why not for the last one it left."""
    done, why = list[Rewrite](), "no cross-entropy"
    for node in list(gm.graph.nodes):
        if target_name(node.target) != "torch.nn.functional.cross_entropy":
            continue
        found = chunks(node)
        if isinstance(found, str):
            why = found
            continue
        steps, linear, size = found
        before = "\n".join(map(statement, (linear, *steps, node)))
        given = arguments(node)
        x, weight, bias = (*linear.args, None)[:3]
        with gm.graph.inserting_before(node):
            for step in steps:
                if step.op == "call_function":
                    x = derived(gm.graph, x, "__getitem__", step.args[1], origin=step)
            width = linear.args[0].meta["val"].shape[-1]  # type: ignore[union-attr]
            flat = derived(gm.graph, x, "reshape", -1, width, origin=linear)
        mean = given.get("reduction", "mean") == "mean"
        low, dtype = linear.meta["val"].dtype, node.meta["val"].dtype
        more = (low, size, dtype, given.get("ignore_index", -100), mean)
        origins = origins_of(node) | origins_of(linear)
        node.target, node.kwargs = chunked_loss, {}
        node.args = (flat, weight, bias, given["target"], *more)
        node.meta["origins"] = origins
        for dead in (*reversed(steps), linear):
            for idle in list(dead.users):
                gm.graph.erase_node(idle)
            gm.graph.erase_node(dead)
        done.append(Rewrite("chunked_loss", before, statement(node), origins))
    return done or why


def derived(graph: fx.Graph, x: Any, method: str, *args: Any, origin: fx.Node) -> fx.Node:
    """A method's result on a node, with its value."""
    made = graph.call_method(method, (x, *args))
    made.meta.update(origin.meta, val=getattr(x.meta["val"], method)(*args))
    return made


def chunks(node: fx.Node) -> tuple[list[fx.Node], fx.Node, int] | str:
    """The calls between a linear layer and a loss, that layer, and a chunk's rows; or why not."""
    given = arguments(node)
    logits = given["input"]
    if any("val" not in n.meta for n in node.all_input_nodes):
        return "nothing is known of its tensors"
    value, labels = logits.meta["val"], given["target"].meta["val"]
    if value.dim() != 2 or labels.dtype not in LABELS or labels.dim() != 1:
        return "the loss isn't one of rows of logits and their classes"
    if given.get("weight") is not None or given.get("label_smoothing", 0.0) != 0.0:
        return "class weights and label smoothing aren't covered"
    legacy = any(given.get(name) is not None for name in ("size_average", "reduce"))
    if legacy or given.get("reduction", "mean") not in ("mean", "sum"):
        return "the losses of the rows are wanted one by one"
    steps: list[fx.Node] = []
    while target_name(logits.target) != "torch.linear":
        if readers(logits) > 1 or not keeps_rows(logits, value.shape[1]):
            return f"{logits} isn't a linear layer's result that only the loss reads"
        steps.insert(0, logits)
        (logits,) = logits.all_input_nodes
    if readers(logits) > 1:
        return f"others read {logits} too"
    if logits.meta["val"].dtype not in PRECISE:
        return f"logits in {logits.meta['val'].dtype}"
    between = logits.next
    while between is not node:
        if between.target not in ROWS and may_write(between):
            return f"{between} may write to what {logits} reads"
        between = between.next
    if not isinstance(value.shape[0], int):
        return "the number of rows varies"
    rows, size = value.shape[0], bytes_of(given["input"])
    if size < LEAST_BYTES or rows < 2 * LEAST_ROWS:
        return f"all logits are {size} bytes"
    return steps, logits, max(-(-rows // CHUNKS), LEAST_ROWS)
