"""Run a captured graph on fakes, forward and (when training) backward, and record the ATen operators.

The result still has views and in-place operators; `functionalize` removes them.

The real compiler: torch/_functorch/_aot_autograd/collect_metadata_analysis.py, graph_capture.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx
from torch.autograd.graph import GradientEdge, increment_version

from minicompile import compat
from minicompile.aot.admit import (
    admit_call,
    admit_inputs,
    admit_no_training,
    admit_operator,
    refusing,
)
from minicompile.aot.layout import empty_dense, empty_like_layout
from minicompile.aot.missing import results_that_reach
from minicompile.aot.outputs import classify, history
from minicompile.aot.result import RuntimeMetadata
from minicompile.aot.tracer import Tracer
from minicompile.compat import settings
from minicompile.errors import Unsupported
from minicompile.ops.graph import origins_of, placeholders, user_line
from minicompile.ops.nodes import aten_ops, is_inplace_view, writes
from minicompile.ops.origin import NO_ORIGINS, Origins
from minicompile.ops.registry import Registry
from minicompile.ops.writes import written_arguments
from minicompile.shapes.symnode import hint

around_trace: Registry[Callable[[], contextlib.AbstractContextManager[None]]] = Registry(
    "around_trace", "name -> a context in which graphs are traced for training"
)

FACTORIES = aten_ops("zeros_like ones_like full_like new_zeros new_ones new_full")
"""Operators that read of a tensor how it lies in memory, and no element."""


class JointTracer(Tracer):
    """Records live tensors (with their autograd history), and follows origins into the backward pass."""

    def __init__(self, mode: Any) -> None:
        super().__init__(mode)
        self.phase = "forward"
        self.hooks: dict[object, list[Any]] = {}
        """Autograd node -> the handles of the hooks that tell when it runs."""
        self.written: set[int] = set()
        """Ids of the storages that operators wrote to."""
        self.running = NO_ORIGINS
        """Origins of the autograd node whose backward runs, or ran last: the engine adds what it sent to
        other gradients."""
        self.after_tangents: set[fx.Node] = set()
        """The tangents, where there are several, and what is computed from them."""

    def bind(self, value: Any, node: fx.Node) -> Any:
        """A snapshot becomes the node's value, since in-place views change a tensor's shape later.

        The tensor that an in-place operator returns keeps the node it has.
        """
        reads = getattr(node.target, "overloadpacket", None) not in FACTORIES
        if reads and not self.after_tangents.isdisjoint(node.all_input_nodes):
            self.after_tangents.add(node)
        if not isinstance(value, torch.Tensor):
            return super().bind(value, node)
        if not self.knows(value) or is_inplace_view(node.target):
            super().bind(value, node)
        node.meta["storage"] = compat.storage_id(value)
        node.meta["val"] = snapshot = empty_like_layout(self.mode, value)
        return snapshot

    def record(self, func: Any, args: Any, kwargs: Any, value: Any) -> Any:
        admit_operator(func, args, self)
        if writes(func):
            changed = written_arguments(func, args, kwargs)
            tensors = [x for x in compat.tree_leaves(changed) if isinstance(x, torch.Tensor)]
            self.written.update(map(compat.storage_id, tensors))
            if any(isinstance(value, list | tuple) for value in changed):
                increment_version(tensors)  # which autograd doesn't do for lists of fakes
        if self.phase == "backward":
            self.origins = self.running
        return super().record(func, args, kwargs, value)

    def remember_autograd(self, values: Any, origins: Origins) -> None:
        """The autograd nodes that were made since the last call came from `origins`."""
        enter = partial(self.enter, origins)
        found = [history(value) for value in compat.tree_leaves(values)]
        while found:
            node = found.pop()
            if node is not None and node not in self.hooks:
                self.hooks[node] = [node.register_prehook(enter), node.register_hook(self.leave)]
                found.extend(following for following, _ in node.next_functions)

    def enter(self, origins: Origins, gradients: Any) -> None:
        self.running = origins

    def leave(self, gradients: Any, *_: Any) -> None:
        sent = {self.argument(x) for x in gradients if x is not None and hint(x.numel())}
        if self.after_tangents and not sent <= self.after_tangents:
            # of several results, which may not all be differentiated
            raise Unsupported("a gradient is not computed from the gradient of a result")

    def forget_autograd(self) -> None:
        for handles in self.hooks.values():
            for handle in handles:
                handle.remove()
        self.hooks.clear()


@torch.inference_mode(False)  # in which views have no base
def trace(
    gm: fx.GraphModule, fakes: list[Any], mode: Any, *, training: bool
) -> tuple[fx.GraphModule, RuntimeMetadata]:
    """Record the captured graph `gm` on inputs like `fakes`; with its backward pass when training.

    The ATen graph takes the inputs, then tangents, and returns ((results...), (gradients...)). Its nodes
    carry `meta["storage"]`: equal for values that share memory.
    """
    admit_inputs(fakes)
    if not training and any(map(requires_grad, fakes)):
        admit_no_training(gm)
    tracer = JointTracer(mode)
    inputs = stand_ins(fakes, mode, training)
    for node, value in zip(placeholders(gm.graph), inputs, strict=True):
        tracer.origins = origins_of(node)
        tracer.placeholder(str(node.target), value)
    tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    # where the gradient of an input goes: writing to it in place gives it another history
    wanted = {
        i: x if x.grad_fn is None else GradientEdge(x.grad_fn, x.output_nr)
        for i, x in tensors.items()
        if x.requires_grad
    }
    try:
        with (
            settings.restored_modes(),  # a graph that ends inside of a block leaves its mode
            tracer.active(),
            contextlib.ExitStack() as around,
            torch.set_grad_enabled(training),
            torch.autograd.set_multithreading_enabled(False),
        ):
            for context in around_trace.values() if training else ():
                around.enter_context(context())
            before = {i: history(x) for i, x in tensors.items()}
            outputs = run_captured(gm, tracer, inputs)
            with refusing("what the graph leaves", None):
                specs, results = classify(outputs, tensors, tracer)
            numbers = (n for spec in specs for n in spec.numbers)
            symbolic = dict.fromkeys(n for n in numbers if isinstance(n, sympy.Expr))
            written = {i: x for i, x in tensors.items() if compat.storage_id(x) in tracer.written}
            updated = {i: new_contents(x, before[i]) for i, x in written.items()}
            sizes = [tracer.sizes.env.number(expr) for expr in symbolic]
            returned = [*results, *sizes, *updated.values()]
            differentiable = [value for value in returned if requires_grad(value)]
            reached = results_that_reach(differentiable, wanted)
            edges = list(wanted.values())
            given = run_backward(differentiable, edges, tracer) if training else []
            gradients = dict(zip(wanted, given))
    finally:
        tracer.forget_autograd()
    flags = tuple(map(requires_grad, returned))
    # autograd goes on to those inputs alone that eager's would reach: another's graph may be used up
    gradients = {i: x for i, x in gradients.items() if x is not None}
    if any(flags) and not gradients:
        raise Unsupported("results require grad, but no input gets a gradient")
    checks = (getattr(node.target, "check", None) for node in gm.graph.nodes)
    metadata = RuntimeMetadata(
        tuple(specs),
        mutated_inputs=tuple(updated),
        before_backward=tuple(filter(None, checks)),
        differentiable_inputs=tuple(gradients),
        results=len(results),
        view_sizes=tuple(symbolic),
        trains=any(flags),
        result_requires_grad=flags,
        reached_from=tuple(map(reached.__getitem__, gradients)),
    )
    found = tuple(returned), tuple(gradients.values())
    return tracer.finish(found, metadata.graph_name), metadata


def new_contents(value: torch.Tensor, before: Any) -> torch.Tensor:
    """Return the new contents of an input that was written to, with its autograd history if that changed."""
    return value.detach() if history(value) is before else value


def requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def run_captured(gm: fx.GraphModule, tracer: JointTracer, inputs: list[Any]) -> Any:
    """Call a captured graph node by node; grad-mode switches inside it act as they do in eager."""
    values = dict(zip(placeholders(gm.graph), inputs, strict=True))
    for node in gm.graph.nodes:
        tracer.origins = origins_of(node)
        tracer.region = node.name if getattr(node.target, "recomputed", False) else None
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return args[0]
        if node.op == "get_attr":
            values[node] = getattr(gm, node.target)
        elif node not in values:
            read = [values[used] for used in node.all_input_nodes]
            with refusing(str(node.target), user_line(node)):
                admit_call(str(node.target), read)
                function = node.target
                if node.op == "call_method":
                    function, args = getattr(args[0], node.target), args[1:]
                values[node] = function(*args, **kwargs)
            tracer.remember_autograd((values[node], read), tracer.origins)
    raise AssertionError("the graph returns nothing")


def run_backward(results: list[Any], wanted: list[Any], tracer: JointTracer) -> list[Any]:
    """Differentiate the results that require grad; the gradient of each input (or `GradientEdge`) that is
    wanted, None where there is none."""
    if not results or not wanted:
        return []
    tangents = []
    tracer.phase, tracer.region = "backward", None
    for index, result in enumerate(results):
        tracer.origins = origins_of(tracer.argument(result))
        tangent = empty_dense(tracer.mode, result)
        tangents.append(tracer.placeholder(f"tangents_{index}", tangent))
    if len(results) > 1:
        tracer.after_tangents.update(map(tracer.argument, tangents))
    # loss.backward() belongs outside of autocast
    with refusing("the backward pass", None), compat.without_autocast():
        gradients = torch.autograd.grad(results, wanted, tangents, allow_unused=True)
    tracer.origins = NO_ORIGINS
    return list(gradients)


def stand_ins(fakes: list[Any], mode: Any, training: bool) -> list[Any]:
    """Return fakes to trace with, which the graph may write to: what is computed from something that requires
    grad still is. No two share memory: a graph doesn't write to memory that inputs share."""
    inputs: list[Any] = []
    for value in fakes:
        if not isinstance(value, torch.Tensor):
            inputs.append(value)
            continue
        made = empty_like_layout(mode, value)
        differentiable = training and value.requires_grad
        if differentiable and not value.is_leaf:
            # it may be written to, which gives it another history
            source = compat.new_fake(mode, (), (), value.dtype, value.device)
            made.copy_(source.requires_grad_())
        elif differentiable and compat.is_view(value):
            made = torch.ops.aten.alias(made)  # its views under no_grad require no grad
        inputs.append(made.requires_grad_(differentiable))
    return inputs
