"""Run a captured graph on fakes, forward and (when training) backward, and record the ATen operators.

The result still has views and in-place operators; `functionalize` removes them. What an output is
of the inputs (the input itself, a view of it, ...) is decided here, where memory is still shared as in eager.

The real compiler: torch/_functorch/_aot_autograd/collect_metadata_analysis.py, graph_capture.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from minicompile import compat
from minicompile.aot.layout import empty_like_layout, geometry, is_dense
from minicompile.aot.result import OutputSpec
from minicompile.aot.tracer import Tracer
from minicompile.aot.views import is_inplace_view, results_of
from minicompile.errors import Unsupported
from minicompile.ops.graph import origins_of
from minicompile.ops.origin import NO_ORIGINS, Origins, SourceLine

STORAGE_SURGERY = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::set_data"}


@dataclass
class Traced:
    """An ATen graph before functionalization: `gm` returns ((results..., bases...), (gradients...)).

    Its placeholders are `primals` inputs, then tangents. `nodes[i]` of `results` belong to the
    outputs of kind "fresh". Nodes carry `meta["storage"]`: equal for values that share memory.
    """

    gm: fx.GraphModule
    primals: int
    outputs: tuple[OutputSpec, ...]
    bases: int
    result_requires_grad: tuple[bool, ...]
    """For each result and base."""
    differentiable_inputs: tuple[int, ...]

    @property
    def trains(self) -> bool:
        return bool(self.differentiable_inputs)

    @property
    def name(self) -> str:
        return "joint" if self.trains else "forward"


class JointTracer(Tracer):
    """Records live tensors (with their autograd history), and follows origins into the backward pass."""

    def __init__(self, mode: Any) -> None:
        super().__init__(mode)
        self.phase = "forward"
        self.hooks: dict[object, list[Any]] = {}
        """Autograd node -> the handles of the hooks that tell when it runs."""
        self.running: Origins | None = None
        """Origins of the autograd node whose backward is running."""

    def bind(self, value: Any, node: fx.Node) -> Any:
        """A snapshot becomes the node's value, since in-place views change a tensor's shape later.

        The tensor that an in-place operator returns keeps the node it has.
        """
        if not isinstance(value, torch.Tensor):
            return super().bind(value, node)
        if not self.knows(value) or is_inplace_view(node.target):
            super().bind(value, node)
        node.meta["storage"] = compat.storage_id(value)
        node.meta["val"] = snapshot = empty_like_layout(self.mode, value)
        return snapshot

    def record(self, func: Any, args: Any, kwargs: Any, value: Any) -> Any:
        if func._schema.name in STORAGE_SURGERY:
            raise Unsupported(f"{func} changes a tensor's storage")
        if self.phase == "backward":
            self.origins = (
                self.running
                if self.running is not None
                else self._origins_of_tensors((args, kwargs))
            )
        return super().record(func, args, kwargs, value)

    def _origins_of_tensors(self, args: Any) -> Origins:
        """For what the engine does between autograd nodes: adding up gradients."""
        tensors = (leaf for leaf in compat.tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return frozenset().union(
            *(origins_of(self._bound[id(t)][1]) for t in tensors if self.knows(t))
        )

    def remember_autograd(self, values: Any, origins: Origins) -> None:
        """The autograd nodes that were made since the last call came from `origins`."""

        def enter(*_: Any) -> None:
            self.running = origins

        def leave(*_: Any) -> None:
            self.running = None

        found = [
            value.grad_fn for value in compat.tree_leaves(values) if isinstance(value, torch.Tensor)
        ]
        while found:
            node = found.pop()
            if node is not None and node not in self.hooks:
                self.hooks[node] = [node.register_prehook(enter), node.register_hook(leave)]
                found.extend(following for following, _ in node.next_functions)

    def forget_autograd(self) -> None:
        for handles in self.hooks.values():
            for handle in handles:
                handle.remove()
        self.hooks.clear()


def user_line(node: fx.Node) -> SourceLine | None:
    return next(
        (origin.line for origin in sorted(origins_of(node)) if origin.line is not None), None
    )


def trace(gm: fx.GraphModule, fakes: list[Any], mode: Any, *, training: bool) -> Traced:
    """Record the captured graph `gm` on inputs like `fakes`; with its backward pass when training."""
    refuse_inputs(fakes)
    tracer = JointTracer(mode)
    inputs = private_inputs(fakes, mode, training)
    nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, value in zip(nodes, inputs, strict=True):
        tracer.placeholder(node.target, value, {"origins": origins_of(node), "phase": "forward"})
    before = [input_state(value) for value in inputs]
    try:
        with (
            tracer.active(),
            torch.set_grad_enabled(training),
            torch.autograd.set_multithreading_enabled(False),
        ):
            outputs = run_forward(gm, dict(zip(nodes, inputs)), tracer)
            refuse_changed_inputs(nodes, inputs, before)
            classified = Classified(outputs, inputs, tracer)
            gradients = run_backward(classified, inputs, tracer) if training else []
    finally:
        tracer.forget_autograd()
    flags = tuple(isinstance(v, torch.Tensor) and v.requires_grad for v in classified.returned)
    graph = tracer.finish(
        (tuple(classified.returned), tuple(gradients)), "joint" if training else "forward"
    )
    wanted = tuple(
        i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor) and v.requires_grad
    )
    return Traced(
        move_placeholders_first(graph),
        len(inputs),
        tuple(classified.specs),
        len(classified.bases),
        flags,
        wanted if any(flags) else (),
    )


def refuse_inputs(fakes: Iterable[Any]) -> None:
    """Sparse tensors have no strides; autograd on fake CUDA tensors ends a process without CUDA."""
    for fake in fakes:
        if isinstance(fake, torch.Tensor) and fake.layout is not torch.strided:
            raise Unsupported(f"an input has layout {fake.layout}")
        if (
            isinstance(fake, torch.Tensor)
            and fake.device.type == "cuda"
            and not torch.backends.cuda.is_built()
        ):
            raise Unsupported("CUDA tensors can't be traced with a build of torch without CUDA")


def private_inputs(fakes: list[Any], mode: Any, training: bool) -> list[Any]:
    """Stand-ins for the captured fakes, which tracing may mutate; inputs that share memory still do."""
    sharers = Counter(compat.storage_id(fake) for fake in fakes if isinstance(fake, torch.Tensor))
    inputs: list[Any] = []
    for fake in fakes:
        if not isinstance(fake, torch.Tensor):
            inputs.append(fake)
            continue
        alone = sharers[compat.storage_id(fake)] == 1
        value = empty_like_layout(mode, fake) if alone else fake.detach()
        inputs.append(value.requires_grad_(training and fake.requires_grad))
    return inputs


def input_state(value: Any) -> Any:
    """What an input must keep: its contents may change in place, these may not."""
    return (geometry(value), value.requires_grad) if isinstance(value, torch.Tensor) else None


def refuse_changed_inputs(nodes: list[fx.Node], inputs: list[Any], before: list[Any]) -> None:
    for node, value, old in zip(nodes, inputs, before):
        if input_state(value) != old:
            raise Unsupported(
                f"input {node.name} changes shape, layout or gradient history in place",
                user_line(node),
            )


def run_forward(
    gm: fx.GraphModule, values: dict[fx.Node, Any], tracer: JointTracer
) -> tuple[Any, ...]:
    """Call the captured graph node by node; grad-mode switches inside it act as they do in eager."""
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        tracer.origins = origins_of(node)
        try:
            values[node] = run_node(gm, node, values)
        except Unsupported as error:
            raise Unsupported(error.reason, error.where or user_line(node), error.hint) from error
        except Exception as error:
            reason = f"{node.target} can't be traced: {type(error).__name__}: {error}"
            raise Unsupported(reason, user_line(node)) from error
        tracer.remember_autograd(
            (values[node], [values[n] for n in node.all_input_nodes]), tracer.origins
        )
    return tuple(fx.map_arg(results_of(gm.graph), values.__getitem__))


def run_node(gm: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        found: Any = gm
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target), f"a captured graph has no {node.op} nodes"
    return node.target(*args, **kwargs)


class Classified:
    """Each output's `OutputSpec`, and what the graph itself must return: fresh results, then
    bases of views.
    """

    def __init__(self, outputs: tuple[Any, ...], inputs: list[Any], tracer: JointTracer) -> None:
        self.tracer, self.inputs = tracer, inputs
        tensors = [(i, v) for i, v in enumerate(inputs) if isinstance(v, torch.Tensor)]
        self.input_of = {compat.storage_id(v): i for i, v in reversed(tensors)}
        self.input_itself = {id(v): i for i, v in tensors}
        shared = {id(v): v for v in outputs if isinstance(v, torch.Tensor)}
        self.sharers = Counter(compat.storage_id(v) for v in shared.values())
        self.results: list[Any] = []
        self.bases: dict[int, torch.Tensor] = {}
        self.first_seen: dict[int, int] = {}
        self.specs = [self.classify(i, value) for i, value in enumerate(outputs)]

    @property
    def returned(self) -> list[Any]:
        return [*self.results, *self.bases.values()]

    def classify(self, position: int, value: Any) -> OutputSpec:
        if isinstance(value, torch.SymInt | torch.SymFloat):
            self.results.append(value)
            return OutputSpec("fresh")
        if not isinstance(value, torch.Tensor):
            return OutputSpec("constant", value=value)
        if id(value) in self.input_itself:
            return OutputSpec(
                "input", self.input_itself[id(value)], requires_grad=value.requires_grad
            )
        if id(value) in self.first_seen:
            return OutputSpec(
                "output", self.first_seen[id(value)], requires_grad=value.requires_grad
            )
        self.first_seen[id(value)] = position
        storage = compat.storage_id(value)
        sizes, strides, offset = geometry(value)
        view: dict[str, Any] = {
            "size": sizes,
            "stride": strides,
            "offset": offset,
            "requires_grad": value.requires_grad,
        }
        if storage in self.input_of:
            base = self.input_of[storage]
            refuse_other_element(value, self.inputs[base])
            view["offset"] = offset - geometry(self.inputs[base])[2]
            return OutputSpec("input_view", base, **view)
        if self.sharers[storage] == 1 and is_dense(value):
            self.results.append(value)
            return OutputSpec("fresh", requires_grad=value.requires_grad)
        if storage not in self.bases:
            self.bases[storage] = self.base_of(storage)
        refuse_other_element(value, self.bases[storage])
        return OutputSpec("view", list(self.bases).index(storage), **view)

    def base_of(self, storage: int) -> torch.Tensor:
        """The first tensor recorded in a storage: all the others are views of it."""
        base = self.tracer.first_in_storage(storage)
        if not is_dense(base) or base.storage_offset() != 0:
            raise Unsupported("outputs are views of a tensor whose memory has gaps")
        return base


def refuse_other_element(view: torch.Tensor, base: torch.Tensor) -> None:
    """Views are rebuilt from sizes and strides, which can't say that bytes are read as another type."""
    if view.dtype != base.dtype or view.is_conj() or view.is_neg():
        raise Unsupported(f"an output views {base.dtype} memory as {view.dtype}, or conjugated")


