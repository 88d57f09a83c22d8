"""Checks of lesson 00."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import minicompile as mc
from minicompile.dynamo.result import Capture
from minicompile.extension import backends, decompose
from minicompile.lessons.exercise import Lesson, Run, show
from minicompile.lessons.model import GPT, GPTConfig

lesson = Lesson("00")


def relu_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x), -1)


def two_sums(x: torch.Tensor) -> torch.Tensor:
    return x.exp().sum(-1) + x.sum(-1)


def product_between(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x) @ x.T, -1)


@lesson.exercise(
    "ex1",
    points=1,
    level="read",
    visible=[relu_softmax],
    hidden=[two_sums, torch.relu, product_between],
    forbidden=["steps", "what_if"],
)
def fusion_saves_kernels(run: Run, kernels_saved: Callable[..., Any]) -> str:
    """Counts kernels in two traces."""
    apart = {"inline": "never", "fusion": False}
    saved = 0
    for function in run.cases:
        x = torch.randn(8, 16)
        fused, unfused = mc.trace(function, x), mc.trace(mc.compile(function, options=apart), x)
        saved = len(unfused.kernels) - len(fused.kernels)
        run.expect(kernels_saved(fused, unfused), saved, f"kernels_saved for {function.__name__}")
    return f"{saved} kernels saved"


@lesson.exercise(
    "ex2",
    points=2,
    level="construct",
    visible=[1, 2],
    hidden=[3, 5],
    forbidden=["compile", "trace", "without", "disable", "scoped"],
)
def kernels_on_request(run: Run, with_kernels: Callable[..., Any]) -> str:
    """Functions that keep loops apart."""
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    for count in run.cases:
        function = with_kernels(count)
        shown = run.seen(show(function))
        run.that(run.seen(callable(function)), f"with_kernels({count})", "a function", shown)
        stages = mc.trace(function, x, w)
        run.expect(len(stages.kernels), count, f"kernels of with_kernels({count})")
        eager = run.seen(function(x, w))
        run.close(mc.compile(function)(x, w), eager, f"with_kernels({count})(x, w)")
    return f"{' and '.join(map(str, run.cases))} kernels, as ordered"


def small_block() -> torch.nn.Module:
    """One block of the lesson model."""
    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)).blocks[0]


@lesson.exercise(
    "ex3",
    points=3,
    level="implement",
    visible=[("none", torch.float32)],
    hidden=[("tanh", torch.float32), ("none", torch.float64), ("tanh", torch.float64)],
    forbidden=["gelu", "GELU"],
    without=["decomposition:aten.gelu"],
)
def gelu_is_parts(run: Run, gelu_in_parts: Callable[..., Any]) -> str:
    """gelu of the block's MLP is computed by the answer, inside a kernel."""
    block, h = small_block(), torch.randn(2, 16, 32)
    x = torch.cat([torch.linspace(-4, 4, 96), torch.linspace(-60, 60, 32)]).reshape(8, 16)
    with torch.no_grad():
        before = mc.trace(block, h)
    with mc.scoped(), torch.no_grad():
        decompose(torch.ops.aten.gelu.default, to="prims")(gelu_in_parts)
        for how, dtype in run.cases:

            def gelu(v: torch.Tensor, how: str = how) -> torch.Tensor:
                return torch.nn.functional.gelu(v, approximate=how)

            kind = str(dtype).removeprefix("torch.")
            title = f"gelu with approximate={how!r} of {kind}s from -4 to 4, then from -60 to 60"
            given = x.to(dtype)
            run.close(mc.compile(gelu)(given), gelu(given), title, rtol=1e-5, atol=1e-6)
        after = mc.trace(block, h)
        run.close(mc.compile(block)(h), block(h), "the block", rtol=1e-4, atol=1e-5)
    run.changed(kernel_names(before), kernel_names(after), "the block's kernels")
    calls = [len(stages.loops.externs) for stages in (before, after)]
    return f"{calls[0]} -> {calls[1]} extern calls in the block"


def kernel_names(stages: Any) -> str:
    """Names of a trace's kernels."""
    return " ".join(kernel.name for kernel in stages.kernels)


class Called(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def relu_softmax_of_product(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x @ x.T), dim=-1)


def joined(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = torch.cat([x, x + 1], dim=1).chunk(2, dim=0)
    return torch.stack((low, high)), low


@lesson.exercise(
    "ex4",
    points=4,
    level="real",
    visible=[relu_softmax_of_product],
    hidden=[joined],
    forbidden=["Interpreter", "GraphModule", "forward", "gm", "plain_backend", "owning_module"],
    computed_names=True,  # of the methods that a graph calls
)
def answer_is_the_backend(run: Run, run_graph: Callable[..., Any]) -> str:
    """`mc.compile` gives captured graphs to the answer."""
    block, h = small_block(), torch.randn(2, 16, 32)
    before = mc.trace(block, h)
    counts: list[int] = []
    called: list[str] = []

    def answering(capture: Capture) -> Callable[[list[Any]], Any]:
        nodes = list(capture.graph.nodes)
        counts.append(capture.graph.op_count)

        def call(inputs: list[Any]) -> Any:
            called.clear()
            with Called(called):
                return run_graph(nodes, list(inputs))

        return call

    with mc.without("backend:inductor"), mc.scoped():
        backends("inductor")(lambda options: answering)
        for function in run.cases:
            x = torch.randn(4, 6)
            got = tuples(mc.compile(function, fullgraph=True)(x))
            run.all_close(got, tuples(function(x)), f"{function.__name__}(x)")
        compiled = mc.compile(block, fullgraph=True)
        run.close(compiled(h), block(h), "the block", rtol=1e-4, atol=1e-5)
    calls = " ".join(str(extern.op) for extern in before.loops.externs)
    run.changed(calls, " ".join(called), "the operators that the block calls")
    return f"{counts[-1]} operations of the block, run by your backend"


def tuples(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
