"""Each decomposition computes what eager computes, forward and backward, and leaves none of it behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from minicompile import compat
from minicompile.aot.decompositions import decompose, normalization
from minicompile.errors import VerifyError
from minicompile.ops.registry import scoped
from minicompile.options import Options
from tests.aot.helpers import assert_aot_as_eager, compile_aot

aten = torch.ops.aten


# name: (function, sizes of its inputs)
EVERYDAY: dict[str, tuple[Callable[..., Any], *tuple[Any, ...]]] = {
    "gelu": (F.gelu, (3, 7)),
    "hardswish": (lambda x: F.hardswish(x * 4), (3, 7)),
    "softplus": (lambda x: F.softplus(x * 20, 2.0, 15.0), (3, 7)),
    "smooth": (lambda x: F.cross_entropy(x, torch.arange(5), label_smoothing=0.1), (5, 5)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (7,), w, b), (3, 2, 7), (7,), (7,)),
    "layer_norm_permuted": (lambda x, w: F.layer_norm(x.mT, (9,), w), (3, 9, 7), (9,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (7,), w, 1e-5), (3, 7), (7,)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (2, 4, 6, 6), (4,), (4,)),
    "batch_norm": (
        lambda x, m: F.batch_norm(x, m.detach(), m.exp().detach(), m, m),
        (2, 4, 6, 6),
        (4,),
    ),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.7), (3, 4), (3, 4)),
    "embedding, by frequency": (
        lambda w: F.embedding(torch.arange(6) % 4, w, scale_grad_by_freq=True),
        (6, 4),
    ),
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 4, 6, 6), (3, 4, 3, 3), (3,)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", EVERYDAY)
def test_results_and_gradients_round_where_eagers_round(name, dtype):
    """The database's samples (test_decomposition_samples.py) reach every rule; these are for every day."""
    fn, *sizes = EVERYDAY[name]
    torch.manual_seed(0)
    inputs = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
    call, _ = compile_aot(fn, inputs, options=Options(verify=True))
    close = 2e-6 if dtype is torch.float32 else 2 * torch.finfo(dtype).eps
    assert_aot_as_eager(call, fn, *inputs, gradient_strides=True, rtol=close, atol=close)


def test_pointwise_operands_at_prims_have_equal_shapes_and_dtypes():
    def fn(x, i, s):
        return (x + i) * s > i

    _, result = compile_aot(fn, [torch.randn(3, 4), torch.arange(4), torch.tensor(2.0)])
    for node in result.level("prims").nodes:
        if node.op == "call_function" and torch.Tag.pointwise in node.target.tags:
            values = [used.meta["val"] for used in node.all_input_nodes]
            assert {tuple(v.shape) for v in values} == {(3, 4)} or node.target.namespace == "prims"
            assert len({v.dtype for v in values}) == 1


def test_a_rule_that_gives_another_shape_is_refused_by_name():
    with scoped():

        @decompose(aten.silu.default, to="core")
        def broken(x):
            return x.sum()

        with pytest.raises(VerifyError, match=r"aten\.silu\.default"):
            compile_aot(F.silu, [torch.randn(3)])


@pytest.mark.parametrize("fn", [F.gelu, F.silu, torch.frac, torch.var])
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
    compiled = mc.compile(
        fn, backend="aot_eager", dynamic=True, fullgraph=True, options={"recompile_limit": 1}
    )
    for rows, columns in ((4, 6), (5, 8), (9, 12)):
        x = torch.randn(rows, columns, requires_grad=True)
        found = [call(x) for call in (compiled, fn)]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*[torch.autograd.grad(y.sum(), x) for y in found])
