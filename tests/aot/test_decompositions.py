"""Each decomposition computes what eager computes, forward and backward, and leaves none of it behind."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from minicompile import compat
from minicompile.aot.decompositions import decompose, normalization
from minicompile.errors import VerifyError
from minicompile.ops.registry import scoped
from minicompile.options import Options
from tests.aot.helpers import compile_aot, forward_and_gradients

aten = torch.ops.aten


def randn(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*size).to(dtype)


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*size, requires_grad=True)


def unit(*size: int) -> torch.Tensor:
    return torch.rand(*size).mul_(0.9).add_(0.05).requires_grad_()


def classes(*size: int, count: int = 5) -> torch.Tensor:
    target = torch.randint(count, size)
    target.view(-1)[0] = -100
    return target


def images() -> torch.Tensor:
    return leaf(2, 4, 6, 6)


# name: (function, its inputs); more of each operator is in test_decomposition_samples.py
DIFFERENTIABLE = {
    # activations
    "gelu": (F.gelu, lambda: [leaf(3, 7)]),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), lambda: [leaf(3, 7)]),
    "silu": (F.silu, lambda: [leaf(3, 7)]),
    "hardswish": (lambda x: F.hardswish(x * 4), lambda: [leaf(3, 7)]),
    "softplus": (lambda x: F.softplus(x * 20, 2.0, 15.0), lambda: [leaf(3, 7)]),
    "property": (lambda x: x.T @ x.mT.T, lambda: [leaf(3, 7)]),
    # softmax
    "softmax": (lambda x: F.softmax(x, -1), lambda: [leaf(3, 7)]),
    "log_softmax": (lambda x: F.log_softmax(x, 0), lambda: [leaf(3, 7)]),
    "cross_entropy": (F.cross_entropy, lambda: [leaf(6, 5), classes(6)]),
    "cross_entropy_weight": (
        lambda x, t, w: F.cross_entropy(x, t, w),
        lambda: [leaf(6, 5), classes(6), torch.rand(5)],
    ),
    "cross_entropy_smooth": (
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
        lambda: [leaf(6, 5), torch.randint(5, (6,))],
    ),
    "safe_softmax": (
        lambda x, m: aten._safe_softmax(x.masked_fill(m, float("-inf")), -1),
        lambda: [leaf(3, 4), torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])],
    ),
    # losses
    "mse": (F.mse_loss, lambda: [leaf(3, 4), leaf(3, 4)]),
    "bce_logits_weights": (
        lambda x, y, w, p: F.binary_cross_entropy_with_logits(x, y, w, pos_weight=p),
        lambda: [leaf(3, 4), torch.rand(3, 4), torch.rand(3, 4), torch.rand(4)],
    ),
    # normalization
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (7,), w, b),
        lambda: [leaf(3, 2, 7), leaf(7), leaf(7)],
    ),
    "layer_norm_permuted": (
        lambda x, w: F.layer_norm(x.transpose(1, 2), (9,), w),
        lambda: [leaf(3, 9, 7), leaf(9)],
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (7,), w, 1e-5), lambda: [leaf(3, 7), leaf(7)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), lambda: [images(), leaf(4), leaf(4)]),
    "batch_norm_eval": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, False),
        lambda: [images(), torch.randn(4), torch.rand(4) + 0.5, leaf(4), leaf(4)],
    ),
    "batch_norm_no_stats": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        lambda: [images(), leaf(4), leaf(4)],
    ),
    # reductions
    "mean_dims": (lambda x: x.mean((0, -1), keepdim=True), lambda: [leaf(3, 4, 2)]),
    "var": (lambda x: x.var(1), lambda: [leaf(3, 4)]),
    "max_dim": (lambda x: x.max(1), lambda: [leaf(3, 4)]),
    # pointwise
    "addcmul": (
        lambda x, a, b: torch.addcmul(x, a, b, value=0.3),
        lambda: [leaf(3, 4), leaf(3, 1), leaf(4)],
    ),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.7), lambda: [leaf(3, 4), leaf(3, 4)]),
    "pow_half": (lambda x: x**0.5 + x**-0.5 + x**-1 + x**-2 + x**1.7, lambda: [unit(3, 4)]),
    # linear algebra
    "linear": (F.linear, lambda: [leaf(3, 4), leaf(5, 4), leaf(5)]),
    "addmm": (
        lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2),
        lambda: [leaf(5), leaf(3, 4), leaf(4, 5)],
    ),
    # indexing
    "embedding": (F.embedding, lambda: [torch.randint(6, (2, 3)), leaf(6, 4)]),
    "index_add": (
        lambda x, i, s: x.index_add(0, i, s, alpha=2),
        lambda: [leaf(3, 4), torch.tensor([2, 2]), leaf(2, 4)],
    ),
    "take": (torch.take, lambda: [leaf(3, 4), torch.tensor([[11, 0], [3, 3]])]),
    # views
    "split": (lambda x: torch.split(x * 2, 3, 1), lambda: [leaf(2, 7)]),
    "repeat": (lambda x: x.repeat(2, 1, 3), lambda: [leaf(2, 3)]),
    "roll": (lambda x: x.roll((1, -2), (0, 1)) + x.roll(3), lambda: [leaf(4, 5)]),
    # pooling and convolution
    "adaptive_avg_pool_uneven": (lambda x: F.adaptive_avg_pool2d(x, (4, 5)), lambda: [images()]),
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), lambda: [images()]),
    "conv": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        lambda: [images(), leaf(3, 4, 3, 3), leaf(3)],
    ),
    # attention
    "sdpa_mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        lambda: [leaf(2, 2, 5, 8), leaf(2, 2, 5, 8), leaf(2, 2, 5, 8), torch.randn(5, 5)],
    ),
}


HALF = [
    "gelu",
    "silu",
    "softmax",
    "log_softmax",
    "layer_norm",
    "group_norm",
    "batch_norm_eval",
    "linear",
    "cross_entropy",
    "mean_dims",
    "var",
    "lerp",
    "softplus",
    "hardswish",
    "mse",
    "embedding",
    "rms_norm",
    "addcmul",
]
CALLS = [(name, torch.float32) for name in DIFFERENTIABLE]
CALLS += [(name, dtype) for name in HALF for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("name, dtype", CALLS)
def test_results_and_gradients_round_where_eagers_round(name, dtype):
    """The database's samples (test_decomposition_samples.py) reach every rule; these are for every day."""
    fn, make = DIFFERENTIABLE[name]
    torch.manual_seed(0)
    inputs = [
        v.detach().to(dtype).requires_grad_(v.requires_grad) if v.is_floating_point() else v
        for v in make()
    ]
    call, _ = compile_aot(fn, inputs, options=Options(verify=True))
    close = 2e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    for got, expected in zip(*(forward_and_gradients(f, inputs) for f in (call, fn)), strict=True):
        torch.testing.assert_close(got, expected, rtol=close, atol=close)
        assert got.stride() == expected.stride()


