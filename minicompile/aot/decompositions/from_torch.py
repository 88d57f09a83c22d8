"""Operators that torch's own table takes apart: no lesson shows them, and our formula would be the same.

A rule is ours where its rounding is eager's and torch's is not, where torch's makes slower kernels, or where
torch's leaves out a check of eager's. An operator that a release of torch has no rule for is called as it is.

The real compiler: torch/_decomp/decompositions.py, torch/_refs/__init__.py.
"""

from __future__ import annotations

from minicompile.aot.decompositions.registry import decompose
from minicompile.compat import torch_decompositions
from minicompile.ops.nodes import aten_ops

OPERATORS = """
    elu_backward.default glu.default glu_backward.default leaky_relu_backward.default
    log_sigmoid_forward.default _prelu_kernel.default _prelu_kernel_backward.default softplus_backward.default
    binary_cross_entropy_backward.default binary_cross_entropy_with_logits.default logsumexp.default
    _safe_softmax.default std_mean.correction
    clamp_max.default clamp_max.Tensor clamp_min.default clamp_min.Tensor heaviside.default isinf.default
    isneginf.default isposinf.default logaddexp2.default nan_to_num.default sgn.default
    special_xlog1py.default special_xlog1py.other_scalar special_xlog1py.self_scalar
    xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor
    block_diag.default diag_embed.default diagonal_backward.default pixel_shuffle.default
    pixel_unshuffle.default rot90.default select_backward.default slice_backward.default tril.default
    triu.default"""

for _op in sorted(aten_ops(OPERATORS) & torch_decompositions.keys(), key=str):
    decompose(_op, to="core")(torch_decompositions[_op])