def run_backward(classified: Classified, inputs: list[Any], tracer: JointTracer) -> list[Any]:
    """Differentiate the returned tensors; the gradient of each input that requires grad, None
    where there is none.
    """
    results = [v for v in classified.returned if isinstance(v, torch.Tensor) and v.requires_grad]
    wanted = [v for v in inputs if isinstance(v, torch.Tensor) and v.requires_grad]
    if not results or not wanted:
        return []
    tangents = []
    for index, result in enumerate(results):
        meta = {"origins": origins_of(tracer.argument(result)), "phase": "backward"}
        tangents.append(
            tracer.placeholder(f"tangents_{index}", empty_like_layout(tracer.mode, result), meta)
        )
    tracer.phase = "backward"
    try:
        gradients = torch.autograd.grad(results, wanted, tangents, allow_unused=True)
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(
            f"the backward pass can't be traced: {type(error).__name__}: {error}"
        ) from error
    tracer.origins = NO_ORIGINS
    return list(gradients)


def move_placeholders_first(gm: fx.GraphModule) -> fx.GraphModule:
    nodes = list(gm.graph.nodes)
    first = next(node for node in nodes if node.op != "placeholder")
    for node in nodes[nodes.index(first) :]:
        if node.op == "placeholder":
            first.prepend(node)
    return gm
