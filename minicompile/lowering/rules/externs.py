"""Operators that a library runs on purpose, each with the reason, by packet (all overloads of a name).

Random operators stay with eager's generator, so that the numbers are eager's exactly, unless a plug-in has
made them functions of a seed (ops/philox.py).
"""

from __future__ import annotations

from minicompile import compat
from minicompile.lowering.context import extern_reasons
from minicompile.lowering.rules.common import aten

REASONS: dict[str, str] = {
    "library matrix product": "mm bmm addmm baddbmm _int_mm dot mv vdot addmv",
    "library convolution": "convolution convolution_backward _convolution",
    "library attention": """
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward""",
    "random: eager's generator gives the numbers": """
        rand rand_like randn randn_like randint randint_like randperm bernoulli native_dropout
        normal normal_functional uniform multinomial exponential geometric log_normal cauchy
        random poisson binomial rrelu_with_noise_functional""",
    "copy between devices, or of complex numbers": "_to_copy",
    "sorting": "sort topk kthvalue median nanmedian mode unique_dim _unique2 msort argsort",
    "the result's size depends on data": "nonzero masked_select bincount histc repeat_interleave",
    "library resampling": "grid_sampler_2d grid_sampler_2d_backward",
    "library recurrent network": "_thnn_fused_lstm_cell mkldnn_rnn_layer _cudnn_rnn miopen_rnn",
    "library linear algebra": """
        linalg_cholesky_ex linalg_lu linalg_lu_factor_ex linalg_inv_ex linalg_qr _linalg_svd _linalg_eigh
        linalg_solve_triangular _linalg_solve_ex _linalg_det _linalg_slogdet linalg_ldl_factor_ex""",
    "library Fourier transform": "_fft_r2c _fft_c2r _fft_c2c",
    "library distances": "_cdist_forward _cdist_backward _pdist_forward",
    "library special function": """
        digamma polygamma erfinv i0 igamma igammac special_airy_ai special_bessel_j0 special_bessel_j1
        special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
        special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_erfcx
        special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e
        special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
        special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta""",
    "library scan": "cummax cummin logcumsumexp",
    "no atomic product, maximum or minimum": "scatter scatter_reduce index_reduce",
    "each element is accumulated in eager's order": """
        embedding_dense_backward _embedding_bag _embedding_bag_forward_only index_add""",
}

for _reason, _names in REASONS.items():
    for _name in _names.split():
        _packet = getattr(aten, _name, None)  # some exist only in newer releases
        if _packet is not None:
            extern_reasons(_packet)(_reason)
if compat.onednn_linear() is not None:
    extern_reasons(compat.onednn_linear())("library matrix product")
