"""Large matrix products: by oneDNN on AMD's processors, in rows of whole vectors on a GPU's tensor cores.

The real compiler: torch/_inductor/fx_passes/pad_mm.py, torch/_inductor/fx_passes/mkldnn_fusion.py.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from minicompile import compat
from minicompile.aot.passes.replacing import replace_nodes
from minicompile.ops.dtypes import HALF_TYPES
from minicompile.ops.graph import Rewrite, origins_of, statement
from minicompile.ops.toolchain import processor_features
from minicompile.passes.manager import graph_pass
from minicompile.passes.replacements import Match
from minicompile.shapes.symnode import hint

aten = torch.ops.aten

LARGE_PRODUCT = 2**26
"""Multiplications from which on a choice of library was measured to pay: 0.7 to 1.0 of MKL's time."""
VECTOR, WORTH_PADDING = 8, 512
"""Elements of 16 bytes; sides of matrices from which on the products save more than padded copies cost."""


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


def processor_vendor() -> str:
    """Return "GenuineIntel", "AuthenticAMD", or "" where it isn't known."""
    found = re.search(r"^vendor_id\s*: (.+)$", processor_features(), re.MULTILINE)
    return found[1] if found else ""


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
