"""What runs around the two compiled graphs: autograd, mutated inputs, aliases.

    call(inputs) = compiled forward, copy new contents back into inputs, rebuild outputs that are views
    backward     = tangents in the layout the graph was compiled for, compiled backward, gradients by input

The real compiler: torch/_functorch/_aot_autograd/runtime_wrappers.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from minicompile import compat
from minicompile.aot.chain import Link, chained, in_turn, one_by_one, pass_on, split
from minicompile.aot.layout import dense_in_order, stride_order
from minicompile.aot.missing import backwards, sufficient
from minicompile.aot.result import (
    AotResult,
    BoxedCallable,
    Differentiated,
    OutputGroup,
    OutputSpec,
    Part,
    RuntimeMetadata,
    Tangent,
)
from minicompile.compat import any_autocast_enabled, is_view, settings
from minicompile.ops.graph import Graph, copies, placeholders
from minicompile.ops.nodes import bytes_of


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

    `forward` and `backward` run the graphs of `result`, compiled or interpreted; `name` is the user's. All
    results are one part.
    """
    metadata, abouts = result.metadata, list[Differentiated]()
    if result.backward is not None:
        again = all(part.again for part in metadata.parts)
        metadata = replace(metadata, parts=(Part((), (), again),))
        abouts = [differentiated(result.backward, range(metadata.saved), interpret)]
    return assemble(metadata, forward, [] if backward is None else [backward], abouts, name)


def differentiated(
    graph: Graph, takes: Sequence[int], compiled: Callable[[Graph], BoxedCallable]
) -> Differentiated:
    """What is around a part's backward graph; `compiled` makes a piece of it run."""
    saved = len(takes)
    expected = placeholders(graph.gm.graph)[saved:]
    values = [node.meta["val"] for node in expected]
    tangents = [
        Tangent(value.dtype, value.device, stride_order(value), bytes_of(node))
        for value, node in zip(values, expected, strict=True)
    ]
    without = backwards(lambda: graph, saved, compiled, interpret)
    return Differentiated(takes, tangents, sufficient(graph, saved), without)


def assemble(
    metadata: RuntimeMetadata,
    forward: BoxedCallable,
    backwards: Sequence[BoxedCallable],
    abouts: Sequence[Differentiated],
    name: str,
) -> BoxedCallable:
    """`make_callable` from what it needs of the graphs: the forward's, and each part's backward."""
    if not backwards:
        compute = inference_call(forward)
    elif len(backwards) == 1:
        compute = training_call(metadata, abouts[0], forward, backwards[0], name)
    else:
        compute = call_of_parts(metadata, abouts, forward, backwards, name)
    call = with_epilogue(compute, metadata)

    def run(inputs: list[Any]) -> Sequence[Any]:
        return without_casts(call, inputs) if any_autocast_enabled() else call(inputs)

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
    about: Differentiated,
    forward: BoxedCallable,
    backward: BoxedCallable,
    name: str,
) -> BoxedCallable:
    """An autograd.Function around the two graphs; compiled once, applied at every call.

    Inputs reach it in their list, so that the forward can let go of them; those that get a gradient are
    arguments as well. Large tangents, which the engine would hold, are taken from it by a hook.
    """
    first_saved = len(metadata.result_requires_grad)
    first_size = first_saved + metadata.saved - metadata.saved_sizes
    wanted, differentiable = metadata.differentiable_inputs, metadata.result_requires_grad
    several = sum(differentiable) > 1
    constant = [] if all(differentiable) else [not flag for flag in differentiable]
    large = sum(tangent.bytes for tangent in about.tangents) >= LARGE
    nothing = (None,) * (len(differentiable) + 1)
    owned = getattr(forward, "owned", False)
    groups = getattr(backward, "groups", ())
    whole = [replace(group, read_later=()) for group in groups]
    device = next((t.device for t in about.tangents if t.device.type != "cpu"), torch.device("cpu"))

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: list[Any], *_: torch.Tensor) -> Any:
            results = forward(inputs)
            anchor = compat.empty_strided_cpu((0,), (1,), torch.float32)
            ctx.set_materialize_grads(False)
            saved = results[first_saved:first_size]
            saved = no_results(saved, results[:first_saved]) if several else saved
            ctx.strides = (
                [v.stride() for v in saved] if compat.top_saved_tensors_hooks(True) else ()
            )
            ctx.save_for_backward(anchor, *saved)
            ctx.sizes = results[first_size:]
            if large:
                ctx.taken = taken = {}

                def take(tangents: tuple[Any, ...]) -> tuple[None, ...]:
                    taken[threading.get_ident()] = tangents
                    return nothing

                ctx.register_prehook(take)
            outputs = results[:first_saved] if owned else owners(results[:first_saved])
            ctx.shapes = [value.shape for value in itertools.compress(outputs, differentiable)]
            if constant:
                apart = filter(torch.is_tensor, itertools.compress(outputs, constant))
                ctx.mark_non_differentiable(*apart)
            return *outputs, anchor

        @staticmethod
        def backward(ctx: Any, *passed: Any) -> Any:
            tangents = ctx.taken.pop(threading.get_ident()) if large else passed
            given = list(itertools.compress(tangents, differentiable))

            def in_groups() -> Iterator[Sequence[Any]]:
                run, arguments, absent = prepared(ctx, given, metadata, about, backward)
                parts = in_turn(without_casts, run, arguments, groups if run is backward else whole)
                return map(present, parts, groups, itertools.repeat(absent))

            def compute() -> tuple[Any, ...]:
                if groups:
                    return None, *itertools.chain(*in_groups())
                run, arguments, _ = prepared(ctx, given, metadata, about, backward)
                return None, *(without_casts(run, arguments) if wanted else (None,))

            if torch.is_grad_enabled():
                every = FirstDerivativeOnly.apply(name, compute, ctx.saved_tensors[0], *tangents)
                return every if not groups else (None, *pass_on(split(every[1:], groups), device))
            del tangents
            return compute() if not groups else (None, *pass_on(in_groups(), device))

    apply = compat.direct_apply(Compiled)
    if groups:
        places = [[wanted[i] for i in group.outputs] for group in groups]
        return chained(apply, places, device, compat.direct_apply(Link))
    if not wanted:  # results require grad all the same
        return lambda inputs: apply(inputs, torch.empty(0, requires_grad=True))[:-1]
    return lambda inputs: apply(inputs, *[inputs[i] for i in wanted])[:-1]


