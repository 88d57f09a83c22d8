"""Checks of lesson 01."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import minicompile as mc
from minicompile.debug.history import Explanation
from minicompile.dynamo.bytecode import decode
from minicompile.extension import bytecode
from minicompile.lessons.exercise import Lesson, Run, show
from minicompile.lessons.model import GPT, GPTConfig

lesson = Lesson("01")


def product_and_relu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.relu(x * 2)
    return z + y


def steps(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x - 1
    z = z * y
    return -z


def pair(x: torch.Tensor, y: torch.Tensor) -> Any:
    low = torch.minimum(x, y)
    return low, -x.clamp(0, 1), y > low


def keywords(x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.softmax(x + y, dim=0), x.size(0)


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=[product_and_relu, steps],
    hidden=[pair, keywords],
    forbidden=["dis", "stack_effect", "stack_after", "explain", "trace"],
)
def heights_as_recorded(run: Run, stack_heights: Callable[..., Any]) -> str:
    """Judged by the heights that the interpreter noted."""
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    for function in run.cases:
        captured = mc.explain(function)(x, y).captures[0]
        recorded = [record.stack_after for record in captured.bytecode]
        got = stack_heights(decode(function.__code__).instructions)
        run.expect(got, recorded, f"stack_heights for {function.__name__}")
    return f"{len(run.cases)} functions, each height as the interpreter has it"


@lesson.exercise(
    "ex2",
    points=2,
    level="construct",
    visible=[(4, 3), (2, 3)],
    hidden=[(9, 3), (3, 7), (5, 1), (1, 12), (4, 2)],
    forbidden=["cond", "disable", "allow_in_graph", "compile"],
)
def branches_by_shape(run: Run, two_paths: Callable[..., Any]) -> str:
    """One graph for each path, without a break."""
    for rows, columns in run.cases:
        x = torch.randn(rows, columns)
        wanted = "relu" if rows >= 4 else "tanh"
        told = f"a graph for {rows} rows of {columns}"
        found = mc.explain(two_paths)(x)
        breaks = run.seen([each.reason for each in found.breaks])
        run.that(not breaks, told, "no break", "".join(breaks[:1]))
        operators = run.seen(sorted(found.operators))
        got = ", ".join(operators) or "no operation"
        names = {name.rpartition(".")[2] for name in operators}  # torch.relu, or x.relu()
        run.that(names & {"relu", "tanh", "where"} == {wanted}, told, f"only {wanted}", got)
        run.close(mc.compile(two_paths, backend="eager")(x), getattr(torch, wanted)(x), told)
    return f"{len(run.cases)} graphs, no breaks"


def small_block() -> torch.nn.Module:
    """One block of the lesson model."""
    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16)).blocks[0]


def graphs(explanation: Explanation) -> str:
    """The text of all graphs, and where they end."""
    return "\n".join(map(str, (*explanation.code, *explanation.breaks)))


def begun(handler: Any) -> None:
    """Raises NotImplementedError for a handler as it was released: inside, the frame would catch it."""
    try:
        handler(mock.MagicMock(), mock.MagicMock())
    except NotImplementedError as error:
        if not str(error):
            raise
    except Exception:  # mocks are no stack
        pass


def block_with(run: Run, opname: str, handler: Any) -> str:
    """What becomes of the block without any handler of an opcode, and with the answer's: one graph."""
    block, h = small_block(), torch.randn(2, 16, 32)
    before = mc.explain(block)(h)
    bytecode(opname)(handler)
    after = mc.explain(block)(h)
    breaks = run.seen([each.reason for each in after.breaks])
    run.that(not breaks, "the block", "one graph", "; ".join(breaks))
    run.close(mc.compile(block, backend="eager", fullgraph=True)(h), block(h), "the block")
    run.changed(graphs(before), graphs(after), "the block's graphs")
    return f"the block is one graph again, of {after.op_count} operations"


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = z = x + 0
    y -= 2
    return z


FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x - 2": lambda x: x - 2,
    "8 / x": lambda x: 8 / x,
    "2 ** x": lambda x: 2**x,
    "x % 3": lambda x: x % 3,
    "x << 7 // 2": lambda x: x.long() << 7 // 2,
    "x -= 2": in_place,
}


@lesson.exercise(
    "ex3",
    points=3,
    level="implement",
    visible=["x - 2", "8 / x"],
    hidden=["2 ** x", "x % 3", "x << 7 // 2", "x -= 2"],
    forbidden=["effect", "EFFECTS", "rules", "step", "plain_machine"],
    without=["bytecode:BINARY_OP"],
)
def operators_by_answer(run: Run, binary_op: Callable[..., Any]) -> str:
    """The answer is the handler of BINARY_OP."""
    begun(binary_op)
    x = torch.arange(1.0, 7.0).reshape(2, 3)
    with mc.scoped():
        bytecode("BINARY_OP")(binary_op)
        for name in run.cases:
            function = FORMULAS[name]
            compiled = mc.compile(function, backend="eager", fullgraph=True)
            run.close(compiled(x), function(x), name)
    return block_with(run, "BINARY_OP", binary_op)


def first_less_second(x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    return x * (rows - columns)


def nested(x: torch.Tensor) -> torch.Tensor:
    low, (high, scale) = x.sum(), (x.amax(), 3)
    return low - high * scale


def first_of_two(x: torch.Tensor) -> torch.Tensor:
    try:
        rows, columns = (*x.shape, 5)
    except ValueError:
        return x + 1
    return x * rows - columns


def too_few(x: torch.Tensor) -> torch.Tensor:
    try:
        one, two, three = [x, x]
    except ValueError:
        return x - 1
    return one + two + three


def rows_of(x: torch.Tensor) -> torch.Tensor:
    above, below = x
    return above - 2 * below


def one_more(x: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    try:
        one, two = numbers
    except ValueError:
        return x - 1
    return x * one + two


CALLS: dict[Any, list[Any]] = {one_more: [([2, 3],), ([2, 3, 4],)]}
"""What functions of more than a tensor are called with, in turn."""


def from_list(x: torch.Tensor) -> torch.Tensor:
    a, b = [x * 2, x]
    return a - b * b


@lesson.exercise(
    "ex4",
    points=4,
    level="real",
    visible=[first_less_second, nested],
    hidden=[from_list, first_of_two, too_few, one_more, rows_of],
    forbidden=["minicompile.dynamo.opcodes", "opcodes", "unpack_sequence", "unpack_ex", "rules"],
    without=["bytecode:UNPACK_SEQUENCE"],
)
def unpacking_by_answer(run: Run, unpack: Callable[..., Any]) -> str:
    """The answer is the handler of UNPACK_SEQUENCE."""
    begun(unpack)
    x = torch.arange(6.0).reshape(2, 3)
    with mc.scoped():
        bytecode("UNPACK_SEQUENCE")(unpack)
        for function in run.cases:
            compiled = mc.compile(function, backend="eager")
            for more in CALLS.get(function, [()]):
                told = f"{function.__name__}({', '.join(['f32[2, 3]', *map(str, more)])})"
                run.close(compiled(x, *more), function(x, *more), told)
            found = mc.explain(function)(x, *more)
            breaks = run.seen([each.reason for each in found.breaks])
            run.that(not breaks, told, "no break", show(breaks))
    return block_with(run, "UNPACK_SEQUENCE", unpack)
