"""Checks of lesson 08."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

import minicompile as mc
from minicompile.aot import partition as rules
from minicompile.aot.result import AotResult, Partition
from minicompile.lessons.exercise import Lesson, Run
from minicompile.lessons.model import Block, GPTConfig
from minicompile.ops.display import bytes_text
from minicompile.ops.events import Event, observer
from minicompile.ops.graph import user_line
from minicompile.plugins.activation_budget.knapsack import flops

aten = torch.ops.aten
lesson = Lesson("08")


def divided(fn: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[AotResult, Any]:
    """Forward and backward graphs of a function, as an observer hears of them; and what the call gives."""
    made: list[AotResult] = []

    def listen(event: Event) -> None:
        made.extend([event.subject] if event.kind == "aot" else [])

    mc.reset()
    with mc.scoped():
        observer("lesson")(listen)
        result = mc.compile(fn, fullgraph=True, backend="aot_eager", options=options)(*inputs)
    return made[0], result


def split_of(aot: AotResult) -> Partition:
    assert aot.partition is not None
    return aot.partition


def block_with_input(dropout: float = 0.0) -> tuple[Block, Tensor]:
    block = Block(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, dropout=dropout))
    return block, torch.randn(2, 8, 16, requires_grad=True)


def gradients_of(block: Block, h: Tensor, **options: Any) -> tuple[AotResult, dict[str, Tensor]]:
    """The compiled block's graphs and its gradients, random numbers from the same seed."""
    torch.manual_seed(0)
    aot, result = divided(block, h, **options)
    leaves = {"h": h, **dict(block.named_parameters())}
    found = torch.autograd.grad(result.square().sum(), list(leaves.values()))
    return aot, dict(zip(leaves, found))


def same_gradients(run: Run, block: Block, h: Tensor, got: dict[str, Tensor]) -> None:
    """The gradients are those by the built-in rules."""
    _, expected = gradients_of(block, h)
    near = {"rtol": 1e-4, "atol": 1e-4}
    run.all_close(list(got.values()), expected, "the block's gradient of ", **near)


# Exercise 1


class Puzzle(NamedTuple):
    sizes: dict[str, int]
    made_of: dict[str, tuple[str, ...]]
    fixed: set[str]
    read: set[str]


SIX = Puzzle(
    {"x": 8, "a": 5, "r": 4, "b": 2, "d": 6, "f": 7},
    {"x": (), "a": ("x",), "r": (), "b": ("a", "r"), "d": ("b",), "f": ("b", "a")},
    {"x", "r"},
    {"d", "f"},
)
CHAIN = Puzzle(
    {"x": 3, "a": 8, "b": 8, "c": 8},
    {"x": (), "a": ("x",), "b": ("a",), "c": ("b",)},
    {"x"},
    {"a", "b", "c"},
)
BANNED = Puzzle(
    {"x": 1, "p": 9, "q": 4, "s": 6, "t": 6},
    {"x": (), "p": ("x",), "q": ("p",), "s": ("q",), "t": ("p", "q")},
    {"x", "p"},
    {"s", "t"},
)
CONSTANT = Puzzle(
    {"c": 9, "x": 5, "y": 7, "z": 8},
    {"c": (), "x": (), "y": ("c", "x"), "z": ("c", "y")},
    {"x"},
    {"y", "z"},
)


ALL_THREE = Puzzle(
    {"x": 2, "y": 3, "z": 4, "p": 7, "q": 7, "s": 7},
    {"x": (), "y": (), "z": (), "p": ("x", "y"), "q": ("y", "z"), "s": ("x", "z")},
    {"x", "y", "z"},
    {"p", "q", "s"},
)
NOTHING_READ = Puzzle({"x": 3, "a": 2}, {"x": (), "a": ("x",)}, {"x"}, set())


def had(name: str, kept: set[str], puzzle: Puzzle) -> bool:
    if name in kept:
        return True
    return name not in puzzle.fixed and all(had(n, kept, puzzle) for n in puzzle.made_of[name])