def call_of_parts(
    metadata: RuntimeMetadata,
    abouts: Sequence[Differentiated],
    forward: BoxedCallable,
    backwards: Sequence[BoxedCallable],
    name: str,
) -> BoxedCallable:
    """The forward as without autograd; then each part's results get a node that takes them as they are."""
    flags = metadata.result_requires_grad
    first_saved, first_size = len(flags), metadata.saved - metadata.saved_sizes
    differentiable, wanted = (
        list(itertools.compress(itertools.count(), flags)),
        metadata.differentiable_inputs,
    )
    plan = []
    for part, about, backward in zip(metadata.parts, abouts, backwards, strict=True):
        own = replace(
            metadata,
            parts=(part,),
            result_requires_grad=(True,) * len(part.results),
            differentiable_inputs=tuple(range(len(part.inputs))),
            saved=len(about.takes),
            saved_sizes=sum(i >= first_size for i in about.takes),
        )
        call = training_call(own, about, after(len(part.inputs)), backward, name)
        results = [differentiable[i] for i in part.results]
        plan.append(([wanted[i] for i in part.inputs], results, about.takes, call))
    compute = inference_call(forward)

    def run(inputs: list[Any]) -> Sequence[Any]:
        given = [[inputs[i] for i in numbers] for numbers, *_ in plan]
        values = compute(inputs)
        outputs, saved = list(values[:first_saved]), list(values[first_saved:])
        saved[:first_size] = no_results(saved[:first_size], outputs)
        for (_, results, takes, call), own in zip(plan, given, strict=True):
            own += [outputs[i] for i in results]
            own += [saved[i] for i in takes]
            for i, result in zip(results, call(own), strict=True):
                outputs[i] = result
        return outputs

    return run


def after(number: int) -> BoxedCallable:
    """The forward of a part, whose results are there, behind so many inputs."""

    def run(values: list[Any]) -> Sequence[Any]:
        found = values[number:]
        values.clear()
        return found

    run.owned = True  # type: ignore[attr-defined]
    return run


def prepared(
    ctx: Any,
    given: list[torch.Tensor | None],
    metadata: RuntimeMetadata,
    about: Differentiated,
    backward: BoxedCallable,
) -> tuple[Callable[..., Any], list[Any], Collection[int]]:
    """What computes the gradients for these tangents (the list is emptied), what it takes, and which of them
    there are none of. Saved tensors that only missing tangents need aren't looked at: they may be written to,
    as in eager. (Where gradients come out in groups, all is computed, with zeros for missing tangents.)"""
    for check in metadata.before_backward:
        check()
    missing = frozenset(i for i, tangent in enumerate(given) if tangent is None)
    if not missing.issuperset(about.sufficient):
        missing = frozenset()
    kernels = all(tangent is None or compat.has_storage(tangent) for tangent in given)
    groups, strides, arguments = getattr(backward, "groups", ()), ctx.strides, list[Any]()
    run, absent = backward, frozenset[int]()
    tensors = metadata.saved - metadata.saved_sizes
    if kernels and (groups or not missing):
        if tensors or not metadata.parts[0].again:
            arguments += ctx.saved_tensors[1:]
        arguments[: len(strides)] = map(with_strides, arguments, strides)
        arguments += ctx.sizes
        arguments += map(fit_tangent, given, ctx.shapes, about.tangents)
        absent = about.without(missing, False)[2] if missing else absent
    else:  # under vmap operators know what to do
        run, takes, absent = about.without(missing, kernels)
        run = one_by_one(run, groups) if groups else run
        wanted = [i + 1 for i in takes if i < tensors]
        used = wanted or not metadata.parts[0].again  # then eager would refuse a second backward
        saved = compat.saved_tensors(ctx, wanted) if used else {}
        for i in takes:
            number, size = i - metadata.saved, i - tensors
            if size < 0:
                value = saved[i + 1]
                arguments.append(with_strides(value, strides[i]) if strides else value)
            elif number < 0:
                arguments.append(ctx.sizes[size])
            else:
                about_it = ctx.shapes[number], about.tangents[number]
                arguments.append(fit_tangent(given[number], *about_it))
    given.clear()
    compat.clear_saved_tensors(ctx)
    return run, arguments, absent


