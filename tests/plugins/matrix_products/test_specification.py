"""Matrix products in kernels of our own, with mode="max-autotune".

- A product of any size and layout is as near to the exact one as the library's.
- What follows is computed of the tiles, and cheap loops before it run as the kernel loads.
- Every tile and every other way that is measured computes the same.
- Other modes, languages, dtypes and varying sizes leave the product to the library, with a reason.

`test_autotune.py` has what is measured and remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import minicompile as mc
from minicompile.codegen.plan import KernelPlan, KernelSource, plan_rule
from minicompile.debug.gpu_assembly import cross_compile
from minicompile.ops.registry import scoped
from minicompile.options import Options
from minicompile.pipeline_result import CompiledStages
from minicompile.plugins.matrix_products.autotune import candidates, load_candidate
from minicompile.runtime.gpu_kernel import Tiles, planned_tiles
from tests.comparing import assert_near, in_double
from tests.torch_versions import torch_has

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
OPTIONS = {"device_codegen": "triton", "verify": True}
SHARED = {80: 163 * 1024, 90: 227 * 1024}


def tuned(fn: Callable[..., Any], **options: Any) -> Any:
    """With templates; the kernels run in Triton's interpreter."""
    return mc.compile(fn, mode="max-autotune", options=OPTIONS | options)


def stages(fn: Callable[..., Any], *args: Any, **options: Any) -> CompiledStages:
    """What is made of a call that is not run."""
    (found,) = mc.trace(tuned(fn, **options), *args).graphs.values()
    return found


def products(found: CompiledStages) -> list[KernelSource]:
    """The kernels that are templates."""
    return [kernel for kernel in found.kernels if kernel.plan.reduction == "product"]


def given(*sizes: tuple[int, ...], dtype: torch.dtype = F32) -> list[Tensor]:
    """Numbers such that products are as large as factors."""
    made = torch.Generator().manual_seed(len(sizes))
    return [(torch.randn(s, generator=made) / s[-1] ** 0.25).to(dtype) for s in sizes]


def assert_right(found: Tensor, fn: Callable[..., Tensor], *args: Tensor) -> None:
    assert_near([found], [fn(*args)], [fn(*in_double(args))], roundings=8)


def both(fn: Callable[..., Tensor], *args: Tensor, kernels: int = 1) -> None:
    """One call is right, by templates alone: as many as are expected."""
    found = stages(fn, *args)
    assert not found.loops.externs and len(products(found)) == kernels
    assert_right(tuned(fn)(*args), fn, *args)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


# -- values


LINEAR = ((97, 81), (115, 81), (115,))
PRODUCTS: list[tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...], torch.dtype]] = [
    (linear, LINEAR, F32),
    (linear, LINEAR, BF16),
    (gelu, LINEAR, F16),
    (torch.mm, ((16, 16), (16, 16)), F32),
    (torch.mm, ((128, 64), (64, 256)), F32),
    (torch.mm, ((33, 300), (300, 17)), F32),
    (torch.addmm, ((40, 48), (40, 64), (64, 48)), BF16),
    (torch.baddbmm, ((2, 1, 48), (2, 40, 64), (2, 64, 48)), F32),
    (lambda x, w: x.t() @ w, ((40, 48), (40, 70)), F32),
    (lambda x, w: x @ w.t(), ((48, 40), (70, 40)), F32),
    (lambda x, w: x.t() @ w.t(), ((40, 48), (70, 40)), F32),
    (lambda x, w: F.relu(x[:, 20:84] @ w), ((40, 100), (64, 30)), F32),
    (lambda x, w: F.relu((x * 2) @ w), ((64, 64), (64, 64)), F32),  # writes over no factor
]


@pytest.mark.parametrize("number", range(len(PRODUCTS)))
def test_products_of_any_size_and_layout(number: int) -> None:
    fn, sizes, dtype = PRODUCTS[number]
    both(fn, *given(*sizes, dtype=dtype))


FOLLOWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "residual": lambda p, y: y + p,
    "column": lambda p, y: p * y[:, :1],
    "cast": lambda p, y: p.to(F32),
    "gelu": lambda p, y: F.gelu(p, approximate="tanh"),
    "chain": lambda p, y: torch.sigmoid(p.float() * 2 + y.float()).to(p.dtype) - y,
    "transposed": lambda p, y: (p * 2).t().contiguous(),
    "reshaped": lambda p, y: torch.tanh(p.view(6, 8, 80)),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("follows", FOLLOWS)
def test_what_follows_is_computed_of_the_tiles(follows, dtype) -> None:
    after = FOLLOWS[follows]

    def fn(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return after(x @ w, y)

    args = given((48, 64), (64, 80), (48, 80), dtype=dtype)
    found = stages(fn, *args)
    assert len(found.kernels) == 1 and not found.loops.externs
    decisions = [d for d in found.schedule.decisions if d.fused]
    assert len(decisions) == len(found.schedule.before) - 1
    assert {d.kind for d in decisions} <= {"template_epilogue"}
    assert_right(tuned(fn)(*args), fn, *args)


PRECEDES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cast": lambda x, w: x.to(BF16) @ w.to(BF16),
    "widened": lambda x, w: x.to(BF16).to(w.dtype) @ w,
    "both": lambda x, w: (x + 1).relu() @ (w * 2).t().contiguous().t(),
    "row": lambda x, w: (x * x[:, :1].exp()) @ w,
    "not zero beyond": lambda x, w: (x + 1) @ (1 / w.abs().add(1)),
    "then": lambda x, w: F.gelu((x * 0.5) @ w),
}


