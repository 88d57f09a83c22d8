"""What runs around the two compiled graphs: autograd, mutated inputs, aliases.

    call(inputs) = compiled forward, copy new contents back into inputs, rebuild outputs that are views
    backward     = tangents in the layout the graph was compiled for, compiled backward, gradients by input

The real compiler: torch/_functorch/_aot_autograd/runtime_wrappers.py.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from minicompile import compat
from minicompile.aot.layout import size_expr, stride_order
from minicompile.aot.result import AotResult, BoxedCallable, OutputSpec
from minicompile.ops.graph import Graph, placeholders

Outputs = list[Any]


# An ATen graph run by eager operators ------------------------------------------------------------


def interpret(graph: Graph) -> BoxedCallable:
    """Run an ATen graph with eager's operators, one by one; every value dies after its last use.

    The graph becomes one straight-line Python function, which costs less per call than walking nodes.
    """
    names: dict[str, Any] = {}
    lines = ["def run(inputs):"]
    nodes = list(graph.gm.graph.nodes)
    inputs = placeholders(graph.gm.graph)
    if inputs:
        lines.append(f"    {', '.join(node.name for node in inputs)}, = inputs")
    lines.append("    inputs.clear()")
    last_use = {used: node for node in nodes for used in node.all_input_nodes}
    for node in nodes:
        if node.op == "get_attr":
            names[f"_{node.name}"] = getattr(graph.gm, str(node.target))
            lines.append(f"    {node.name} = _{node.name}")
        elif node.op == "call_function":
            names[f"_{node.name}"] = node.target
            arguments = [code(a, names) for a in node.args] + [
                f"{k}={code(v, names)}" for k, v in node.kwargs.items()
            ]
            lines.append(f"    {node.name} = _{node.name}({', '.join(arguments)})")
        elif node.op == "output":
            lines.append(f"    return {code(list(flat_outputs(node.args[0])), names)}")
            continue
        dead = [used.name for used in node.all_input_nodes if last_use[used] is node]
        dead += [node.name] if node not in last_use else []
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    exec(compile("\n".join(lines), f"<{graph.name}>", "exec"), names)
    run: BoxedCallable = names["run"]
    return run


def flat_outputs(tree: Any) -> Sequence[Any]:
    """The outputs of a graph in order: nested tuples (joint graphs) flattened."""
    return [
        leaf
        for part in tree
        for leaf in (flat_outputs(part) if isinstance(part, tuple | list) else [part])
    ]


def code(value: Any, names: dict[str, Any]) -> str:
    """Python source of a node's argument; what has no literal gets a name."""
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple | list):
        inner = ", ".join(code(v, names) for v in value)
        return f"[{inner}]"
    if isinstance(value, bool | int | str | None):
        return repr(value)
    name = f"_constant{len(names)}"
    names[name] = value
    return name


# Symbolic sizes ----------------------------------------------------------------------------------


INTEGER_FUNCTIONS: dict[str, Callable[..., int]] = {
    "FloorDiv": operator.floordiv,
    "ModularIndexing": lambda base, divisor, modulus: base // divisor % modulus,
}


class SizeReader:
    """Computes symbolic sizes of a call from its inputs."""

    def __init__(self, graph: Graph) -> None:
        self.sources: dict[sympy.Symbol, tuple[int, int | None]] = {}
        for position, node in enumerate(placeholders(graph.gm.graph)):
            value = node.meta["val"]
            if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
                self.sources[value.node.expr] = (position, None)
            elif isinstance(value, torch.Tensor):
                for dim, size in enumerate(map(size_expr, value.shape)):
                    if isinstance(size, sympy.Symbol):
                        self.sources.setdefault(size, (position, dim))

    def function(self, sizes: Sequence[Any]) -> Callable[[Sequence[Any]], list[int]]:
        """Inputs -> the sizes as ints."""
        if all(isinstance(size, int) for size in sizes):
            plain = [int(size) for size in sizes]
            return lambda inputs: plain
        symbols = sorted(set().union(*(sympy.sympify(s).free_symbols for s in sizes)), key=str)
        compute = sympy.lambdify(symbols, list(sizes), modules=[INTEGER_FUNCTIONS, "math"])
        places = [self.sources[symbol] for symbol in symbols]

        def read(inputs: Sequence[Any]) -> list[int]:
            found = [inputs[i] if dim is None else inputs[i].shape[dim] for i, dim in places]
            return [int(size) for size in compute(*found)]

        return read


