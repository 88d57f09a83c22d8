"""Checks of lesson 09."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

import minicompile as mc
from minicompile.aot.result import AotResult
from minicompile.extension import graph_pass
from minicompile.lessons.exercise import Lesson, Run, expects, show
from minicompile.lessons.model import Block, GPTConfig
from minicompile.ops.events import Event, observer

lesson = Lesson("09")


def compiled(fn: Callable[..., Any], *inputs: Any) -> tuple[AotResult, Any]:
    """A function's graphs, as an observer hears of them, and what the call gives."""
    made: list[AotResult] = []

    def listen(event: Event) -> None:
        made.extend([event.subject] if event.kind == "aot" else [])

    mc.reset()
    with mc.scoped():
        observer("lesson")(listen)
        result = mc.compile(fn, fullgraph=True, backend="aot_eager")(*inputs)
    return made[0], result


def same_gradients(run: Run, block: Block, h: Tensor) -> AotResult:
    """The compiled block's gradients are eager's. Gives its graphs."""
    leaves = {"h": h, **dict(block.named_parameters())}
    values = list(leaves.values())
    expected = torch.autograd.grad(block(h).square().sum(), values)
    aot, result = compiled(block, h)
    got = torch.autograd.grad(result.square().sum(), values)
    near = {"rtol": 1e-4, "atol": 1e-4}
    run.all_close(got, dict(zip(leaves, expected)), "the block's gradient of ", **near)
    return aot


def calls(aot: AotResult, name: str) -> int:
    """How often an ATen operator is called in the graph after rewriting."""
    nodes = aot.level("full").nodes
    return sum(str(node.target).startswith(f"aten.{name}.") for node in nodes)


# Exercise 1


def two_relus(x: Tensor) -> Tensor:
    return torch.relu(torch.relu(x)) + x * 2 + x * 2


def negated(x: Tensor) -> Tensor:
    return torch.neg(torch.neg(x.sin())) * torch.neg(torch.neg(x.cos()))


def nothing(x: Tensor) -> Tensor:
    return x + 1


def four_times(x: Tensor) -> Tensor:
    return (x + x) * 4


def quartered(x: Tensor) -> Tensor:
    return x / 4 + 1


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[(two_relus, expects({"relus": 1})), (nothing, expects({}))],
    hidden=[
        (negated, expects({"negations": 2})),
        (four_times, expects({"lesson.twice": 1})),
        (quartered, expects({"quarter": 1})),
    ],
    forbidden=["rewrites", "steps", "diff", "logs"],
)
def who_fired(run: Run, fired: Callable[..., Any]) -> str:
    """Counts of rewrites by pattern."""
    mc.register_pattern("lesson.twice", search=lambda x: x + x, examples=[torch.empty(2)])(
        lambda x: x * 2
    )
    searches = {"relus": lambda x: x.relu().relu(), "negations": lambda x: x.neg().neg()}
    for name, replace in (("relus", torch.relu), ("negations", lambda x: x)):
        mc.register_pattern(name, search=searches[name], examples=[torch.empty(2)])(replace)
    early = {"stage": "pre_grad", "examples": [torch.empty(2)]}
    mc.register_pattern("quarter", search=lambda x: x / 4, **early)(lambda x: x * 0.25)
    total = 0
    for fn, expected in run.cases:
        aot, _ = compiled(fn, torch.randn(3, 4))
        run.expect(fired(aot), expected, f"fired for {fn.__name__}")
        total += sum(expected.values())
    return f"{total} rewrite in {len(run.cases)} graphs"


# Exercise 2


def careless(gm: fx.GraphModule, mode: Any) -> int:
    """`x * 1` is `x`, and who cares about memory."""
    found = [n for n in gm.graph.nodes if n.op == "call_function" and n.args[1:] == (1,)]
    found = [n for n in found if getattr(n.target, "__name__", "") == "mul"]
    for node in found:
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    return len(found)


@lesson.exercise(
    "ex2",
    points=2,
    level="construct",
    visible=lambda: [torch.randn(2, 3)],
    hidden=lambda: [torch.randn(5), -torch.rand(2, 2, 2), torch.zeros(3)],
    forbidden=["graph_pass", "register_pattern", "careless", "is_compiling"],
)
def break_the_careless(run: Run, broken_by: Callable[..., Any]) -> str:
    """An alias that a careless rewrite makes."""
    for x in run.cases:
        what, given = f"broken_by of {show(x)}", x.clone()
        eager = run.seen(broken_by(x))
        run.that(torch.equal(run.seen(x), given), what, "x as it was", "another x")
        with mc.scoped():
            mc.register_pattern(
                "one", search=lambda x: x * 1, examples=[torch.empty(2)], stage="pre_grad"
            )(lambda x: x)
            _, safe = compiled(broken_by, x.clone())
        run.close(safe, eager, f"{what}, with the package's pattern")
        with mc.scoped():
            graph_pass("careless", stage="pre_grad")(careless)
            aot, broken = compiled(broken_by, x.clone())
        fired = run.seen(sum(r.changed for r in aot.passes if r.name == "pre_grad.careless"))
        run.that(fired > 0, what, "a product x * 1 in the graph", "none")
        other = run.seen(broken)
        same = isinstance(other, Tensor) and torch.equal(other, eager)
        run.that(not same, f"{what}, by careless", "another answer than eager's", "the same")
    return "careless gives another answer, the pattern does not"


