"""Checks of lesson 06: decompositions that the compiler uses, right in floating point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import minicompile as mc
from minicompile.extension import decompose
from minicompile.lessons.exercise import Lesson, Run, show
from minicompile.lessons.model import GPT, MLP, Block, GPTConfig

lesson = Lesson("06")
aten = torch.ops.aten
Tensor = torch.Tensor

SMALL = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)


def eager_graphs(function: Any) -> Any:
    """Compiled as far as the graph, which eager operators run: raises what goes wrong."""
    return mc.compile(function, backend="aot_eager", fullgraph=True)


def traced(function: Any, *inputs: Any) -> Any:
    return mc.trace(mc.compile(function, backend="aot_eager"), *inputs)


def prims(function: Any, *inputs: Any) -> list[str]:
    """The operators of the compiled graph at the lowest level."""
    return [str(op) for _, op in traced(function, *inputs).aot.level("prims").calls]


def still_called(operators: Sequence[str], names: Sequence[str]) -> int:
    """How many calls are left of operators with these names."""
    return sum(any(name in op for name in names) for op in operators)


def to(dtype: torch.dtype, inputs: Sequence[Any]) -> list[Any]:
    """Floating-point tensors in another type."""
    floats = (isinstance(x, Tensor) and x.is_floating_point() for x in inputs)
    return [x.to(dtype) if is_float else x for x, is_float in zip(inputs, floats)]


# Exercise 1 --------------------------------------------------------------------------------------


def activation(x: Tensor) -> Tensor:
    return F.gelu(x)


def probabilities(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def largest_and_place(x: Tensor) -> Tensor:
    values, places = x.max(-1)
    return values * places


def loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.int64))


def normalized(x: Tensor) -> Tensor:
    return F.layer_norm(x, [8])


def traces_of(functions: Sequence[Any], train: bool) -> list[Any]:
    """Traces of functions, with a backward pass or without."""
    x = torch.randn(4, 8, requires_grad=train)
    return [traced(function, x) for function in functions]


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[([activation, probabilities], "full", False), ([activation], "prims", False)],
    hidden=[
        ([loss, largest_and_place], "prims", False),
        ([activation, loss], "core", True),
        ([normalized], "full", False),  # three results, taken apart
        ([], "full", False),
    ],
    forbidden=["calls", "summary", "externs", "steps", "family"],
)
def operators_by_level(run: Run, vocabulary: Callable[..., Any]) -> str:
    """Collects the operators of some traces."""
    counts = []
    for functions, level, train in run.cases:
        traces = traces_of(functions, train)
        expected = {str(op) for trace in traces for _, op in trace.aot.level(level).calls}
        names = ", ".join(function.__name__ for function in functions)
        got = run.seen(vocabulary(traces, level))
        what = f"vocabulary(traces of {names or 'nothing'}, {level!r})"
        run.that(isinstance(got, set), what, "a set", show(got))
        missing, more = sorted(expected - got), sorted(got - expected)
        run.that(not missing and not more, what, f"also {missing}", f"instead {more}")
        counts.append(f"{len(got)} at {level}")
    return ", ".join(counts)


# Exercise 2 --------------------------------------------------------------------------------------


def naive_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    power = torch.exp(x)
    return power / power.sum(dim, keepdim=True)


@lesson.exercise(
    "ex2",
    points=2,
    level="construct",
    visible=[torch.float32],
    hidden=[torch.float64, torch.bfloat16, torch.float16],
    forbidden=["softmax", "compile", "trace", "logsumexp"],
)
def naive_softmax_is_spoiled(run: Run, spoilers: Callable[..., Any]) -> str:
    """Compiles a softmax with the naive rule."""
    for dtype in run.cases:
        name = str(dtype).removeprefix("torch.")
        large, small = run.seen(spoilers(dtype))
        for which, row in (("first", large), ("second", small)):
            what = f"spoilers({name}), the {which} row"
            run.same(row.dtype, dtype, f"{what}: type")
            run.that(bool(row.isfinite().all()), what, "finite numbers", show(row))
        run.that(bool((large > 0).any()), f"spoilers({name})[0]", "a positive number", show(large))
        run.that(bool((small <= 0).all()), f"spoilers({name})[1]", "none above 0", show(small))
        with mc.scoped():
            decompose(aten._softmax.default, to="prims", wide=True)(naive_softmax)
            mc.reset()
            compiled = eager_graphs(probabilities)
            found = run.seen([compiled(row) for row in (large, small)])
        mc.reset()
        for which, row, got in (("first", large, found[0]), ("second", small, found[1])):
            what = f"naive softmax of the {which} row, {name} {show(row)}"
            run.that(bool(got.isnan().any()), what, "NaN", show(got))
            right = probabilities(row)
            run.that(bool(right.isfinite().all()), f"eager's {what}", "no NaN", show(right))
    return f"{2 * len(run.cases)} rows spoiled, all numbers finite"


# Exercise 3 --------------------------------------------------------------------------------------


def rms_norm_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What the custom operator runs, which the compiler knows nothing of."""
    return F.rms_norm(x, [x.shape[-1]], weight, eps)


