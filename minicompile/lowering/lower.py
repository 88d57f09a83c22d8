"""From a functional ATen graph to a `LoopGraph`, node by node.

Each call becomes a value by its operator's rule (context.py), or an extern call with the reason. Values stay
formulas until something needs their memory. The real compiler: GraphLowering in torch/_inductor/graph.py.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import fx

from minicompile import compat
from minicompile.errors import Unsupported
from minicompile.lowering import realize as heuristics
from minicompile.lowering import rules
from minicompile.lowering.context import (
    LoweringContext,
    Rule,
    extern_reasons,
    layout_of,
    lowering,
    template,
)
from minicompile.lowering.ir import (
    LIBRARY_PRODUCTS,
    ExternKernel,
    ExternOutput,
    InputBuffer,
    Layout,
    LoopGraph,
    Operation,
    Output,
    written_by,
)
from minicompile.lowering.value import Storage, TensorValue
from minicompile.ops import plugins
from minicompile.ops.dtypes import LOOP_DTYPES, short
from minicompile.ops.gates import REFUSED, allowed
from minicompile.ops.graph import (
    Graph,
    origins_of,
    output_node,
    statement,
    target_name,
    user_line,
)
from minicompile.ops.nodes import gives_view
from minicompile.options import Options
from minicompile.shapes.expr import Size, to_size

__all__ = ["LoweringContext", "lower", "lowering", "rules"]

NUMBERS = (int, torch.SymInt, torch.SymFloat, sympy.Expr)


def lower(graph: Graph, options: Options) -> LoopGraph:
    """Lower a functional ATen graph; nodes carry `meta["val"]` and `meta["origins"]`.

    Raises Unsupported for graphs that mutate, hold tensors that aren't strided, or read data into sizes.
    """
    return Lowering(graph, options).run()


class Lowering:
    """One graph on its way."""

    def __init__(self, graph: Graph, options: Options) -> None:
        self.graph, self.options = graph, options
        self.ctx, self.rules = LoweringContext(options), plugins.rules(lowering, options.plugins)
        self.values: dict[fx.Node, Any] = {}
        self.inputs: list[InputBuffer | Size] = []
        self.hints: dict[sympy.Symbol, int] = {}
        self.returned = set(output_node(graph.gm.graph).all_input_nodes)

    def run(self) -> LoopGraph:
        outputs = self.visit()
        name, ctx = self.graph.name, self.ctx
        found = LoopGraph(name, self.inputs, ctx.constants, ctx.operations, outputs, self.hints)
        drop_unread(found)
        if self.options.verify:
            found.verify()
        return found

    def visit(self) -> list[Output]:
        """Lower each node. Return what the graph gives."""
        visit = {
            "placeholder": self._placeholder,
            "get_attr": self._attribute,
            "call_function": self._call,
        }
        *nodes, output = self.graph.nodes
        self.ctx.names.update(n.name for n in nodes if n.op in ("placeholder", "get_attr"))
        for node in nodes:
            if node.op not in visit:
                raise Unsupported(f"a {node.op} node in an ATen graph")
            self.ctx.enter(node)
            self.values[node] = visit[node.op](node)
        items: Any = output.args[0]
        return [self.output(item) for item in items]

    # -- inputs and outputs

    def _placeholder(self, node: fx.Node) -> Any:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            for value in (*val.shape, *val.stride()):
                self._hint(value)
            buffer = InputBuffer(node.name, layout_of(val), origins_of(node))
            self.ctx.input_offsets[node.name] = to_size(val.storage_offset())
            self.inputs.append(buffer)
            return self.ctx.in_memory(buffer)
        if isinstance(val, NUMBERS) and not isinstance(val, bool):
            self._hint(val)
            self.inputs.append(to_size(val))
            return to_size(val)
        raise Unsupported(f"a graph input of type {type(val).__name__}")

    def _hint(self, value: Any) -> None:
        """Note a size symbol's value when compiling."""
        size = to_size(value)
        if isinstance(size, sympy.Expr):
            self.ctx.env = value.node.shape_env
            self.hints |= {s: self.ctx.env.hints[s] for s in size.free_symbols}

    def _attribute(self, node: fx.Node) -> TensorValue:
        value: Any = operator.attrgetter(str(node.target))(self.graph.gm)
        if not isinstance(value, torch.Tensor):
            raise Unsupported(f"a graph attribute of type {type(value).__name__}")
        return self.ctx.constant(value, node.name)

    def output(self, item: Any) -> Output:
        """A graph output in memory, laid out as eager's."""
        value = self.values[item] if isinstance(item, fx.Node) else item
        if isinstance(value, tuple | list):
            raise Unsupported("a graph output that is a tuple", where=user_line(item))
        if not isinstance(value, TensorValue):
            return value  # type: ignore[no-any-return]
        self.ctx.enter(item)
        layout = layout_of(item.meta["val"])
        found = self.ctx.realize_as(value, layout, "graph output")
        if found is None:
            where = f"a new tensor with strides {layout.stride} for size {layout.size}"
            raise Unsupported(where, where=user_line(item))
        return found

    # -- calls

    def _call(self, node: fx.Node) -> Any:
        op, val = node.target, node.meta.get("val")
        arguments: Any = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        args, kwargs = arguments
        if op is operator.getitem:
            return args[0][args[1]]
        if isinstance(val, NUMBERS):
            return self._known_size(node, val)
        if not isinstance(op, torch._ops.OpOverload):
            raise Unsupported(f"no lowering for {target_name(op)}", where=user_line(node))
        if op._schema.is_mutable:
            raise Unsupported(f"{op} mutates its argument", where=user_line(node))
        rule, operands = self.rules.get(op), values_in((args, kwargs))
        own = self.options.mode.startswith("max-autotune") or not self.options.library
        if rule is None and own:
            rule = plugins.rules(template, self.options.plugins).get(op)
        reason = self._why_extern(op, rule, operands)
        if reason is None and not self._may_lower(node, op):
            reason = REFUSED
        if reason is None:
            assert rule is not None
            try:
                result = rule(self.ctx, *args, **kwargs)
            except Unsupported as refusal:
                reason = refusal.reason
            else:
                if not gives_view(op):
                    result = self._fresh(result, {value.storage for value in operands})
                for value in values_in(result):
                    self.realize_if_better(node, value)
                return result
        return self._extern(node, op, reason)

    def _why_extern(
        self, op: torch._ops.OpOverload, rule: Rule | None, operands: Sequence[TensorValue]
    ) -> str | None:
        """Why a library must run this call, or None if its rule can try."""
        if rule is None:
            reason = extern_reasons.get(op) or extern_reasons.get(op.overloadpacket)
            return reason or f"no lowering for {op}"
        if gives_view(op):  # works on layouts alone
            return None
        results = [layout.dtype for layout in self.ctx.layouts if layout is not None]
        for dtype in (*(value.dtype for value in operands), *results):
            if dtype not in LOOP_DTYPES:
                return f"loops can't hold {short(dtype)}"
        return None

    def _may_lower(self, node: fx.Node, op: torch._ops.OpOverload) -> bool:
        """Do gates let an operator's rule be used? Where a library can't take its place, it must be."""
        only_loops, origins = gives_view(op) and _copy_of(op) is None, self.ctx.origins
        return only_loops or allowed(
            "lowering", op, partial(statement, node), origins=lambda: origins
        )

    def _fresh(self, result: Any, given: set[Storage]) -> Any:
        """Results that eager puts into new memory are new tensors here too, even if nothing changed."""
        if isinstance(result, tuple | list):
            return tuple(self._fresh(part, given) for part in result)
        return self.ctx.copy_of(result) if result.storage in given else result

    def realize_if_better(self, node: fx.Node, value: TensorValue) -> None:
        """Write a node's result to memory where that is better than inlining it.

        Its readers may look at some elements only; all of its indices have to be in range, as in eager.
        """
        storage, users = value.storage, len(node.users)
        if storage.buffer is not None:
            return
        why = "indices to check" if storage.cost.checks else heuristics.too_large(storage)
        if why is None and users > 1 and node in self.returned:
            why = f"graph output with {users - 1} other users"
        if why is None and node in self.returned and node.target is torch.ops.aten.clone.default:
            why = "graph output: what is copied may die"
        if why is None:
            why = heuristics.worth_keeping(storage, users)
        if why is None and self.options.inline == "never" and value.view is None:
            why = 'options.inline = "never"'
        if why is not None:
            self.ctx.settle(storage, why)

    def _extern(self, node: fx.Node, op: torch._ops.OpOverload, reason: str) -> Any:
        """Call an operator as it is. Its results lie as eager's do."""
        ctx, layouts = self.ctx, self.ctx.layouts
        val: Any = node.meta.get("val")
        for layout in layouts:
            for size in layout.size if layout is not None else ():
                self._known_size(node, size)
        if gives_view(op):
            op = _copying(node, op, reason)
            layouts = [
                lay and Layout.contiguous(lay.device, lay.dtype, lay.size) for lay in layouts
            ]
        single, why = isinstance(val, torch.Tensor), f"read by {op}"

        def operand(argument: fx.Node) -> Any:
            value = self.values[argument]
            if not isinstance(value, TensorValue):
                return value
            if op in LIBRARY_PRODUCTS:
                return ctx.realize(value, why)
            # operators choose their result's strides by their operands'; the wrapper mends them
            layout = layout_of(argument.meta["val"])
            return ctx.realize_as(value, layout, why) or ctx.realize(value, why)

        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        name = ctx.new_name()
        places = [(name, None)] if single else [(f"{name}_{k}", k) for k in range(len(layouts))]
        outputs = tuple(
            ExternOutput(place, layout, ctx.origins, number) if layout is not None else None
            for (place, number), layout in zip(places, layouts, strict=True)
        )
        kernel = ExternKernel(name, op, args, dict(kwargs), outputs, reason, ctx.origins)
        ctx.operations.append(kernel)
        results = tuple(
            ctx.in_memory(made) if made is not None else _number(number)
            for made, number in zip(outputs, [val] if single else val or (), strict=True)
        )
        return results[0] if single else results

    def _known_size(self, node: fx.Node, value: Any) -> Size:
        """A number as a Size. Refuses one that only the operator knows, once it has run."""
        size = to_size(value)
        if isinstance(size, sympy.Expr) and not size.free_symbols <= self.hints.keys():
            raise Unsupported(
                f"{target_name(node.target)}: the size of its result depends on data",
                where=user_line(node),
            )
        return size


