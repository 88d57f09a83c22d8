"""What runs around the two compiled graphs: autograd, mutated inputs, aliases.

    call(inputs) = find memories that inputs share, compiled forward, copy new contents back into inputs,
                   bring inputs into their new layout, rebuild outputs that are views
    backward     = tangents in the layout the graph was compiled for, compiled backward, gradients by input

The real compiler: torch/_functorch/_aot_autograd/runtime_wrappers.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from minicompile import compat
from minicompile.aot.layout import dense_in_order, stride_order
from minicompile.aot.result import AotResult, BoxedCallable, OutputSpec, SharedMemory
from minicompile.ops.graph import Graph, placeholders

Call = Callable[[list[Any]], Sequence[Any]]


def interpret(graph: Graph) -> BoxedCallable:
    """Run an ATen graph with eager's operators, one by one; every value dies after its last use."""
    return compat.boxed_function(graph.gm)


# The callable ------------------------------------------------------------------------------------


def make_callable(
    result: AotResult, forward: BoxedCallable, backward: BoxedCallable | None
) -> BoxedCallable:
    """The function of the captured graph: takes a list of its inputs (emptied), gives its outputs.

    `forward` and `backward` run the graphs of `result`, compiled or interpreted.
    """
    if backward is None:
        compute = inference_call(result, forward)
    else:
        compute = training_call(result, forward, backward)
    call = with_epilogue(compute, result)

    def run(inputs: list[Any]) -> Sequence[Any]:
        if compat.any_autocast_enabled():  # the graph already has the casts that autocast asked for
            with compat.without_autocast():
                return call(inputs)
        return call(inputs)

    return run


def inference_call(result: AotResult, forward: BoxedCallable) -> Call:
    """Without autograd."""

    def run(inputs: list[Any]) -> Sequence[Any]:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return forward(inputs)
        return forward(inputs)

    return run


def training_call(result: AotResult, forward: BoxedCallable, backward: BoxedCallable) -> Call:
    """An autograd.Function around the two graphs; compiled once, applied at every call."""
    metadata = result.metadata
    first_saved = len(metadata.result_requires_grad)
    first_size = first_saved + metadata.saved - metadata.saved_sizes
    inputs_count = len(placeholders(result.forward.gm.graph))
    differentiable = metadata.result_requires_grad
    fit_tangents = tangent_fitter(result)

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            results = forward(list(inputs))
            outputs = tuple(results[:first_saved])
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*results[first_saved:first_size])
            ctx.sizes = results[first_size:]
            ctx.shapes = [value.shape for value in itertools.compress(outputs, differentiable)]
            ctx.mark_non_differentiable(
                *(
                    value
                    for value, flag in zip(outputs, differentiable)
                    if not flag and isinstance(value, torch.Tensor)
                )
            )
            return outputs

        @staticmethod
        def backward(ctx: Any, *tangents: Any) -> Any:
            def compute() -> tuple[Any, ...]:
                for check in metadata.before_backward:
                    check()
                fitted = fit_tangents(itertools.compress(tangents, differentiable), ctx.shapes)
                arguments = [*ctx.saved_tensors, *ctx.sizes, *fitted]
                compat.clear_saved_tensors(ctx)
                gradients: list[Any] = [None] * inputs_count
                for index, gradient in zip(metadata.differentiable_inputs, backward(arguments)):
                    gradients[index] = gradient
                return tuple(gradients)

            if torch.is_grad_enabled():
                return FirstDerivativeOnly.apply(torch.ones((), requires_grad=True), compute)
            return compute()

    return lambda inputs: Compiled.apply(*inputs)


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


def tangent_fitter(result: AotResult) -> Callable[..., list[torch.Tensor]]:
    """Bring incoming gradients into the layout of the backward graph's tangent inputs; zeros for
    missing ones.
    """
    assert result.backward is not None
    inputs = placeholders(result.backward.gm.graph)[result.metadata.saved :]
    values = [node.meta["val"] for node in inputs]
    orders = [stride_order(value) for value in values]

    def fit(tangents: Sequence[Any], shapes: Sequence[Any]) -> list[torch.Tensor]:
        fitted = []
        for tangent, shape, value, order in zip(tangents, shapes, values, orders, strict=True):
            if tangent is None:
                tangent = torch.zeros(shape, dtype=value.dtype, device=value.device)
            fitted.append(dense_in_order(tangent, order))
        return fitted

    return fit


