"""Functionalization: the same values without in-place operators and without shared memory.

Each piece of memory (storage) has a root, the first value seen in it, and a version. A write
through a view is carried to the root by the inverses of the views on the way (`slice_scatter`
undoes `slice`), or, where one has none, by its place in the root's memory (`as_strided_scatter`);
other views of that storage are replayed from the root when next read.

The real compiler: aten/src/ATen/FunctionalTensorWrapper.cpp, FunctionalInverses.cpp.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.layout import (
    extent,
    inverse_order,
    is_dense,
    overlaps,
    stride_order,
    with_layout,
)
from minicompile.aot.result import RuntimeMetadata
from minicompile.aot.tracer import Tracer
from minicompile.errors import Unsupported
from minicompile.ops.functional import functional_form
from minicompile.ops.graph import origins_of, user_line
from minicompile.ops.nodes import (
    ALIASES,
    alias_root,
    aten_ops,
    has_effect,
    is_inplace_view,
    results_of,
    writes,
)
from minicompile.ops.registry import Registry
from minicompile.ops.writes import written_arguments

aten = torch.ops.aten

inverse: Registry[Callable[..., torch.Tensor]] = Registry(
    "inverse", "view operator -> how its base looks once the view is written to"
)
"""(contents of the base, new contents of the view, the view's further arguments) -> new base."""

INVERSES: dict[OpOverload, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(
        aten_ops(
            "view.default _unsafe_view.default _reshape_alias.default unsqueeze.default "
            "squeeze.default squeeze.dim squeeze.dims"
        ),
        lambda base, new, *_: new.reshape(base.shape),
    ),
    aten.permute.default: lambda base, new, dims: new.permute(
        inverse_order([dim % base.dim() for dim in dims])
    ),
    aten.t.default: lambda base, new: new.t(),
    aten.transpose.int: lambda base, new, dim0, dim1: new.transpose(dim0, dim1),
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
for _view, _rule in INVERSES.items():
    inverse(_view)(_rule)

IN_MEMORY_ORDER = {aten.bernoulli_, aten.normal_}
"""Random operators that fill memory from its start; their functional forms go from row to row."""


def functional_variant(op: OpOverload) -> OpOverload:
    """The operator with the same arguments that returns what `op` writes (add for add_), or the view that an
    in-place view makes (t for t_)."""
    namespace, written = op._schema.name.split("::")
    name = written.removesuffix("_")
    wanted = {a.name: str(a.type) for a in op._schema.arguments}
    for candidate in (name, f"{written}_functional", f"{name}_functional"):
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        for overload in packet.overloads() if packet is not None else ():
            found: OpOverload = getattr(packet, overload)
            arguments = {a.name: str(a.type) for a in found._schema.arguments}
            if arguments == wanted and not found._schema.is_mutable:
                return found
    return functional_form(op)


@dataclass
class VersionedStorage:
    """A piece of memory: its root node in the old graph, and how often it has been written."""

    root: fx.Node
    version: int = 0


def functionalize(gm: fx.GraphModule, metadata: RuntimeMetadata, mode: Any) -> fx.GraphModule:
    """A graph that returns the same, with memory of its own for each of the results."""
    run = Functionalizer(gm, metadata, mode)
    with run.tracer.rewriting():
        for node in gm.graph.nodes:
            run.tracer.follow(node)
            run.visit(node)
        return run.finish()


class Functionalizer:
    """State of one run over the old graph. Values are fakes that stand for nodes of the new graph."""

    def __init__(self, gm: fx.GraphModule, metadata: RuntimeMetadata, mode: Any) -> None:
        self.gm, self.metadata = gm, metadata
        self.tracer = Tracer(mode)
        self.values: dict[fx.Node, tuple[Any, int]] = {}
        """Old node -> its value in the new graph, and the storage's version when that was computed."""
        self.storages: dict[int, VersionedStorage] = {}
        self.view_of: dict[fx.Node, fx.Node] = {}
        self.same_as: dict[fx.Node, fx.Node] = {}
        """In-place results and aliases: old node -> the first old node with these contents."""

    # Reading and writing old nodes

    def storage(self, node: fx.Node) -> VersionedStorage | None:
        return self.storages.get(node.meta.get("storage", -1))

    def read(self, node: fx.Node) -> Any:
        """The node's present contents: replayed from the root if the storage was written since."""
        node = self.same_as.get(node, node)
        value, version = self.values[node]
        storage = self.storage(node)
        if storage is None or version == storage.version:
            return value
        value = self.apply_view(node, self.read(self.view_of[node]))
        self.values[node] = (value, storage.version)
        return value

    def view_call(self, node: fx.Node) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
        """(operator, arguments after the base, keyword arguments) of a view, in place or not."""
        target = node.target
        assert isinstance(target, OpOverload)
        args, kwargs = fx.map_arg((node.args[1:], dict(node.kwargs)), self.read)
        return functional_variant(target) if is_inplace_view(target) else target, args, kwargs

    def apply_view(self, node: fx.Node, base: torch.Tensor) -> Any:
        if node.target in (aten.as_strided.default, operator.getitem):
            return self.place(self.memory(node), node)
        target, args, kwargs = self.view_call(node)
        return target(base, *args, **kwargs)

    def memory(self, node: fx.Node) -> torch.Tensor:
        """All of the storage that a value lies in, as one row in memory of its own."""
        storage, value = self.storages[node.meta["storage"]], node.meta["val"]
        root = storage.root.meta["val"]
        if not is_dense(root) or root.dtype is not value.dtype or value.is_conj():
            reason = f"{node.target} speaks of addresses in memory with gaps, or of another type"
            raise Unsupported(reason, user_line(node))
        row = self.read(storage.root).permute(stride_order(root))
        return row.clone(memory_format=torch.contiguous_format).view(-1)

    def place(self, row: torch.Tensor, node: fx.Node, new: torch.Tensor | None = None) -> Any:
        """Where a value lies in the row of its storage; with `new`: the row with that written there."""
        old, root = node.meta["val"], self.storages[node.meta["storage"]].root.meta["val"]
        start = root.storage_offset()
        offset = old.storage_offset() - start
        if old.numel() != 0 and not (offset >= 0 and extent(old) - start <= row.numel()):
            reason = "as_strided reaches memory outside of the tensor it is called on"
            raise Unsupported(reason, user_line(node))
        place = (old.shape, old.stride(), offset)
        return row.as_strided(*place) if new is None else row.as_strided_scatter(new, *place)

    def write(self, node: fx.Node, new: torch.Tensor) -> None:
        """`new` becomes the contents of `node`, and through the inverse views of everything that
        shares its memory."""
        node = self.same_as.get(node, node)
        old, storage = node.meta["val"], self.storages[node.meta["storage"]]
        if overlaps(old) or overlaps(storage.root.meta["val"]):
            raise Unsupported("a write to a tensor whose elements share memory", user_line(node))
        new = new.to(dtype=old.dtype, device=old.device)  # as in-place operators do
        if new.shape != old.shape:
            new = new.expand(old.shape)
        chain = [node]
        while chain[-1] in self.view_of:
            chain.append(self.view_of[chain[-1]])
        *views, root = chain
        if all(self.has_inverse(view) for view in views):
            new = self.carried(chain, new)
        else:
            old, order = root.meta["val"], stride_order(root.meta["val"])
            row = self.place(self.memory(node), node, new)
            new = row.view([old.shape[dim] for dim in order]).permute(inverse_order(order))
        storage.version += 1
        self.values[root] = (with_layout(new, root.meta["val"]), storage.version)

    def carried(self, chain: list[fx.Node], new: torch.Tensor) -> torch.Tensor:
        """New contents of the root at the end of a chain of views, given those of the first."""
        for view, base in pairwise(chain):
            target, args, kwargs = self.view_call(view)
            new = inverse[target](self.read(base), new, *args, **kwargs)
        return new

    def has_inverse(self, view: fx.Node) -> bool:
        """May a write be carried through the view by its operator's inverse?"""
        if view.target is operator.getitem:
            return False
        return self.view_call(view)[0] in inverse and not overlaps(view.meta["val"])

    # Going through the old graph

    def visit(self, node: fx.Node) -> None:
        target, value = node.target, node.meta.get("val")
        if node.op == "output":
            return
        if node.op != "call_function":
            self.new_root(node, self.copy(node))
        elif target is operator.getitem:
            self.visit_getitem(node)
        elif target in ALIASES:
            self.visit_alias(node)
        elif writes(target):
            self.visit_mutation(node, target)
        elif isinstance(value, torch.Tensor) and self.storage(node) is not None:
            self.visit_view(node)
        else:
            self.new_root(node, self.copy(node))

    def copy(self, node: fx.Node) -> Any:
        return self.tracer.copy(node, self.gm, self.read)

    def new_root(self, node: fx.Node, value: Any) -> None:
        self.values[node] = (value, 0)
        if isinstance(value, torch.Tensor) and "storage" in node.meta:
            self.storages.setdefault(node.meta["storage"], VersionedStorage(node))

    def viewed(self, call: fx.Node, storage: int) -> fx.Node:
        """The argument of a call that lies in a storage: what the call's result is a view of."""
        source = next(x for x in call.all_input_nodes if x.meta.get("storage") == storage)
        return self.same_as.get(source, source)

    def visit_alias(self, node: fx.Node) -> None:
        source = node.all_input_nodes[0]
        if self.storage(node) is not None:
            self.same_as[node] = self.same_as.get(source, source)
        else:  # a constant enters: later writes are to this copy of it
            self.new_root(node, self.read(source))

    def visit_view(self, node: fx.Node) -> None:
        """Copy the view with its value where nothing changed; else compute it on the new contents."""
        storage = self.storages[node.meta["storage"]]
        self.view_of[node] = base = self.viewed(node, node.meta["storage"])
        relaid = storage.version > 0 and not is_dense(storage.root.meta["val"])
        if relaid or is_inplace_view(node.target) or node.target is aten.as_strided.default:
            value = self.apply_view(node, self.read(base))
        else:
            value = self.copy(node)
        self.values[node] = (value, storage.version)

    def visit_getitem(self, node: fx.Node) -> None:
        """Part of a result with several tensors: possibly a view."""
        whole, index = node.args
        assert isinstance(whole, fx.Node) and isinstance(index, int)
        storage = self.storage(node)
        if storage is None:
            self.new_root(node, self.values[whole][0][index])
        else:
            self.view_of[node] = self.viewed(whole, node.meta["storage"])
            self.values[node] = (self.values[whole][0][index], storage.version)

    # Operators that write

    def visit_mutation(self, node: fx.Node, op: OpOverload) -> None:
        written = compat.tree_leaves(written_arguments(op, node.args, node.kwargs))
        fresh = sum(r.alias_info is None for r in op._schema.returns)
        result = self.compute(node, op)
        parts = list(result) if isinstance(result, tuple | list) else [result]
        # lists are gone through one by one, and nobody knows when a user's operator reads what it writes
        whole = isinstance(node.args[0], list) or op.namespace not in ("aten", "prims")
        used = [node.args, node.kwargs] if whole else written
        memory = [x.meta.get("storage") for x in compat.tree_leaves(used) if isinstance(x, fx.Node)]
        if any(memory.count(x.meta["storage"]) > 1 for x in written if isinstance(x, fx.Node)):
            raise Unsupported(f"{op} goes several times into one memory", user_line(node))
        for target, new in zip(written, compat.tree_leaves(parts[fresh:]), strict=True):
            if isinstance(target, fx.Node):
                old = target.meta["val"].dtype
                if op is not aten.copy_.default and not torch.can_cast(new.dtype, old):
                    reason = f"{op} gives {new.dtype}, which eager doesn't write to {old}"
                    raise Unsupported(reason, user_line(node))
                self.write(target, new)
        if fresh == 1:
            self.new_root(node, parts[0])
        elif fresh:
            self.values[node] = (tuple(parts[:fresh]), 0)
        else:  # it returns what it wrote
            self.same_as[node] = self.same_as.get(written[0], written[0])

    def compute(self, node: fx.Node, op: OpOverload) -> Any:
        """The results of the operator's functional form."""
        args: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.read)
        if op is aten.copy_.default:  # of a tensor or a number
            if not isinstance(args[1], torch.Tensor):
                return torch.full_like(*args[:2])
            # the backward may read what was written: its source may change after the graph
            return args[1].clone() if self.metadata.trains else args[1]
        if op is aten.zero_.default:
            return torch.zeros_like(args[0])
        target: Any = node.args[0]
        if op.overloadpacket in IN_MEMORY_ORDER and not target.meta["val"].is_contiguous():
            reason = f"{op} draws other numbers where elements don't lie in rows"
            raise Unsupported(reason, user_line(node))
        form, given = functional_variant(op), dict[str, Any](kwargs)
        for position, parameter in enumerate(op._schema.arguments):
            if position < len(args) and not parameter.kwarg_only:
                given[parameter.name] = args[position]
            elif parameter.has_default_value():
                # spelled out, since the functional form may have another default
                given.setdefault(parameter.name, parameter.default_value)
        # by name, since the functional form may have another order
        places = [a.name for a in form._schema.arguments if not a.kwarg_only]
        return form(*[given.pop(name) for name in places], **given)

    # The end of the graph

    def finish(self) -> fx.GraphModule:
        returned, gradients = results_of(self.gm.graph)
        self.tracer.phase, self.tracer.region = "forward", None
        forward = [self.read_any(value) for value in returned]
        results: tuple[Any, ...] = tuple(self.own_memory(forward, returned))
        if self.metadata.trains:
            results = (results, tuple(self.dense(self.read_any(value)) for value in gradients))
        gm = self.tracer.finish(results, self.metadata.graph_name)
        gm.graph.eliminate_dead_code(has_effect)
        return gm

    def read_any(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        self.tracer.origins = origins_of(value)
        return self.read(value)

    def own_memory(self, values: list[Any], returned: Sequence[Any]) -> list[Any]:
        """Each returned tensor must have memory of its own: not an input's, not another result's, not a part
        of something that eager doesn't return a part of."""
        taken: set[fx.Node] = set()
        owned: list[Any] = []
        for value, old in zip(values, returned, strict=True):
            if isinstance(value, torch.Tensor):
                node = self.tracer.argument(value)
                root, start = alias_root(node), old.meta["val"].storage_offset()
                if root.op != "call_function" or root in taken or value.storage_offset() != start:
                    self.tracer.origins = origins_of(node)
                    value = aten.clone.default(value)
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
