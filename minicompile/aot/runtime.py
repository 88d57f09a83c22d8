"""What runs around the two compiled graphs: autograd, mutated inputs, aliases.

    call(inputs) = compiled forward, copy new contents back into inputs, rebuild outputs that are views
    backward     = tangents in the layout the graph was compiled for, compiled backward, gradients by input

The real compiler: torch/_functorch/_aot_autograd/runtime_wrappers.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import torch

from minicompile import compat
from minicompile.aot.layout import dense_in_order
from minicompile.aot.missing import without
from minicompile.aot.result import (
    AotResult,
    BoxedCallable,
    OutputSpec,
    RuntimeMetadata,
    Tangent,
)
from minicompile.compat import any_autocast_enabled, is_view, settings
from minicompile.ops.graph import Graph, copies, placeholders


def interpret(graph: Graph) -> BoxedCallable:
    """Run an ATen graph with eager's operators, one by one; every value dies after its last use. What lies
    otherwise in eager than in the graph is copied where that views it."""
    made, _ = copies(graph.gm.graph)
    aten, prims = torch.ops.aten, torch.ops.prims
    for node in made.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    # which says of a result that it requires grad, also where nothing is differentiated
    for node in made.find_nodes(op="call_function", target=prims.convert_element_type.default):
        node.args, node.kwargs = node.args[:1], {"dtype": node.args[1]}
        node.target = aten._to_copy.default
    return compat.boxed_function(compat.graph_module(graph.gm, made, graph.name))


# The callable ------------------------------------------------------------------------------------


def make_callable(
    result: AotResult, forward: BoxedCallable, backward: BoxedCallable | None, name: str = "it"
) -> BoxedCallable:
    """The function of the captured graph: takes a list of its inputs (emptied), gives its outputs.

    `forward` and `backward` run the graphs of `result`, compiled or interpreted; `name` is the user's.
    """
    return assemble(result.metadata, forward, backward, lambda: result.backward, name)


def assemble(
    metadata: RuntimeMetadata,
    forward: BoxedCallable,
    backward: BoxedCallable | None,
    graph: Callable[[], Graph | None],
    name: str,
) -> BoxedCallable:
    """`make_callable` from what it needs of its result; `graph` gives the backward graph, seldom needed."""
    if backward is None:
        compute = inference_call(forward)
    else:
        compute = training_call(metadata, forward, backward, graph, name)
    call = with_epilogue(compute, metadata)

    def run(inputs: list[Any]) -> Sequence[Any]:
        return without_casts(call, inputs)

    return run


def without_casts(call: BoxedCallable, inputs: list[Any]) -> Sequence[Any]:
    """A graph already has the casts that autocast asked for."""
    if any_autocast_enabled():
        with compat.without_autocast():
            return call(inputs)
    return call(inputs)


def inference_call(forward: BoxedCallable) -> BoxedCallable:
    """Without autograd."""
    owned = getattr(forward, "owned", False)

    def run(inputs: list[Any]) -> Sequence[Any]:
        before = torch.is_grad_enabled()
        if before:
            settings.set_grad_enabled(False)  # `torch.no_grad()` takes eight times as long
        try:
            results = forward(inputs)
            return results if owned else owners(results)
        finally:
            if before:
                settings.set_grad_enabled(True)

    return run


def training_call(
    metadata: RuntimeMetadata,
    forward: BoxedCallable,
    backward: BoxedCallable,
    graph: Callable[[], Graph | None],
    name: str,
) -> BoxedCallable:
    """An autograd.Function around the two graphs; compiled once, applied at every call.

    Inputs reach it in their list, so that the forward can let go of them; those that get a gradient are
    arguments as well.
    """
    first_saved = len(metadata.result_requires_grad)
    first_size = first_saved + metadata.saved - metadata.saved_sizes
    wanted, differentiable = metadata.differentiable_inputs, metadata.result_requires_grad
    constant = [] if all(differentiable) else [not flag for flag in differentiable]
    owned = getattr(forward, "owned", False)

    @cache
    def interpreted(missing: frozenset[int]) -> tuple[BoxedCallable, tuple[int, ...]]:
        """The backward without these tangents, and which saved tensors it reads."""
        whole = graph()
        assert whole is not None
        reduced = without(whole, metadata.saved, missing, metadata.reached_from)
        read = enumerate(placeholders(reduced.gm.graph)[: first_size - first_saved])
        return interpret(reduced), tuple(i for i, node in read if node.users)

    def gradients(ctx: Any, given: list[torch.Tensor | None]) -> Sequence[Any]:
        """The gradients for these tangents; the list is emptied."""
        for check in metadata.before_backward:
            check()
        missing = frozenset(i for i, tangent in enumerate(given) if tangent is None)
        run, takes = backward, None
        apart = bool(missing) and missing.issuperset(metadata.sufficient)
        # under vmap operators know what to do
        if apart or not all(x is None or compat.has_storage(x) for x in given):
            run, takes = interpreted(missing)
        arguments = saved_values(ctx, first_size - first_saved, takes, apart)
        arguments[: len(ctx.strides)] = map(with_strides, arguments, ctx.strides)
        arguments += [*ctx.sizes, *map(fit_tangent, given, ctx.shapes, metadata.tangents)]
        given.clear()
        compat.clear_saved_tensors(ctx)
        computed = without_casts(run, arguments)
        if not missing:
            return computed
        reached = (not missing.issuperset(tangents) for tangents in metadata.reached_from)
        return [value if there else None for value, there in zip(computed, reached)]

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: list[Any], *_: torch.Tensor) -> Any:
            results = forward(inputs)
            anchor = compat.empty_strided_cpu((0,), (1,), torch.float32)
            ctx.set_materialize_grads(False)
            saved = results[first_saved:first_size]
            ctx.strides = (
                [v.stride() for v in saved] if compat.top_saved_tensors_hooks(True) else ()
            )
            # an output that is saved as itself can't be unpacked alone
            returned_ids = set(map(id, results[:first_saved]))
            saved = [x.detach() if id(x) in returned_ids else x for x in saved]
            ctx.save_for_backward(anchor, *saved)
            ctx.sizes = results[first_size:]
            outputs = results[:first_saved] if owned else owners(results[:first_saved])
            ctx.shapes = [value.shape for value in itertools.compress(outputs, differentiable)]
            if constant:
                apart = filter(torch.is_tensor, itertools.compress(outputs, constant))
                ctx.mark_non_differentiable(*apart)
            return *outputs, anchor

        @staticmethod
        def backward(ctx: Any, *tangents: Any) -> Any:
            given = list(itertools.compress(tangents, differentiable))

            def compute() -> tuple[Any, ...]:
                return None, *gradients(ctx, given)

            if torch.is_grad_enabled():
                return FirstDerivativeOnly.apply(name, compute, ctx.saved_tensors[0], *tangents)
            del tangents
            return compute()

    apply = compat.direct_apply(Compiled)
    return lambda inputs: apply(inputs, *[inputs[i] for i in wanted])[:-1]


class FirstDerivativeOnly(torch.autograd.Function):
    """Gradients made with `create_graph=True`: they may be used, but not differentiated again.

    They depend on the tangents and, through an output of the forward, on all of its inputs: so every way to
    differentiate them comes here, even where a second-order term goes through saved tensors alone.
    """

    @staticmethod
    def forward(ctx: Any, name: str, compute: Callable[[], tuple[Any, ...]], *_: Any) -> Any:
        ctx.name = name
        return compute()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"second derivatives of a compiled function are not supported: the backward pass of "
            f"{ctx.name} is compiled and has no graph of its own; differentiate twice without mc.compile"
        )


def saved_values(ctx: Any, count: int, takes: Collection[int] | None, later: bool) -> list[Any]:
    """The saved tensors that are read: those that `takes` lists, or all. In eager each result has a history of its own: `later`, when another
    one may be differentiated, the rest is there still. Raises RuntimeError if one was written to since."""
    kept: dict[int, tuple[torch.Tensor, int]] | None = getattr(ctx, "kept", None)
    if takes is None:
        if kept is None:
            return [*ctx.saved_tensors[1:]] if count else []
        takes = range(count)
    if kept is not None:
        if any(i not in kept or kept[i][0]._version != kept[i][1] for i in takes):
            raise RuntimeError("a tensor that was saved for the backward was written to since")
        return [kept[i][0] if i in takes else None for i in range(count)]
    saved = compat.saved_tensors(ctx, [i + 1 for i in takes])
    if later:
        ctx.kept = {}
        for i in range(count):
            with contextlib.suppress(RuntimeError):
                value = compat.saved_tensors(ctx, [i + 1])[i + 1]
                ctx.kept[i] = value.detach(), value._version
    return [saved.get(i + 1) for i in range(count)]


def fit_tangent(tangent: torch.Tensor | None, shape: Any, expected: Tangent) -> torch.Tensor:
    """An incoming gradient in the layout of the backward graph's input; zeros for a missing one."""
    if tangent is None:
        tangent = torch.zeros(shape, dtype=expected.dtype, device=expected.device)
    elif tangent.layout is not torch.strided:  # of a sparse embedding
        tangent = tangent.to_dense()
    return dense_in_order(tangent, list(expected.order))


