"""Operators with bodies: `Branch`, `Loop` and `Scan`. Their bodies are captured graphs at first, then ATen.

    y = cond(test, x, w)          a captured node; its target holds the bodies "true" and "false"

    if test:                      what the wrapper does: the bodies are compiled graphs
        results = buf0_true([x, w])
    else:
        results = buf0_false([x])

A gradient is an operator too: that of a Branch is a Branch, that of a Scan a Scan the other way round. Their
bodies compute the forward again, so it may draw no random numbers.
The real compiler: torch/_higher_order_ops/cond.py, while_loop.py, scan.py, map.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from minicompile import compat
from minicompile.aot.autograd import ahead_of_time
from minicompile.aot.functionalize import functionalize
from minicompile.aot.joint import run_captured, trace
from minicompile.aot.layout import empty_dense, is_dense, with_layout
from minicompile.aot.runtime import interpret
from minicompile.errors import Unsupported
from minicompile.lowering.context import extern_reasons
from minicompile.ops.bodies import BodyOperator
from minicompile.ops.generated import define
from minicompile.ops.graph import Graph, origins_of, output_node, placeholders
from minicompile.ops.nodes import is_random
from minicompile.options import Options

Tensors = Sequence[Tensor]


class Body:
    """A graph, and which of the operator's operands each of its placeholders is."""

    def __init__(self, graph: Graph, feeds: Sequence[int], functional: bool = False) -> None:
        self.graph, self.feeds, self.functional = graph, feeds, functional

    def call(self, name: str, operands: Sequence[str]) -> str:
        """The text that calls the compiled graph."""
        return f"{name}([{', '.join(operands[i] for i in self.feeds)}])"

    @property
    def inputs(self) -> list[Any]:
        return [node.meta["val"] for node in placeholders(self.graph.gm.graph)]

    @property
    def eager(self) -> Callable[[list[Any]], Any]:
        if self.functional:
            return interpret(self.graph)
        return lambda inputs: self.graph.function(*inputs)


class Traceable(BodyOperator):
    """What stands for a function while a graph of its calls is traced."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.trace = function  # type: ignore[method-assign]
        self.name = self.__name__ = "body"


def aten_body(
    function: Callable[..., Tensors], fakes: Tensors, outputs: Tensors, like: Body, feeds: Any
) -> Body:
    """The functional ATen graph of `function(tracer, *tensors)`. Each result has memory of its own, laid out
    like one of `outputs`. Its inputs are called as those of the body `like`, as far as these go."""
    names = [node.name for node in placeholders(like.graph.gm.graph)]
    names += [f"x{i}" for i in range(len(names), len(fakes))]
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in names]
    origins = origins_of(output_node(like.graph.gm.graph))
    for node, fake in zip(inputs, fakes):
        node.meta.update(val=fake, origins=origins)

    def own(tracer: Any, *tensors: Tensor) -> Any:
        taken = set(map(compat.storage_id, tensors))
        results = []
        for value, expected in zip(function(tracer, *tensors), outputs, strict=True):
            value = with_layout(value.detach(), expected)
            if compat.storage_id(value) in taken:
                value = value.clone()
            taken.add(compat.storage_id(value))
            results.append(value)
        return tuple(results)

    graph.output(graph.call_function(Traceable(own), tuple(inputs)))
    gm, mode = compat.graph_module(torch.nn.Module(), graph, like.graph.name), fakes_mode(outputs)
    with compat.no_dispatch_modes():
        traced, metadata = trace(gm, [*fakes], mode, training=False)
        functional = functionalize(traced, metadata, mode)
    return Body(Graph(functional, like.graph.name, "functionalization"), feeds, functional=True)


def fakes_mode(fakes: Tensors) -> Any:
    return next(x.fake_mode for x in fakes if isinstance(x, compat.FakeTensor))  # type: ignore[attr-defined]


def gradients(
    body: Body, inputs: Sequence[Any], wanted: Sequence[int], tangents: Any, tracer: Any
) -> list[Tensor]:
    """Run a captured body on `inputs`, and differentiate it by those that are wanted."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
        outputs = run_captured(body.graph.gm, tracer, [inputs[i] for i in body.feeds])
    differentiable = filter(is_float, outputs)
    pairs = [(y, t) for y, t in zip(differentiable, tangents, strict=True) if y.requires_grad]
    sources = [inputs[i] for i in wanted]
    if not pairs or not sources:
        return list(map(torch.zeros_like, sources))
    with compat.without_autocast():  # as loss.backward(), which belongs outside of it
        found = torch.autograd.grad(
            [y for y, _ in pairs], sources, [t for _, t in pairs], allow_unused=True
        )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(sources, found)]


