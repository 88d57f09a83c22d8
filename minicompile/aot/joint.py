"""Run a captured graph on fakes, forward and (when training) backward, and record the ATen operators.

The result still has views and in-place operators; `functionalize` removes them.

The real compiler: torch/_functorch/_aot_autograd/collect_metadata_analysis.py, graph_capture.py.
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter
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
    admit_operator,
    admit_write,
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
        self.inputs: list[int] = []
        """Ids of the inputs' storages."""
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
        admit_operator(func, args, self.inputs)
        if writes(func):
            changed = written_arguments(func, args, kwargs)
            tensors = [x for x in compat.tree_leaves(changed) if isinstance(x, torch.Tensor)]
            self.written.update(map(compat.storage_id, tensors))
            several = any(isinstance(value, list | tuple) for value in changed)
            if several:
                increment_version(tensors)  # which autograd doesn't do for lists of fakes
            read = [] if several else compat.tree_leaves((args, kwargs))
            admit_write(func, tensors, read, self.inputs)
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
    tracer = JointTracer(mode)
    inputs = stand_ins(fakes, mode, training)
    for node, value in zip(placeholders(gm.graph), inputs, strict=True):
        tracer.origins = origins_of(node)
        tracer.placeholder(str(node.target), value)
    tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    tracer.inputs = [compat.storage_id(x) for x in tensors.values()]
    # where the gradient of an input goes: writing to it in place gives it another history
    wanted = {
        i: x if x.grad_fn is None else GradientEdge(x.grad_fn, x.output_nr)
        for i, x in tensors.items()
        if x.requires_grad
    }
    lost = not training and any(map(requires_grad, fakes))
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
            of_input = {tracer.argument(x): i for i, x in tensors.items()}
            outputs = CapturedRun(gm, tracer, lost).run(*inputs)
            with refusing("what the graph leaves", None):
                specs, results = classify(outputs, inputs, of_input, tracer)
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


class CapturedRun(fx.Interpreter):
    """Calls a captured graph node by node; grad-mode switches inside it act as they do in eager.

    `lost`: inputs require grad, but no gradients are traced.
    """

    def __init__(self, gm: fx.GraphModule, tracer: JointTracer, lost: bool) -> None:
        super().__init__(gm)
        self.lost = lost
        self.extra_traceback = False
        self.tracer = tracer

    def run(self, *args: Any, **_: Any) -> Any:
        """As fx does, but for its progress bar, whose lock a process may be forked under: that would wait for
        ever."""
        self.env, self.args_iter = {}, iter(args)
        for node in self.graph.nodes:
            result = self.env[node] = self.run_node(node)
            for last in self.user_to_last_uses.get(node, ()):
                del self.env[last]
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, types.MethodDescriptorType):
            return self.call_method(target.__name__, args, kwargs)
        return super().call_function(target, args, kwargs)

    def run_node(self, node: fx.Node) -> Any:
        self.tracer.origins = origins_of(node)
        self.tracer.region = node.name if getattr(node.target, "recomputed", False) else None
        read = [self.env[used] for used in node.all_input_nodes]
        if self.lost and node.target is settings.set_grad_enabled and node.args[0]:
            raise Unsupported("grad mode is enabled where the caller disabled it", user_line(node))
        with refusing(str(node.target), user_line(node)):
            admit_call(str(node.target), read)
            value = super().run_node(node)
        self.tracer.remember_autograd((value, read), self.tracer.origins)
        return value


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
    """Return fakes to trace with, which the graph may write to: inputs that share memory still do, and what
    is computed from something that requires grad still is."""
    sharers = Counter(compat.storage_id(x) for x in fakes if isinstance(x, torch.Tensor))
    inputs: list[Any] = []
    for value in fakes:
        if not isinstance(value, torch.Tensor):
            inputs.append(value)
            continue
        alone = sharers[compat.storage_id(value)] == 1
        made = empty_like_layout(mode, value) if alone else value.data  # own version
        differentiable = training and value.requires_grad
        if differentiable and not value.is_leaf:
            # it may be written to, which gives it another history
            source = compat.new_fake(mode, (), (), value.dtype, value.device)
            made.copy_(source.requires_grad_())
        elif differentiable and compat.is_view(value):
            made = torch.ops.aten.alias(made)  # its views under no_grad require no grad
        inputs.append(made.requires_grad_(differentiable))
    return inputs
