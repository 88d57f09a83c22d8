"""Kernel plans, kernel sources and wrappers: code with the source line of every line."""

from __future__ import annotations

from typing import Any

from minicompile.codegen.plan import CodeLine, KernelPlan, KernelSource, WrapperSource
from minicompile.ops.display import bytes_text, count_text
from minicompile.ops.dtypes import short
from minicompile.ops.origin import NO_ORIGINS, source_lines
from minicompile.show.html import (
    box,
    code,
    code_listing,
    columns,
    details,
    facts,
    heading,
    plain_code,
    shows,
    table,
    text,
)
from minicompile.show.loops import body_listing
from minicompile.show.palette import line_colour


def loops_text(plan: KernelPlan) -> str:
    loops = " × ".join(f"{v} < {s}" for v, s in plan.ranges.items()) or "one element"
    if plan.reduction_ranges:
        loops += " over " + " × ".join(f"{v} < {s}" for v, s in plan.reduction_ranges.items())
    return loops


def plan_facts(plan: KernelPlan) -> str:
    vector = (
        f"{plan.vector_width} lanes along {plan.vector_axis}" if plan.vector_width > 1 else "none"
    )
    tiles = ", ".join(f"{axis}: {size}" for axis, size in plan.tiles.items()) or "none"
    rows: list[tuple[object, object]] = [
        ("loops", loops_text(plan)),
        ("reduction", plan.reduction),
        ("phases", ", ".join(f"{p.level} ({len(p.values)} values)" for p in plan.phases) or "one"),
        ("vectors", vector),
        ("tiles", tiles),
        ("indices", short(plan.index_dtype)),
    ]
    if plan.language == "triton":
        rows.append(("warps", plan.num_warps))
    else:
        rows.append(("threads", "parallel" if plan.parallel else "one"))
    if plan.sizes:
        rows.append(
            (
                "sizes",
                ", ".join(f"{s} ({plan.hints.get(s, '?')} when compiling)" for s in plan.sizes),
            )
        )
    if plan.stashed:
        rows.append(("kept between phases", count_text(len(plan.stashed), "value")))
    rows += [
        ("reads", bytes_text(plan.cost.bytes_read)),
        ("writes", bytes_text(plan.cost.bytes_written)),
        ("arithmetic", f"{plan.cost.flops} operations"),
    ]
    return facts(rows)


@shows(KernelPlan)
def plan_view(plan: KernelPlan) -> str:
    arguments = table(
        ("parameter", "buffer", "dtype", "role"),
        ([code(a.name), code(a.buffer), short(a.dtype), a.role] for a in plan.arguments),
    )
    rejected = (
        heading("not taken")
        + table(
            ("alternative", "why not"),
            ([text(a.description), text(a.reason)] for a in plan.alternatives),
        )
        if plan.alternatives
        else ""
    )
    return box(
        plan.name,
        f"plan · {plan.language} for {plan.device} · computes {' + '.join(n.name for n in plan.node.nodes)}",
        columns(
            plan_facts(plan) + heading("parameters") + arguments + rejected, body_listing(plan.body)
        ),
    )


def legend(lines: list[CodeLine]) -> str:
    """The source lines that this code came from, with their colours."""
    found = sorted({at for line in lines for at in source_lines(line.origins)})
    return table(
        ("colour", "line"),
        (
            [
                f'<span style="border-left:14px solid {line_colour(at)}"></span>',
                f"{text(at.place)} {code(at.text)}",
            ]
            for at in found
        ),
    )


@shows(KernelSource)
def kernel_view(kernel: KernelSource) -> str:
    about = f"{kernel.language} · {len(kernel.lines)} lines · {kernel.plan.cost}"
    prelude = (
        details("helpers", "what the lines call", plain_code(kernel.prelude, kernel.language))
        if kernel.prelude
        else ""
    )
    return box(
        kernel.name,
        about,
        prelude,
        code_listing([(line.text, line.origins) for line in kernel.lines], kernel.language),
        details("source lines", "what the colours mean", legend(kernel.lines)),
    )


@shows(WrapperSource)
def wrapper_view(wrapper: WrapperSource) -> str:
    about = f"Python · {len(wrapper.lines)} lines · calls {len(wrapper.kernels)} kernels"
    return box(
        wrapper.name,
        about,
        code_listing([(line.text, line.origins) for line in wrapper.lines], "python"),
    )


@shows("minicompile.runtime.assembly.Assembly")
def assembly_view(assembly: Any) -> str:
    """The levels below a Triton kernel, each line with the colour of the kernel line it came from."""
    source: KernelSource = assembly.source
    parts = []
    for level, lines in assembly.levels.items():
        origins = [
            source.lines[at].origins if at is not None else NO_ORIGINS
            for at in assembly.kernel_lines(level)
        ]
        listed = lines.splitlines()
        origins += [NO_ORIGINS] * (len(listed) - len(origins))
        known = sum(1 for made in origins if made)
        about = f"{count_text(len(listed), 'line')}, {known} of them from a source line"
        content = code_listing(list(zip(listed, origins, strict=False)), level)
        parts.append(details(level.upper(), about, content))
    head = str(assembly).split("\n")[0].split(": ", 1)
    kernel = code_listing([(line.text, line.origins) for line in source.lines], source.language)
    return box(head[0], head[-1], details("kernel", f"{len(source.lines)} lines", kernel), *parts)


@shows("minicompile.codegen.plan.KernelModule")
def module_view(module: Any) -> str:
    """The file that is compiled: all kernels of a graph behind their helpers."""
    about = f"{module.language} · {count_text(len(module.kernels), 'kernel')} in one file"
    names = ", ".join(kernel.name for kernel in module.kernels)
    return box(
        "kernel module",
        about,
        facts([("kernels", names)]),
        plain_code(module.text, module.language),
    )
