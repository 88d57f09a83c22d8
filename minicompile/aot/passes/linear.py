"""Matrix products and convolutions: biases, the library, products of products or of one input, batch norm.

A bias leaves `addmm` on the way to prims, so that the kernel that follows can add it; where none follows, it
goes back. What is switched on by an option rounds differently from eager.

The real compiler: torch/_inductor/fx_passes/{post_grad,b2b_gemm,pad_mm,group_batch_fusion}.py,
freezing_patterns.py.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from minicompile import compat
from minicompile.aot.passes.patterns import home, replace_nodes
from minicompile.ops.dtypes import HALF_TYPES
from minicompile.ops.graph import Rewrite, origins_of, statement
from minicompile.ops.nodes import alias_root, bytes_of, has_effect, is_view
from minicompile.ops.toolchain import processor_vendor
from minicompile.passes.manager import graph_pass
from minicompile.passes.patterns import Match, register_pattern
from minicompile.shapes.symnode import hint

aten = torch.ops.aten

LIBRARY = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution.default}
LIBRARY |= {aten._scaled_dot_product_flash_attention_for_cpu.default}
NORM = aten._native_batch_norm_legit_no_training.default
LARGE_PRODUCT = 2**26
"""Multiplications from which on a choice of library was measured to pay: 0.7 to 1.0 of MKL's time."""
VECTOR, WORTH_PADDING = 8, 512
"""Elements of 16 bytes; sides of matrices from which on the products save more than padded copies cost."""
EXACT = {torch.float32, torch.float64}
"""Half types round after each operator, which a fused one doesn't."""


