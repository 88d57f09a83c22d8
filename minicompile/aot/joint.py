"""Run a captured graph on fakes, forward and (when training) backward, and record the ATen operators.

The result still has views and in-place operators; `functionalize` removes them. What an output is
of the inputs (the input itself, a view of it, ...) is decided here, where memory is still shared as in eager.

The real compiler: torch/_functorch/_aot_autograd/collect_metadata_analysis.py, graph_capture.py.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction

from minicompile import compat
from minicompile.aot.layout import empty_like_layout, geometry, is_dense, size_expr
from minicompile.aot.result import OutputSpec, RuntimeMetadata
from minicompile.aot.tracer import Tracer
from minicompile.aot.views import is_inplace_view
from minicompile.aot.vjps import own_gradients
from minicompile.errors import Unsupported, VerifyError
from minicompile.ops.graph import origins_of, placeholders, user_line
from minicompile.ops.origin import NO_ORIGINS, Origins, SourceLine, union

STORAGE_SURGERY = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::set_data"}


class JointTracer(Tracer):
    """Records live tensors (with their autograd history), and follows origins into the backward pass."""

    def __init__(self, mode: Any) -> None:
        super().__init__(mode)
        self.phase = "forward"
        self.hooks: dict[object, list[Any]] = {}
        """Autograd node -> the handles of the hooks that tell when it runs."""
        self.running = NO_ORIGINS
        """Origins of the autograd node whose backward is running; none between two nodes, when the engine
        adds up gradients.
        """

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
            self.origins = self.running or self._origins_of_tensors((args, kwargs))
        return super().record(func, args, kwargs, value)

    def _origins_of_tensors(self, values: Any) -> Origins:
        known = filter(self.knows, compat.tree_leaves(values))
        return union(origins_of(self._bound[id(value)][1]) for value in known)

    def remember_autograd(self, values: Any, origins: Origins) -> None:
        """The autograd nodes that were made since the last call came from `origins`."""
        enter, leave = partial(self.run_as, origins), partial(self.run_as, NO_ORIGINS)
        found = [getattr(value, "grad_fn", None) for value in compat.tree_leaves(values)]
        while found:
            node = found.pop()
            if node is not None and node not in self.hooks:
                self.hooks[node] = [node.register_prehook(enter), node.register_hook(leave)]
                found.extend(following for following, _ in node.next_functions)

    def run_as(self, origins: Origins, *_: Any) -> None:
        self.running = origins

    def forget_autograd(self) -> None:
        for handles in self.hooks.values():
            for handle in handles:
                handle.remove()
        self.hooks.clear()


def trace(
    gm: fx.GraphModule, fakes: list[Any], mode: Any, *, training: bool
) -> tuple[fx.GraphModule, RuntimeMetadata]:
    """Record the captured graph `gm` on inputs like `fakes`; with its backward pass when training.

    The ATen graph takes the inputs, then tangents, and returns ((results...), (gradients...)). Its nodes
    carry `meta["storage"]`: equal for values that share memory.
    """
    tracer = JointTracer(mode)
    inputs = private_inputs(fakes, mode, training)
    nodes = placeholders(gm.graph)
    for node, value in zip(nodes, inputs, strict=True):
        tracer.origins = origins_of(node)
        tracer.placeholder(str(node.target), value)
    before = [input_state(value) for value in inputs]
    lost = not training and any(map(requires_grad, fakes))
    try:
        with (
            tracer.active(),
            own_gradients() if training else contextlib.nullcontext(),
            torch.set_grad_enabled(training),
            torch.autograd.set_multithreading_enabled(False),
        ):
            outputs = CapturedRun(gm, tracer, lost).run(*inputs)
            for node, value, state in zip(nodes, inputs, before):
                if input_state(value) != state:
                    reason = f"input {node.name} changes shape, layout or gradient history in place"
                    raise Unsupported(reason, user_line(node))
            specs, results, bases, sizes = classify(outputs, inputs, tracer)
            returned = [*results, *bases, *sizes.values()]
            gradients = run_backward(returned, inputs, tracer) if training else []
    finally:
        tracer.forget_autograd()
    wanted = tuple(i for i, value in enumerate(inputs) if requires_grad(value))
    flags = tuple(map(requires_grad, returned))
    checks = (getattr(node.target, "check", None) for node in gm.graph.nodes)
    metadata = RuntimeMetadata(
        tuple(specs),
        before_backward=tuple(filter(None, checks)),
        differentiable_inputs=wanted if any(flags) else (),
        bases=len(bases),
        view_sizes=tuple(sizes),
        trains=any(flags) and bool(wanted),
        result_requires_grad=flags,
    )
    return tracer.finish((tuple(returned), tuple(gradients)), metadata.graph_name), metadata


def requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def private_inputs(fakes: list[Any], mode: Any, training: bool) -> list[Any]:
    """Stand-ins for the captured fakes, which tracing may mutate; inputs that share memory still do.

    Refused: sparse tensors, which have no strides; CUDA without CUDA, where autograd ends the process.
    """
    tensors = [value for value in fakes if isinstance(value, torch.Tensor)]
    for value in tensors:
        if value.layout is not torch.strided:
            raise Unsupported(f"an input has layout {value.layout}")
        if value.device.type == "cuda" and not torch.backends.cuda.is_built():
            raise Unsupported("CUDA tensors can't be traced with a build of torch without CUDA")
    sharers = Counter(map(compat.storage_id, tensors))
    inputs: list[Any] = []
    for value in fakes:
        if isinstance(value, torch.Tensor):
            alone = sharers[compat.storage_id(value)] == 1
            private = empty_like_layout(mode, value) if alone else value.detach()
            inputs.append(private.requires_grad_(training and value.requires_grad))
        else:
            inputs.append(value)
    return inputs


def input_state(value: Any) -> Any:
    """What an input must keep: its contents may change in place, these may not."""
    if not isinstance(value, torch.Tensor):
        return None
    return tuple(value.shape), value.stride(), value.storage_offset(), value.requires_grad


@contextlib.contextmanager
def refusing(what: str, where: SourceLine | None) -> Iterator[None]:
    """Whatever goes wrong inside is a reason not to compile, but for a user's rule that is wrong."""
    try:
        yield
    except VerifyError:
        raise
    except Unsupported as error:
        raise Unsupported(error.reason, error.where or where, error.hint) from error
    except Exception as error:
        reason = f"{what} can't be traced: {type(error).__name__}: {error}"
        raise Unsupported(reason, where) from error


