"""From a functional ATen graph to a `LoopGraph`, node by node.

Each call becomes a value by its operator's rule (registry.py), or an extern call with the reason. Values stay
formulas until something needs their memory. The real compiler: GraphLowering in torch/_inductor/graph.py.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from minicompile.errors import Unsupported
from minicompile.lowering import realize as heuristics
from minicompile.lowering import rules
from minicompile.lowering.context import LoweringContext, layout_of, tensor_layouts
from minicompile.lowering.ir import (
    ConstantBuffer,
    ExternKernel,
    InputBuffer,
    Layout,
    LoopGraph,
    Operation,
    Output,
    View,
    verify,
    written_by,
)
from minicompile.lowering.registry import Rule, extern_reasons, lowering
from minicompile.lowering.value import BufferValue, LazyValue, TensorValue, base_of, values_in
from minicompile.ops.dtypes import LOOP_DTYPES, short
from minicompile.ops.graph import Graph, origins_of, output_node, target_name
from minicompile.ops.origin import source_lines
from minicompile.options import Options
from minicompile.shapes.expr import Size, to_size

__all__ = ["LoweringContext", "lower", "lowering", "rules"]

STRIDES_DONT_MATTER = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.baddbmm.default,
    }
)
"""Libraries whose result lies the same way however their operands do."""


def lower(graph: Graph, options: Options) -> LoopGraph:
    """Lower a functional ATen graph; nodes carry `meta["val"]` and `meta["origins"]`.

    Raises Unsupported for graphs that mutate, hold tensors that aren't strided, or read data into sizes.
    """
    return _Lowering(graph, options).run()


class _Lowering:
    def __init__(self, graph: Graph, options: Options) -> None:
        self.graph, self.options = graph, options
        self.ctx = LoweringContext(options)
        self.values: dict[fx.Node, Any] = {}
        self.inputs: list[InputBuffer | Size] = []
        self.hints: dict[sympy.Symbol, int] = {}
        self.symbols: set[sympy.Basic] = set()
        self.returned = set(output_node(graph.gm.graph).all_input_nodes)

    def run(self) -> LoopGraph:
        outputs: list[Output] = []
        self.ctx.names.update(
            n.name for n in self.graph.nodes if n.op in ("placeholder", "get_attr")
        )
        for node in self.graph.nodes:
            self.ctx.enter(node)
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node)
            elif node.op == "get_attr":
                self.values[node] = self._attribute(node)
            elif node.op == "output":
                outputs = [self._output(item) for item in _returned(node)]
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            else:
                raise Unsupported(f"a {node.op} node in an ATen graph")
        ctx = self.ctx
        operations, constants = _without_unread(ctx, outputs)
        found = LoopGraph(self.graph.name, self.inputs, constants, operations, outputs, self.hints)
        if self.options.verify:
            verify(found)
        return found

    # -- inputs and outputs

    def _placeholder(self, node: fx.Node) -> Any:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            layout = layout_of(val)
            for value in (*val.shape, *val.stride()):
                self._hint(value)
            buffer = InputBuffer(node.name, layout, origins_of(node))
            self.ctx.input_offsets[node.name] = to_size(val.storage_offset())
            self.inputs.append(buffer)
            return BufferValue(buffer, layout)
        if isinstance(val, int | torch.SymInt | sympy.Expr) and not isinstance(val, bool):
            self._hint(val)
            size = to_size(val)
            self.inputs.append(size)
            return size
        raise Unsupported(f"a graph input of type {type(val).__name__}")

    def _hint(self, value: Any) -> None:
        """Note a size symbol's value when compiling."""
        size = to_size(value)
        if isinstance(size, sympy.Expr):
            self.symbols |= size.free_symbols
        hint = getattr(getattr(value, "node", None), "hint", None)
        if isinstance(size, sympy.Symbol) and isinstance(hint, int):
            self.hints[size] = hint

    def _attribute(self, node: fx.Node) -> TensorValue:
        value: Any = self.graph.gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise Unsupported(f"a graph attribute of type {type(value).__name__}")
        return self.ctx.constant(value, node.name)

    def _output(self, item: Any) -> Output:
        if not isinstance(item, fx.Node):
            return item  # type: ignore[no-any-return]
        value = self.values[item]
        if isinstance(value, tuple | list):
            raise Unsupported("a graph output that is a tuple", where=_where(item))
        if not isinstance(value, TensorValue):
            return value  # type: ignore[no-any-return]
        self.ctx.enter(item)
        memory = self.ctx.realize_as(value, self._layout(item, value), "graph output")
        return View(memory.buffer.name, memory.layout)

    def _layout(self, node: fx.Node, value: TensorValue) -> Layout:
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            raise Unsupported(f"{node.name} has no value at compile time", where=_where(node))
        return layout_of(val)

    # -- calls

    def _call(self, node: fx.Node) -> Any:
        op, val = node.target, node.meta.get("val")
        if op is operator.getitem:
            return self._resolve(node.args[0])[node.args[1]]
        if isinstance(val, int | torch.SymInt | sympy.Expr):
            return self._known_size(node, val)
        if not isinstance(op, torch._ops.OpOverload):
            raise Unsupported(f"no lowering for {target_name(op)}", where=_where(node))
        if op._schema.is_mutable:
            raise Unsupported(f"{op} mutates its argument", where=_where(node))
        rule = lowering.get(op)
        args, kwargs = self._resolve(node.args), self._resolve(node.kwargs)
        reason = self._why_extern(node, op, rule, args, kwargs)
        if reason is None:
            assert rule is not None
            try:
                result = rule(self.ctx, *args, **kwargs)
            except Unsupported as refusal:
                reason = refusal.reason
            else:
                return self._settle(node, self._fresh(op, args, result))
        return self._extern(node, op, args, kwargs, reason)

    def _resolve(self, argument: Any) -> Any:
        """A node's arguments as rules get them: nodes by their values, symbolic ints as sizes."""
        if isinstance(argument, fx.Node):
            return self.values[argument]
        if isinstance(argument, tuple | list):
            return [self._resolve(item) for item in argument]
        if isinstance(argument, dict):
            return {key: self._resolve(item) for key, item in argument.items()}
        if isinstance(argument, torch.SymInt):
            return to_size(argument)
        if isinstance(argument, torch.SymFloat | torch.SymBool):
            raise Unsupported("a symbolic number that is no size")
        return argument

    def _why_extern(
        self, node: fx.Node, op: torch._ops.OpOverload, rule: Rule | None, args: Any, kwargs: Any
    ) -> str | None:
        """Why a library must run this call, or None if its rule can try."""
        if rule is None:
            reason = extern_reasons.get(op) or extern_reasons.get(op.overloadpacket)
            return reason or f"no lowering for {op}"
        if is_view(op):  # works on layouts alone
            return None
        results = [layout.dtype for layout in tensor_layouts(node.meta.get("val")) if layout]
        for dtype in [v.dtype for v in values_in((args, kwargs))] + results:
            if dtype not in LOOP_DTYPES:
                return f"loops can't hold {short(dtype)}"
        return None

    def _fresh(self, op: torch._ops.OpOverload, args: Any, result: Any) -> Any:
        """Results that eager puts into new memory are new tensors here too, even if nothing changed."""
        if is_view(op):
            return result
        given = {id(base_of(v)) for v in values_in(args)}
        memory = {v.buffer for v in values_in(args) if isinstance(v, BufferValue)}
        memory |= {
            v.memory.buffer for v in values_in(args) if isinstance(v, LazyValue) and v.memory
        }

        def settle(value: Any) -> Any:
            if isinstance(value, tuple | list):
                return tuple(settle(v) for v in value)
            if not isinstance(value, TensorValue):
                return value
            aliases = id(base_of(value)) in given
            aliases |= isinstance(value, BufferValue) and value.buffer in memory
            return self.ctx.copy_of(value) if aliases else value

        return settle(result)

    def _settle(self, node: fx.Node, result: Any) -> Any:
        """Write a node's result to memory where that is better than inlining it."""
        for value in values_in(result):
            base = base_of(value)
            if not isinstance(base, LazyValue) or base.memory is not None:
                continue
            why = heuristics.too_large(base) or self._why_kept(node, base)
            if self.options.inline == "never" and base is value:
                why = why or 'options.inline = "never"'
            if why is not None:
                self.ctx.realize(base, why)
        return result

    def _why_kept(self, node: fx.Node, value: LazyValue) -> str | None:
        users = len(node.users)
        if users > 1 and node in self.returned:
            return f"graph output with {users - 1} other users"
        return heuristics.worth_keeping(value, users)

    def _extern(
        self,
        node: fx.Node,
        op: torch._ops.OpOverload,
        args: Any,
        kwargs: Any,
        reason: str,
    ) -> Any:
        layouts: list[Layout | None] | None = None
        for layout in tensor_layouts(node.meta.get("val")):
            for size in layout.size if layout is not None else ():
                self._known_size(node, size)
        if is_view(op):
            # an alias of an argument could be overwritten with it: take the copying variant
            copying = getattr(torch.ops.aten, f"{op.overloadpacket.__name__}_copy", None)
            name = op._overloadname
            if op.namespace != "aten" or copying is None or name not in copying.overloads():
                raise Unsupported(f"{op}: {reason}", where=_where(node))
            op = getattr(copying, name)
            layouts = [
                None if lay is None else Layout.contiguous(lay.device, lay.dtype, lay.size)
                for lay in tensor_layouts(node.meta.get("val"))
            ]
        if op not in STRIDES_DONT_MATTER:
            args = self._with_eager_strides(node.args, args)
            kwargs = self._with_eager_strides(node.kwargs, kwargs)
        return self.ctx.extern(op, args, kwargs, reason, layouts)

    def _known_size(self, node: fx.Node, value: Any) -> Size:
        """A number as a Size. Refuses one that only the operator knows, once it has run."""
        size = to_size(value)
        if isinstance(size, sympy.Expr) and not size.free_symbols <= self.symbols:
            raise Unsupported(
                f"{target_name(node.target)}: the size of its result depends on data",
                where=_where(node),
            )
        return size

    def _with_eager_strides(self, nodes: Any, values: Any) -> Any:
        """Operands as they lie in eager: operators choose their result's strides by them."""
        if isinstance(nodes, fx.Node) and isinstance(values, TensorValue):
            layout = self._layout(nodes, values)
            return self.ctx.realize_as(values, layout, f"read by {target_name(self._target())}")
        if isinstance(nodes, tuple | list):
            return [self._with_eager_strides(n, v) for n, v in zip(nodes, values, strict=True)]
        if isinstance(nodes, dict):
            return {k: self._with_eager_strides(nodes[k], values[k]) for k in nodes}
        return values

    def _target(self) -> object:
        return self.ctx.node.target if self.ctx.node is not None else ""