def values_in(nested: Any) -> list[TensorValue]:
    return [value for value in compat.tree_leaves(nested) if isinstance(value, TensorValue)]


def _number(value: Any) -> Any:
    """A number that an operator returns beside tensors."""
    return to_size(value) if isinstance(value, torch.SymInt) else value


def _copying(node: fx.Node, op: torch._ops.OpOverload, reason: str) -> torch._ops.OpOverload:
    """A view operator's copying variant: an alias of an argument could be overwritten with it."""
    found = _copy_of(op)
    if found is None:
        raise Unsupported(f"{op}: {reason}", where=user_line(node))
    return found


def _copy_of(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    packet = getattr(torch.ops.aten, f"{op.overloadpacket.__name__}_copy", None)
    return getattr(packet, op._overloadname, None) if op.namespace == "aten" else None


def drop_unread(graph: LoopGraph) -> None:
    """Drop operations and constants that nothing reads, and single outputs of operators.

    Operators that do more than compute (random numbers, checks) stay.
    """
    needed = set(graph.returned)
    kept: list[Operation] = []
    for operation in reversed(graph.operations):
        names = {buffer.name for buffer in written_by(operation)}
        effect = isinstance(operation, ExternKernel) and operation.has_effect
        if names & needed or effect:
            if isinstance(operation, ExternKernel):
                operation.outputs = tuple(
                    o if o is not None and o.name in needed else None for o in operation.outputs
                )
            needed.update(operation.reads)
            kept.append(operation)
    graph.operations[:] = kept[::-1]
    graph.constants = [c for c in graph.constants if c.name in needed]
