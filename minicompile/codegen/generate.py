"""From a schedule to kernels: which language, then a plan, then the text of each.

A language is a rule in the registry `code_generator` (plans -> KernelModule); `runtime/load.py` has the one
that turns its modules into callables. A new one is chosen with `options={"device_codegen": name}`.
The real compiler: torch/_inductor/codegen/common.py (register_backend_for_device).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from minicompile.codegen.cpp import kernel_module
from minicompile.codegen.plan import KernelModule, KernelPlan, KernelSource, Language
from minicompile.codegen.planning import make_plan
from minicompile.codegen.triton import print_triton
from minicompile.errors import BackendError, OptionError
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.scheduling.nodes import FusedSchedulerNode, Schedule

CodeGenerator = Callable[[Sequence[KernelPlan]], KernelModule]

code_generator: Registry[CodeGenerator] = Registry(
    "code_generator", "language -> function from kernel plans to a KernelModule"
)

DEVICE_LANGUAGE: Mapping[str, Language] = {"cpu": "cpp", "cuda": "triton"}


generate_cpp = code_generator("cpp")(kernel_module)


@code_generator("triton")
def generate_triton(plans: Sequence[KernelPlan]) -> KernelModule:
    """Each kernel stands for itself: Triton compiles them one by one."""
    kernels = [print_triton(plan) for plan in plans]
    return KernelModule("triton", "\n\n".join(k.prelude + k.text for k in kernels), kernels)


def language_of(device: torch.device, options: Options) -> Language:
    """The language for a device: the one asked for, else C++ for CPUs and Triton for GPUs."""
    if options.device_codegen == "auto":
        if device.type not in DEVICE_LANGUAGE:
            raise BackendError(f"no code generator for {device.type} tensors: only cpu and cuda")
        return DEVICE_LANGUAGE[device.type]
    if options.device_codegen not in code_generator:
        known = ", ".join(map(repr, code_generator))
        raise OptionError(f"no code generator {options.device_codegen!r}; known: 'auto', {known}")
    if device.type == "cuda" and options.device_codegen == "cpp":
        raise OptionError("C++ kernels can't run on CUDA tensors: leave device_codegen at 'auto'")
    return options.device_codegen


def make_plans(schedule: Schedule, options: Options) -> dict[int, KernelPlan]:
    """The plan of each fused node, by its position in the schedule."""
    plans: dict[int, KernelPlan] = {}
    for position, node in enumerate(schedule.nodes):
        if isinstance(node, FusedSchedulerNode):
            language = language_of(node.nodes[0].buffer.layout.device, options)
            plans[position] = make_plan(node, schedule, language, options, position)
    return plans


def generate_kernels(plans: Mapping[int, KernelPlan]) -> list[KernelModule]:
    """One module per language. Kernels are found again by their names."""
    by_language: dict[Language, list[KernelPlan]] = {}
    for plan in plans.values():
        by_language.setdefault(plan.language, []).append(plan)
    return [code_generator[language](group) for language, group in by_language.items()]


def by_position(
    plans: Mapping[int, KernelPlan], modules: Sequence[KernelModule]
) -> dict[int, KernelSource]:
    """The kernel of each fused node, by its position in the schedule."""
    named = {kernel.name: kernel for module in modules for kernel in module.kernels}
    return {position: named[plan.name] for position, plan in plans.items()}