if not hasattr(torch.ops.lesson06, "rms_norm"):  # once a process
    rms_norm_op = torch.library.custom_op("lesson06::rms_norm", rms_norm_kernel, mutates_args=())
    rms_norm_op.register_fake(lambda x, weight, eps: torch.empty_like(x))
rms_norm_overload = torch.ops.lesson06.rms_norm.default


class RMSNorm(nn.Module):
    """By the custom operator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.lesson06.rms_norm(x, self.weight, 1e-5)
        return out


class SiluMLP(MLP):
    """With silu instead of gelu."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.project(F.silu(self.widen(x)))
        return out


class ModernBlock(nn.Module):
    """The lesson model's block with RMS norms and silu, and a Huber loss of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(SMALL)
        self.block.norm1, self.block.norm2 = RMSNorm(32), RMSNorm(32)  # type: ignore[assignment]
        self.block.mlp = SiluMLP(SMALL)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.huber_loss(self.block(x), target)


def activated(x: Tensor) -> Tensor:
    return F.silu(x)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = torch.ops.lesson06.rms_norm(x, weight, eps)
    return out


def hubered(x: Tensor, y: Tensor, reduction: str, delta: float) -> Tensor:
    return F.huber_loss(x, y, reduction=reduction, delta=delta)


@lesson.exercise(
    "ex3",
    points=4,
    level="implement",
    visible=lambda: [
        (activated, [torch.randn(3, 5)]),
        (normed, [torch.randn(3, 8), torch.rand(8), 1e-5]),
        (hubered, [torch.randn(4, 4), torch.randn(4, 4), "mean", 1.0]),
    ],
    hidden=lambda: [
        (activated, [torch.tensor([1000.0, -1000.0, 0.0, 20.0])]),
        (normed, [torch.randn(2, 3, 16) * 100 + 7, torch.randn(16), 0.5]),
        (hubered, [torch.randn(7) * 3, torch.randn(7), "sum", 0.25]),
        (hubered, [torch.randn(2, 7) * 3, torch.randn(2, 7), "none", 2.0]),
    ],
    forbidden=[
        "F", "functional", "silu_", "huber_loss", "smooth_l1_loss", "mse_loss", "l1_loss", "nn",
        "ops", "decompositions", "vector_norm",
    ],
    without=["decomposition:aten.silu", "decomposition:aten.huber_loss"],
)  # fmt: skip
@torch.no_grad()
def three_decompositions(
    run: Run,
    silu: Callable[..., Any],
    rms_norm: Callable[..., Any],
    huber: Callable[..., Any],
) -> str:
    """Each alone in float64 and float32, then all in a block of a GPT."""
    torch.manual_seed(0)
    block, h, target = ModernBlock(), torch.randn(1, 8, 32), torch.randn(1, 8, 32)
    before = prims(block, h, target)
    decompose(aten.silu.default, to="core")(silu)
    decompose(rms_norm_overload, to="core")(rms_norm)
    decompose(aten.huber_loss.default, to="core")(huber)
    rules = {activated: silu, normed: rms_norm, hubered: huber}
    for function, inputs in run.cases:
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            mc.reset()
            given = to(dtype, inputs)
            expected = function(*given)
            got = eager_graphs(function)(*given)
            what = f"{rules[function].__name__} of {', '.join(map(show, given))}"
            run.close(got, expected, what, rtol=tolerance, atol=tolerance)
    after = prims(block, h, target)
    run.changed("\n".join(before), "\n".join(after), "the graph of the block")
    mc.reset()
    run.close(eager_graphs(block)(h, target), block(h, target), "the block's loss")
    names = ("silu", "rms_norm", "huber_loss")
    left = still_called(after, names)
    run.expect(left, 0, "calls of silu, rms_norm and huber_loss left in the block")
    return f"calls left in the block: {still_called(before, names)} -> {left}"


# Exercise 4 --------------------------------------------------------------------------------------


def log_probabilities(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def loss_and_gradient(model: GPT, call: Any, tokens: Tensor) -> list[Tensor]:
    """A GPT's loss, and the gradient of a weight, by a function that calls the GPT."""
    weight = model.blocks[0].attention.qkv.weight  # type: ignore[union-attr]
    _, loss = call(tokens, tokens)
    return [loss.detach(), *torch.autograd.grad(loss, weight)]


