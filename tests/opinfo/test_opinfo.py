"""A part of torch's operator database; `python -m tests.opinfo` runs all of it."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minicompile.lowering.context import lowering
from minicompile.lowering.rules.common import aten, elementwise
from minicompile.options import Options
from tests.opinfo.cases import KINDS, VARIANTS, Case, cases, database
from tests.opinfo.compare import Verdict, Way, check
from tests.torch_versions import needs

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
i0 special.entr narrow_copy nonzero
"""


RFFT = pytest.param("fft.rfft", marks=needs("the fake of rfft has eager's strides"))
OTHERS = ("int", "bool", "half", "complex")


def verdicts(
    name: str, variants: tuple[str, ...], kinds: tuple[str, ...], way: Way, samples: int = 1
) -> list[Verdict]:
    op = database()[name]
    return [check(case, way) for case in cases(op, variants, kinds, samples)]


@pytest.mark.parametrize("name", [*FAMILIES.split(), RFFT])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_operator(backend: str, name: str) -> None:
    """As in eager, in every variant and kind of dtype; in a graph unless its sizes depend on data."""
    variants = VARIANTS if backend == "aot_eager" else ("function", "out_strided")
    found = verdicts(name, variants, ("float",), Way(backend))
    found += verdicts(name, ("function",), OTHERS, Way(backend))
    assert [f"{v.case.name}: {v.wrong}" for v in found if v.wrong] == []
    assert any(v.in_graph for v in found) == (name != "nonzero")


def called_by_ours() -> bool:
    """Is a frame of the compiler below this one? Capture breaks here, and Python asks."""
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return any(frame.f_globals["__name__"] == "minicompile.dynamo.dispatch" for frame in frames)


MISTAKES: dict[str, Callable[..., Any]] = {
    "values": lambda x: x + 1e-4 if compiling() else x + 0,
    "dtype": lambda x: x.double() if compiling() else x + 0,
    "strides": lambda x: (x + 0).t().contiguous().t() if compiling() else x + 0,
    "memory": lambda x: x.clone() if compiling() else x.t().t(),
    "input 0": lambda x: x.detach().mul_(1 if compiling() else 2).sum() * 0,
    "requires grad": lambda x: x.detach() + 0 if compiling() else x + 0,
    "gradient 0": lambda x: x.detach() + 0 * x if compiling() else x + 0,
    "raises": lambda x: x.view(5) if called_by_ours() else x + 0,
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_found(what: str) -> None:
    """Functions that do something else while they are compiled."""
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    case = Case("mistake", "function", torch.float32, 0, MISTAKES[what], (x,), {})
    assert what in check(case).wrong


# Lowering rules that are wrong -------------------------------------------------------------------


def scaled(rule: Any, ctx: Any, *args: Any, **kwargs: Any) -> Any:
    result = rule(ctx, *args, **kwargs)
    return elementwise(ctx, lambda ops, a, b: ops.mul(a, b), result, 1.0001)


PLANTED: dict[str, tuple[str, Any, Callable[..., Any], str]] = {
    "values": ("exp", aten.exp.default, scaled, "result 0: values"),
    "raises": ("tanh", aten.tanh.default, lambda rule, ctx, x: {}[x], "internal-error"),
}
"""What is wrong: an operator of the database, the one that is lowered wrongly, how, and what is told."""


@pytest.mark.long
@pytest.mark.parametrize("what", PLANTED)
def test_wrong_rules_are_found(what: str) -> None:
    name, op, wrong, told = PLANTED[what]
    with lowering.scoped():
        lowering(op)(functools.partial(wrong, lowering[op]))
        found = verdicts(name, ("function",), tuple(KINDS), Way("inductor"), 4)
    assert any(told in verdict.wrong for verdict in found)


def test_kernels_that_do_not_compile_are_found() -> None:
    way = Way("inductor", options=Options(cpp_flags=("-fno-such-flag",)))
    found = verdicts("exp", ("function",), ("float",), way)
    assert all(verdict.wrong.startswith("missing-tool") for verdict in found)
