"""Checks of lesson 10: operators as loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import minicompile as mc
from minicompile.debug.reference import run_reference
from minicompile.lessons.exercise import Lesson, Run
from minicompile.lessons.model import GPT, Block, GPTConfig
from minicompile.lowering.context import lowering
from minicompile.lowering.ir import (
    ExternKernel,
    FormulaOps,
    LoopGraph,
    evaluate_loops,
    loop_ranges,
)
from minicompile.shapes.expr import Expr, index_text, simplify_index

lesson = Lesson("10")
aten = torch.ops.aten
Rule = Callable[..., Any]

SMALL = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)


def small_block() -> Block:
    return Block(SMALL).requires_grad_(False)


def without_extern(run: Run, loops: LoopGraph, op: torch._ops.OpOverload, given_input: str) -> None:
    """Raises Wrong if the operator is still a call."""
    for reason in run.seen([call.reason for call in loops.externs if call.op is op]):
        run.that(False, given_input, "loops", f"a call of {op} ({reason})")


# -- 1: bytes


def relu_softmax(x: Tensor) -> Tensor:
    return torch.softmax(torch.relu(x), -1)


def total_of_rows(x: Tensor) -> Tensor:
    return torch.exp(x).sum(1)


def centred_twice(x: Tensor) -> Tensor:
    return x.double() - x.double().mean(0)


def around_a_product(x: Tensor) -> Tensor:
    return torch.exp((x + 1) @ x.t()).sum(1)


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[(total_of_rows, (4, 6)), (relu_softmax, (4, 6))],
    hidden=[(centred_twice, (4, 6)), (around_a_product, (3, 5)), (relu_softmax, (2, 9))],
    forbidden=["cost_of", "schedule"],
)
def loops_move_bytes(run: Run, bytes_moved: Callable[[LoopGraph], int]) -> str:
    """Compares with the cost of unfused kernels."""
    moved = 0
    for function, shape in run.cases:
        x = torch.randn(shape)
        apart = mc.trace(mc.compile(function, options={"fusion": False}), x)
        moved = sum(plan.cost.bytes for plan in apart.plans)
        what = f"{function.__name__}(f32{list(shape)})"
        run.expect(bytes_moved(apart.loops), moved, f"bytes_moved of {what}")
    return f"{len(apart.plans)} loops move {moved} bytes, as the kernels do"


# -- 2: a quarter turn


class Places(FormulaOps):
    """Notes where each buffer is read."""

    def __init__(self, ranges: Any) -> None:
        super().__init__(ranges)
        self.places: list[Expr] = []

    def load(self, buffer: str, index: Expr) -> str:
        self.places.append(simplify_index(index, self.ranges))
        return super().load(buffer, index)


@lesson.exercise(
    "ex2",
    points=2,
    level="construct",
    visible=[(4, 6)],
    hidden=[(5, 3), (2, 7)],
    forbidden=["rot90", "as_strided", "arange", "gather", "index_select", "take_along_dim"],
)
def turned_by_index(run: Run, quarter_turn: Callable[[Tensor], Tensor]) -> str:
    """One loop, which reads the table at W*p1 - p0 + W - 1."""
    wanted = ""
    for rows, columns in run.cases:
        x = torch.arange(float(rows * columns)).reshape(rows, columns)
        what = f"x: f32[{rows}, {columns}]"
        loops = mc.trace(quarter_turn, x).loops
        run.expect(len(loops.operations), 1, f"{what}, loops and calls")
        (made,) = loops.operations
        call = run.seen(str(made) if isinstance(made, ExternKernel) else "")
        run.that(not call, what, "a loop", f"a call: {call}")
        p, _ = loop_ranges(made.loops)
        places = Places(p)
        evaluate_loops(made.loops, places)
        p0, p1 = p
        wanted = index_text(columns * p1 - p0 + columns - 1)
        found = run.seen(", ".join(dict.fromkeys(map(index_text, places.places))))
        run.that(found == wanted, f"{what}, read at", wanted, found)
        run.close(quarter_turn(x), torch.rot90(x), what)
    return f"one loop reads x at {wanted}; nothing is copied"


# -- 3: addcmul


@lesson.exercise(
    "ex3",
    points=3,
    level="implement",
    visible=[
        ((4, 6), (4, 6), (4, 6), 1, torch.float32),
        ((4, 6), (6,), (4, 1), 2, torch.float32),
    ],
    hidden=[
        ((4, 6), (6,), (4, 1), -0.5, torch.float32),
        ((5,), (3, 5), (3, 1), 2, torch.float32),
        ((2, 3), (2, 3), (1, 3), 0.1, torch.float64),
    ],
    forbidden=["lowering", "decomposition", "addcmul"],
    without=["decomposition:aten.addcmul"],
)
def addcmul_is_a_loop(run: Run, lower_addcmul: Rule) -> str:
    """The rule replaces a library call, alone and in a gated block."""
    op, block = aten.addcmul.default, small_block()

    def gated(h: Tensor, gate: Tensor) -> Tensor:
        return torch.addcmul(h, block(h), gate)

    h, gate = torch.randn(1, 8, 16), torch.rand(16)
    before = mc.trace(gated, h, gate)
    lowering(op)(lower_addcmul)
    for *shapes, value, dtype in run.cases:
        a, b, c = (torch.randn(shape, dtype=dtype) for shape in shapes)

        def one(a: Tensor, b: Tensor, c: Tensor, value: float = value) -> Tensor:
            return torch.addcmul(a, b, c, value=value)

        what = f"addcmul of {', '.join(str(list(s)) for s in shapes)}, value={value}"
        loops = mc.trace(one, a, b, c).loops
        without_extern(run, loops, op, what)
        run.close(run_reference(loops, [a, b, c])[0], one(a, b, c), what)
        run.expect(len(loops.operations), 1, f"{what}: loops")
    mc.reset()
    after = mc.trace(gated, h, gate)
    without_extern(run, after.loops, op, "the gated block")
    run.changed(str(before.loops), str(after.loops), "the gated block's loops")
    run.close(mc.compile(gated)(h, gate), gated(h, gate), "the gated block", rtol=1e-5, atol=1e-5)
    calls, left = len(before.loops.externs), len(after.loops.externs)
    return f"one loop, no library call; the gated block has {calls} -> {left} calls"


# -- 4: roll

Shifts = tuple[int, ...]


@lesson.exercise(
    "ex4",
    points=4,
    level="implement",
    visible=[((4, 6), (-2,), (1,)), ((5,), (3,), (0,))],
    hidden=[
        ((3, 5), (2,), ()),
        ((3, 4, 5), (1, -7), (0, -1)),
        ((4, 6), (13,), (-2,)),
        ((4, 6), (1, 2), (1, -1)),
    ],
    forbidden=["torch.roll", "aten.roll", "cat", "arange"],
    without=["decomposition:aten.roll"],
)
def roll_is_an_index(run: Run, lower_roll: Rule) -> str:
    """The rule replaces a library call; a block that reads shifted tokens has no loop more."""
    op, block = aten.roll.default, small_block()

    def late(h: Tensor) -> Tensor:
        out: Tensor = block(torch.roll(h, 1, 1))
        return out

    h = torch.randn(2, 8, 16)
    plain, before = mc.trace(block, h), mc.trace(late, h)
    lowering(op)(lower_roll)
    for shape, shifts, dims in run.cases:
        x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)

        def one(x: Tensor, shifts: Shifts = shifts, dims: Shifts = dims) -> Tensor:
            return torch.roll(x, shifts, dims) * 1

        what = f"roll(x, {shifts}, {dims}) of {list(shape)}"
        loops = mc.trace(one, x).loops
        without_extern(run, loops, op, what)
        run.close(run_reference(loops, [x])[0], one(x), what)
        run.expect(len(loops.operations), 1, f"{what}: loops")
        selects = run.seen(str(loops)).count("masked")
        run.that(not selects, what, "one load", "a select of several loads")
    mc.reset()
    after = mc.trace(late, h)
    without_extern(run, after.loops, op, "a block of shifted tokens")
    run.changed(str(before.loops), str(after.loops), "the block's loops")
    count = len(after.loops.operations)
    run.expect(count, len(plain.loops.operations), "a block of shifted tokens: loops and calls")
    run.close(mc.compile(late)(h), late(h), "a block of shifted tokens", rtol=1e-5, atol=1e-5)
    return f"an index, no copy; the block has {count} loops and calls with the shift and without"


# -- 5: logsumexp


def rows(*numbers: float) -> Tensor:
    return torch.tensor(numbers).reshape(-1, 3)


INFINITE = float("inf")


@lesson.exercise(
    "ex5",
    points=5,
    level="real",
    visible=lambda: [
        (torch.randn(4, 6), [1], False),
        (torch.arange(1000.0, 1009.0).reshape(3, 3), [-1], False),
    ],
    hidden=lambda: [
        (rows(-INFINITE, -INFINITE, -INFINITE, 0.0, INFINITE, 1.0), [1], False),
        (torch.randn(2, 3, 4), [0, 2], True),
        (torch.randn(2, 3, 4) * 300, [1], False),
        (torch.randn(2, 3, 4), [-1, 0], False),
        (torch.randn(3, 5, dtype=torch.float64), [0], True),
    ],
    forbidden=["lowering", "decomposition", "logsumexp"],
    without=["decomposition:aten.logsumexp"],
)
def logsumexp_is_stable(run: Run, lower_logsumexp: Rule) -> str:
    """The rule replaces a library call; the loss of a GPT is computed with it."""
    op, model = aten.logsumexp.default, GPT(SMALL).requires_grad_(False)

    def loss(idx: Tensor, targets: Tensor) -> Tensor:
        logits = model(idx)
        right = logits.gather(-1, targets[..., None]).squeeze(-1)
        return (torch.logsumexp(logits, -1) - right).mean()

    idx, targets = torch.randint(96, (2, 8)), torch.randint(96, (2, 8))
    before = mc.trace(loss, idx, targets)
    lowering(op)(lower_logsumexp)
    for x, dims, keepdim in run.cases:

        def one(x: Tensor, dims: list[int] = dims, keepdim: bool = keepdim) -> Tensor:
            return torch.logsumexp(x, dims, keepdim)

        what = f"logsumexp({x.flatten()[:3].tolist()} ..., {dims}, {keepdim}) of {list(x.shape)}"
        loops = mc.trace(one, x).loops
        without_extern(run, loops, op, what)
        run.close(run_reference(loops, [x])[0], one(x), what, rtol=1e-5, atol=1e-5)
    mc.reset()
    after = mc.trace(loss, idx, targets)
    without_extern(run, after.loops, op, "the GPT's loss")
    run.changed(str(before.loops), str(after.loops), "the loops of the GPT's loss")
    run.close(mc.compile(loss)(idx, targets), loss(idx, targets), "the GPT's loss")
    calls, left = len(before.loops.externs), len(after.loops.externs)
    return f"finite at 1000, equal to eager; the GPT's loss has {calls} -> {left} library calls"