# Exercise 3


def int_one(x: Tensor) -> Tensor:
    return x.sin() * 1 + 2


def float_one(x: Tensor) -> Tensor:
    return (x * 1.0).sin()


def times_two(x: Tensor) -> Tensor:
    return x * 2


def pair(x: Tensor) -> Tensor:
    return x.cos().t().t().sin()


def single(x: Tensor) -> Tensor:
    return x.t() + 1


def both(x: Tensor) -> Tensor:
    return (x.exp().t() * 1.0).t().t()


@lesson.exercise(
    "ex3",
    points=3,
    level="implement",
    visible=[
        (float_one, "x * 1.0", expects(0), expects(0)),
        (times_two, "x * 2", expects(1), expects(0)),
        (pair, "x.t().t()", expects(0), expects(0)),
        (single, "x.t()", expects(0), expects(1)),
    ],
    hidden=[
        (int_one, "x * 1", expects(0), expects(0)),
        (both, "(x.t() * 1.0).t().t()", expects(0), expects(1)),
    ],
    without=["pass:prims.remove_no_ops", "pass:post_grad.remove_no_ops"],
    forbidden=["remove_no_ops", "gives_back_argument"],
)
def two_patterns(run: Run, register_two: Callable[..., Any]) -> str:
    """x * 1 and x.t().t() disappear, in small functions and in a block."""
    block = Block(GPTConfig(n_layer=1, n_head=4, n_embd=4, block_size=8))
    h = torch.randn(2, 8, 4, requires_grad=True)
    before, _ = compiled(block, h)
    register_two()
    for fn, what, products, transposes in run.cases:
        x = torch.randn(3, 4)
        aot, got = compiled(fn, x)
        run.close(got, fn(x), what)
        left = run.seen(calls(aot, "mul"))
        run.that(left == products, what, f"{products} products left", left)
        left = run.seen(calls(aot, "t"))
        run.that(left == transposes, what, f"{transposes} transposes left", left)
    after = same_gradients(run, block, h)
    run.changed(str(before.level("full")), str(after.level("full")), "the block's joint graph")
    ones = calls(before, "mul")
    left = run.seen(calls(after, "mul"))
    run.that(left == 0, "the block with heads of width one", "0 products by one left", left)
    pairs = (calls(before, "t") - run.seen(calls(after, "t"))) // 2
    run.that(pairs > 0, "the block with heads of width one", "pairs of transposes gone", pairs)
    return f"{ones} products by one and {pairs} pairs of transposes gone from the block"


# Exercise 4


class Factored(nn.Module):
    """A linear layer whose weight is a product of two matrices."""

    def __init__(self, inner: int, middle: int, columns: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(inner, middle) / inner)
        self.b = nn.Parameter(torch.randn(middle, columns) / middle)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.size(-1))
        made = torch.mm(torch.mm(flat, self.a), self.b)
        return made.view(*x.shape[:-1], made.size(-1))


def product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(torch.mm(x, a), b)


def rewrites(aot: AotResult) -> int:
    return sum(r.changed for r in aot.passes if "pattern:" in r.name)


def is_cheaper(rows: int, inner: int, middle: int, columns: int) -> bool:
    before = rows * inner * middle + rows * middle * columns
    return inner * middle * columns + rows * inner * columns < before


@lesson.exercise(
    "ex4",
    points=4,
    level="real",
    visible=[(64, 8, 32, 8), (4, 8, 32, 8), (8, 8, 8, 8)],
    hidden=[(40, 16, 2, 16), (16, 24, 64, 4), (20, 12, 8, 8)],
    forbidden=["multi_dot"],
)
def products_of_products(run: Run, register_products: Callable[..., Any]) -> str:
    """mm(mm(x, a), b) by multiplications, alone and in a block that learns."""
    block, h = (
        Block(GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=16)),
        torch.randn(4, 16, 8, requires_grad=True),
    )
    block.mlp.widen = Factored(8, 64, 32)  # type: ignore[assignment]
    before, _ = compiled(block, h)
    register_products()
    for shape in run.cases:
        rows, inner, middle, columns = shape
        sizes = (rows, inner), (inner, middle), (middle, columns)
        expected = int(is_cheaper(*shape))
        for training in (False, True):
            inputs = [torch.randn(size, requires_grad=training) for size in sizes]
            aot, got = compiled(product, *inputs)
            names = " @ ".join(map(str, sizes)) + " in training" * training
            count = run.seen(rewrites(aot))
            run.that(count == expected, names, f"{expected} rewrites", count)
            run.close(got, product(*inputs), names, rtol=1e-4, atol=1e-3)
    after = same_gradients(run, block, h)
    run.changed(str(before.level("full")), str(after.level("core")), "the block's joint graph")
    count = run.seen(rewrites(after))
    run.that(count == 1, "the block in training", "1 rewrite", count)
    fires = sum(is_cheaper(*shape) for shape in run.cases)
    return f"fires for {fires} of {len(run.cases)} shapes, and in the block"
