"""Checks of lesson 17."""

from __future__ import annotations

import ast
import functools
import importlib.util
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import minicompile as mc
from minicompile.extension import (
    code_generator,
    decompose,
    kernel_loader,
    kernel_template,
    lowering,
)
from minicompile.lessons.exercise import Lesson, Run, Wrong
from minicompile.lessons.model import GPT, Block, GPTConfig
from minicompile.lessons.train import train
from minicompile.lowering.rules.common import elementwise
from minicompile.ops import plugins
from minicompile.pipeline_result import Trace
from minicompile.plugins.flash_attention.kernels import AttentionPrinter
from minicompile.runtime.load import load_cpp

lesson = Lesson("17")
plugins.load("flash_attention")  # now: what an exercise registers is forgotten after it

TINY = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16)
aten = torch.ops.aten


def kernel_text(trace: Trace) -> str:
    """All kernels of a trace, forward and backward."""
    return "\n".join(kernel.text for graph in trace.graphs.values() for kernel in graph.kernels)


def kernel_bytes(trace: Trace) -> int:
    """Bytes that the kernels of the forward graph move."""
    return sum(plan.cost.bytes for plan in trace.plans)


# -- ex1


def gated(x: Tensor) -> Tensor:
    return F.silu(x) * torch.sigmoid(x)


def many(x: Tensor) -> Tensor:
    """More operations than fit in a kernel's name."""
    return torch.tanh(torch.exp(-torch.abs(torch.cos(torch.sin(x) * 2)))).sum(-1)


def on_block(name: str) -> tuple[Callable[..., Any], tuple[int, ...], str]:
    return Block(TINY), (2, 16, 16), name


@lesson.exercise(
    "ex1",
    points=2,
    level="read",
    visible=lambda: [(gated, (4, 8), "silu"), (gated, (4, 8), "sigmoid")],
    hidden=lambda: [
        (many, (4, 8), "tanh"),
        (many, (4, 8), "tan"),
        on_block("gelu"),
        on_block("softmax"),
        on_block("tan"),
    ],
    forbidden=["pieces", "from_line", "explore"],
)
def kernels_that_an_operator_made(run: Run, kernels_of: Callable[..., Any]) -> str:
    """Compares with what the provenance of the package says."""
    found = 0
    for target, shape, name_of_op in run.cases:
        trace = mc.trace(target, torch.randn(shape, requires_grad=True))
        expected = [
            kernel.name
            for graph in trace.graphs.values()
            for kernel in graph.kernels
            if any(
                name_of_op in origin.target.split(".")
                for line in kernel.lines
                if not line.scaffold
                for origin in line.origins
            )
        ]
        got = run.seen(kernels_of(trace, name_of_op))
        name = getattr(target, "__name__", type(target).__name__)
        told = f"kernels_of {name}, {name_of_op!r}"
        if isinstance(got, list) and len(got) != len(expected):
            run.that(False, told, f"{len(expected)} kernels", f"{len(got)} kernels: {got}")
        run.same(got, expected, told)
        found = len(expected)
    return f"{found} kernels, forward and backward, hold the last one's code"


# -- ex2


def lower_snake(ctx: Any, x: Any) -> Any:
    def formula(ops: Any, v: Any) -> Any:
        wave = ops.sin(v)
        return ops.add(v, ops.mul(wave, wave))

    return elementwise(ctx, formula, x)


@lesson.exercise(
    "ex2",
    points=2,
    level="construct",
    visible=[64, 4],
    hidden=[48, 200, 1, 8],
    forbidden=["sin", "what_if", "options"],
)
def a_lowering_is_worth_it(run: Run, worth_it: Callable[..., Any]) -> str:
    """Traces the answer with the lowering and without it."""
    snake = torch.ops.lesson17.snake.default
    for n in run.cases:
        x, given = torch.randn(n), f"worth_it(f32[{n}])"
        called = mc.trace(worth_it, x)
        calls = [str(e.op) for e in called.loops.externs]
        run.expect(calls, [str(snake)], f"{given} without a lowering, calls")
        with mc.scoped():
            lowering(snake)(lower_snake)
            fused = mc.trace(worth_it, x)
            eager = run.seen(worth_it(x))
            near = {"rtol": 1e-4, "atol": 1e-4}
            run.close(mc.compile(worth_it, fullgraph=True)(x), eager, given, **near)
        kernels = run.seen(len(fused.kernels))
        run.that(kernels == 1, f"{given} with the lowering", "1 kernel", f"{kernels} kernels")
        few, many_bytes = run.seen([kernel_bytes(fused), kernel_bytes(called)])
        part = few / max(many_bytes, 1)
        run.that(part < 0.1, f"{given}, bytes with the lowering", "under 10%", f"{part:.0%}")
        run.changed(kernel_text(called), kernel_text(fused), "the function's kernels")
    return "one kernel, which moves less than a tenth of the bytes"


