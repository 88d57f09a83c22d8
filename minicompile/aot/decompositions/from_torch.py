"""Operators that torch's own table takes apart: no lesson shows them, and our formula would be the same.

A rule is ours where its rounding is eager's and torch's is not, or where torch's makes slower kernels, fixes
a size that is symbolic, or leaves out a check of eager's. An operator that a release of torch has no rule for
is called as it is.

The real compiler: torch/_decomp/decompositions.py, torch/_refs/__init__.py.
"""

from __future__ import annotations

from minicompile.aot.decompositions.registry import Target, decompose
from minicompile.compat import torch_decompositions
from minicompile.ops.nodes import aten_ops


def take(names: str, to: Target, wide: bool = False) -> None:
    """Register torch's rules for some operators; `wide`: half types are computed in float32."""
    for op in sorted(aten_ops(names) & torch_decompositions.keys(), key=str):
        decompose(op, to=to, wide=wide)(torch_decompositions[op])


CORE = """
    _prelu_kernel.default _prelu_kernel_backward.default elu.default elu_backward.default glu.default
    glu_backward.default hardsigmoid.default hardswish.default hardswish_backward.default hardtanh.default
    hardtanh_backward.default leaky_relu.default leaky_relu_backward.default log_sigmoid_forward.default
    mish.default native_dropout_backward.default sigmoid_backward.default softplus.default
    softplus_backward.default tanh_backward.default threshold.default threshold_backward.default

    binary_cross_entropy_backward.default
    binary_cross_entropy_with_logits.default mse_loss.default
    smooth_l1_loss.default

    _fused_rms_norm_backward.default _safe_softmax.default aminmax.default count_nonzero.default
    count_nonzero.dim_IntList dot.default logsumexp.default std_mean.correction trace.default

    addcdiv.default addcmul.default clamp_max.default clamp_max.Tensor clamp_min.default clamp_min.Tensor
    floor_divide.default floor_divide.Scalar heaviside.default isinf.default isneginf.default
    isposinf.default lerp.Scalar lerp.Tensor logaddexp2.default masked_fill.Scalar masked_fill.Tensor
    nan_to_num.default rsub.Scalar rsub.Tensor sgn.default special_xlog1py.default
    special_xlog1py.other_scalar special_xlog1py.self_scalar xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor

    arange.default arange.start eye.default eye.m fill.Scalar fill.Tensor new_full.default new_ones.default
    new_zeros.default ones.default ones_like.default zero.default zeros.default zeros_like.default

    _unsafe_index.Tensor _unsafe_index_put.default block_diag.default diag_embed.default
    diagonal_backward.default index_fill.int_Scalar index_fill.int_Tensor pixel_shuffle.default
    pixel_unshuffle.default repeat.default rot90.default select_backward.default
    slice_backward.default take.default transpose.int tril.default triu.default unsafe_split.Tensor

    _unsafe_view.default squeeze.default stack.default t.default"""

PRIMS = """
    native_group_norm.default native_group_norm_backward.default index_add.default index_copy.default
    clamp.Tensor pow.Scalar"""

take(CORE, to="core")
take(PRIMS, to="prims")
take("nll_loss_forward.default nll_loss2d_forward.default", to="core", wide=True)