class CapturedRun(fx.Interpreter):
    """Calls a captured graph node by node; grad-mode switches inside it act as they do in eager.

    `lost`: inputs require grad, but no gradients are traced.
    """

    def __init__(self, gm: fx.GraphModule, tracer: JointTracer, lost: bool) -> None:
        super().__init__(gm)
        self.lost = lost
        self.extra_traceback = False
        self.tracer = tracer

    def run_node(self, node: fx.Node) -> Any:
        self.tracer.origins = origins_of(node)
        self.tracer.region = node.name if getattr(node.target, "recomputed", False) else None
        read = [self.env[used] for used in node.all_input_nodes]
        if self.lost and node.target is compat.set_grad_enabled and node.args[0]:
            raise Unsupported("grad mode is enabled where the caller disabled it", user_line(node))
        with refusing(str(node.target), user_line(node)):
            bytes_given = any(getattr(x, "dtype", 0) is torch.uint8 for x in read)
            if bytes_given and node.target is torch.nn.functional.interpolate:
                raise Unsupported("images of bytes are resampled in eager's fixed-point arithmetic")
            value = super().run_node(node)
        self.tracer.remember_autograd((value, read), self.tracer.origins)
        return value


def classify(
    outputs: tuple[Any, ...], inputs: list[Any], tracer: JointTracer
) -> tuple[list[OutputSpec], list[Any], list[torch.Tensor], dict[Any, torch.SymInt]]:
    """Each output's `OutputSpec`, and what the graph itself must return: fresh results, bases and
    symbolic sizes of views.
    """
    tensors = [(i, value) for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    input_itself = {id(value): i for i, value in tensors}
    input_memory = {compat.storage_id(value) for _, value in tensors}
    of_input = {tracer.argument(value): i for i, value in tensors}
    distinct = {id(value): value for value in outputs if isinstance(value, torch.Tensor)}
    sharers = Counter(map(compat.storage_id, distinct.values()))
    specs: list[OutputSpec] = []
    results: list[Any] = []
    bases: dict[int, torch.Tensor] = {}
    sizes: dict[Any, torch.SymInt] = {}
    first_seen: dict[int, int] = {}
    for position, value in enumerate(outputs):
        if not isinstance(value, torch.Tensor):
            symbolic = isinstance(value, torch.SymInt | torch.SymFloat)
            results.extend([value] if symbolic else [])
            specs.append(OutputSpec("fresh") if symbolic else OutputSpec("constant", value=value))
            continue
        storage = compat.storage_id(value)
        same = first_seen.setdefault(id(value), position)
        if id(value) in input_itself:
            spec = OutputSpec("input", input_itself[id(value)])
        elif same != position:
            spec = OutputSpec("output", same)
        elif value.requires_grad and value.is_leaf:
            raise Unsupported("an output is a leaf that the graph makes: it would get a gradient")
        elif storage in input_memory:
            index = viewed_input(tracer.argument(value), of_input)
            check_history(value, inputs[index])
            spec = view_of("input_view", index, value, inputs[index], sizes)
        elif sharers[storage] == 1 and is_dense(value):
            results.append(value)
            spec = OutputSpec("fresh")
        else:
            base = bases.setdefault(storage, tracer.first_in_storage(storage))
            if not is_dense(base) or base.storage_offset() != 0:
                raise Unsupported("outputs are views of a tensor whose memory has gaps")
            check_history(value, base)
            spec = view_of("view", list(bases).index(storage), value, base, sizes)
        specs.append(replace(spec, requires_grad=value.requires_grad))
    return specs, results, list(bases.values()), sizes


def viewed_input(node: fx.Node, of_input: Mapping[fx.Node, int]) -> int:
    """The input that a view was made of: others may share its memory, but gradients go to this one."""
    while node not in of_input:
        if not node.args or not isinstance(node.args[0], fx.Node):
            raise Unsupported("an output shares memory with an input that it was not made of")
        node = node.args[0]
    return of_input[node]


def check_history(view: torch.Tensor, base: torch.Tensor) -> None:
    """Gradients of a view that is rebuilt go straight to its base: no custom function may come between."""
    step = view.grad_fn
    while step is not None and step is not base.grad_fn:
        if isinstance(step, BackwardCFunction):
            raise Unsupported("an output is a view that a custom autograd.Function gives")
        step = step.next_functions[0][0] if step.next_functions else None


def view_of(
    kind: Literal["view", "input_view"],
    index: int,
    view: torch.Tensor,
    base: torch.Tensor,
    sizes: dict[Any, torch.SymInt],
) -> OutputSpec:
    """Views are rebuilt from sizes and strides, which can't say that bytes are read as another type."""
    if view.dtype != base.dtype or view.is_conj() or view.is_neg():
        raise Unsupported(f"an output views {base.dtype} memory as {view.dtype}, or conjugated")
    offset = view.storage_offset() - base.storage_offset()
    for number in (*view.shape, *view.stride(), offset):
        if isinstance(number, torch.SymInt):
            sizes.setdefault(size_expr(number), number)
    size, stride, _ = geometry(view)
    return OutputSpec(kind, index, size=size, stride=stride, offset=size_expr(offset))


def run_backward(returned: list[Any], inputs: list[Any], tracer: JointTracer) -> list[Any]:
    """Differentiate the returned tensors; the gradient of each input that requires grad, None
    where there is none.
    """
    results = [value for value in returned if requires_grad(value)]
    wanted = [value for value in inputs if requires_grad(value)]
    if not results or not wanted:
        return []
    tangents = []
    tracer.phase, tracer.region = "backward", None
    for index, result in enumerate(results):
        tracer.origins = origins_of(tracer.argument(result))
        tangent = empty_like_layout(tracer.mode, result)
        tangents.append(tracer.placeholder(f"tangents_{index}", tangent))
    with refusing("the backward pass", None):
        gradients = torch.autograd.grad(results, wanted, tangents, allow_unused=True)
    tracer.origins = NO_ORIGINS
    return list(gradients)