def is_float(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


class ControlFlow(BodyOperator):
    """`parts`: the bodies by name. `results`: fakes like those that the operator gives."""

    def __init__(self, name: str, parts: dict[str, Body], results: Tensors) -> None:
        self.name = self.__name__ = self.__qualname__ = name
        self.__module__ = ""
        self.parts, self.results, self.mode = parts, results, fakes_mode(results)
        self.functional = all(part.functional for part in parts.values())
        self.function: Callable[..., Any] | None = None
        random = [
            is_random(node) or getattr(node.target, "random", False)
            for part in parts.values()
            for node in part.graph.nodes
        ]
        self.random = any(random)
        if self.random:
            self.tags = (*self.tags, torch.Tag.nondeterministic_seeded)

    @property
    def graphs(self) -> list[Graph]:
        return [part.graph for part in self.parts.values()]

    def bodies(self, options: Options) -> dict[str, Graph]:
        found = {}
        for name, part in self.parts.items():
            with compat.without_autocast():
                aot = ahead_of_time(part.graph, part.inputs, options, training=False)
            found[name] = aot.forward
        return found

    def __call__(self, *args: Tensor) -> Any:
        if any(isinstance(x, compat.FakeTensor) for x in args):
            return Differentiated.apply(self.new_results, None, *args)
        if self.function is None:
            names = [f"x{i}" for i in range(len(args))]
            lines = [f"    {line}" for line in self.lines("", names)]
            text = "\n".join([f"def run({', '.join(names)}):", *lines, "    return tuple(results)"])
            bodies = {name: part.eager for name, part in self.parts.items()}
            self.function = define("run", text, {"torch": torch, **bodies}, self.name)
        return self.function(*args)

    def new_results(self, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(empty_dense(self.mode, x) for x in self.results)

    def record(self, tracer: Any, *args: Tensor) -> tuple[Tensor, ...]:
        """Add a node that calls the operator to an ATen graph."""
        with compat.no_dispatch_modes():
            values = self.new_results()
            tracer.record(self, args, {}, values)
        return values

    def trace(self, tracer: Any, *args: Tensor) -> Any:
        """Record an operator with ATen bodies and, where gradients may be asked for, how to get them."""
        if self.functional:
            return self.record(tracer, *args)
        args = tuple(self.arranged(i, x) for i, x in enumerate(args))
        wanted = (
            [i for i, x in enumerate(args) if x.requires_grad] if torch.is_grad_enabled() else []
        )
        with compat.no_dispatch_modes():
            forward, backward = self.differentiated(wanted, *args)
        if wanted and forward.random:
            what = f"{self.name} draws random numbers, which its backward would draw anew"
            raise Unsupported(what)
        count = len(self.results)
        run = partial(forward.record, tracer)
        back = partial(backward, tracer) if backward is not None else None
        return Differentiated.apply(run, back and (back, wanted, count), *args)

    def arranged(self, place: int, value: Tensor) -> Tensor:
        """An operand without gaps in memory."""
        return value if is_dense(value) and not value.is_conj() else value.contiguous()

    def differentiated(self, wanted: Sequence[int], *args: Tensor) -> tuple[Any, Any]:
        """The operator with ATen bodies, and a function that records its gradients for the wanted operands:
        (tracer, operands, all that the operator gave, tangents of the results that are floats)."""
        raise NotImplementedError

    def aten(self, part: Body, args: Sequence[Tensor], outputs: Tensors) -> Body:
        """A captured body as an ATen graph."""

        def run(tracer: Any, *tensors: Tensor) -> Any:
            return run_captured(part.graph.gm, tracer, [*tensors])

        return aten_body(run, [args[i] for i in part.feeds], outputs, part, part.feeds)


class Differentiated(torch.autograd.Function):
    """A call that gives fakes, with the history that the call of an operator has."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], back: Any, *args: Tensor) -> Any:
        values = run(*args)
        ctx.back, ctx.values, count = back, values, len(values)
        if back is not None:
            count = back[2]
            ctx.save_for_backward(*args)
        ctx.mark_non_differentiable(*(x for x in values[:count] if not is_float(x)))
        return values[:count]

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor) -> Any:
        back, wanted, _ = ctx.back
        pairs = [(t, y) for t, y in zip(tangents, ctx.values) if is_float(y)]
        laid_out = [with_layout(t, y) for t, y in pairs]
        found = dict(zip(wanted, back(ctx.saved_tensors, ctx.values, laid_out)))
        return (None, None, *(found.get(i) for i in range(len(ctx.saved_tensors))))


class Branch(ControlFlow):
    """(test, *operands): the body "true" or the body "false"."""

    def lines(self, prefix: str, arguments: list[str]) -> list[str]:
        test, *operands = arguments
        return [
            f"if {test}:",
            f"    results = {self.parts['true'].call(f'{prefix}true', operands)}",
            "else:",
            f"    results = {self.parts['false'].call(f'{prefix}false', operands)}",
        ]

    def differentiated(self, wanted: Sequence[int], *args: Tensor) -> tuple[Any, Any]:
        args, results = args[1:], self.results
        parts = {name: self.aten(part, args, results) for name, part in self.parts.items()}
        forward = Branch(self.name, parts, results)
        if not wanted:
            return forward, None
        places, tangents = [i - 1 for i in wanted], [*filter(is_float, results)]
        found = [args[i] for i in places]

        def backward(part: Body) -> Body:
            def run(tracer: Any, *tensors: Tensor) -> Any:
                inputs = tensors[: len(args)]
                return gradients(part, inputs, places, tensors[len(args) :], tracer)

            every = [*args, *tangents]
            return aten_body(run, every, found, part, range(len(every)))

        back = Branch(
            f"{self.name}_backward", {n: backward(p) for n, p in self.parts.items()}, found
        )
        return forward, lambda tracer, args, values, given: back.record(tracer, *args, *given)


class Loop(ControlFlow):
    """(*carry, *operands): the body "step" gives the next carry, as long as the body "test" gives True."""

    def lines(self, prefix: str, arguments: list[str]) -> list[str]:
        count = len(self.results)
        operands = [f"carry[{i}]" for i in range(count)] + arguments[count:]
        return [
            f"carry = [{', '.join(f'{x}.clone()' for x in arguments[:count])}]",
            f"while {self.parts['test'].call(f'{prefix}test', operands)}[0]:",
            f"    carry = {self.parts['step'].call(f'{prefix}step', operands)}",
            "results = carry",
        ]

    def differentiated(self, wanted: Sequence[int], *args: Tensor) -> tuple[Any, Any]:
        if wanted:
            raise Unsupported("a while_loop is differentiated")
        carry, test = args[: len(self.results)], self.parts["test"]
        answer = [output_node(test.graph.gm.graph).args[0][0].meta["val"]]  # type: ignore[index, union-attr]
        parts = {"test": self.aten(test, args, answer)}
        parts["step"] = self.aten(self.parts["step"], args, carry)
        return Loop(self.name, parts, carry), None


class Scan(ControlFlow):
    """(*carry, *rows, *operands): the body "step" gets the carry, a row of each of `rows`, and the operands.
    It gives the next carry, and rows of further results."""

    def __init__(
        self, name: str, step: Body, results: Tensors, carries: int, rows: int, reverse: bool
    ) -> None:
        super().__init__(name, {"step": step}, results)
        self.carries, self.rows, self.reverse = carries, rows, reverse

    def lines(self, prefix: str, arguments: list[str]) -> list[str]:
        n, end = self.carries, self.carries + self.rows
        operands = [f"carry[{i}]" for i in range(n)]
        operands += [f"{x}[i]" for x in arguments[n:end]] + arguments[end:]
        steps = f"range(len({arguments[n]}))"
        stacked = "rows[::-1]" if self.reverse else "rows"
        return [
            f"carry, rows = [{', '.join(arguments[:n])}], []",
            f"for i in {f'reversed({steps})' if self.reverse else steps}:",
            f"    carry = {self.parts['step'].call(f'{prefix}step', operands)}",
            f"    rows.append(carry[{n}:])",
            f"results = [*carry[:{n}], *map(torch.stack, zip(*{stacked}))]",
        ]

    def arranged(self, place: int, value: Tensor) -> Tensor:
        is_row = self.carries <= place < self.carries + self.rows
        return value.contiguous() if is_row else super().arranged(place, value)

    def differentiated(self, wanted: Sequence[int], *args: Tensor) -> tuple[Any, Any]:
        part, n, end = self.parts["step"], self.carries, self.carries + self.rows
        length = args[n].shape[0]

        def new(x: Tensor, before: tuple[Any, ...] = (), skip: int = 0) -> Tensor:
            with self.mode:
                return torch.empty((*before, *x.shape[skip:]), dtype=x.dtype, device=x.device)

        inputs = [*args[:n], *(new(x, skip=1) for x in args[n:end]), *args[end:]]
        ys = [new(x, skip=1) for x in self.results[n:]]
        results = [*args[:n], *(new(x) for x in self.results[n:])]
        if not wanted:
            step = self.aten(part, inputs, [*args[:n], *ys])
            return Scan(self.name, step, results, n, self.rows, self.reverse), None

        # the forward keeps the carry that each step got
        carries = [new(x) for x in args[:n]]

        def remembering(tracer: Any, *tensors: Tensor) -> Any:
            given = [tensors[part.feeds.index(i)] for i in range(n)]
            return [*run_captured(part.graph.gm, tracer, [*tensors]), *given]

        fakes = [inputs[i] for i in part.feeds]
        step = aten_body(remembering, fakes, [*args[:n], *ys, *carries], part, part.feeds)
        stacks = [new(x, (length,)) for x in carries]
        forward = Scan(self.name, step, [*results, *stacks], n, self.rows, self.reverse)

        # backward: the carry is its gradient and the operands' sums, rows are those of the forward
        floats = [i for i in range(n) if is_float(args[i])]
        summed = [i for i in wanted if i >= end]
        by_row = [i for i in wanted if n <= i < end]
        sums = [args[i] for i in summed]
        moving = [*(args[i] for i in floats), *sums]
        row_tangents = [y for y in ys if is_float(y)]
        rows = [*inputs[n:end], *carries, *row_tangents]

        def reversing(tracer: Any, *tensors: Tensor) -> Any:
            pieces = iter(tensors)
            carry, before, xs, old, given, rest = (
                [next(pieces) for _ in range(k)]
                for k in (len(floats), len(sums), self.rows, n, len(row_tangents), len(args) - end)
            )
            every = [*floats, *summed, *by_row]
            found = gradients(part, [*old, *xs, *rest], every, [*carry, *given], tracer)
            added = [a + b for a, b in zip(before, found[len(floats) :])]
            return [*found[: len(floats)], *added, *found[len(floats) + len(sums) :]]

        fakes = [*moving, *rows, *args[end:]]
        outputs = [*moving, *(inputs[i] for i in by_row)]
        body = aten_body(reversing, fakes, outputs, part, range(len(fakes)))
        given = [*moving, *(new(args[i]) for i in by_row)]
        name, count = f"{self.name}_backward", len(moving)
        back = Scan(name, body, given, count, len(rows), not self.reverse)

        def backward(tracer: Any, args: Any, values: Any, tangents: Any) -> list[Tensor]:
            kept = values[len(self.results) :]
            zeros = [torch.zeros_like(args[i]) for i in summed]
            first, others = tangents[: len(floats)], tangents[len(floats) :]
            operands = [*first, *zeros, *args[n:end], *kept, *others, *args[end:]]
            found = dict(zip([*floats, *summed, *by_row], back.record(tracer, *operands)))
            return [found[i] for i in wanted]

        return forward, backward


extern_reasons(Branch, Loop, Scan)("its bodies are graphs of their own")
