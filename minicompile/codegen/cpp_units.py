"""Which C kernels of a graph are compiled once for several, and which files are compiled side by side."""

from __future__ import annotations

from collections.abc import Sequence

from minicompile.codegen.cpp import call_of, print_kernel
from minicompile.codegen.helpers import c_prelude
from minicompile.codegen.plan import CppPlan, KernelModule, KernelSource

KERNELS_OF_ONE = 8
"""With more distinct kernels than this, two compilers at work are faster than one."""


def kernel_module(plans: Sequence[CppPlan]) -> KernelModule:
    """All kernels of a graph: one text, and the same as one or two files to compile side by side.

    Kernels that differ in name only (the layers of a model) are compiled once: the others call the first.
    """
    sources = [print_kernel(plan) for plan in plans]
    alike: dict[str, list[KernelSource]] = {}
    for source in sources:
        alike.setdefault(source.text.replace(source.name, "", 1), []).append(source)
    groups = list(alike.values())
    units: list[list[list[KernelSource]]] = [[], []] if len(groups) > KERNELS_OF_ONE else [[]]
    for group in sorted(groups, key=lambda group: -len(group[0].lines)):
        min(units, key=lambda unit: sum(len(g[0].lines) for g in unit)).append(group)
    return KernelModule("cpp", _unit_text(groups), sources, tuple(map(_unit_text, units)))


def _unit_text(groups: Sequence[Sequence[KernelSource]]) -> str:
    parts = []
    for original, *copies in groups:
        parts.append(original.text)
        parts += [call_of(original, copy.plan) for copy in copies]
    text = "\n".join(parts)
    return f"{c_prelude(text)}\n{text}"
