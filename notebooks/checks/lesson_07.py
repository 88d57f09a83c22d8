"""Checks of lesson 07."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._ops import OpOverload

import minicompile as mc
from minicompile.aot.result import AotResult
from minicompile.lessons.exercise import Lesson, Run, expects
from minicompile.lessons.model import Block, GPTConfig
from minicompile.ops.events import Event, observer
from minicompile.ops.graph import output_node

aten = torch.ops.aten
lesson = Lesson("07")


def autograd(fn: Callable[..., Any], *inputs: Any) -> AotResult:
    """What the room of ahead-of-time autograd makes of a function, as an observer hears of it."""
    made: list[AotResult] = []

    def listen(event: Event) -> None:
        made.extend([event.subject] if event.kind == "aot" else [])

    mc.reset()
    with mc.scoped():
        observer("lesson")(listen)
        mc.compile(fn, backend="aot_eager")(*inputs)
    return made[0]


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def block_with_input() -> tuple[Block, Tensor]:
    block = Block(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)).double()
    return block, doubles(2, 8, 16)


def gradients(fn: Callable[..., Tensor], leaves: Sequence[Tensor], *inputs: Tensor) -> list[Tensor]:
    """Of a sum of squares, by eager autograd or by a compiled function."""
    return list(torch.autograd.grad(fn(*inputs).square().sum(), leaves))


def same_block_gradients(run: Run, block: Block, h: Tensor, **how: float) -> str:
    """The compiled block's gradients are eager's. Gives the text of its joint graph."""
    leaves = {"h": h, **dict(block.named_parameters())}
    expected = gradients(block, list(leaves.values()), h)
    mc.reset()
    compiled = mc.compile(block, backend="aot_eager")
    got = gradients(compiled, list(leaves.values()), h)
    run.all_close(got, dict(zip(leaves, expected)), "the block's gradient of ", **how)
    return str(autograd(block, h).level("full"))


# Exercise 1


def one_detached(x: Tensor, w: Tensor) -> Tensor:
    return x * w.detach()


def zero_is_a_gradient(x: Tensor, w: Tensor) -> Tensor:
    return x.sin() + w * 0


def all_there(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def number_first(n: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return n * (a > 0) + b.cos()


def two_of_three(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
    return q * p.detach().exp() + r.argmax()


def counted(*sizes: int) -> Tensor:
    return torch.arange(sizes[0])


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[
        (one_detached, (doubles, doubles), expects(["w"])),
        (zero_is_a_gradient, (doubles, doubles), expects([])),
        (all_there, (doubles, doubles), expects([])),
    ],
    hidden=[
        (number_first, (counted, doubles, doubles), expects(["a"])),
        (two_of_three, (doubles, doubles, doubles), expects(["p", "r"])),
    ],
    forbidden=["autograd", "backward"],
)
def the_missing_gradient(run: Run, without_gradient: Callable[..., Any]) -> str:
    """Names of inputs, from joint graphs."""
    missing = 0
    for fn, make, expected in run.cases:
        got = without_gradient(autograd(fn, *(one(3) for one in make)))
        run.expect(got, expected, f"without_gradient for {fn.__name__}")
        missing += len(expected)
    return f"{missing} missing gradient found in {len(run.cases)} joint graphs"


# Exercise 2


def backward_reads(aot: AotResult) -> list[str]:
    """The forward values that a backward operation reads."""
    graph = aot.level("full")
    returned = output_node(graph.gm.graph).args[0][0]  # type: ignore[index]
    backward = [node for node in graph.nodes if node.meta.get("phase") == "backward"]
    read = {used for node in backward for used in node.all_input_nodes}

    def name(node: fx.Node) -> str:
        made = "the result" if node in returned else node.name
        return "the input" if node.op == "placeholder" else made

    return sorted(name(node) for node in read if node.meta["phase"] == "forward")


@lesson.exercise(
    "ex2",
    points=2,
    level="construct",
    visible=[(3, 4)],
    hidden=[(2, 5), (6,)],
    forbidden=["register_vjp", "Function", "detach", "no_grad"],
)
def what_backward_reads(
    run: Run,
    reads_nothing: Callable[..., Any],
    reads_input: Callable[..., Any],
    reads_result: Callable[..., Any],
) -> str:
    """Three functions, by the values their backward reads."""
    wanted = (
        (reads_nothing, expects([])),
        (reads_input, expects(["the input"])),
        (reads_result, expects(["the result"])),
    )
    for shape in run.cases:
        for fn, expected in wanted:
            x = torch.rand(shape, requires_grad=True)
            what = f"{fn.__name__} of a tensor of shape {list(shape)}"
            y = fn(x)
            result = run.seen(y)
            run.that(
                isinstance(result, Tensor) and result.shape == x.shape and result.requires_grad,
                what,
                "a result of that shape, with a gradient",
                result,
            )
            (slope,) = run.seen(torch.autograd.grad(y.sum(), x))
            run.that(bool(slope.any()), what, "a gradient", "zeros")
            read = backward_reads(autograd(fn, x))
            run.expect(read, expected, f"what the backward of {what} reads")
    return "nothing, the input, the result"


# Exercise 3


def calling(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Tensor]:
    return lambda x: op(x, *args, **kwargs)


@lesson.exercise(
    "ex3",
    points=3,
    level="implement",
    visible=[(aten.gelu.default, (), {}), (aten.sin.default, (), {})],
    hidden=[
        (aten.softplus.default, (3.0, 20.0), {}),
        (aten.gelu.default, (), {"approximate": "tanh"}),
    ],
    forbidden=["autograd", "backward", "gelu_backward", "grad_fn", "func"],
)
def differences_are_a_rule(run: Run, by_differences: Callable[..., Any]) -> str:
    """A vjp made of finite differences, for single operators and in the block."""
    near = {"rtol": 1e-9, "atol": 1e-9}
    for op, args, kwargs in run.cases:
        x, fn = doubles(3, 4), calling(op, args, kwargs)
        expected = gradients(fn, [x], x)[0]
        with mc.scoped():
            mc.register_vjp(op)(by_differences(op))
            mc.reset()
            compiled = mc.compile(fn, backend="aot_eager")
            got = gradients(compiled, [x], x)[0]
        settings = ", ".join(map(str, [*args, *kwargs.values()]))
        run.close(got, expected, f"the gradient of {op}{settings and ' with ' + settings}", **near)
    block, h = block_with_input()
    before = str(autograd(block, h).level("full"))
    with mc.scoped():
        mc.register_vjp(aten.gelu.default)(by_differences(aten.gelu.default))
        after = same_block_gradients(run, block, h, rtol=1e-8, atol=1e-8)
    run.changed(before, after, "the block's joint graph")
    calls = after.count("aten.gelu.default")
    run.expect(after.count("aten.gelu_backward"), 0, "calls of gelu_backward in the block")
    return f"gelu is called {calls} times in the block's joint graph, gelu_backward never"


# Exercises 4 and 5


def with_softmax(dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.softmax(x, dim)


def close_gradients(run: Run, fn: Callable[..., Tensor], leaves: list[Tensor], what: str) -> None:
    """Compiled with the rules that are registered, and eager."""
    expected = gradients(fn, leaves, *leaves)
    mc.reset()
    got = gradients(mc.compile(fn, backend="aot_eager"), leaves, *leaves)
    run.all_close(got, expected, what)


@lesson.exercise(
    "ex4",
    points=4,
    level="real",
    visible=[((2, 3), -1)],
    hidden=[((4, 2, 3), 0), ((3, 1, 5), 1)],
    forbidden=["autograd", "backward", "gelu_backward", "_softmax_backward_data", "func"],
)
def three_rules_of_the_block(
    run: Run,
    gelu_vjp: Callable[..., Any],
    softmax_vjp: Callable[..., Any],
    bmm_vjp: Callable[..., Any],
) -> str:
    """Gradients of gelu, softmax and bmm, alone and in the block."""
    block, h = block_with_input()
    before = str(autograd(block, h).level("full"))
    mc.register_vjp(aten.gelu.default)(gelu_vjp)
    mc.register_vjp(aten._softmax.default)(softmax_vjp)
    mc.register_vjp(aten.bmm.default)(bmm_vjp)
    for shape, dim in run.cases:
        of = f"of shape {list(shape)}"
        close_gradients(run, F.gelu, [doubles(*shape)], f"the gradient of gelu(x) {of}")
        what = f"the gradient of softmax(x, {dim}) {of}"
        close_gradients(run, with_softmax(dim), [doubles(*shape)], what)
        rows, columns = shape[-2:]
        factors = [doubles(2, rows, columns), doubles(2, columns, 4)]
        close_gradients(run, torch.bmm, factors, f"a gradient of bmm(a, b), a {of}")
    after = same_block_gradients(run, block, h)
    run.changed(before, after, "the block's joint graph")
    left = sorted({name for name in ("gelu_backward", "_softmax_backward_data") if name in after})
    run.expect(left, [], "PyTorch's formulas in the block's joint graph")
    rules = sum(
        text in after.partition("# backward pass")[0] for text in ("gelu", "_softmax", "bmm")
    )
    return f"{rules} rules, and the block's gradients are eager's"


def with_layer_norm(dims: int) -> Callable[..., Tensor]:
    return lambda x, w, b: F.layer_norm(x, x.shape[-dims:], w, b)


def without_weights(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def without_bias(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w)


@lesson.exercise(
    "ex5",
    points=3,
    level="stretch",
    visible=[((2, 4), 1)],
    hidden=[((2, 3, 4), 2), ((5, 3, 2), 1)],
    forbidden=["autograd", "backward", "native_layer_norm_backward", "func"],
)
def layer_norm_by_hand(run: Run, layer_norm_vjp: Callable[..., Any]) -> str:
    """Three gradients of an operator with three results."""
    block, h = block_with_input()
    before = str(autograd(block, h).level("full"))
    norm: OpOverload = aten.native_layer_norm.default
    mc.register_vjp(norm)(layer_norm_vjp)
    for shape, dims in run.cases:
        leaves = [doubles(*shape), doubles(*shape[-dims:]), doubles(*shape[-dims:])]
        what = f"a gradient of layer_norm over {list(shape[-dims:])} of {list(shape)}"
        close_gradients(run, with_layer_norm(dims), leaves, what)
        what = f"the gradient of layer_norm without weight and bias, {list(shape)}"
        close_gradients(run, without_weights, [doubles(*shape)], what)
        what = f"a gradient of layer_norm without bias, {list(shape)}"
        close_gradients(run, without_bias, [doubles(*shape), doubles(shape[-1])], what)
    after = same_block_gradients(run, block, h)
    run.changed(before, after, "the block's joint graph")
    left = after.count("native_layer_norm_backward")
    run.expect(left, 0, "calls of native_layer_norm_backward in the block")
    return (
        f"{after.count('aten.native_layer_norm.default')} layer norms differentiated by your rule"
    )
