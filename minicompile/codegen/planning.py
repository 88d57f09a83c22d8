"""From a fused node to a `KernelPlan`: every decision about a kernel, before a line is printed.

`make_plan` merges and legalises the bodies, fills in the facts (arguments, sizes, cost), and lets the rules
of the registry `plan` (codegen/rules.py) decide the rest, in the order in which they were registered. A
rule edits the plan; its key starts with the language it is for ("cpp" or "triton") or with "any". A rule
registered under a built-in key replaces the built-in one, a new key runs after all others:

    @plan_rule("cpp:narrow")
    def narrow(plan, options):
        plan.vector_width = 4

The real compiler: torch/_inductor/codegen/simd.py, cpp.py and torch/_inductor/runtime/triton_heuristics.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sympy
import torch

from minicompile.codegen import cpp_rules as _cpp_rules  # noqa: F401  registers its rules
from minicompile.codegen import tiles as _tiles  # noqa: F401  registers its rules
from minicompile.codegen.legalize import legalize
from minicompile.codegen.merge import loop_level, merge
from minicompile.codegen.phases import cost, cut
from minicompile.codegen.plan import Cost, KernelArgument, KernelPlan, Language
from minicompile.codegen.rules import count, is_update, plan_rule
from minicompile.lowering.ir import Buffer
from minicompile.options import Options
from minicompile.scheduling.body import LoopBody
from minicompile.scheduling.nodes import FusedSchedulerNode, Schedule
from minicompile.shapes.expr import size_hint


def make_plan(
    node: FusedSchedulerNode,
    schedule: Schedule,
    language: Language,
    options: Options,
    position: int,
) -> KernelPlan:
    """The plan of one kernel. `position` is the node's number in the schedule: part of the name."""
    buffers = schedule.graph.buffers
    dtypes = {name: buffer.layout.dtype for name, buffer in buffers.items()}
    merged = merge(node, schedule.memory.internal, dtypes)
    body, new = legalize(merged.body, dtypes)
    loop = loop_level(body, {new[v] for v in merged.every})
    updated = {v.buffer for v in body.stores if is_update(v) or v.buffer in schedule.memory.aliases}
    plan = KernelPlan(
        name=f"{language}_fused_{operation_names(body)}_{position}",
        language=language,
        device=node.nodes[0].buffer.layout.device,
        node=node,
        body=body,
        phases=(),
        arguments=arguments_of(body, dtypes, updated),
        sizes=size_symbols(body),
        reduction="looped" if body.reduction_ranges else "none",
        loop=loop,
        hints=dict(schedule.graph.size_hints),
    )
    plan.cost = estimate(plan, buffers)
    for key in plan_rule:
        if str(key).partition(":")[0] in (language, "any"):
            plan_rule[key](plan, options)
    plan.phases = cut(body, loop, plan.stashed, recompute=plan.reduction != "persistent")
    return plan


def operation_names(body: LoopBody, most: int = 4) -> str:
    """`add_gelu`: the user's operations in the kernel, in order, each once; never numbers or constants."""
    found: list[str] = []
    for value in body.values:
        for origin in sorted(value.origins):
            name = origin.target.rpartition(".")[2].strip("_")
            name = "".join(c if c.isalnum() else "_" for c in name)
            if name and name not in found:
                found.append(name)
    return "_".join(found[:most]) or "kernel"


def arguments_of(
    body: LoopBody, dtypes: Mapping[str, torch.dtype], updated: Iterable[str]
) -> tuple[KernelArgument, ...]:
    """Tensor parameters in the order of first use."""
    loaded = {v.buffer for v in body.loads}
    stored = {v.buffer for v in body.stores}
    both = (loaded & stored) | set(updated)
    names: dict[str, KernelArgument] = {}
    counts = {"in": 0, "out": 0, "inout": 0}
    prefix = {"in": "in_ptr", "out": "out_ptr", "inout": "in_out_ptr"}
    for value in body.values:
        if value.op not in ("load", "store") or value.buffer in names:
            continue
        role = "inout" if value.buffer in both else "in" if value.op == "load" else "out"
        names[value.buffer] = KernelArgument(
            f"{prefix[role]}{counts[role]}",
            value.buffer,
            dtypes[value.buffer],
            role,  # type: ignore[arg-type]
        )
        counts[role] += 1
    return tuple(names.values())


def size_symbols(body: LoopBody) -> tuple[sympy.Symbol, ...]:
    """The size symbols in ranges, indices and bounds, sorted by name."""
    own = set(body.all_ranges) | {v.symbol for v in body.values}
    found: set[sympy.Symbol] = set()
    for expr in body.all_ranges.values():
        found |= sympy.sympify(expr).free_symbols
    for value in body.values:
        if value.index is not None:
            found |= value.index.free_symbols
        if not isinstance(value.size, int):
            found |= value.size.free_symbols
    return tuple(sorted(found - own, key=str))


def estimate(plan: KernelPlan, buffers: Mapping[str, Buffer]) -> Cost:
    """Bytes and operations at the size hints. A buffer is read once, whatever reads it again."""
    body, hints = plan.body, plan.hints
    rows = count(body.ranges.values(), hints)
    elements = rows * count(body.reduction_ranges.values(), hints)
    touched: dict[str, int] = {}
    flops = 0
    for value in body.values:
        times = elements if value in plan.loop or value.op == "reduction" else rows
        flops += cost(value) * times
        if value.op in ("load", "store"):
            assert value.index is not None
            used = [
                size for var, size in body.all_ranges.items() if var in value.index.free_symbols
            ]
            whole = size_hint(buffers[value.buffer].layout.storage_size, hints)
            size = whole if value.indirect else min(count(used, hints), whole)
            size = min(size, times)
            touched[value.buffer] = max(touched.get(value.buffer, 0), size * value.dtype.itemsize)
    by_role = {"in": 0, "out": 0, "inout": 0}
    for argument in plan.arguments:
        by_role[argument.role] += touched[argument.buffer]
    both = by_role["inout"]
    return Cost(by_role["in"] + both, by_role["out"] + both, flops)