@pytest.mark.long
@pytest.mark.parametrize("precedes", PRECEDES)
def test_cheap_loops_before_a_product_run_as_its_kernel_loads(precedes) -> None:
    fn, args = PRECEDES[precedes], given((40, 300), (300, 24))
    found = stages(fn, *args)
    (kernel,) = found.kernels
    assert kernel.plan.reduction == "product" and not found.loops.externs
    kinds = [d.kind for d in found.schedule.decisions if d.fused]
    assert "template_prologue" in kinds and len(kinds) == len(found.schedule.before) - 1
    assert_right(tuned(fn)(*args), fn, *args)
    (out,) = (a for a in kernel.plan.arguments if a.role == "out")
    tensors = dict(zip((b.name for b in found.loops.inputs), args, strict=True))  # type: ignore[union-attr]
    for tiles in distinct(kernel):
        result = torch.full((40, 24), 77.0, dtype=out.dtype)
        run(kernel, tiles, {**tensors, out.buffer: result})
        assert_right(result, fn, *args)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: (F.gelu(x) + torch.tanh(x).exp()) @ w,
        lambda x, w: (x * 2) @ w + (x * 2).sum(),
    ],
)  # fmt: skip
def test_factors_that_cost_much_or_that_others_read_are_made_before(fn) -> None:
    found = stages(fn, *given((40, 64), (64, 24)))
    assert "template_prologue" not in [d.kind for d in found.schedule.decisions if d.fused]


def test_one_products_kernel_reads_the_other_product() -> None:
    both(swiglu, *given((40, 64), (48, 64), (48, 64), dtype=BF16), kernels=2)


def test_batches_of_products_with_scale_and_softmax() -> None:
    def scores(q: Tensor, k: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) * 0.125, -1)

    args = given((2, 3, 33, 64), (2, 3, 40, 64), dtype=BF16)
    both(scores, *args)
    (decision,) = (d for d in stages(scores, *args).schedule.decisions if d.cause == "template")
    assert decision.kind == "template_epilogue" and "row" in decision.reason