def down_the_columns(x: Tensor) -> Tensor:
    return torch.softmax(x, 0) + torch.log_softmax(x, 0)


@lesson.exercise(
    "ex4",
    points=4,
    level="real",
    visible=lambda: [
        (probabilities, torch.randn(3, 5)),
        (probabilities, torch.tensor([[1.0, 2.0, 100.0], [-200.0, -201.0, -202.0]])),
        (log_probabilities, torch.tensor([[-900.0, 0.0, 3.0], [2000.0, 1.0, 0.0]])),
    ],
    hidden=lambda: [
        (log_probabilities, torch.tensor([[-2000.0, 0.0, 3.0], [1e4, -1e4, 0.0]])),
        (probabilities, torch.tensor([[3000.0, 0.0, -3000.0], [5.0, 4.0, 3.0]])),
        (probabilities, torch.tensor([[2.0, float("-inf")], [float("-inf"), -900.0]])),
        (down_the_columns, torch.randn(4, 3) * 300),
    ],
    forbidden=[
        "softmax",
        "log_softmax",
        "_softmax",
        "logsumexp",
        "logaddexp",
        "logcumsumexp",
        "cross_entropy",
        "ops",
    ],
    without=["decomposition:aten._softmax", "decomposition:aten._log_softmax"],
)
def repaired_softmax(
    run: Run, stable_softmax: Callable[..., Any], stable_log_softmax: Callable[..., Any]
) -> str:
    """Alone in float64 and float32, then in a GPT, whose loss and gradients are compared."""
    torch.manual_seed(0)
    model = GPT(SMALL)
    tokens = torch.randint(0, SMALL.vocab_size, (2, 8))
    before = prims(model, tokens, tokens)
    decompose(aten._softmax.default, to="prims", wide=True)(stable_softmax)
    decompose(aten._log_softmax.default, to="prims", wide=True)(stable_log_softmax)
    for function, x in run.cases:
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
            mc.reset()
            given = x.to(dtype)
            expected = function(given)
            got = eager_graphs(function)(given)
            what = f"{function.__name__.replace('_', ' ')} of {show(given)}"
            run.close(got, expected, what, rtol=tolerance, atol=tolerance)
    mc.reset()
    after = prims(model, tokens, tokens)
    run.changed("\n".join(before), "\n".join(after), "the graph of the GPT")
    mc.reset()
    expected = loss_and_gradient(model, model, tokens)
    got = loss_and_gradient(model, eager_graphs(model), tokens)
    names = ("loss", "gradient of its qkv weight")
    run.all_close(got, dict(zip(names, expected)), "the GPT's ")
    softmaxes = ("aten._softmax.default", "aten._log_softmax.default")
    left = still_called(after, softmaxes)
    run.expect(left, 0, "calls of softmax left in the GPT")
    return f"calls of softmax in the GPT: {still_called(before, softmaxes)} -> {left}"