# The callable ------------------------------------------------------------------------------------


def make_callable(
    result: AotResult, forward: BoxedCallable, backward: BoxedCallable | None
) -> BoxedCallable:
    """The function of the captured graph: takes a list of its inputs (emptied), gives its outputs.

    `forward` and `backward` run the graphs of `result`, compiled or interpreted.
    """
    metadata = result.metadata
    returned = sum(spec.kind == "fresh" for spec in metadata.outputs) + metadata.bases
    if metadata.trains:
        assert backward is not None
        compute = training_call(result, forward, backward, returned)
    else:
        compute = inference_call(forward, metadata.mutated_inputs, returned)
    call = with_outputs(
        compute, metadata.outputs, SizeReader(result.forward), returned - metadata.bases
    )

    def run(inputs: list[Any]) -> Outputs:
        if compat.any_autocast_enabled():  # the graph already has the casts that autocast asked for
            with compat.without_autocast():
                return call(inputs)
        return call(inputs)

    return run


def inference_call(
    forward: BoxedCallable, mutated: tuple[int, ...], returned: int
) -> Callable[[list[Any]], Sequence[Any]]:
    """Without autograd: compute, then copy new contents back into mutated inputs."""

    def compute(inputs: list[Any]) -> Sequence[Any]:
        targets = [inputs[i] for i in mutated]
        results = forward(inputs)
        for target, new in zip(targets, results[returned:]):
            target.copy_(new)
        return results[:returned] if mutated else results

    def run(inputs: list[Any]) -> Sequence[Any]:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return compute(inputs)
        return compute(inputs)

    return run


def training_call(
    result: AotResult, forward: BoxedCallable, backward: BoxedCallable, returned: int
) -> Callable[[list[Any]], Sequence[Any]]:
    """An autograd.Function around the two graphs; compiled once, applied at every call."""
    metadata = result.metadata
    mutated, wanted = metadata.mutated_inputs, metadata.differentiable_inputs
    first_saved = returned + len(mutated)
    first_size = first_saved + metadata.saved - metadata.saved_sizes
    inputs_count = len(placeholders(result.forward.gm.graph))
    differentiable = metadata.result_requires_grad
    constant = [i for i, flag in enumerate(differentiable) if not flag]
    fit_tangents = tangent_fitter(result, differentiable)

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            results = forward(list(inputs))
            for index, new in zip(mutated, results[returned:first_saved]):
                inputs[index].copy_(new)
            outputs = tuple(results[:returned])
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*results[first_saved:first_size])
            ctx.sizes = results[first_size:]
            ctx.shapes = [value.shape for value, flag in zip(outputs, differentiable) if flag]
            if constant:
                ctx.mark_non_differentiable(
                    *(outputs[i] for i in constant if isinstance(outputs[i], torch.Tensor))
                )
            return outputs

        @staticmethod
        def backward(ctx: Any, *tangents: Any) -> Any:
            def compute() -> tuple[Any, ...]:
                arguments = [*ctx.saved_tensors, *ctx.sizes, *fit_tangents(tangents, ctx.shapes)]
                compat.clear_saved_tensors(ctx)
                found = list(backward(arguments))
                gradients: list[Any] = [None] * inputs_count
                for index, gradient in zip(wanted, found):
                    gradients[index] = gradient
                return tuple(gradients)

            if torch.is_grad_enabled():
                return FirstDerivativeOnly.apply(torch.ones((), requires_grad=True), compute)
            return compute()

    def run(inputs: list[Any]) -> Sequence[Any]:
        results: Sequence[Any] = Compiled.apply(*inputs)
        return results

    return run