def is_view(op: torch._ops.OpOverload) -> bool:
    """Whether eager returns an alias of an argument."""
    return any(result.alias_info is not None for result in op._schema.returns)


def _returned(node: fx.Node) -> Sequence[Any]:
    items = node.args[0]
    return items if isinstance(items, tuple | list) else (items,)


def _where(node: fx.Node) -> Any:
    lines = source_lines(origins_of(node))
    return lines[0] if lines else None


def _without_unread(
    ctx: LoweringContext, outputs: Sequence[Output]
) -> tuple[list[Operation], list[ConstantBuffer]]:
    """Drop operations that nothing reads, and single outputs of operators.

    Operators that do more than compute (random numbers, checks) stay.
    """
    needed = {output.buffer for output in outputs if isinstance(output, View)}
    kept: list[Operation] = []
    for operation in reversed(ctx.operations):
        names = {buffer.name for buffer in written_by(operation)}
        if names & needed or _has_effect(operation):
            if isinstance(operation, ExternKernel):
                operation.outputs = tuple(
                    o if o is not None and o.name in needed else None for o in operation.outputs
                )
            needed |= ctx.reads[operation.name]
            kept.append(operation)
    return kept[::-1], [c for c in ctx.constants if c.name in needed]


def _has_effect(operation: Operation) -> bool:
    if not isinstance(operation, ExternKernel):
        return False
    return not operation.outputs or torch.Tag.nondeterministic_seeded in operation.op.tags