def test_what_is_reduced_next_is_left_to_the_reductions_kernel() -> None:
    """Where the library's product is faster, nothing is lost."""

    def fn(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.layer_norm(torch.tanh(x @ w) + y, (48,))

    args = given((40, 64), (64, 48), (40, 48))
    both(fn, *args)
    found = stages(fn, *args)
    assert len(found.kernels) == 2 and not [
        d for d in found.schedule.decisions if d.fused and "template" in d.kind
    ]
    assert any(d.cause == "template" and "reduces" in d.reason for d in found.schedule.decisions)


def test_a_product_that_others_read_reaches_memory() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        product = x @ w
        return F.relu(product), product, product.sum(0)

    args = given((40, 64), (64, 48))
    for found, wanted in zip(tuned(fn)(*args), fn(*args), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    (kernel,) = products(stages(fn, *args))
    assert [a.role for a in kernel.plan.arguments].count("out") == 2


def test_gradients_of_linear_layers() -> None:
    x, w, b = given((48, 32), (64, 32), (64,))
    wanted, found = ([t.clone().requires_grad_() for t in (x, w, b)] for _ in "ab")
    gelu(*wanted).square().sum().backward()
    tuned(gelu)(*found).square().sum().backward()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-4)


# -- tiles and other ways


def distinct(kernel: KernelSource) -> list[Tiles]:
    """Candidates that differ for an interpreter."""
    found = {(t.way, t.y, t.x, t.r): t for t in candidates(kernel)}
    return list(found.values())


def run(kernel: KernelSource, tiles: Tiles, tensors: dict[str, Tensor]) -> None:
    load_candidate(kernel, tiles)(*(tensors[a.buffer] for a in kernel.plan.arguments))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("fn", [torch.mm, lambda x, w: F.gelu(x @ w) + 1])
def test_every_candidate_computes_the_same(fn, dtype) -> None:
    args = given((40, 512), (512, 72), dtype=dtype)
    (kernel,) = stages(fn, *args).kernels
    (out,) = (a for a in kernel.plan.arguments if a.role == "out")
    names = [b.name for b in stages(fn, *args).loops.inputs]  # type: ignore[union-attr]
    tried = distinct(kernel)
    assert {tiles.way for tiles in tried} == {"", "library"}
    for tiles in tried:
        found = torch.full((40, 72), 77.0, dtype=out.dtype)
        run(kernel, tiles, {**dict(zip(names, args, strict=True)), out.buffer: found})
        assert_right(found, fn, *args)


def test_float32_is_multiplied_as_torchs_setting_says() -> None:
    args, before = given((64, 64), (64, 64)), torch.get_float32_matmul_precision()
    try:
        for setting, wanted in (("highest", "ieee"), ("high", "tf32")):
            torch.set_float32_matmul_precision(setting)
            (kernel,) = stages(torch.mm, *args).kernels
            assert f'input_precision="{wanted}"' in kernel.text
    finally:
        torch.set_float32_matmul_precision(before)


# -- where a library multiplies


def reasons(fn: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    return [extern.reason for extern in stages(fn, *args, **options).loops.externs]


def test_other_modes_and_other_languages_have_no_templates() -> None:
    x, w = given((64, 64), (64, 64))
    for options in ({"mode": "default"}, {"device_codegen": "auto"}):
        (reason,) = reasons(torch.mm, x, w, **options)
        assert reason == "library matrix product"


def test_a_library_takes_what_a_template_refuses() -> None:
    x, w = given((64, 64), (64, 64))
    ((small,), (wide,)) = reasons(torch.mm, x[:3], w), reasons(torch.mm, x.double(), w.double())
    assert "a tile of a template has 16 rows" in small and "float64" in wide
    scaled = reasons(lambda c, a, b: torch.addmm(c, a, b, beta=2), w, x, w)
    assert "scales before it adds" in scaled[0]


def test_sizes_that_vary_are_the_librarys() -> None:
    fn = mc.compile(gelu, mode="max-autotune", options=OPTIONS, dynamic=True)
    for rows in (48, 80):
        args = given((rows, 64), (32, 64), (32,))
        assert_right(fn(*args), gelu, *args)
    (found,) = mc.trace(fn, *args).graphs.values()
    assert "sizes vary" in found.loops.externs[0].reason


def test_without_the_plugin_a_product_is_the_librarys_even_without_a_library() -> None:
    args, own = given((64, 64), (64, 64)), {"mode": "default", "library": False}
    assert reasons(torch.mm, *args, **own) == []
    for chosen in ("none", ["matrix_products"]):  # which needs another one
        (reason,) = reasons(torch.mm, *args, plugins=chosen, **own)
        assert reason == "library matrix product"


# -- the reference


# -- plug-ins


def test_candidates_from_outside_are_measured() -> None:
    def mine(plan: KernelPlan, options: Options) -> None:
        plan.choices += ({"y": 16, "x": 16, "r": 16, "warps": 1, "stages": 1},)

    args = given((64, 64), (64, 64))
    with scoped():
        plan_rule("triton:mine")(mine)
        (kernel,) = stages(torch.mm, *args).kernels
        assert Tiles(16, 16, 1, 16, 1) in candidates(kernel)


# -- on GPUs


@pytest.mark.long
@pytest.mark.parametrize("sm", [80, 90])
@pytest.mark.parametrize("follows", ["gelu", "residual"])
def test_candidates_fit_their_gpus(sm, follows) -> None:
    """The planned tiles use tensor cores, find their memory, and next to nothing spills."""
    after = FOLLOWS[follows]
    args = [torch.empty(s, dtype=BF16) for s in ((4096, 1024), (1024, 4096), (4096, 4096))]
    (kernel,) = products(stages(lambda x, w, y: after(x @ w, y), *args))
    tiles = planned_tiles(kernel.plan)
    if sm == 80:
        tiles = replace(tiles, stages=3)
    found = cross_compile(kernel, ("cuda", sm), tiles)
    fits = (follows, sm) != ("gelu", 80) or torch_has("a product with GELU fits on sm_80")
    assert found.spilled_bytes <= (64 if fits else 136) and found.shared_bytes <= SHARED[sm]
    assert ("HGMMA" if sm == 90 else "HMMA") in found.levels["sass"]
    assert "LDGSTS" in found.levels["sass"]  # factors arrive while others are multiplied


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("fn", [gelu, swiglu])
def test_compiled_candidates_compute_the_same(fn, dtype) -> None:
    sizes = ((200, 1024), (136, 1024), (136,) if fn is gelu else (136, 1024))
    args = [x.cuda() for x in given(*sizes, dtype=dtype)]
    assert_right(mc.compile(fn, mode="max-autotune")(*args), fn, *args)
    (found,) = mc.trace(mc.compile(fn, mode="max-autotune"), *args).graphs.values()
    last = found.kernels[-1]
    tensors = {b.name: t for b, t in zip(found.loops.inputs, args, strict=True)}  # type: ignore[union-attr]
    for name in (a.buffer for a in last.plan.arguments if a.buffer not in tensors):
        tensors[name] = F.linear(args[0], args[1]) if name == "buf0" else fn(*args)
    wanted = fn(*args)
    (out,) = (a for a in last.plan.arguments if a.role != "in")
    for tiles in candidates(last):
        mine = dict(tensors)
        if fn is swiglu:
            mine[out.buffer] = F.linear(args[0], args[1])
        else:
            mine[out.buffer] = torch.zeros_like(wanted)
        run(last, tiles, mine)
        assert_right(mine[out.buffer], fn, *args)
