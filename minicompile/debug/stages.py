"""Stages as text for logs and the dump folder: graphs in FX's own form, IR around fusion, all code."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from minicompile.aot.result import AotResult
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import Listing, Snapshot, argument_text, origins_of, target_name
from minicompile.ops.origin import Origins, short_file, source_lines, union
from minicompile.pipeline_result import CompiledStages
from minicompile.scheduling.nodes import FusionDecision, Schedule, SchedulerNode


def places(origins: Origins) -> str:
    """` from model.py:8, 9`: the user's lines by file; nothing where there are none."""
    files: dict[str, list[str]] = {}
    for line in source_lines(origins):
        files.setdefault(short_file(line.file), []).append(str(line.line))
    told = (f"{file}:{', '.join(dict.fromkeys(numbers))}" for file, numbers in files.items())
    return " from " + "; ".join(told) if files else ""


def graph_origins(graph: Listing) -> Origins:
    return union(map(origins_of, graph.nodes))


def fx_name(node: fx.Node) -> str:
    """`%mul.1`. Dots for underscores: `grep mul_` finds operators that work in place and nothing else."""
    return "%" + node.name.replace("_", ".")


def fx_text(graph: Listing) -> str:
    """A graph as `str(torch.fx.Graph)` writes it; partitioner's tag and shape are comments."""
    lines = ["graph():"]
    for node in graph.nodes:
        name, value = fx_name(node), node.meta.get("val")
        if node.op == "output":
            lines.append(f"    return {argument_text(node.args[0], fx_name)}")
            continue
        kind = "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__
        target, arguments, about = name[1:], "", value_text(value)
        if node.op != "placeholder":
            target, phase = target_name(node.target), node.meta.get("phase")
            about = f"is_{phase} {about}" if phase else about
        if node.op.startswith("call"):
            keywords = argument_text(node.kwargs, fx_name)
            arguments = f"(args = {argument_text(node.args, fx_name)}, kwargs = {keywords})"
        lines.append(f"    {name} : {kind} = {node.op}[target={target}]{arguments}  # {about}")
    return "\n".join(lines)


def partitioned(aot: AotResult, name: str) -> Listing | None:
    """The forward or backward as the partitioner left it: before post-grad passes."""
    for record in aot.passes:
        is_late, before = record.name.startswith("post_grad."), record.before
        if is_late and isinstance(before, Snapshot) and before.name == name:
            return before
    return aot.forward if name == "forward" else aot.backward


def decision_text(decision: FusionDecision, numbers: bool) -> str:
    """One question of the scheduler: the two sides, what speaks for or against, what became of it."""
    lines = []
    for role in ("producer", "consumer"):
        nodes, name = getattr(decision, f"{role}s"), getattr(decision, role)
        kinds = ", ".join(sorted({getattr(node, "kind", "extern").title() for node in nodes}))
        lines.append(f"FusionDecision: {name} ({'Fused ' * (len(nodes) > 1)}{kinds}) <- {role}")
    bodies = [node.body for node in decision.nodes if isinstance(node, SchedulerNode)]
    ranges = {str(list(body.all_ranges.values())) for body in bodies}
    if decision.fused:
        lines += [f"✓ Ranges match: {same}" for same in ranges if len(ranges) == 1]
        lines.append(f"✓ {decision.kind.replace('_', ' ').title()} fusion: {decision.reason}")
    else:
        lines.append(f"✗ Cannot fuse: {decision.reason}")
    lines += [f"  {decision.numbers()}"] if numbers else []
    verdict = "Fused into 1 kernel" if decision.fused else "Separate kernels"
    return "\n".join([*lines, f"→ {verdict}{places(decision.origins)}"])


def pre_fusion(schedule: Schedule) -> str:
    """Every node as it was recorded, with its loop body."""
    return "\n\n".join(f"{node}\n{getattr(node, 'body', '')}".rstrip() for node in schedule.before)


def post_fusion(schedule: Schedule) -> str:
    """Kernels and extern calls in running order, with loop bodies over each kernel's own variables."""
    bodies: Iterable[list[object]] = ([n, *getattr(n, "bodies", ())] for n in schedule.nodes)
    return "\n\n".join("\n".join(map(str, texts)) for texts in bodies)


def output_code(stages: CompiledStages) -> str:
    """All kernels, then the wrapper, as Python; what is in another language is a string."""
    texts = dict.fromkeys((k.language, "", k.prelude) for k in stages.kernels if k.prelude)
    for kernel in stages.kernels:
        texts[kernel.language, f"# {kernel.name}{places(kernel.origins)}\n", kernel.text] = None
    parts = [
        about + (text if language == "triton" else f"{language} = r'''\n{text}'''\n")
        for language, about, text in texts
    ]
    return "\n".join([*parts, stages.wrapper.text])
