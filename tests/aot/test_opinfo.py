"""A part of torch's operator database; `python -m tests.aot.opinfo` runs all of it."""

from __future__ import annotations

import pytest

from tests.aot.opinfo_cases import (
    VARIANTS,
    cases,
    check,
    database,
)

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
zeros_like full randn_like fft.rfft special.i0 narrow_copy nonzero
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