PLAIN = {
    "arange_big": (
        lambda x: x[0, 0] * 0 + torch.arange(11) * 1_000_000_000,
        lambda: [torch.ones(1, 1, dtype=torch.long)],
    ),
    "casts": (
        lambda x: (x.int(), x.double(), x.bool(), x.half().float()),
        lambda: [randn(3, 2) * 3],
    ),
    "int_division": (
        lambda x, y: (x / y, x // y, x % y, torch.div(x, y, rounding_mode="trunc"), x.float() // y),
        lambda: [torch.randint(-9, 9, (3, 4)), torch.tensor([-3, 2, 5, -7])],
    ),
    "mixed_dtypes": (
        lambda x, i, b: (
            x + i,
            i * b,
            b + b,
            i > x,
            torch.where(b, i, x),
            x * 2,
            i * 2.5,
            i + True,
            b & (i > 0),
        ),
        lambda: [randn(3, 4), torch.randint(-4, 4, (4,)), torch.rand(3, 1) > 0.5],
    ),
    "zero_dim": (
        lambda x, s: (x + s, x * s.double(), s > x, s.sum(), s.mean(), s.amax()),
        lambda: [randn(3), torch.tensor(2.0)],
    ),
    "int_math": (
        lambda i: (i.sqrt(), i.exp(), i.float().log(), i**2, i**3, 2**i, i.pow(-1.0)),
        lambda: [torch.randint(1, 5, (4,))],
    ),
    "nan_reductions": (
        lambda x: (x.amax(0), *x.max(0), x.amin(0), x.clamp(min=0), torch.maximum(x, -x)),
        lambda: [torch.tensor([[1.0, math.nan], [math.nan, 2.0]])],
    ),
    "logical": (
        lambda x, y: (x.logical_and(y), x.logical_or(y), x.logical_xor(y), x.logical_not()),
        lambda: [torch.tensor([0.0, 2.0, math.nan]), torch.tensor([0, 3, 0])],
    ),
    "empty": (
        lambda x: (x.sum(), x.sum(1), x.mean(), x + 1, torch.softmax(x, 1), x.var()),
        lambda: [torch.randn(0, 3)],
    ),
    "tensor_constant": (
        lambda x: x + torch.tensor([1.0, 2.0]) * torch.tensor(3.0),
        lambda: [randn(3, 2)],
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_operator_equals_eager_in_values_dtypes_and_strides(name):
    fn, make = PLAIN[name]
    torch.manual_seed(0)
    inputs = make()
    call, _ = compile_aot(fn, inputs)
    expected = fn(*inputs)
    for got, wanted in zip(
        call(list(inputs)), expected if isinstance(expected, tuple) else (expected,), strict=True
    ):
        assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_softmax_and_log_softmax_are_stable_for_large_values():
    x = torch.tensor([[1e4, 1e4 - 1, -1e4], [88.0, 89.0, 90.0]])
    call, _ = compile_aot(lambda x: (x.softmax(-1), x.log_softmax(-1), x.logsumexp(1)), [x])
    for got, expected in zip(
        call([x]), (x.softmax(-1), x.log_softmax(-1), x.logsumexp(1)), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_pointwise_operands_at_prims_have_equal_shapes_and_dtypes():
    def fn(x, i, s):
        return (x + i) * s > i

    _, result = compile_aot(fn, [randn(3, 4), torch.arange(4), torch.tensor(2.0)])
    for node in result.level("prims").nodes:
        if node.op == "call_function" and torch.Tag.pointwise in node.target.tags:
            values = [used.meta["val"] for used in node.all_input_nodes]
            assert {tuple(v.shape) for v in values} == {(3, 4)} or node.target.namespace == "prims"
            assert len({v.dtype for v in values}) == 1


def test_a_rule_from_outside_changes_the_result_and_is_undone():
    x = randn(3, 4)
    with scoped():

        @decompose(aten.silu.default, to="core")
        def wrong_on_purpose(x):
            return x * 2

        call, _ = compile_aot(F.silu, [x])
        torch.testing.assert_close(call([x])[0], x * 2)
    call, _ = compile_aot(F.silu, [x])
    torch.testing.assert_close(call([x])[0], F.silu(x))


def test_a_rule_that_gives_another_shape_is_refused_by_name():
    with scoped():

        @decompose(aten.silu.default, to="core")
        def broken(x):
            return x.sum()

        with pytest.raises(VerifyError, match=r"aten\.silu\.default"):
            compile_aot(F.silu, [randn(3)])


@pytest.mark.parametrize("fn", [F.gelu, F.silu, F.softplus, torch.frac, torch.var])
def test_formulas_over_real_numbers_leave_integers_to_the_library(fn):
    """Eager's kernels refuse them, which a formula would not."""
    for x in (torch.arange(4), torch.arange(0), torch.tensor(True)):
        with pytest.raises(RuntimeError):
            fn(x)
        with pytest.raises(RuntimeError):
            mc.compile(lambda x: fn(x), backend="aot_eager")(x)


@pytest.mark.parametrize(
    "op, sizes",
    [
        (torch.addmm, ((5,), (3, 4), (4, 5))),
        (torch.baddbmm, ((5,), (2, 3, 4), (2, 4, 5))),
        (torch.addmv, ((3,), (3, 4), (4,))),
    ],
)
@pytest.mark.parametrize("factors", [{"alpha": 0}, {"beta": 0}, {"alpha": 0, "beta": 2}])
def test_what_a_factor_of_zero_leaves_out_may_hold_nan(op, sizes, factors):
    bias, a, b = map(torch.rand, sizes)
    (bias if factors.get("beta") == 0 else a).fill_(math.nan)
    fn = lambda *inputs: op(*inputs, **factors)  # noqa: E731
    got = mc.compile(fn, backend="aot_eager", fullgraph=True)(bias, a, b)
    torch.testing.assert_close(got, fn(bias, a, b), equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_batch_norm_saves_in_inference_is_the_device_s_choice(device: str) -> None:
    """The CPU's operator saves nothing, the GPU's the statistics that it used."""
    op, rule = aten._native_batch_norm_legit_functional.default, normalization.batch_norm
    with compat.fake_mode():
        x, of_channels = torch.empty(4, 8, device=device), torch.empty(8, device=device)
        given = (x, *[of_channels] * 4, False, 0.1, 1e-5)
        results = [fn(*given) for fn in (op, rule)]
    assert len({tuple(t.shape for t in found) for found in results}) == 1
    assert len({*map(id, results[1])}) == len(results[1]), "one tensor twice"


@pytest.mark.gpu
def test_batch_norm_in_inference_on_a_gpu() -> None:
    module = torch.nn.BatchNorm2d(8).cuda().eval()
    module.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 8, 5, 5, device="cuda", requires_grad=True)
    found = [fn(x) for fn in (module, mc.compile(module, fullgraph=True))]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*[torch.autograd.grad(y.square().sum(), x)[0] for y in found])


@pytest.mark.parametrize("order", [2, 6, 0.5, -1, -math.inf])
def test_a_norm_of_one_number_is_its_absolute_value(order: float) -> None:
    x = torch.tensor([3.3, -1e30, 1e-30, 0.0])[:, None]
    compiled = mc.compile(lambda x: torch.linalg.vector_norm(x, order, dim=1), fullgraph=True)
    assert torch.equal(compiled(x), x.abs()[:, 0])
    scalar = mc.compile(lambda x: torch.linalg.vector_norm(x, order, dim=0), fullgraph=True)
    assert torch.equal(scalar(x[0, 0]), x[0, 0])


def test_a_number_in_a_vmap_of_scalars() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(lambda element: element * 2 + 1.5)(x)

    x = torch.randn(4)
    torch.testing.assert_close(mc.compile(doubled, fullgraph=True)(x), doubled(x))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.mse_loss(x, x.cos()) + F.huber_loss(x, x.cos()) + F.smooth_l1_loss(x, x.sin()),
        lambda x: F.batch_norm(x, None, None, training=True) + F.normalize(x),
        lambda x: x.repeat(2, 3).lerp(x.new_ones(1), 0.3) + torch.eye(3 * x.shape[1])[0],
        lambda x: F.elu(F.mish(F.hardswish(x))).index_fill(1, torch.arange(2), 3.0),
    ],
)
def test_no_rule_asks_how_large_symbolic_sizes_are(fn) -> None:
    compiled = mc.compile(fn, backend="aot_eager", dynamic=True, options={"recompile_limit": 1})
    for rows, columns in ((4, 6), (5, 8), (9, 12)):
        x = torch.randn(rows, columns, requires_grad=True)
        found = [call(x) for call in (compiled, fn)]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*[torch.autograd.grad(y.sum(), x) for y in found])