def enough(kept: set[str], puzzle: Puzzle) -> bool:
    return all(had(name, kept, puzzle) for name in puzzle.read)


def cost(kept: set[str], puzzle: Puzzle) -> int:
    return sum(puzzle.sizes[name] for name in kept)


def fewest_bytes(puzzle: Puzzle) -> int:
    names = puzzle.sizes
    sets = (set(kept) for n in range(len(names) + 1) for kept in combinations(names, n))
    return min(cost(kept, puzzle) for kept in sets if enough(kept, puzzle))


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[SIX, CHAIN],
    hidden=[BANNED, CONSTANT, ALL_THREE, NOTHING_READ],
    forbidden=["FlowNetwork", "minimum_cut", "Cut", "networkx"],
)
def the_cheapest_set(run: Run, cheapest: Callable[..., Any]) -> str:
    """Cuts of small networks."""
    found = []
    for puzzle in run.cases:
        what = f"cheapest({', '.join(map(str, puzzle))})"
        kept = run.seen(cheapest(*puzzle))
        run.that(isinstance(kept, Set) and kept <= set(puzzle.sizes), what, "a set of names", kept)
        names = sorted(puzzle.read)
        run.that(enough(kept, puzzle), what, f"a set from which {names} can be made", kept)
        least = fewest_bytes(puzzle)
        got = f"{cost(kept, puzzle)} bytes in {sorted(kept)}"
        run.that(cost(kept, puzzle) == least, what, f"{least} bytes", got)
        found.append(f"{least} bytes")
    return ", ".join(found)


# Exercise 2


@lesson.exercise(
    "ex2",
    points=2,
    level="construct",
    visible=[(8, 4)],
    hidden=[(3, 16), (32, 8)],
    forbidden=["checkpoint", "partitioner", "memory_budget"],
)
def worth_cutting(run: Run, worth_a_cut: Callable[..., Any]) -> str:
    """A function that saves little of much."""
    for rows, width in run.cases:
        x = torch.rand(rows, width, requires_grad=True)
        w = torch.rand(width, width, requires_grad=True)
        what = f"worth_a_cut of f32[{rows}, {width}] and f32[{width}, {width}]"
        aot, result = divided(worth_a_cut, x, w)
        slopes = torch.autograd.grad(result.sum(), [x, w], allow_unused=True)
        missing = run.seen([slope is None for slope in slopes])
        run.that(not any(missing), what, "gradients of x and w", f"none: {missing}")
        split = split_of(aot)
        saved, read = run.seen([split.saved_bytes, split.default_bytes])
        run.that(saved > 0, what, "more than 0 bytes saved beside the inputs", saved)
        most = f"at most a quarter of {read} bytes that the backward reads"
        run.that(4 * saved <= read, what, most, f"{saved} bytes saved")
    return "saves at most a quarter"


# Exercise 3