# Exercise 5 --------------------------------------------------------------------------------------


def plain(x: Tensor, last: list[int]) -> Tensor:
    return F.layer_norm(x, last)


def scaled(x: Tensor, last: list[int]) -> Tensor:
    numbers = torch.arange(1.0, x.shape[-1] + 1, dtype=x.dtype) / x.shape[-1]
    return F.layer_norm(x, last, numbers.expand(last), -numbers.expand(last), 1e-3)


def three_results(x: Tensor, last: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    return torch.native_layer_norm(x, last, None, None, 0.5)


MOST = 8
"""Times eager's error that an answer may have."""


@lesson.exercise(
    "ex5",
    points=3,
    level="stretch",
    visible=lambda: [
        (plain, torch.randn(4, 64), [64]),
        (scaled, torch.randn(4, 64) + 10_000, [64]),
    ],
    hidden=lambda: [
        (plain, torch.randn(3, 4, 16) + 10_000, [4, 16]),
        (scaled, torch.randn(3, 4, 16) - 300, [4, 16]),
        (plain, torch.randn(2, 32) * 1e-4, [32]),
    ],
    forbidden=["layer_norm", "native_layer_norm", "var_mean", "var", "std", "rms_norm", "F", "ops",
               "std_mean", "double", "float64"],
    without=["decomposition:aten.native_layer_norm"],
)  # fmt: skip
@torch.no_grad()
def norm_far_from_zero(run: Run, layer_norm: Callable[..., Any]) -> str:
    """Errors against float64, beside eager's own; then in a block."""
    torch.manual_seed(0)
    block, h = Block(SMALL), torch.randn(1, 8, 32)
    before = prims(block, h)
    decompose(aten.native_layer_norm.default, to="prims", wide=True)(layer_norm)
    for function, x, last in run.cases:
        mc.reset()
        exact = function(x.double(), last)
        what = f"layer_norm of {show(x)} over the last sizes {last}"
        got = run.seen(eager_graphs(function)(x, last))
        run.same(got.shape, exact.shape, f"{what}, its size")
        ours, eagers = ((r.double() - exact).abs().max().item() for r in (got, function(x, last)))
        limit = MOST * max(eagers, torch.finfo(x.dtype).eps * exact.abs().max().item())
        run.that(
            ours <= limit,
            what,
            f"at most {MOST} times eager's error",
            f"{ours / limit * MOST:.0f} times",
        )
    x = torch.randn(2, 3, 4) + 1
    mc.reset()
    got = eager_graphs(three_results)(x, [4])
    names = ("result", "mean", "one over the deviation")
    expected = dict(zip(names, three_results(x, [4])))
    run.all_close(got, expected, f"native_layer_norm of {show(x)} over [4], its ")
    mc.reset()
    after = prims(block, h)
    run.changed("\n".join(before), "\n".join(after), "the graph of the block")
    mc.reset()
    run.close(eager_graphs(block)(h), block(h), "the block's result")
    left = still_called(after, ["native_layer_norm"])
    run.expect(left, 0, "calls of layer norm left in the block")
    return (
        f"calls of layer norm in the block: {still_called(before, ['native_layer_norm'])} -> {left}"
    )
