"""Functionalization: the same values without in-place operators and without shared memory.

Each piece of memory (storage) has a root, the first value seen in it, and a version. A write
through a view is carried to the root by the inverses of the views on the way (`slice_scatter`
undoes `slice`); other views of that storage are replayed from the root when next read. What was
written into inputs is returned, to be copied back.

The real compiler: aten/src/ATen/FunctionalTensorWrapper.cpp, FunctionalInverses.cpp.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile.aot.joint import Traced, is_inplace_view, user_line
from minicompile.aot.layout import is_dense, with_layout
from minicompile.aot.tracer import Tracer
from minicompile.aot.views import ALIASES, alias_root, argument, has_effect, results_of
from minicompile.errors import Unsupported
from minicompile.ops.graph import origins_of, placeholders

aten = torch.ops.aten
Inverse = Callable[..., torch.Tensor]


# Inverse views: (contents of the base, new contents of the view, the view's further arguments) -> new base.


def _undo_shape(base: torch.Tensor, new: torch.Tensor, *_: Any) -> torch.Tensor:
    return new.reshape(base.shape)


def _undo_permute(base: torch.Tensor, new: torch.Tensor, dims: list[int]) -> torch.Tensor:
    order = [dim % base.dim() for dim in dims]
    return new.permute(sorted(range(len(order)), key=order.__getitem__))


def _undo_transpose(
    base: torch.Tensor, new: torch.Tensor, dim0: int = 0, dim1: int = -1
) -> torch.Tensor:
    return new.transpose(dim0, dim1)


def _undo_squeeze(base: torch.Tensor, new: torch.Tensor, *_: Any) -> torch.Tensor:
    return new.reshape(base.shape)


def _undo_nothing(base: torch.Tensor, new: torch.Tensor, *_: Any) -> torch.Tensor:
    return new


def _undo_dtype(base: torch.Tensor, new: torch.Tensor, *_: Any) -> torch.Tensor:
    return new.view(base.dtype)


def _scatter(op: OpOverload) -> Inverse:
    return lambda base, new, *args, **kwargs: op(base, new, *args, **kwargs)


INVERSES: dict[OpOverload, Inverse] = {
    aten.view.default: _undo_shape,
    aten._unsafe_view.default: _undo_shape,
    aten._reshape_alias.default: _undo_shape,
    aten.unsqueeze.default: _undo_shape,
    aten.squeeze.default: _undo_squeeze,
    aten.squeeze.dim: _undo_squeeze,
    aten.squeeze.dims: _undo_squeeze,
    aten.permute.default: _undo_permute,
    aten.t.default: lambda base, new: new.t(),
    aten.transpose.int: _undo_transpose,
    aten.select.int: _scatter(aten.select_scatter.default),
    aten.slice.Tensor: _scatter(aten.slice_scatter.default),
    aten.diagonal.default: _scatter(aten.diagonal_scatter.default),
    aten.view.dtype: _undo_dtype,
    aten.view_as_real.default: lambda base, new: torch.view_as_complex(new),
    aten.view_as_complex.default: lambda base, new: torch.view_as_real(new),
    aten._conj.default: lambda base, new: new.conj(),
    aten._neg_view.default: lambda base, new: -new,
}

OUT_OF_PLACE = {
    "aten::detach_": aten.detach.default,
    "aten::t_": aten.t.default,
    "aten::transpose_": aten.transpose.int,
    "aten::unsqueeze_": aten.unsqueeze.default,
    "aten::as_strided_": aten.as_strided.default,
}


def out_of_place_view(op: OpOverload) -> OpOverload:
    """The view that an in-place view makes: aten.t for aten.t_."""
    known = OUT_OF_PLACE.get(op._schema.name)
    return known if known is not None else functional_variant(op)


def functional_variant(op: OpOverload) -> OpOverload:
    """The operator with the same arguments that returns what `op` writes: for add_, add.out, normal_, ..."""
    namespace, name = op._schema.name.split("::")
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    for candidate in (
        name.removesuffix("_"),
        f"{name}_functional",
        f"{name.removesuffix('_')}_functional",
    ):
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        for overload in packet.overloads() if packet is not None else ():
            found: OpOverload = getattr(packet, overload)
            arguments = [(a.name, str(a.type)) for a in found._schema.arguments]
            if arguments == wanted and not found._schema.is_mutable:
                return found
    raise Unsupported(f"{op} writes into its arguments and has no functional form")


def _is_out(schema: Any, name: str) -> bool:
    return any(a.is_out and a.name == name for a in schema.arguments)


@dataclass
class Storage:
    """A piece of memory: its root node in the old graph, and how often it has been written."""

    root: fx.Node
    version: int = 0
    sharers: list[str] = field(default_factory=list)
    """Other inputs in the same memory."""


def functionalize(traced: Traced, mode: Any) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """A functional graph, and the indices of inputs whose new contents it returns.

    The graph returns (results..., bases..., updated inputs...); when training, the pair of that
    and (gradients...).
    """
    run = Functionalizer(traced, mode)
    with torch.no_grad(), run.tracer.active():
        for node in traced.gm.graph.nodes:
            run.tracer.origins, run.tracer.phase = origins_of(node), node.meta.get("phase")
            run.visit(node)
        return run.finish()


class Functionalizer:
    """State of one run over the old graph. Values are fakes that stand for nodes of the new graph."""

    def __init__(self, traced: Traced, mode: Any) -> None:
        self.traced = traced
        self.tracer = Tracer(mode)
        self.values: dict[fx.Node, tuple[Any, int]] = {}
        """Old node -> its value in the new graph, and the storage's version when that was computed."""
        self.storages: dict[int, Storage] = {}
        self.view_of: dict[fx.Node, fx.Node] = {}
        self.same_as: dict[fx.Node, fx.Node] = {}
        """In-place results and aliases: old node -> the old node whose contents they are."""

    # Reading and writing old nodes

    def canonical(self, node: fx.Node) -> fx.Node:
        while node in self.same_as:
            node = self.same_as[node]
        return node

    def storage(self, node: fx.Node) -> Storage | None:
        return self.storages.get(node.meta.get("storage", -1))

    def read(self, node: fx.Node) -> Any:
        """The node's present contents: replayed from the root if the storage was written since."""
        node = self.canonical(node)
        value, version = self.values[node]
        storage = self.storage(node)
        if storage is None or version == storage.version:
            return value
        value = self.apply_view(node, self.read(self.view_of[node]))
        self.values[node] = (value, storage.version)
        return value

    def apply_view(self, node: fx.Node, base: torch.Tensor) -> torch.Tensor:
        if node.target is operator.getitem:
            views, index = node.args
            assert isinstance(views, fx.Node) and isinstance(index, int)
            found: torch.Tensor = self.call(views, base)[index]
            return found
        result: torch.Tensor = self.call(node, base)
        return result

    def call(self, node: fx.Node, base: torch.Tensor) -> Any:
        target = node.target
        assert isinstance(target, OpOverload)
        if is_inplace_view(target):
            target = out_of_place_view(target)
        args, kwargs = fx.map_arg((node.args[1:], node.kwargs), self.read)
        if target is aten.as_strided.default:
            start = self.tracer.argument(base)
            if alias_root(start) is not start or start.op != "call_function":
                base = base.clone(memory_format=torch.contiguous_format)
        return target(base, *args, **kwargs)

    def write(self, node: fx.Node, new: torch.Tensor) -> None:
        """`new` becomes the contents of `node`, and through the inverse views of everything that
        shares its memory.
        """
        node = self.canonical(node)
        storage = self.storage(node)
        assert storage is not None
        if storage.sharers:
            names = ", ".join([storage.root.name, *storage.sharers])
            raise Unsupported(f"inputs {names} share memory and one is written to", user_line(node))
        while node in self.view_of:
            base = self.view_of[node]
            new, node = self.undo_view(node, self.read(base), new), base
        root = node.meta["val"]
        new = with_layout(new, root)
        storage.version += 1
        self.values[node] = (new, storage.version)

    def undo_view(self, node: fx.Node, base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        target = node.target
        if target is operator.getitem:
            return self.undo_split(node, base, new)
        assert isinstance(target, OpOverload)
        if is_inplace_view(target):
            target = out_of_place_view(target)
        args, kwargs = fx.map_arg((node.args[1:], dict(node.kwargs)), self.read)
        if target in INVERSES:
            return INVERSES[target](base, new, *args, **kwargs)
        view, whole = node.meta["val"], self.canonical(self.view_of[node]).meta["val"]
        if not covers(whole, view) or not distinct_places(view):
            reason = f"a write through {target} can't be carried to the memory it views"
            raise Unsupported(reason, user_line(node))
        place = (list(view.shape), list(view.stride()), view.storage_offset())
        result: torch.Tensor = aten.as_strided_scatter.default(base, new, *place)
        return result

    def undo_split(self, node: fx.Node, base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """A write to one result of `unbind` or `split`."""
        views, index = node.args
        assert isinstance(views, fx.Node) and isinstance(index, int)
        packet = views.target.overloadpacket if isinstance(views.target, OpOverload) else None
        result: torch.Tensor
        if packet is aten.unbind:
            result = aten.select_scatter.default(base, new, argument(views, 1, 0), index)
            return result
        if packet in (aten.split, aten.split_with_sizes):
            dim = argument(views, 2, 0)
            sizes = [part.shape[dim] for part in views.meta["val"][: index + 1]]
            start = sum(sizes[:-1])
            result = aten.slice_scatter.default(base, new, dim, start, start + sizes[-1])
            return result
        raise Unsupported(
            f"a write to a result of {views.target} can't be carried to the memory it views"
        )

    # Going through the old graph

    def visit(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            meta = {key: value for key, value in node.meta.items() if key != "val"}
            value = self.tracer.placeholder(node.name, node.meta["val"], meta)
            self.new_root(node, value)
        elif node.op == "get_attr":
            name = str(node.target)
            self.new_root(
                node, self.tracer.attribute(name, getattr(self.traced.gm, name), node.meta["val"])
            )
        elif node.op == "call_function":
            self.visit_call(node)

    def new_root(self, node: fx.Node, value: Any) -> None:
        self.values[node] = (value, 0)
        if isinstance(value, torch.Tensor) and "storage" in node.meta:
            storage = self.storages.setdefault(node.meta["storage"], Storage(node))
            if storage.root is not node:
                storage.sharers.append(node.name)

    def visit_call(self, node: fx.Node) -> None:
        target, value = node.target, node.meta["val"]
        if isinstance(value, torch.SymInt | torch.SymFloat):
            self.values[node] = (value, 0)  # sizes become nodes where they are used
        elif target is operator.getitem:
            self.visit_getitem(node)
        elif target in ALIASES:
            self.visit_alias(node)
        elif isinstance(target, OpOverload) and is_inplace_view(target):
            self.visit_view(node, self.argument_node(node, 0))
        elif isinstance(target, OpOverload) and target._schema.is_mutable:
            self.visit_mutation(node, target)
        elif isinstance(value, torch.Tensor) and self.storage(node) is not None:
            self.visit_view(node, self.viewed_argument(node))
        else:
            copied = self.tracer.copy(node, self.read)
            self.new_root(node, copied)

    def argument_node(self, node: fx.Node, index: int) -> fx.Node:
        found = node.args[index]
        assert isinstance(found, fx.Node)
        return found

    def viewed_argument(self, node: fx.Node) -> fx.Node:
        for source in node.all_input_nodes:
            if source.meta.get("storage") == node.meta["storage"]:
                return source
        raise Unsupported(
            f"{node.target} returns memory of something that is not its argument", user_line(node)
        )

    def visit_alias(self, node: fx.Node) -> None:
        source = self.argument_node(node, 0)
        if self.storage(node) is not None:
            self.same_as[node] = source
        else:  # a constant enters: later writes are to this copy of it
            self.new_root(node, self.read(source))

    def visit_view(self, node: fx.Node, base: fx.Node) -> None:
        storage = self.storage(node)
        assert storage is not None
        self.view_of[node] = base = self.canonical(base)
        self.values[node] = (self.reuse_or_apply(node, base), storage.version)

    def reuse_or_apply(self, node: fx.Node, base: fx.Node) -> torch.Tensor:
        """Copy the view with its value where nothing changed; else compute it on the new contents."""
        if node.target in (aten.as_strided.default, aten.as_strided_.default):
            return self.strided_view(node, base)
        storage = self.storage(node)
        assert storage is not None
        relaid = storage.version > 0 and not is_dense(storage.root.meta["val"])
        if relaid or is_inplace_view(node.target):
            return self.apply_view(node, self.read(base))
        copied: torch.Tensor = self.tracer.copy(node, self.read)
        return copied

    def strided_view(self, node: fx.Node, base: fx.Node) -> torch.Tensor:
        """`as_strided` speaks of addresses: give it a base that starts its own memory."""
        if not covers(base.meta["val"], node.meta["val"]):
            reason = "as_strided reaches memory outside of the tensor it is called on"
            raise Unsupported(reason, user_line(node))
        return self.apply_view(node, self.read(base))

    def visit_getitem(self, node: fx.Node) -> None:
        """Part of a result with several tensors: possibly a view of what was split."""
        whole, index = node.args
        assert isinstance(whole, fx.Node) and isinstance(index, int)
        whole_value, _ = self.values[whole]
        if whole_value is None:  # an operator that writes: the part is the tensor written to
            return
        self.values[node] = (whole_value[index], 0)
        storage = self.storage(node)
        if storage is None:
            self.new_root(node, whole_value[index])
        elif isinstance(node.meta["val"], torch.Tensor):
            self.view_of[node] = self.canonical(self.shared_argument(whole, node))
            self.values[node] = (whole_value[index], storage.version)

    def shared_argument(self, whole: fx.Node, part: fx.Node) -> fx.Node:
        for source in whole.all_input_nodes:
            if source.meta.get("storage") == part.meta["storage"]:
                return source
        raise Unsupported(f"{whole.target} returns tensors that share memory", user_line(whole))

    # Operators that write

    def visit_mutation(self, node: fx.Node, op: OpOverload) -> None:
        schema = op._schema
        written = [
            (a.name, node.args[i] if i < len(node.args) else node.kwargs.get(a.name))
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        targets = [target for _, target in written]
        if any(isinstance(t, list | tuple) for t in targets):
            raise Unsupported(f"{op} writes into a list of tensors", user_line(node))
        result = self.compute(node, op, {name for name, _ in written})
        parts = list(result) if isinstance(result, tuple | list) else [result]
        returned = len(schema.returns)
        nodes = [t for t in targets if isinstance(t, fx.Node)]
        if returned and all(
            r.alias_info is not None for r in schema.returns
        ):  # it returns what it wrote
            self.visit_written_results(node, nodes, parts)
            return
        self.values[node] = (tuple(parts[:returned]) if returned != 1 else parts[0], 0)
        if returned == 1 and "storage" in node.meta:
            self.new_root(node, parts[0])
        for target, new in zip((t for t in targets), parts[returned:], strict=True):
            if isinstance(target, fx.Node):
                self.write(target, self.fit(target, new))

    def visit_written_results(
        self, node: fx.Node, targets: list[fx.Node], parts: list[torch.Tensor]
    ) -> None:
        for target, new in zip(targets, parts, strict=True):
            self.write(target, self.fit(target, new))
        if len(targets) == 1:
            self.same_as[node] = targets[0]
        else:
            self.values[node] = (None, 0)
            for user in node.users:
                index = user.args[1]
                assert user.target is operator.getitem and isinstance(index, int)
                self.same_as[user] = targets[index]

    def compute(self, node: fx.Node, op: OpOverload, written: set[str]) -> Any:
        """The results of the operator's functional form."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.read)
        if op is aten.copy_.default:
            return args[1]
        if op._schema.name == "aten::zero_":
            return torch.zeros_like(args[0])  # type: ignore[arg-type]
        schema = op._schema
        given = {k: v for k, v in kwargs.items() if not _is_out(schema, k)}
        for left_out in schema.arguments[len(args) :]:  # defaults may differ between the two forms
            if left_out.has_default_value() and not left_out.is_out:
                given.setdefault(left_out.name, left_out.default_value)
        return functional_variant(op)(*args, **given)

    def fit(self, target: fx.Node, new: torch.Tensor) -> torch.Tensor:
        """What a write of `new` leaves in `target`: cast and broadcast as in-place operators do."""
        old = target.meta["val"]
        if new.dtype != old.dtype:
            new = new.to(old.dtype)
        if new.device != old.device:
            new = new.to(old.device)
        if new.shape != old.shape:
            new = new.expand(old.shape)
        return new

    # The end of the graph

    def finish(self) -> tuple[fx.GraphModule, tuple[int, ...]]:
        inputs = placeholders(self.traced.gm.graph)[: self.traced.primals]
        mutated = tuple(i for i, node in enumerate(inputs) if self.is_written(node))
        returned, gradients = results_of(self.traced.gm.graph)
        self.tracer.phase = "forward"
        forward = [self.read_any(value) for value in returned] + [
            self.read(inputs[i]) for i in mutated
        ]
        owned = self.own_memory(forward)
        dense = [self.dense(self.read_any(value)) for value in gradients]
        results = (tuple(owned), tuple(dense)) if self.traced.trains else tuple(owned)
        gm = self.tracer.finish(results, self.traced.name)
        gm.graph.eliminate_dead_code(has_effect)
        return gm, mutated

    def is_written(self, node: fx.Node) -> bool:
        storage = self.storage(node)
        return storage is not None and storage.version > 0

    def read_any(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        self.tracer.origins = origins_of(value)
        return self.read(value)

    def own_memory(self, values: list[Any]) -> list[Any]:
        """Each returned tensor must have memory of its own: not an input's, not another result's."""
        taken: set[fx.Node] = set()
        owned: list[Any] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                node = self.tracer.argument(value)
                root = alias_root(node)
                if root.op != "call_function" or root in taken:
                    self.tracer.origins = origins_of(node)
                    value = aten.clone.default(value)
                else:
                    taken.add(root)
            owned.append(value)
        return owned

    def dense(self, gradient: Any) -> Any:
        """Gradients are handed to the autograd engine as ordinary dense tensors."""
        if not isinstance(gradient, torch.Tensor) or is_dense(gradient):
            return gradient
        node = self.tracer.argument(gradient)
        self.tracer.origins, self.tracer.phase = origins_of(node), "backward"
        return gradient.clone(memory_format=torch.contiguous_format)


def covers(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Does a contiguous base that starts its memory contain every element of the view?"""
    if not base.is_contiguous() or base.storage_offset() != 0:
        return False
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride()))
    return view.numel() == 0 or bool(view.storage_offset() + reach < base.numel())


def distinct_places(view: torch.Tensor) -> bool:
    """No two elements of the view share an address (expanded and overlapping views do)."""
    span = 1
    for stride, size in sorted(
        (int(s), int(n)) for s, n in zip(view.stride(), view.shape) if n != 1
    ):
        if stride < span:
            return False
        span = stride * (size - 1) + span
    return True
