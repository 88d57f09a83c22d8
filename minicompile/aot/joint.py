"""Run a captured graph on fakes, forward and (when training) backward, and record the ATen operators.

The result still has views and in-place operators; `functionalize` removes them.

The real compiler: torch/_functorch/_aot_autograd/collect_metadata_analysis.py, graph_capture.py,
runtime_wrappers.py (merge_view_inputs).
"""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx
from torch.autograd.graph import GradientEdge, increment_version

from minicompile import compat
from minicompile.aot.layout import (
    collide,
    empty_dense,
    empty_like_layout,
    extent,
    geometry,
    is_dense,
)
from minicompile.aot.missing import tangents_before
from minicompile.aot.outputs import classify, history, is_own_leaf
from minicompile.aot.parts import find_parts
from minicompile.aot.result import RuntimeMetadata, SharedMemory
from minicompile.aot.tracer import Tracer
from minicompile.aot.vjps import own_gradients
from minicompile.compat import settings
from minicompile.errors import OptionError, Unsupported
from minicompile.ops.graph import origins_of, placeholders, user_line
from minicompile.ops.nodes import is_inplace_view, writes, written_arguments
from minicompile.ops.origin import NO_ORIGINS, Origins, SourceLine, union

STORAGE_SURGERY = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::set_data"}
MOVES = {
    f"aten::{name}_" for name in ("index_put", "index_add", "index_copy", "scatter", "scatter_add")
}
"""They put what they read into other places; eager refuses to read there what they write."""


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
        """Origins of the autograd node whose backward is running; none between two nodes, when the engine
        adds up gradients."""
        self.readers: dict[Any, Origins] = {}
        """Edge of the autograd graph -> who read the value in forward and has sent a gradient by now."""
        self.sent: list[tuple[Any, Any]] = []
        """Gradients that the last node has sent, and where: (gradient, edge)."""

    def bind(self, value: Any, node: fx.Node) -> Any:
        """A snapshot becomes the node's value, since in-place views change a tensor's shape later.

        The tensor that an in-place operator returns keeps the node it has.
        """
        if after := self.after.union(*map(tangents_before, node.all_input_nodes)):
            node.meta["after"] = after
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
        if func._schema.name == "aten::mkldnn_rnn_layer_backward" and not args[18]:
            raise Unsupported("an LSTM in evaluation has no backward kernel that a graph can call")
        if writes(func):
            changed = written_arguments(func, args, kwargs)
            tensors = [x for x in compat.tree_leaves(changed) if isinstance(x, torch.Tensor)]
            self.written.update(map(compat.storage_id, tensors))
            moves, given = func._schema.name in MOVES, compat.tree_leaves((args, kwargs))
            if any(isinstance(value, list | tuple) for value in changed):
                increment_version(tensors)  # which autograd doesn't do for lists of fakes
            elif any(collide(x, y, moves) for x in tensors for y in given):
                raise Unsupported(f"{func} writes to elements that it reads in other places")
        if self.phase == "backward":
            self.origins = self.running or self.adding(compat.tree_leaves((args, kwargs)))
        return super().record(func, args, kwargs, value)

    def adding(self, operands: list[Any]) -> Origins:
        """Origins of a sum of gradients: the readers whose gradients are in it, not who made these first."""
        edges = [edge for sent, edge in self.sent if any(sent is x for x in operands)]
        if edges:
            return union(self.readers[edge] for edge in edges)
        return union(origins_of(self.argument(x)) for x in filter(self.knows, operands))

    def has_written(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and compat.storage_id(value) in self.written

    def remember_autograd(self, values: Any, origins: Origins) -> None:
        """The autograd nodes that were made since the last call came from `origins`."""
        enter = partial(self.enter, origins)
        found = [history(value) for value in compat.tree_leaves(values)]
        while found:
            node = found.pop()
            if node is not None and node not in self.hooks:
                leave = partial(self.leave, origins, node.next_functions)
                self.hooks[node] = [node.register_prehook(enter), node.register_hook(leave)]
                found.extend(following for following, _ in node.next_functions)

    def enter(self, origins: Origins, gradients: Any) -> None:
        """What the node makes is for its gradients, even zeros that it makes without reading them."""
        self.running = origins
        nodes = (self.argument(x) for x in gradients if self.knows(x))
        self.after = frozenset[int]().union(*map(tangents_before, nodes))

    def leave(self, origins: Origins, edges: Any, gradients: Any, *_: Any) -> None:
        self.running, self.after = NO_ORIGINS, frozenset()
        self.sent = [pair for pair in zip(gradients, edges) if pair[0] is not None]
        for _, edge in self.sent:
            self.readers[edge] = self.readers.get(edge, NO_ORIGINS) | origins

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
    refuse_layouts(fakes)
    with settings.restored_modes():  # a graph that ends inside of a block leaves its mode
        traced, metadata, written = record(gm, fakes, (), mode, training)
    memories = shared_memories(fakes, written)
    if memories:
        traced, metadata, _ = record(gm, fakes, memories, mode, training)
    return traced, metadata


def record(
    gm: fx.GraphModule,
    fakes: list[Any],
    memories: tuple[SharedMemory, ...],
    mode: Any,
    training: bool,
) -> tuple[fx.GraphModule, RuntimeMetadata, list[int]]:
    """One run of the captured graph; also which inputs lie in memory that it writes to."""
    tracer = JointTracer(mode)
    nodes = placeholders(gm.graph)
    inputs = stand_ins(fakes, memories, mode, training)
    for i, value in enumerate(inputs):
        source = nodes[i if i < len(fakes) else memories[i - len(fakes)].of]
        tracer.origins = origins_of(source)
        tracer.placeholder(str(source.target) if i < len(fakes) else "memory", value)
    members = {i for memory in memories for i in memory.members}
    # where the gradient of an input goes: writing to it in place gives it another history
    wanted = {
        i: x if x.grad_fn is None else GradientEdge(x.grad_fn, x.output_nr)
        for i, x in enumerate(inputs)
        if requires_grad(x) and i not in members
    }
    lost = not training and any(map(requires_grad, fakes))
    try:
        with (
            tracer.active(),
            own_gradients() if training else contextlib.nullcontext(),
            torch.set_grad_enabled(training),
            torch.autograd.set_multithreading_enabled(False),
        ):
            live = views_of_memories(inputs, fakes, memories, training)
            every = [*live, *inputs[len(fakes) :]]
            before = [history(value) for value in every]
            layouts = [geometry(x) if isinstance(x, torch.Tensor) else None for x in live]
            of_input = {
                tracer.argument(x): i for i, x in enumerate(live) if isinstance(x, torch.Tensor)
            }
            run = CapturedRun(gm, tracer, lost)
            outputs = run.run(*live)
            changed = any(layout and geometry(x) != layout for x, layout in zip(live, layouts))
            if changed or not run.relaid.isdisjoint(map(id, live)):
                raise Unsupported("an operator changes the shape of an input in place")
            with refusing("what the graph leaves", None):
                specs, results, bases = classify(outputs, live, of_input, tracer)
                numbers = (n for spec in specs for n in spec.numbers)
                symbolic = dict.fromkeys(n for n in numbers if isinstance(n, sympy.Expr))
                written = [i for i, x in enumerate(every) if tracer.has_written(x)]
                updated = new_contents(every, before, [i for i in written if i not in members])
            sizes = [tracer.sizes.env.number(expr) for expr in symbolic]
            returned = [*results, *bases, *sizes, *updated.values()]
            results = [value for value in returned if requires_grad(value)]
            parts = find_parts(results, wanted) if training else []
            given = run_backward(results, list(wanted.values()), tracer) if training else []
            gradients = dict(zip(wanted, given))
    finally:
        tracer.forget_autograd()
    flags = tuple(map(requires_grad, returned))
    if any(flags) and not wanted:
        raise Unsupported("only tensors that the graph makes are differentiated")
    # autograd goes on to those inputs alone that eager's would reach: another's graph may be used up
    gradients = {i: x for i, x in gradients.items() if x is not None}
    checks = (getattr(node.target, "check", None) for node in gm.graph.nodes)
    metadata = RuntimeMetadata(
        tuple(specs),
        mutated_inputs=tuple(updated),
        memories=memories,
        before_backward=tuple(filter(None, checks)),
        differentiable_inputs=tuple(gradients),
        hidden=len(specs) - len(outputs),
        bases=len(bases),
        view_sizes=tuple(symbolic),
        trains=any(flags) and bool(wanted),
        result_requires_grad=flags,
        parts=tuple(part.among(gradients) for part in parts),
    )
    found = tuple(returned), tuple(gradients.values())
    traced = tracer.finish(found, metadata.graph_name)
    return traced, metadata, written


def new_contents(
    inputs: list[Any], before: list[Any], written: list[int]
) -> dict[int, torch.Tensor]:
    """What inputs hold now, by position; with its history where that changed. One such tensor stands for
    others in its memory that have no history of their own."""
    found: dict[int, torch.Tensor] = {}
    memory: set[int] = set()
    for i in written:
        value, storage = inputs[i], compat.storage_id(inputs[i])
        if value.grad_fn is not before[i]:
            found[i] = value
        elif storage not in memory:
            found[i] = value.detach()
        memory.add(storage)
    return found


def requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@contextlib.contextmanager
def refusing(what: str, where: SourceLine | None) -> Iterator[None]:
    """Whatever goes wrong inside is a reason not to compile, but for a user's rule that is wrong."""
    try:
        yield
    except OptionError:
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
        self.relaid: set[int] = set()
        """Ids of tensors whose own shape changed, for which a view stands since then."""

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

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """`x.t_()` is traced as `x.t()`, which takes the place of `x` from then on."""
        packet = None if target.startswith("_") else getattr(torch.ops.aten, target, None)
        if packet is None or not is_inplace_view(getattr(packet, packet.overloads()[0])):
            return super().call_method(target, args, kwargs)
        old = args[0]
        if old.requires_grad and not torch.is_grad_enabled():
            raise Unsupported("a tensor that requires grad changes its shape unseen by autograd")
        new = super().call_method(target.removesuffix("_"), args, kwargs)
        with compat.no_dispatch_modes():  # counts as a write: autograd refuses other views then
            getattr(old.detach(), target)(*args[1:], **kwargs)
        self.env = {node: new if value is old else value for node, value in self.env.items()}
        self.relaid.add(id(old))
        return new

    def run_node(self, node: fx.Node) -> Any:
        self.tracer.origins = origins_of(node)
        self.tracer.region = node.name if getattr(node.target, "recomputed", False) else None
        read = [self.env[used] for used in node.all_input_nodes]
        if self.lost and node.target is settings.set_grad_enabled and node.args[0]:
            raise Unsupported("grad mode is enabled where the caller disabled it", user_line(node))
        with refusing(str(node.target), user_line(node)):
            bytes_given = any(getattr(x, "dtype", 0) is torch.uint8 for x in read)
            name = str(node.target)
            if bytes_given and ("interpolate" in name or "upsample" in name):
                raise Unsupported("images of bytes are resampled in eager's fixed-point arithmetic")
            if "as_strided" in name and torch.is_grad_enabled():
                refuse_offset(read[0])
            targets = compat.tree_leaves(fx.map_arg(node.kwargs.get("out"), self.env.__getitem__))
            earlier, self.tracer.written = self.tracer.written, set()
            value = super().run_node(node)
            for x in targets:  # some of torch's composites forget it where they meet fakes
                if x is not None and not self.tracer.has_written(x):
                    raise Unsupported("what it writes to `out` can't be traced")
            self.tracer.written |= earlier
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
        tracer.after = frozenset({index} if len(results) > 1 else ())
        tangents.append(tracer.placeholder(f"tangents_{index}", tangent))
    tracer.after = frozenset()
    # loss.backward() belongs outside of autocast
    with refusing("the backward pass", None), compat.without_autocast():
        gradients = torch.autograd.grad(results, wanted, tangents, allow_unused=True)
    tracer.origins = NO_ORIGINS
    return list(gradients)


# What the graph is traced on: stand-ins for inputs, which it may write to, and for memory that some share


def refuse_layouts(fakes: list[Any]) -> None:
    """Sparse tensors have no strides; with CUDA tensors but without CUDA, autograd ends the process."""
    for value in filter(torch.is_tensor, fakes):
        if value.layout is not torch.strided:
            raise Unsupported(f"an input has layout {value.layout}")
        if value.device.type == "cuda" and not torch.backends.cuda.is_built():
            raise Unsupported("CUDA tensors can't be traced with a build of torch without CUDA")


def shared_memories(fakes: list[Any], written: Collection[int]) -> tuple[SharedMemory, ...]:
    """The inputs' tensors of autograd, where several inputs share memory and one is written to. If they are
    several too, or there are gaps between their elements, the storage as a whole comes first."""
    storages: dict[int, dict[int, list[int]]] = {}
    for i, value in enumerate(fakes):
        if isinstance(value, torch.Tensor):
            groups = storages.setdefault(compat.storage_id(value), {})
            groups.setdefault(id(compat.autograd_base(value)), []).append(i)
    found: list[SharedMemory] = []
    for groups in storages.values():
        members = [i for group in groups.values() for i in group]
        if len(members) == 1 or not set(members) & set(written):
            continue
        bases = [compat.autograd_base(fakes[i]) for i in members]
        if len(groups) > 1 or not is_dense(bases[0]):
            found.append(SharedMemory(members[0], (), max(map(extent, bases))))
        found += [SharedMemory(group[0], tuple(group)) for group in groups.values()]
    return tuple(found)


def stand_ins(
    fakes: list[Any], memories: tuple[SharedMemory, ...], mode: Any, training: bool
) -> list[Any]:
    """Fakes to trace with: of the captured ones, then of the memories. Inputs that share memory still do;
    what is computed from something that requires grad still is."""
    sharers = Counter(compat.storage_id(x) for x in fakes if isinstance(x, torch.Tensor))
    roots: dict[int, torch.Tensor] = {}
    inputs: list[Any] = []
    for value in [*fakes, *memories]:
        if isinstance(value, SharedMemory):
            member = fakes[value.of]
            root, like = roots.get(compat.storage_id(member)), compat.autograd_base(member)
            if value.size is not None:
                like = compat.new_fake(mode, (value.size,), (1,), like.dtype, like.device)
            made = empty_like_layout(mode, like) if root is None else view_like(root, like).detach()
            roots.setdefault(compat.storage_id(member), made)
        elif isinstance(value, torch.Tensor):
            alone, like = sharers[compat.storage_id(value)] == 1, value
            made = empty_like_layout(mode, value) if alone else value.data  # own version
        else:
            inputs.append(value)
            continue
        if training and like.requires_grad and not like.is_leaf:
            # it may be written to, which gives it another history
            source = compat.new_fake(mode, (), (), like.dtype, like.device)
            made.copy_(source.requires_grad_())
        elif training and like.requires_grad and compat.is_view(like):
            made = torch.ops.aten.alias(made)  # its views under no_grad require no grad
        inputs.append(made.requires_grad_(training and like.requires_grad))
    return inputs


def view_like(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a base's memory that another tensor is."""
    if like.element_size() != base.element_size():
        raise Unsupported("inputs share memory as types of several sizes, and one is written to")
    base = base if like.dtype is base.dtype else base.view(like.dtype)
    return base.as_strided(like.shape, like.stride(), like.storage_offset())


def refuse_offset(view: torch.Tensor) -> None:
    """Raises Unsupported for a view by strides of a tensor that begins within its memory: where that is
    written to, autograd, with fakes, looks for the view's gradient in the wrong place."""
    if compat.autograd_base(view).storage_offset() != 0:
        raise Unsupported("a view by strides of a tensor that is a part of other memory")


def views_of_memories(
    inputs: list[Any], fakes: list[Any], memories: tuple[SharedMemory, ...], training: bool
) -> list[Any]:
    """The stand-ins of inputs, those in shared memories as views of these."""
    live = inputs[: len(fakes)]
    with compat.no_dispatch_modes():  # autograd may replay a view to answer
        tracked = [getattr(value, "grad_fn", None) is not None for value in fakes]
    for memory, base in zip(memories, inputs[len(fakes) :]):
        for i in memory.members:
            live[i] = base
            if (like := fakes[i])._base is not None:
                if training and is_own_leaf(like):
                    raise Unsupported("an input that is a leaf shares memory that is written to")
                if training:
                    refuse_offset(like)
                with torch.set_grad_enabled(training and tracked[i]):
                    live[i] = view_like(base, like)
    return live
