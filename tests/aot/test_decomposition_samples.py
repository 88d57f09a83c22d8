"""Every decomposition equals eager on samples of torch's operator database; one that no sample reaches
fails.
"""

from __future__ import annotations

import pytest
import torch

from minicompile.aot.decompositions import decompose, decomposition
from minicompile.ops.registry import scoped
from tests.aot.decomposition_samples import Report, check, own_samples, run_database
from tests.torch_versions import needs

NAMES = (
    "__rsub__", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "addcdiv",
    "addcmul", "addmv", "addr", "alias_copy", "aminmax", "angle", "arange", "as_strided_copy",
    "as_strided_scatter", "block_diag", "clamp_max", "clamp_min", "deg2rad", "detach_copy",
    "diag", "diag_embed", "diagonal_copy", "diagonal_scatter", "dist",
    "empty_permuted", "empty_strided", "erfinv", "expand_copy", "eye", "fft.ifftshift",
    "floor_divide", "fmax", "fmin", "frac", "full_like", "heaviside", "i0", "index_copy",
    "index_fill", "index_put", "isinf", "isneginf", "isposinf", "lcm", "ldexp", "lerp",
    "linalg.vander", "logaddexp", "logaddexp2", "logit", "logsumexp",
    "masked_fill", "masked_scatter", "max", "max_pool2d_with_indices_backward", "min",
    "mvlgamma", "nan_to_num", "nansum", "narrow_copy", "native_batch_norm", "new_empty_strided",
    "new_full", "nn.functional.adaptive_avg_pool2d", "nn.functional.binary_cross_entropy",
    "nn.functional.binary_cross_entropy_with_logits", "nn.functional.celu",
    "nn.functional.channel_shuffle", "nn.functional.cosine_embedding_loss",
    "nn.functional.embedding", "nn.functional.gelu", "nn.functional.glu",
    "nn.functional.group_norm", "nn.functional.hardsigmoid", "nn.functional.hardswish",
    "nn.functional.huber_loss", "nn.functional.interpolate", "nn.functional.layer_norm",
    "nn.functional.leaky_relu", "nn.functional.linear_cross_entropy",
    "nn.functional.logsigmoid", "nn.functional.max_unpool2d", "nn.functional.max_unpool3d",
    "nn.functional.mish", "nn.functional.mse_loss",
    "nn.functional.multi_head_attention_forward", "nn.functional.nll_loss", "nn.functional.pad",
    "nn.functional.pixel_shuffle", "nn.functional.pixel_unshuffle", "nn.functional.prelu",
    "nn.functional.relu6", "nn.functional.rrelu", "nn.functional.scaled_dot_product_attention",
    "nn.functional.selu", "nn.functional.silu", "nn.functional.smooth_l1_loss",
    "nn.functional.soft_margin_loss", "nn.functional.softplus", "nn.functional.threshold",
    "norm", "permute_copy", "put", "rad2deg", "renorm", "rot90", "round",
    "scatter", "scatter_reduce", "sigmoid", "sinc",
    "special.entr", "special.i0e",
    "special.i1", "special.i1e", "special.modified_bessel_i0",
    "special.modified_bessel_i1",

    "special.spherical_bessel_j0", "special.xlog1py", "split_with_sizes_copy", "squeeze_copy",
    "std", "std_mean", "t_copy", "take", "tanh", "tensordot", "trace", "transpose_copy",
    "trapz", "triu", "unbind_copy", "unfold_copy", "unsafe_split", "unsqueeze_copy",
    "view_copy", "xlogy", "zero_",
)  # fmt: skip
"""Operators of the database whose graphs, forward and backward, call every operator that has a rule."""

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


@pytest.fixture(scope="module")
def report() -> Report:
    return Report()


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs("bfloat16 batch_norm is precise near 0"))
        if name == "native_batch_norm"
        else name
        for name in NAMES
    ],
)
def test_database_operator(name, report):
    run_database(name, 2, report, DTYPES)
    report.names.add(name)
    assert report.take_wrong() == []


OWN = own_samples()


@pytest.mark.parametrize("name", OWN)
def test_own_sample(name, report):
    check(OWN[name], report)
    report.names.add(name)
    assert report.take_wrong() == []


def test_rms_norm_backward(report):
    """An operator without a kernel for the CPU: its rule against autograd."""
    op = torch.ops.aten._fused_rms_norm_backward.default
    x, weight = (
        torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((3, 4), (4,))
    )
    rstd = (x * x).mean(1, keepdim=True).add(1e-5).rsqrt()
    grad = torch.randn(3, 4, dtype=torch.float64)
    expected = torch.autograd.grad(x * rstd * weight, [x, weight], grad)
    with torch.no_grad():
        found = decomposition[op].rule(grad, x, [4], rstd, weight, [True, True])
    torch.testing.assert_close(found, expected)
    report.checked[op] += 1


@pytest.mark.parametrize(
    ("op", "arguments"),
    [(torch.ops.aten.split.Tensor, (2, 1)), (torch.ops.aten.unbind.int, (1,))],
    ids=["split", "unbind"],
)
def test_splits_are_replaced_before_a_graph_holds_them(op, arguments, report):
    """Tracing itself applies their rules: the same views of the same memory."""
    x = torch.arange(15.0).view(3, 5)
    found, expected = decomposition[op].rule(x, *arguments), op(x, *arguments)
    places = [(y.shape, y.stride(), y.data_ptr()) for y in found]
    assert places == [(y.shape, y.stride(), y.data_ptr()) for y in expected]
    report.checked[op] += 1


def test_every_rule_was_exercised(report):
    """Of a whole run of this file: a rule that nothing above reaches is missing a sample."""
    if any(name not in report.names for name in (*NAMES, *OWN)):
        pytest.skip("not all samples were chosen to run")
    assert [str(op) for op in decomposition if not report.checked[op]] == []


WRONG = {
    "value": lambda x: x * torch.sigmoid(x * 1.001),
    "raises": lambda x: x @ x.nonsense,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_noticed(name):
    found = Report()
    with scoped():
        decompose(torch.ops.aten.silu.default, to="core")(WRONG[name])
        run_database("nn.functional.silu", 3, found, (torch.float32,))
    said = {
        "value": "the rule of aten.silu.default: Tensor-likes",
        "raises": "no attribute 'nonsense'",
    }
    assert any(said[name] in line for line in found.wrong)


def test_a_rule_that_is_only_wrong_for_special_values_is_noticed():
    found = Report()
    with scoped():
        decompose(torch.ops.aten.relu.default, to="core")(lambda x: torch.where(x > 0, x, 0.0))
        run_database("nn.functional.relu", 3, found, (torch.float32,))
    assert found.wrong and all("special values" in line for line in found.wrong)
