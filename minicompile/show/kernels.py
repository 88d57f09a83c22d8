"""Kernel plans, kernel sources and wrappers: code with the source line of every line."""

from __future__ import annotations

from typing import Any

from minicompile.codegen.plan import KernelPlan, KernelSource, WrapperSource
from minicompile.ops.display import count_text
from minicompile.show.explorer import below
from minicompile.show.html import box, columns, details, shows
from minicompile.show.listing import code_listing, headline, listing, plain_code, source_cell
from minicompile.show.loops import body_listing
from minicompile.show.reports import text_line


@shows(KernelPlan)
def plan_view(plan: KernelPlan) -> str:
    """The plan as a terminal has it, beside the loop body."""
    lines = map(text_line, str(plan).split("\n")[1:])
    return box(*headline(plan), columns(listing(lines), body_listing(plan.body)))


@shows(KernelSource)
def kernel_view(kernel: KernelSource) -> str:
    prelude = ""
    if kernel.prelude:
        helpers = plain_code(kernel.prelude, kernel.language)
        prelude = details("helpers", "what the lines call", helpers)
    return box(
        kernel.name,
        f"{kernel.language} · {len(kernel.lines)} lines · {kernel.plan.cost}",
        prelude,
        code_listing(kernel.lines, kernel.language, first=1),
        details("source lines", "what the colours mean", source_cell(kernel.origins)),
    )


@shows(WrapperSource)
def wrapper_view(wrapper: WrapperSource) -> str:
    about = (
        f"Python · {len(wrapper.lines)} lines · calls {count_text(len(wrapper.kernels), 'kernel')}"
    )
    return box(wrapper.name, about, code_listing(wrapper.lines, "python", first=1))


@shows("minicompile.debug.gpu_assembly.Assembly")
def assembly_view(assembly: Any) -> str:
    """The levels below a Triton kernel, each line with the colour of the kernel line it came from."""
    source: KernelSource = assembly.source
    kernel = code_listing(source.lines, source.language, first=1)
    parts = [details("kernel", f"{len(source.lines)} lines", kernel)]
    for level in assembly.levels:
        lines = [piece.subject for piece in below(source, "", level, assembly).pieces]
        known = sum(1 for line in lines if line.origins)
        about = f"{count_text(len(lines), 'line')}, {known} of them from a source line"
        parts.append(details(level.upper(), about, code_listing(lines, level, first=1)))
    return box(*headline(assembly), *parts)