def present(gradients: Sequence[Any], group: OutputGroup, absent: Collection[int]) -> Sequence[Any]:
    """A group's gradients, None for those that are in `absent`."""
    if not absent:
        return gradients
    return [None if i in absent else one for one, i in zip(gradients, group.outputs)]


def no_results(saved: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """What to save where a node's own results are among it: torch hands those out with all others only."""
    own = set(map(id, results))
    return [value.detach() if id(value) in own else value for value in saved]


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


LARGE = 1 << 20
"""Bytes of tangents from which on it pays to let go of them when they are used."""


def fit_tangent(tangent: torch.Tensor | None, shape: Any, expected: Tangent) -> torch.Tensor:
    """An incoming gradient in the layout of the backward graph's input; zeros for a missing one."""
    if tangent is None:
        tangent = torch.zeros(shape, dtype=expected.dtype, device=expected.device)
    elif tangent.layout is not torch.strided:  # of a sparse embedding
        tangent = tangent.to_dense()
    return dense_in_order(tangent, expected.order)


def with_strides(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A saved tensor as it was before the user's hooks, which may have copied it into rows."""
    if value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(
        value
    )


def owners(values: Sequence[Any]) -> list[Any]:
    """Results that callers may write to: views made here, outside of autograd, they could not."""
    return [v.detach() if isinstance(v, torch.Tensor) and is_view(v) else v for v in values]


# Around autograd: mutated inputs, outputs that the graph doesn't compute ---------------------------


PLACES = {"input": 0, "input_view": 0, "fresh": 1, "base": 1, "view": 1, "output": 2}
"""Where an output comes from: inputs, results of the graph, outputs so far."""


def with_epilogue(compute: BoxedCallable, metadata: RuntimeMetadata) -> BoxedCallable:
    """Afterwards write new contents into inputs, and make the outputs that are inputs, views of inputs or of
    bases, or constants.

    Each output is constant, an element of one of three lists (`PLACES`), or a view of it.
    """
    returned, mutated, specs = metadata.returned, metadata.mutated_inputs, metadata.outputs
    histories = metadata.result_requires_grad[returned:]
    if all(spec.kind == "fresh" for spec in specs) and not mutated:
        return compute
    first_size = returned - len(metadata.view_sizes)
    positions = {size: first_size + i for i, size in enumerate(metadata.view_sizes)}
    fresh = itertools.count()
    constants = [spec.value for spec in specs]
    plan = []
    for number, spec in enumerate(specs):
        if spec.kind == "constant":
            continue
        index = next(fresh) if spec.kind == "fresh" else spec.base
        if spec.kind in ("base", "view"):
            index += first_size - metadata.bases
        view = view_maker(spec, positions) if spec.is_view else None
        plan.append((number, PLACES[spec.kind], index, view))
    plan.sort(key=lambda step: step[1])  # an output that is another one comes last
    used = {*mutated, *(index for _, place, index, _ in plan if place == 0)}

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


def view_maker(spec: OutputSpec, positions: dict[Any, int]) -> Callable[..., torch.Tensor]:
    """Return a function of (base, results of the graph) that makes the view which `spec` describes.

    `positions`: where among the results the symbolic sizes, strides and offsets are.
    """
    rank, numbers = len(spec.size), spec.numbers

    def view(base: torch.Tensor, results: Sequence[Any]) -> torch.Tensor:
        found: Sequence[Any] = numbers
        if positions:
            found = [results[positions[n]] if n in positions else n for n in numbers]
        creation = spec.creation
        if creation == compat.VIEW_AS_USUAL and compat.is_view(base):
            creation = compat.creation_meta(base)
        with torch.set_grad_enabled(spec.requires_grad):
            made = base.as_strided(found[:rank], found[rank:-1], base.storage_offset() + found[-1])
            made = made.detach() if spec.detached else made
        # in inference mode torch notes that on views, or the view is none to autograd
        plain = compat.is_view(made) and not torch.is_inference_mode_enabled()
        if creation is not None and plain and compat.creation_meta(made) != creation:
            compat.set_creation_meta(made, creation)
        return made

    return view