# Around autograd: memory that inputs share, mutated inputs, outputs that the graph doesn't compute --


PLACES = {"input": 0, "input_view": 0, "fresh": 1, "view": 1, "output": 2, "constant": 3}
"""Where an output comes from: inputs, results of the graph, outputs so far, constants."""


def with_epilogue(compute: Call, result: AotResult) -> Call:
    """Add shared memories to the inputs; afterwards change inputs in place, and make the outputs that are
    inputs, views of inputs or of bases, or constants.

    Each output is an element of one of four lists (`PLACES`), or a view of it.
    """
    metadata = result.metadata
    returned, mutated, memories = metadata.returned, metadata.mutated_inputs, metadata.memories
    histories = metadata.result_requires_grad[returned:]
    specs = result.metadata.outputs
    if all(spec.kind == "fresh" for spec in specs) and not mutated and not metadata.relaid:
        return lambda inputs: list(compute(inputs))
    first_size = returned - len(metadata.view_sizes)
    positions = {size: first_size + i for i, size in enumerate(metadata.view_sizes)}
    relaid = [(spec, numbers_of(spec, positions)) for spec in metadata.relaid]
    fresh = itertools.count()
    constants = [spec.value for spec in specs]
    plan = []
    for number, spec in enumerate(specs):
        index = spec.base
        if spec.kind == "fresh":
            index = next(fresh)
        elif spec.kind == "view":
            index += first_size - metadata.bases
        elif spec.kind == "constant":
            index = number
        plan.append(
            (PLACES[spec.kind], index, view_maker(spec, positions) if spec.is_view else None)
        )

    of_inputs = [index for place, index, _ in plan if place == 0]
    used = {*mutated, *of_inputs, *(spec.base for spec in metadata.relaid)}

    def run(inputs: list[Any]) -> Sequence[Any]:
        inputs.extend([shared_memory(inputs, memory) for memory in memories])
        kept = {i: inputs[i] for i in used}
        results = compute(inputs)
        for index, new, history in zip(mutated, results[returned:], histories):
            with torch.set_grad_enabled(history):
                kept[index].copy_(new)
        for spec, numbers in relaid:
            with torch.set_grad_enabled(spec.requires_grad):
                size, stride, offset = numbers(results)
                target = kept[spec.base]
                target.as_strided_(size, stride, target.storage_offset() + offset)
        outputs: list[Any] = []
        places = (kept, results, outputs, constants)
        for place, index, view in plan:
            value = places[place][index]
            outputs.append(value if view is None else view(value, results))
        return outputs

    return run


def shared_memory(inputs: list[Any], memory: SharedMemory) -> torch.Tensor:
    value: torch.Tensor = inputs[memory.of]
    if memory.size is not None:
        return value.detach().as_strided((memory.size,), (1,), 0)
    return value if value._base is None else value._base


def numbers_of(spec: OutputSpec, positions: dict[Any, int]) -> Callable[..., tuple[Any, Any, Any]]:
    """Results of the graph -> size, stride and offset as `spec` describes them. `positions`: where among
    the results the symbolic ones are.
    """
    rank = len(spec.size)
    given = (*spec.size, *spec.stride, spec.offset)

    def numbers(results: Sequence[Any]) -> tuple[Any, Any, Any]:
        found = given
        if positions:
            found = tuple(results[positions[n]] if n in positions else n for n in given)
        return found[:rank], found[rank:-1], found[-1]

    return numbers


def view_maker(spec: OutputSpec, positions: dict[Any, int]) -> Callable[..., torch.Tensor]:
    """(base, results of the graph) -> the view that `spec` describes."""
    numbers = numbers_of(spec, positions)

    conjugate, negative = spec.lazy

    def view(base: torch.Tensor, results: Sequence[Any]) -> torch.Tensor:
        size, stride, offset = numbers(results)
        base = base.detach() if spec.detached else base
        with torch.set_grad_enabled(spec.requires_grad and not spec.cut):
            if spec.dtype is not None:
                same = base.element_size() == spec.dtype.itemsize
                base = base.view(spec.dtype) if same else torch.view_as_real(base)
            made = base.as_strided(size, stride, base.storage_offset() + offset)
            made = made.conj() if conjugate else made
            made = compat.negative_view(made) if negative else made
        if spec.cut:
            with torch.enable_grad():
                made = made.view_as(made)
        if spec.creation is not None and compat.creation_meta(made) != spec.creation:
            compat.set_creation_meta(made, spec.creation)
        return made

    return view