def rand_mask(
    x: Tensor, w1: Tensor, w2: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    a = torch.mm(x, w1)
    m = (torch.rand_like(a) > 0.5) if mask is None else mask
    d = F.gelu(a) * m * 2
    o = torch.mm(d, w2)
    return o, m


def poisson_counts(
    x: Tensor, w1: Tensor, w2: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    a = torch.mm(x, w1)
    m = torch.poisson(a.detach().abs()) if mask is None else mask
    d = torch.sigmoid(a) * m + a
    o = torch.mm(d, w2)
    return o, m


def normal_noise(
    x: Tensor, w1: Tensor, w2: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    a = torch.mm(x, w1)
    m = torch.normal(a.detach(), 1.0) if mask is None else mask
    d = torch.sigmoid(a) * m + a
    o = torch.mm(d, w2)
    return o, m


def batched_noise(
    x: Tensor, w1: Tensor, w2: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    a = torch.bmm(x.view(2, 256, 64), w1.expand(2, 64, 512))
    m = torch.randn_like(a) if mask is None else mask
    d = F.gelu(a) * m
    o = torch.mm(d.view(512, 512), w2)
    return o, m


PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


def operator(node: fx.Node) -> str:
    """ "rand" for aten.rand_like.default, "mm" for aten.mm.default."""
    return str(node.target).split(".")[1].removesuffix("_like")


def is_drawn(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def variables(aot: AotResult) -> dict[str, str]:
    """Names of forward values -> the variables that hold them: the last value of an assignment's line."""
    assert aot.joint is not None
    found: dict[str, str] = {}
    for node in aot.joint.nodes:
        line = user_line(node) if node.op == "call_function" else None
        if line is not None and node.meta["phase"] == "forward" and " = " in line.text:
            left = line.text.partition(" = ")[0].strip()
            found = {name: held for name, held in found.items() if held != left}
            found[node.name] = left
    return found


def made_twice(aot: AotResult) -> Iterator[fx.Node]:
    """Forward calls that the backward graph has too."""
    assert aot.joint is not None
    again = {value.name for value in split_of(aot).recomputed}
    return (node for node in aot.joint.nodes if node.name in again)


@lesson.exercise(
    "ex3",
    points=3,
    level="implement",
    visible=[rand_mask],
    hidden=[poisson_counts, batched_noise, normal_noise],
    forbidden=[
        "is_random",
        "is_heavy",
        "why_not_recomputed",
        "why_never_recomputed",
        "Cut",
        "min_cut",
    ],
)
def what_may_run_twice(run: Run, may_recompute: Callable[..., Any]) -> str:
    """The partitioner's rule: what the backward may make again."""

    def rule(node: fx.Node, parts: rules.JointParts, in_memory: set[fx.Node]) -> str:
        if node.op == "placeholder":
            return "an input of the graph"
        if rules.is_view(node):
            return ""
        return "" if may_recompute(rules.call_of(node)) else "may_recompute says no"

    said = ""
    block, h = block_with_input(dropout=0.25)
    built_in, _ = gradients_of(block, h)
    with run.replaced("minicompile.aot.partition:why_not_recomputed", rule):
        for net in run.cases:
            said = one_division(run, net)
        aot, got = gradients_of(block, h)
    for name in run.seen([operator(node) for node in made_twice(aot) if is_drawn(node)]):
        run.that(False, f"the block: {name} reran in backward", "forward's mask", "another")
    same_gradients(run, block, h, got)
    run.changed(str(split_of(built_in)), str(split_of(aot)), "what the block saves")
    return said


def one_division(run: Run, net: Callable[..., tuple[Tensor, Tensor]]) -> str:
    """The running example under the rule in force, its saved values and its gradients."""
    x, w1, w2 = torch.randn(512, 64), torch.randn(64, 512), torch.randn(512, 64)
    leaves = [w1.requires_grad_(), w2.requires_grad_()]
    aot, (o, m) = divided(net, x, w1, w2)
    got = run.seen(list(torch.autograd.grad(o.sum(), leaves)))
    mask = run.seen(m.detach())
    again = run.seen([(operator(node), is_drawn(node)) for node in made_twice(aot)])
    o_eager, _ = net(x, w1, w2, mask)
    eager = torch.autograd.grad(o_eager.sum(), leaves)
    same = all(torch.allclose(g, e, rtol=1e-3, atol=1e-2) for g, e in zip(got, eager, strict=True))
    for name, drawn in again:
        run.that(same or not drawn, f"{name} reran in backward", "forward's mask", "another")
    for name, _ in again:
        run.that(name not in PRODUCTS, f"{name} reran in backward", "one product", "two")
    for g, e in zip(got, eager, strict=True):
        run.near(g, e, "a gradient of the example", rtol=1e-3, atol=1e-2)
    split, held = split_of(aot), variables(aot)
    kept = [value for value in split.saved if not value.is_input]
    names = ", ".join(held.get(value.name, value.name) for value in kept)
    said = run.seen(f"saved {{{names}}}, {split.saved_bytes / 2**20:.2f} MiB")
    wanted = f"saved {{a, m}}, {(512 * 512 * 4 + mask.nbytes) / 2**20:.2f} MiB"
    run.same(Words(said), Words(wanted), f"the example with {net.__name__}")
    return f"{said}; masks agree"


class Words(str):
    """Text that a message shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


# Exercise 4


class Value(NamedTuple):
    name: str
    bytes: int
    work: int


def most_work(values: Sequence[Value], room: int) -> int:
    """What the best choice spares."""
    best = {0: 0}
    for value in values:
        for used, work in list(best.items()):
            total = used + value.bytes
            if total <= room:
                best[total] = max(best.get(total, 0), work + value.work)
    return max(best.values())


def tried(
    run: Run, keep: Callable[..., Any], values: list[Value], room: int, what: str
) -> set[str]:
    """The answer's choice, if it is a best one."""
    kept = run.seen(keep(list(values), room))
    names = {value.name for value in values}
    run.that(isinstance(kept, Set) and kept <= names, what, "a set of names", kept)
    taken = sum(value.bytes for value in values if value.name in kept)
    run.that(taken <= room, what, f"at most {room} bytes", taken)
    spared = sum(value.work for value in values if value.name in kept)
    best = most_work(values, room)
    run.that(spared == best, what, f"{best} of work spared", spared)
    return set(kept)


THREE = [Value("a", 10, 60), Value("b", 20, 100), Value("c", 30, 120)]


@lesson.exercise(
    "ex4",
    points=4,
    level="real",
    visible=[(THREE, 52, 0.37)],
    hidden=[
        ([Value("all", 10, 30)], 10, 0.11),
        ([Value(f"v{i}", 7 + i % 5, 10 + i * i % 17) for i in range(40)], 100, 0.73),
        (THREE, 0, 0.52),
    ],
    forbidden=[
        "within_budget",
        "dp_knapsack",
        "greedy_knapsack",
        "ilp_knapsack",
        "Cut",
    ],
)
def fill_the_budget(run: Run, keep: Callable[..., Any]) -> str:
    """A knapsack, alone and in the partitioner."""
    block, h = block_with_input()
    built_in, _ = gradients_of(block, h)
    said = ""
    for values, room, budget in run.cases:
        tried(run, keep, values, room, f"keep({values}, {room})")
        limits: list[int] = []

        def chosen(
            parts: rules.JointParts,
            naive: rules.Saved,
            budget: float,
            limits: list[int] = limits,
        ) -> rules.Saved:
            bans = {node: rules.why_never_recomputed(node, parts) for node in parts.candidates}
            least = rules.Cut(parts, bans, parts.primals, {}).width // rules.ONE_BYTE
            most = sum(map(rules.bytes_of, naive.keys() - set(parts.primals)))
            free = [node for node in naive if not bans[node]]
            offered = [Value(n.name, rules.bytes_of(n), work(n, naive)) for n in free]
            room = int(budget * (most - least))
            limits.append(least + room)
            kept = tried(run, keep, offered, room, f"keep for the block, {room} bytes of room")
            bans |= {node: "your choice" for node in free if node.name in kept}
            return rules.Cut(parts, bans, parts.primals, {}).saved()

        with run.replaced("minicompile.plugins.activation_budget.knapsack:within_budget", chosen):
            aot, got = gradients_of(block, h, memory_budget=budget)
        split = split_of(aot)
        saved = run.seen(split.saved_bytes)
        run.that(saved <= limits[0], "the block", f"at most {limits[0]} bytes saved", saved)
        same_gradients(run, block, h, got)
        run.changed(str(split_of(built_in)), str(split), "what the block saves")
        said = f"{split.saved_bytes} of {split.default_bytes} bytes saved, gradients agree"
    return said


def work(node: fx.Node, naive: rules.Saved) -> int:
    """Operations between a value and those that could be kept before it."""
    between = rules.ancestors([node], stop=lambda used: used in naive and used is not node)
    return sum(flops(used) for used in between if used is node or used not in naive)


# Exercise 5


@lesson.exercise(
    "ex5",
    points=2,
    level="stretch",
    visible=[torch.float32],
    hidden=[torch.float64, torch.bfloat16],
    forbidden=["bytes_of", "size_of"],
)
def weigh_values(run: Run, weight: Callable[..., Any]) -> str:
    """Bytes of values, as the network's widths."""
    said, several = "", fx.Graph().placeholder("several")
    for value in ((torch.randn(2), torch.randn(2)), 3):
        several.meta["val"] = value
        got = run.seen(weight(several))
        run.that(got == 0, f"weight of a {type(value).__name__}", 0, got)
    for dtype in run.cases:
        block, _ = block_with_input(dropout=0.25)
        block, h = block.to(dtype), torch.randn(2, 8, 16, dtype=dtype, requires_grad=True)
        built_in, _ = divided(block, h)
        assert built_in.joint is not None
        values = [node for node in built_in.joint.nodes if node.op != "output"]
        for node, got in zip(values, run.seen([weight(node) for node in values]), strict=True):
            expected = rules.bytes_of(node)
            what = f"weight of {node.name}, a {str(dtype).removeprefix('torch.')} block"
            run.that(got == expected, what, f"{expected} bytes", got)
        with run.replaced("minicompile.aot.partition:bytes_of", lambda node: 1):
            unweighted, _ = divided(block, h)
        with run.replaced("minicompile.aot.partition:bytes_of", weight):
            aot, _ = divided(block, h)
        run.changed(str(split_of(unweighted)), str(split_of(aot)), "what the block saves")
        run.expect(str(split_of(aot)), str(split_of(built_in)), "what the block saves")
        said = f"{split_of(aot).saved_bytes} bytes saved, as by the built-in rule"
    return said


# Exercise 6


def tokens_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, weight).view(-1, weight.shape[0])
    return F.cross_entropy(logits, labels, ignore_index=7)


@lesson.exercise(
    "ex6",
    points=3,
    level="stretch",
    visible=[("4 rows", 4, 1.0, 0)],
    hidden=[
        ("6 rows, some of which are labels that don't count", 6, 1.0, 3),
        ("large logits", 5, 500.0, 1),
    ],
    forbidden=["cross_entropy", "nll_loss", "grad", "backward", "vjp", "chunked_loss"],
)
def a_loss_in_chunks(run: Run, losses_and_slopes: Callable[..., Any]) -> str:
    """Losses and their gradients, alone and in the pass."""
    for what, rows, scale, ignored in run.cases:
        logits = (torch.randn(rows, 9) * scale).requires_grad_()
        labels = torch.randint(9, (rows,))
        labels[:ignored] = -100
        losses = F.cross_entropy(logits, labels, reduction="sum")
        (slopes,) = torch.autograd.grad(losses, logits)
        got = run.seen(losses_and_slopes(logits.detach(), labels, -100))
        pair = isinstance(got, Sequence) and len(got) == 2
        run.that(pair, f"losses_and_slopes of {what}", "two tensors", type(got).__name__)
        run.near(got[0], losses.detach(), f"the losses of {what}", rtol=1e-4, atol=1e-4)
        run.near(got[1], slopes, f"the slopes of {what}", rtol=1e-4, atol=1e-5)
    x, weight = (torch.randn(n, 8, requires_grad=True) for n in (2048, 8192))
    labels, pass_of = torch.randint(8192, (2048,)), "minicompile.plugins.chunked_loss.cross_entropy"
    eager = tokens_loss(x, weight, labels)
    expected = torch.autograd.grad(eager, [x, weight])
    whole, _ = divided(tokens_loss, x, weight, labels, plugins="none")
    with run.replaced(f"{pass_of}:losses_and_slopes", losses_and_slopes):
        aot, loss = divided(tokens_loss, x, weight, labels)
    run.close(loss.detach(), eager.detach(), "the model's loss", rtol=1e-4, atol=1e-4)
    got = torch.autograd.grad(loss, [x, weight])
    by_name = dict(zip(("x", "weight"), expected))
    run.all_close(got, by_name, "the model's gradient of ", rtol=1e-4, atol=1e-4)
    run.changed(str(split_of(whole)), str(split_of(aot)), "what the loss saves")
    before, after = (bytes_text(split_of(one).saved_bytes) for one in (whole, aot))
    return f"{after} saved instead of {before}"