class FirstDerivativeOnly(torch.autograd.Function):
    """Gradients made with `create_graph=True`: they may be used, but not differentiated again.

    All of them depend on `anchor`, so that even a gradient whose second-order term goes through saved tensors
    alone raises instead of losing it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, compute: Callable[[], tuple[Any, ...]]) -> Any:
        return compute()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "second derivatives of a compiled function are not supported: its backward pass is "
            "compiled and has no graph of its own; differentiate twice without mc.compile"
        )


def tangent_fitter(
    result: AotResult, differentiable: tuple[bool, ...]
) -> Callable[[Sequence[Any], Sequence[Any]], list[torch.Tensor]]:
    """Bring incoming gradients into the layout of the backward graph's tangent inputs; zeros for
    missing ones.
    """
    assert result.backward is not None
    positions = [i for i, flag in enumerate(differentiable) if flag]
    values = [
        node.meta["val"] for node in placeholders(result.backward.gm.graph)[result.metadata.saved :]
    ]
    orders = [stride_order(value) for value in values]
    plain = [order == list(range(len(order))) for order in orders]

    def fit(tangents: Sequence[Any], shapes: Sequence[Any]) -> list[torch.Tensor]:
        fitted = []
        for index, position in enumerate(positions):
            tangent = tangents[position]
            if tangent is None:
                value = values[index]
                tangent = torch.zeros(shapes[index], dtype=value.dtype, device=value.device)
            if not plain[index]:
                order = orders[index]
                if not tangent.permute(order).is_contiguous():
                    inverse = sorted(range(len(order)), key=order.__getitem__)
                    tangent = tangent.permute(order).contiguous().permute(inverse)
            elif not tangent.is_contiguous():
                tangent = tangent.contiguous()
            fitted.append(tangent)
        return fitted

    return fit


def with_outputs(
    compute: Callable[[list[Any]], Sequence[Any]],
    specs: tuple[OutputSpec, ...],
    sizes: SizeReader,
    fresh: int,
) -> Callable[[list[Any]], Outputs]:
    """Add the outputs that the graph doesn't compute: inputs, views of inputs or of bases, constants."""
    if all(spec.kind == "fresh" for spec in specs):
        return lambda inputs: list(compute(inputs))
    makers = [output_maker(spec, sizes, specs, index, fresh) for index, spec in enumerate(specs)]

    def run(inputs: list[Any]) -> Outputs:
        kept = list(inputs)
        results = compute(inputs)
        outputs: Outputs = []
        for make in makers:
            outputs.append(make(kept, results, outputs))
        return outputs

    return run


OutputMaker = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Any]
"""(inputs, results of the graph, outputs so far) -> output."""


def output_maker(
    spec: OutputSpec, sizes: SizeReader, specs: tuple[OutputSpec, ...], index: int, fresh: int
) -> OutputMaker:
    if spec.kind == "fresh":
        position = sum(earlier.kind == "fresh" for earlier in specs[:index])
        return lambda inputs, results, outputs: results[position]
    if spec.kind == "input":
        return lambda inputs, results, outputs: inputs[spec.base]
    if spec.kind == "output":
        return lambda inputs, results, outputs: outputs[spec.base]
    if spec.kind == "constant":
        return lambda inputs, results, outputs: spec.value
    rank = len(spec.size)
    geometry = sizes.function((*spec.size, *spec.stride, spec.offset))

    def view(inputs: Sequence[Any], results: Sequence[Any], outputs: Sequence[Any]) -> torch.Tensor:
        base: torch.Tensor = (
            inputs[spec.base] if spec.kind == "input_view" else results[fresh + spec.base]
        )
        numbers = geometry(inputs)
        if not spec.requires_grad:
            base = base.detach()
        start = base.storage_offset() + numbers[-1]
        return base.as_strided(numbers[:rank], numbers[rank:-1], start)

    return view