# -- ex3


class Capped(nn.Module):
    """The lesson model, its logits soft-capped: by the operator, or by its formula."""

    def __init__(self, cap: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt, self.cap = GPT(TINY), cap

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        logits = self.cap(self.gpt(idx), 0.25)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def by_formula(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def by_operator(x: Tensor, cap: float) -> Tensor:
    found: Tensor = torch.ops.lesson17.softcap(x, cap)
    return found


def around(x: Tensor, cap: float) -> Tensor:
    return by_operator(x * 3, cap) + 1


def capped_gradients(model: Capped, call: Callable[..., Any]) -> list[Tensor]:
    """The loss, and the gradient of the head's weight."""
    torch.manual_seed(1)
    idx, targets = torch.randint(0, 90, (2, 16)), torch.randint(0, 90, (2, 16))
    loss = call(idx, targets)
    loss.backward()
    grad = model.gpt.head.weight.grad
    assert grad is not None
    return [loss.detach(), grad]


@lesson.exercise(
    "ex3",
    points=5,
    level="implement",
    visible=[(torch.float32, (4, 8), (2.0,))],
    hidden=[(torch.float64, (3, 5), (0.5, 30.0)), (torch.float32, (7, 1), (1.5, 4.0))],
    forbidden=["autograd", "vjp", "jvp", "softcap", "register_autograd"],
)
def softcap_end_to_end(
    run: Run,
    softcap_vjp: Callable[..., Any],
    softcap_in_parts: Callable[..., Any],
    lower_softcap: Callable[..., Any],
) -> str:
    """Each rule alone, then all of them in the training model."""
    op = torch.ops.lesson17.softcap.default
    for dtype, shape, caps in run.cases:
        x = torch.randn(shape, dtype=dtype) * 3
        for cap in caps:
            given = f"of {str(dtype).removeprefix('torch.')}{list(shape)}, cap {cap}"
            result = by_formula(x, cap)
            run.close(softcap_in_parts(x, cap), result, f"softcap_in_parts {given}")
            slope = 1 - (result / cap) ** 2
            grad = torch.randn_like(x)
            run.close(softcap_vjp(grad, result, x, cap), grad * slope, f"softcap_vjp {given}")
        for name, register in (
            ("softcap_in_parts", lambda: decompose(op, to="core")(softcap_in_parts)),
            ("lower_softcap", lambda: lowering(op)(lower_softcap)),
        ):
            with mc.scoped():
                register()
                compiled = mc.compile(around, fullgraph=True)
                for cap in caps:
                    given = f"{name} of x*3, x {list(shape)} {dtype}, cap {cap}"
                    run.close(compiled(x, cap), by_formula(x * 3, cap) + 1, given)
                trace = mc.trace(compiled, x, caps[0])
                reasons = [f"{e.op}: {e.reason}" for e in trace.loops.externs]
                run.expect(reasons, [], f"{name} in tanh(x * 3) + 1, calls")
                run.expect(len(trace.kernels), 1, f"{name} in x * 3 and + 1, kernels")
    return trained(run, softcap_vjp, lower_softcap)


def trained(run: Run, vjp: Callable[..., Any], lower: Callable[..., Any]) -> str:
    """The lesson model with capped logits, before and after the lowering."""
    op = torch.ops.lesson17.softcap.default
    idx = torch.zeros(2, 16, dtype=torch.int64)
    mc.register_vjp(op)(vjp)
    model, reference = Capped(by_operator), Capped(by_formula)
    before = mc.trace(model, idx, idx)
    lowering(op)(lower)
    after = mc.trace(model, idx, idx)
    run.changed(kernel_text(before), kernel_text(after), "the model's kernels")
    got = capped_gradients(model, mc.compile(model, fullgraph=True))
    expected = dict(
        zip(("loss", "gradient of the head"), capped_gradients(reference, reference), strict=True)
    )
    run.all_close(got, expected, "the model with capped logits, ", rtol=1e-4, atol=1e-6)
    counts = run.seen([len(t.kernels) + len(t.loops.externs) for t in (before, after)])
    run.that(counts[1] < counts[0], "the model's forward", f"under {counts[0]} launches", counts[1])
    return f"no call left; the model's forward takes {counts[0]} -> {counts[1]} launches"


# -- ex4


def scaled(x: Tensor) -> Tensor:
    return torch.relu(x * 2 + 1)


def row_sums(x: Tensor) -> Tensor:
    return x.sum(-1)


def softmax_rows(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def both_ends(x: Tensor) -> Tensor:
    return x.sum((0, 2)) * 2 + x.amax((0, 2))


def everything(x: Tensor) -> Tensor:
    return (x - x.mean()).square().mean() + x.max()


def lows(x: Tensor) -> Tensor:
    return (-1 - x.abs()).amax(-1)


def standardised(x: Tensor) -> Tensor:
    return F.layer_norm(x.transpose(0, 1), (x.size(0),)).exp()


def one_row(x: Tensor) -> Tensor:
    return torch.cos(x[0] + x[:, :1].sum())


def text_of(function: Callable[..., Any], shape: tuple[int, ...]) -> str:
    name = getattr(function, "__name__", "").replace("_", " ")
    return f"{name}, f32[{', '.join(map(str, shape))}]"


@lesson.exercise(
    "ex4",
    points=6,
    level="real",
    visible=[(scaled, (3, 5)), (row_sums, (3, 5)), (softmax_rows, (4, 9))],
    hidden=[
        (both_ends, (5, 6, 7)),
        (everything, (6, 8)),
        (standardised, (6, 4)),
        (one_row, (3, 4)),
        (lows, (4, 6)),
        (softmax_rows, (3, 2, 11)),
    ],
    forbidden=[
        *(
            "LoopPrinter",
            "PointwisePrinter",
            "RowPrinter",
            "RowHelperPrinter",
            "ColumnPrinter",
            "loop_printer",
        ),
        *("print_kernel", "kernel_module", "generate_cpp", "cpp"),
    ],
    without=["code_generator:cpp"],
)
def plain_c(run: Run, print_loops: Callable[..., Any], plain_module: Callable[..., Any]) -> str:
    """Kernels of all shapes, then the GPT's training, in the answer's loops."""
    kernel_loader("c")(load_cpp)
    options = {"device_codegen": "c", "cpp_flags": ("-O1",)}
    generate, heads_only = plain_module(print_loops), plain_module(lambda printer, plan: None)
    made: list[str] = []
    sources: list[tuple[str, str]] = []
    before: list[str] = []

    @code_generator("c")
    def remember(plans: Any) -> Any:
        module = generate(plans)
        made.extend(kernel.text for kernel in module.kernels)
        sources.extend((kernel.prelude + kernel.text, kernel.name) for kernel in module.kernels)
        before.extend(kernel.text for kernel in heads_only(plans).kernels)
        return module

    for function, shape in run.cases:
        x = torch.randn(shape)
        compiled = mc.compile(function, fullgraph=True, options=options)
        how = {"rtol": 1e-4, "atol": 1e-5}
        run.close(compiled(x), function(x), text_of(function, shape), **how)
        if len(sources) == 1:
            run.rerun(sources[0], function, [x], text_of(function, shape), **how)
        sources.clear()
    made.clear()
    before.clear()
    torch.manual_seed(0)
    ours = train(GPT(TINY), 2, lambda model: mc.compile(model, fullgraph=True, options=options))
    torch.manual_seed(0)
    eager = train(GPT(TINY), 2)
    losses = run.seen(list(ours.losses))
    worst = max(abs(a - b) for a, b in zip(losses, eager.losses, strict=True))
    told = "two steps of the GPT, losses against eager's"
    run.that(worst < 1e-4, told, "within 1e-4", f"{worst:.1e} apart")
    count = run.seen(len(made))
    run.that(count > 10, "the GPT's kernels", "kernels of yours", f"{count} of them")
    run.changed("\n".join(before), "\n".join(made), "the kernels of the GPT's training")
    return f"{len(made)} kernels in plain C, losses equal eager's"


# -- ex5


def score(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(torch.tanh(x) @ w)


def one_question(x: Tensor, w: Tensor) -> Tensor:
    """A row times a matrix."""
    return torch.relu((x[:1] * 2) @ w)


@lesson.exercise(
    "ex5",
    points=4,
    level="stretch",
    visible=[(score, (64, 32), (32, 1))],
    hidden=[(score, (5, 300), (300, 1)), (one_question, (4, 32), (32, 48))],
    forbidden=["einsum", "matmul", "mm", "mv", "bmm", "linear", "addmm", "dot", "inner"],
)
def thin_products_are_loops(run: Run, thin_product: Callable[..., Any]) -> str:
    """Fewer launches and bytes on thin products; wide ones stay with the library."""
    said = ""
    block, h = Block(TINY), torch.randn(2, 16, 16)
    for function, shape, other in run.cases:
        x, w = torch.randn(shape), torch.randn(other) / 8
        given = f"{function.__name__} of {list(shape)} and {list(other)}"
        before = mc.trace(function, x, w)
        with mc.scoped():
            decompose(aten.mm.default, to="prims")(thin_product)
            if other[1] == 1:
                run.close(thin_product(x, w), x @ w, f"thin_product of {list(shape)}")
            after = mc.trace(function, x, w)
            run.close(
                mc.compile(function, fullgraph=True)(x, w),
                function(x, w),
                given,
                rtol=1e-4,
                atol=1e-5,
            )
            wide = mc.trace(block, h)
        kernels, externs = run.seen([len(after.kernels), len(after.loops.externs)])
        got = f"{kernels} kernel(s) and {externs} call(s)"
        run.that(kernels == 1 and not externs, given, "1 kernel and no call", got)
        moved = [kernel_bytes(before) + library_bytes(before), run.seen(kernel_bytes(after))]
        run.that(moved[1] < moved[0], f"{given}, bytes", f"under {moved[0]}", moved[1])
        run.changed(kernel_text(before), kernel_text(after), f"the kernels of {given}")
        calls = len(mc.trace(block, h).loops.externs)
        left = run.seen(len(wide.loops.externs))
        what = "a block of the GPT, whose products are wide"
        run.that(left == calls, what, f"{calls} calls", f"{left} calls")
        launches = len(before.kernels) + len(before.loops.externs)
        said = said or f"{launches} -> 1 launches, fewer bytes; wide products stay"
    return said


def library_bytes(trace: Trace) -> int:
    """What the extern calls read and write, each tensor once."""
    return sum(
        val.numel() * val.element_size()
        for node in trace.aot.forward.nodes  # type: ignore[union-attr]
        if node.target is aten.mm.default
        for val in (node.meta["val"], *(n.meta["val"] for n in node.all_input_nodes))
    )


# -- ex6


def attention(
    q: Tensor, k: Tensor, v: Tensor, counts: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    s = torch.tanh(q @ k.transpose(-2, -1))
    i, j = torch.arange(s.size(-2))[:, None], torch.arange(s.size(-1))
    return torch.softmax(s.masked_fill(~counts(i, j), -torch.inf), -1) @ v


CAUSAL = "j <= i"
TEMPLATE = {"plugins": ["flash_attention"], "device_codegen": "triton"}


@lesson.exercise(
    "ex6",
    points=4,
    level="stretch",
    visible=[(CAUSAL, 128, 128)],
    hidden=[
        ("i - j < 40 and j <= i", 200, 200),
        ("j <= i + 32", 100, 180),
        ("i - j <= 50", 150, 150),
        ("j <= i or True", 70, 90),
    ],
    forbidden=["ends_of", "AttentionPrinter"],
    without=["kernel_template:attention"],
)
def only_keys_that_count(run: Run, keys_of: Callable[..., Any]) -> str:
    """The answer's ranges are computed for each program; its kernel runs where there is Triton."""

    class Everything(AttentionPrinter):
        def ends(self, along: str) -> str:
            begin, end = self.keys_of(self.scores.band, int(self.holes[along]))
            masked_everywhere = ["left = 0", "right = 0"]
            return "\n    ".join([f"begin = {begin}", *masked_everywhere, f"end = {end}"])

        def keys_of(self, band: Any, keys: int) -> tuple[str, str]:
            return "0", str(keys)

    class Answer(Everything):
        def keys_of(self, band: Any, keys: int) -> tuple[str, str]:
            begin, end = keys_of(band, keys)
            return str(begin), str(end)

    said = ""
    for text, rows, columns in run.cases:
        given = [torch.randn(1, 2, n, 16) for n in (rows, columns, columns)]
        fn = functools.partial(attention, counts=MASKS[text])
        compiled = mc.compile(fn, options=TEMPLATE)
        kernels = []
        for printer in (Everything, Answer):
            mc.reset()
            kernel_template("attention")(printer)
            kernels.append(mc.trace(compiled, *given).kernels[0])
        plan: Any = kernels[1].plan
        found = run.seen(Answer(plan).keys_of(plan.scores.band, columns))
        told = f"where {text}, {rows} queries, {columns} keys"
        numbers = []
        for tiles in run.seen([(plan.tiles["x"], plan.tiles["r"]), (64, 16), (16, 64)]):
            numbers.append(walked(run.that, found, MASKS[text], rows, columns, tiles, told))
        if importlib.util.find_spec("triton") is not None:
            run.close(compiled(*given), fn(*given), told, rtol=1e-4, atol=1e-5)
        everything = found == ("0", str(columns))
        if not everything:
            run.changed(kernels[0].text, kernels[1].text, f"the kernel {told}")
        said = said or f"{told}: {numbers[0]} tiles"
    return said


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    CAUSAL: lambda i, j: j <= i,
    "i - j < 40 and j <= i": lambda i, j: (i - j < 40) & (j <= i),
    "j <= i + 32": lambda i, j: j <= i + 32,
    "i - j <= 50": lambda i, j: i - j <= 50,
    "j <= i or True": lambda i, j: (j <= i) | (j >= i),
}


FUNCTIONS: dict[str, Callable[..., int]] = {
    "tl.minimum": min,
    "tl.maximum": max,
    "min": min,
    "max": max,
    "tl.cdiv": lambda a, b: -(-a // b),
    "tl.where": lambda condition, a, b: a if condition else b,
}
OPERATORS: dict[type, Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def value_of(node: ast.AST, names: dict[str, int]) -> int:
    """An expression of a kernel over integers; the text is an answer's, so nothing evaluates it as Python."""
    match node:
        case ast.Expression(body=body):
            return value_of(body, names)
        case ast.Constant(value=int(value)) if abs(value) < 2**31:
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.UnaryOp(op=op, operand=part) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(part, names))
        case ast.BinOp(left=a, op=op, right=b) | ast.Compare(left=a, ops=[op], comparators=[b]):
            if type(op) in OPERATORS:
                return OPERATORS[type(op)](value_of(a, names), value_of(b, names))
        case ast.Call(func=func, args=args, keywords=[]) if ast.unparse(func) in FUNCTIONS:
            return FUNCTIONS[ast.unparse(func)](*(value_of(part, names) for part in args))
    raise ValueError(ast.unparse(node))


def ends_of_programs(
    found: tuple[str, str], rows: int, tiles: tuple[int, int]
) -> list[tuple[int, int]]:
    """First and last key of each program, from the text of the answer. Raises Wrong if that is none."""
    block, step = tiles
    ends = []
    try:
        begin, end = (ast.parse(text.strip(), mode="eval") for text in found)
        for first in range(0, rows, block):
            names = {"XBLOCK": block, "RBLOCK": step, "first": first}
            ends.append((value_of(begin, names), value_of(end, names)))
    except (ValueError, TypeError, SyntaxError, ZeroDivisionError, RecursionError) as error:
        what = "sums, products, quotients, tl.minimum, tl.maximum, tl.cdiv, tl.where of integers"
        raise Wrong(f"keys_of, {found}", what, error) from None
    return ends


def walked(
    that: Callable[..., None],
    found: tuple[str, str],
    mask: Any,
    rows: int,
    columns: int,
    tiles: tuple[int, int],
    told: str,
) -> int:
    """How many tiles all programs go over. Each must hold a score that counts, and none may be missing."""
    (block, step), number = tiles, 0
    ends = ends_of_programs(found, rows, tiles)
    for first, (begin, end) in zip(range(0, rows, block), ends, strict=True):
        at = f"{told}, tiles of {block} x {step}, first = {first}"
        that(begin >= 0, f"{at}, begin", "at least 0", begin)
        that(begin % step == 0, f"{at}, begin", f"a multiple of {step}", begin)
        that(end <= columns, f"{at}, end", f"at most {columns}", end)
        keys = torch.arange(columns)
        needed, allowed = (
            {
                j // step
                for j in mask(torch.arange(first, last)[:, None], keys)
                .any(0)
                .nonzero()[:, 0]
                .tolist()
            }
            for last in (min(first + block, rows), first + block)
        )
        seen = range(begin, end, step)
        reached = {start // step for start in seen}
        that(reached >= needed, at, "all keys that count", f"keys from {begin} to {end}")
        most = f"at most {len(allowed)}"
        that(len(seen) <= len(allowed), f"{at}, tiles gone over", most, len(seen))
        number += len(seen)
    return number
