"""Kernel sources and wrappers: code with the source line of every line."""

from __future__ import annotations

from minicompile.codegen.plan import KernelSource, WrapperSource
from minicompile.ops.display import count_text
from minicompile.show.html import box, details, shows
from minicompile.show.listing import code_listing, plain_code, source_cell


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