def is_call(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def read_by_library(node: fx.Node) -> bool:
    """Do only library calls, and the caller, read the node or views of it?"""
    return all(
        read_by_library(user) if is_view(user) else user.op == "output" or user.target in LIBRARY
        for user in node.users
    )


@graph_pass("addmm", stage="post_grad", order=60)
def add_bias_in_product(gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """mm + bias is one library call where no kernel could take the addition."""
    done: list[Rewrite] = []
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        product, wide = node.args if is_call(node.args[0], aten.mm.default) else node.args[::-1]
        if not is_call(product, aten.mm.default) or not is_call(wide, aten.expand.default):
            continue
        bias, alone = wide.args[0], len(product.users) == 1 and not node.kwargs
        types = {value.meta["val"].dtype for value in (bias, product)}
        if alone and types <= EXACT and bias.meta["val"].dim() == 1 and read_by_library(node):
            before = "\n".join(map(statement, (product, node)))
            node.target, node.args = aten.addmm.default, (bias, *product.args)
            node.meta["origins"] = origins_of(node) | origins_of(product)
            done.append(Rewrite("addmm", before, statement(node), origins_of(node)))
            gm.graph.eliminate_dead_code(has_effect)
    return done


@graph_pass("back_to_back_gemm", stage="post_grad", order=70)
def mark_products_of_products(gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """mm(mm(x, a), b): `meta["back_to_back"]` of the outer one has the bytes that lie between them."""
    done = []
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        inner = node.args[0]
        if inner.target is aten.mm.default and len(inner.users) == 1:
            text = f"{statement(inner)}\n{statement(node)}"
            node.meta["back_to_back"] = size = bytes_of(inner)
            after, origins = f"{text}  # {size} bytes between", origins_of(node) | origins_of(inner)
            done.append(Rewrite("back_to_back_gemm", text, after, origins))
    return done


def products(gm: fx.GraphModule) -> list[tuple[Any, tuple[Any, Any, Any]]]:
    """Each product of two matrices, with a bias or none, that nothing scales; its rows, terms and columns."""
    found = (n for n in gm.graph.nodes if n.target in (aten.mm.default, aten.addmm.default))
    plain = [node for node in found if not node.kwargs]
    sides = ([x.meta["val"].shape for x in node.args[-2:]] for node in plain)
    return [(node, (*x, weight[1])) for node, (x, weight) in zip(plain, sides)]


@graph_pass("onednn", stage="post_grad", order=80)
def choose_library(gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """Large float32 products on AMD's processors are oneDNN's: eager calls MKL, which is made for Intel's."""
    done: list[Rewrite] = []
    linear, switched_on = compat.onednn_linear(), torch.backends.mkldnn.enabled
    wanted = linear is not None and switched_on and processor_vendor() == "AuthenticAMD"
    for node, (rows, inner, columns) in products(gm) if wanted else ():
        *bias, x, weight = node.args
        known = all(isinstance(size, int) for size in (rows, inner, columns))
        plain = all(is_float32_on_cpu(value.meta["val"]) for value in node.args)
        plain = plain and all(b.meta["val"].dim() == 1 for b in bias)
        if plain and known and rows * inner * columns >= LARGE_PRODUCT:
            before = statement(node)
            with gm.graph.inserting_before(node):
                turned = gm.graph.call_function(aten.permute.default, (weight, [1, 0]))
            turned.meta = weight.meta | {"val": weight.meta["val"].t()}
            node.target, node.args = linear, (x, turned, *(bias or [None]), "none", [], "")
            done.append(Rewrite("onednn", before, statement(node), origins_of(node)))
    return done


def is_float32_on_cpu(value: Tensor) -> bool:
    return value.dtype is torch.float32 and value.device.type == "cpu"


@graph_pass("pad_products", stage="post_grad", order=90)
def pad_products(gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """Large half-precision products on GPUs get rows of whole vectors: tensor cores are faster then."""
    done: list[Rewrite | None] = []
    for node, (rows, inner, columns) in products(gm):
        x, known = node.args[-2], all(isinstance(size, int) for size in (inner, columns))
        if not known or not runs_on_tensor_cores(x.meta["val"]):
            continue
        more, wider = (-size % VECTOR for size in (inner, columns))
        # a gradient that is read by columns: its rows are neighbours in memory
        turned = (
            isinstance(rows, int) and node.target is aten.mm.default and by_columns(x.meta["val"])
        )
        below = -rows % VECTOR if turned else 0
        if not (more or wider or below) or min(hint(rows), inner, columns) < WORTH_PADDING:
            continue

        def padded(
            *given: Tensor, below: int = below, more: int = more, wider: int = wider,
            rows: Any = rows, columns: int = columns,
        ) -> Tensor:  # fmt: skip
            *bias, x, weight = given
            x, weight = pad_matrix(x, below, more), pad_matrix(weight, more, wider)
            if not bias:
                product = torch.mm(x, weight)[:, :columns]
                return product[:rows] if below else product
            (whole,) = (F.pad(b, (0, wider)) if b.shape[-1] == columns else b for b in bias)
            return torch.addmm(whole, x, weight)[:, :columns]

        match = Match((node,), tuple(node.args), (node,))
        done.append(replace_nodes("pad_products", gm, mode, match, padded, "post_grad"))
    return list(filter(None, done))


def runs_on_tensor_cores(value: Tensor) -> bool:
    return value.device.type == "cuda" and value.dtype in HALF_TYPES


def by_columns(x: Tensor) -> bool:
    return bool(x.stride(0) < x.stride(1))


def pad_matrix(x: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros below and to the right; the matrix lies by columns if it did."""
    if not rows and not columns:
        return x
    if by_columns(x):
        return F.pad(x.t(), (0, rows, 0, columns)).t()
    return F.pad(x, (0, columns, 0, rows))


def is_cheaper(match: Match) -> bool:
    """Is x @ (a @ b) less arithmetic than (x @ a) @ b?"""
    x, a, b = match.values
    (rows, inner), (_, middle), (_, columns) = (map(hint, v.shape) for v in (x, a, b))
    return inner * middle * columns + rows * inner * columns < rows * middle * (inner + columns)


@register_pattern(
    "reassociate_gemm",
    search=lambda x, a, b: torch.mm(torch.mm(x, a), b),
    examples=[torch.empty(2, 2, requires_grad=True) for _ in "xab"],
    when=is_cheaper,
    option="reassociate_gemm",
)
def weights_first(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(x, torch.mm(a, b))


@graph_pass("batch_linears", stage="prims", order=60, option="batch_linears")
def batch_linears(gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """Products of one input with several weights are one product with the weights side by side."""
    groups: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in gm.graph.find_nodes(op="call_function", target=aten.mm.default):
        if alias_root(node.args[1]).op == "placeholder" and node.meta["val"].dtype in EXACT:
            groups[node.args[0], home(node)].append(node)
    done = []
    for (x, _), group in groups.items():
        if len(group) > 1:
            weights = [node.args[1] for node in group]
            for weight in weights:
                hoist(weight, group[0])
            match = Match(tuple(group), (x, *weights), tuple(group))
            done.append(replace_nodes("batch_linears", gm, mode, match, side_by_side, "post_grad"))
    return list(filter(None, done))


def hoist(node: Any, place: fx.Node) -> None:
    """Compute a view of an input before `place`."""
    if node.op != "placeholder" and place < node:
        for used in node.all_input_nodes:
            hoist(used, place)
        place.prepend(node)


def side_by_side(x: Tensor, *weights: Tensor) -> Any:
    return torch.mm(x, torch.cat(weights, 1)).split([w.shape[1] for w in weights], 1)


@graph_pass("fold_batch_norm", stage="joint", order=40, option="fold_batch_norm")
def fold_batch_norm(gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """In inference, batch norm's scale goes into the weights of the convolution before it, in the graph."""
    done = []
    inference = all(node.meta.get("phase") != "backward" for node in gm.graph.nodes)
    for norm in gm.graph.find_nodes(op="call_function", target=NORM) if inference else ():
        conv, gamma, beta, mean, var, _, eps = norm.args
        results = tuple(user for user in norm.users if user.args[1] == 0)
        plain = is_call(conv, aten.convolution.default) and not conv.args[6]  # not transposed
        if plain and len(results) == 1 and conv.meta["val"].dtype in EXACT:

            def folded(
                x: Tensor, w: Tensor, b: Any, gamma: Any, beta: Any, mean: Tensor, var: Tensor,
                eps: Any = eps, rest: Any = conv.args[3:],
            ) -> Tensor:  # fmt: skip
                scale = torch.rsqrt(var + eps) if gamma is None else gamma * torch.rsqrt(var + eps)
                shift = (-mean if b is None else b - mean) * scale
                shift = shift if beta is None else shift + beta
                scaled = w * scale.view(-1, *[1] * (w.dim() - 1))
                return aten.convolution(x, scaled, shift, *rest)

            arguments = (*conv.args[:3], gamma, beta, mean, var)
            match = Match(results, arguments, (conv, norm, *results))
            done.append(replace_nodes("fold_batch_norm", gm, mode, match, folded, "joint"))
    return list(filter(None, done))