def with_strides(value: Any, strides: tuple[int, ...]) -> Any:
    """A saved tensor as it was before the user's hooks, which may have copied it into rows."""
    if value is None or value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(
        value
    )


def owners(values: Sequence[Any]) -> list[Any]:
    """Results that callers may write to: views made here, outside of autograd, they could not."""
    return [v.detach() if isinstance(v, torch.Tensor) and is_view(v) else v for v in values]


# Around autograd: mutated inputs, outputs that the graph doesn't compute ---------------------------


def with_epilogue(compute: BoxedCallable, metadata: RuntimeMetadata) -> BoxedCallable:
    """Afterwards write new contents into inputs, and gather the outputs: constants, elements of three lists
    (inputs, results of the graph, outputs so far), and views of these."""
    returned, mutated, specs = metadata.returned, metadata.mutated_inputs, metadata.outputs
    histories = metadata.result_requires_grad[returned:]
    if all(spec.kind == "result" and not spec.is_view for spec in specs) and not mutated:
        return compute
    positions = {size: metadata.results + i for i, size in enumerate(metadata.view_sizes)}
    constants = [spec.value for spec in specs]
    lists = ("input", "result", "output")
    plan = [
        (number, lists.index(spec.kind), spec.base, view_maker(spec, positions))
        for number, spec in enumerate(specs)
        if spec.kind != "constant"
    ]
    plan.sort(key=lambda step: step[1])  # an output that is another one comes last
    used = {*mutated, *(spec.base for spec in specs if spec.kind == "input")}

    def run(inputs: list[Any]) -> Sequence[Any]:
        kept = {i: inputs[i] for i in used}
        results = compute(inputs)
        for index, new, differentiable in zip(mutated, results[returned:], histories):
            with torch.set_grad_enabled(differentiable):
                kept[index].copy_(new)
        outputs = list(constants)
        places = (kept, results, outputs)
        for number, place, index, view in plan:
            value = places[place][index]
            outputs[number] = value if view is None else view(value, results)
        return outputs

    return run


def view_maker(spec: OutputSpec, positions: dict[Any, int]) -> Callable[..., torch.Tensor] | None:
    """Return a function of (base, results of the graph) that makes the view which `spec` describes, if it
    does.

    `positions`: where among the results the symbolic sizes, strides and offsets are.
    """
    if not spec.is_view:
        return None
    rank, numbers = len(spec.stride), spec.numbers

    def make(base: torch.Tensor, results: Sequence[Any]) -> torch.Tensor:
        found: Sequence[Any] = numbers
        if positions:
            found = [results[positions[n]] if n in positions else n for n in numbers]
        # a view without a history, of a tensor with one, was made without grad mode
        with torch.set_grad_enabled(spec.requires_grad or not base.requires_grad):
            view = base.as_strided(found[:rank], found[rank:-1], base.storage_offset() + found[-1])
            return view.detach() if spec.detached else view

    return make
