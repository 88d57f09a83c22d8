"""A part of torch's operator database; `python -m tests.opinfo` runs all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.opinfo.cases import VARIANTS, Case, cases, database
from tests.opinfo.compare import check

compiling = torch.compiler.is_compiling

FAMILIES = """
add sub mul div.floor_rounding pow abs exp tanh sigmoid clamp where lerp addcmul isnan bitwise_and
sum mean amax argmax prod cumsum var norm logsumexp softmax sort topk
mm addmv baddbmm matmul einsum linalg.solve linalg.qr
reshape permute transpose unbind chunk select diagonal expand cat stack flip T
index_select gather scatter_add masked_fill index_put take_along_dim
nn.functional.relu nn.functional.gelu nn.functional.linear nn.functional.conv2d
nn.functional.layer_norm nn.functional.batch_norm nn.functional.max_pool2d nn.functional.avg_pool3d
nn.functional.cross_entropy nn.functional.mse_loss nn.functional.embedding bernoulli kron
nn.functional.upsample_bilinear nn.functional.triplet_margin_with_distance_loss
positive contiguous zeros_like full arange randn_like polygamma.polygamma_n_0 linalg.matrix_rank
fft.rfft i0 special.entr narrow_copy nonzero
"""


@pytest.mark.parametrize("name", FAMILIES.split())
def test_operator(name: str) -> None:
    """As in eager, in every variant and kind of dtype; in a graph unless its sizes depend on data."""
    op, found = database()[name], []
    for case in cases(op, VARIANTS, ("float",), 1):
        found.append(check(case, "minicompile"))
    for case in cases(op, ("function",), ("int", "bool", "half", "complex"), 1):
        found.append(check(case, "minicompile"))
    assert [f"{v.case}: {v.wrong}" for v in found if v.wrong] == []
    assert any(v.in_graph for v in found) == (name != "nonzero")


MISTAKES: dict[str, Callable[..., Any]] = {
    "values": lambda x: x + 1e-4 if compiling() else x + 0,
    "dtype": lambda x: x.double() if compiling() else x + 0,
    "strides": lambda x: (x + 0).t().contiguous().t() if compiling() else x + 0,
    "memory": lambda x: x.clone() if compiling() else x.t().t(),
    "input 0": lambda x: x.detach().mul_(1 if compiling() else 2).sum() * 0,
    "requires grad": lambda x: x.detach() + 0 if compiling() else x + 0,
    "gradient 0": lambda x: x.detach() + 0 * x if compiling() else x + 0,
    "raises": lambda x: x.view(5) if compiling() else x + 0,
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_found(what: str) -> None:
    """Functions that do something else while they are compiled."""
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    case = Case("mistake", "function", torch.float32, 0, MISTAKES[what], (x,), {})
    assert what in check(case, "minicompile").wrong
