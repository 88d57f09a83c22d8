"""From a schedule to kernels: which language, then every decision about a kernel, then the text of all.

`make_plan` merges and legalises the bodies, fills in the facts (arguments, sizes, cost), and lets rules
decide the rest:

    plan_rule     edits the plan: tiles, vector width, threads, launches that run in the kernel's place
    rival_rule    gives other ways to compute the same, which may turn out faster

A plan rule's key starts with the language it is for ("cpp" or "triton") or with "any". A rule registered
under a built-in key replaces the built-in one, a new key runs after all others, or `before` one:

    @plan_rule("cpp:narrow")
    def narrow(plan, options):
        plan.vector_width = 4

A language is a rule in the registry `code_generator` (plans -> KernelModule); `runtime/load.py` has the one
that turns its modules into callables. A new one is chosen with `options={"device_codegen": name}`.
The real compiler: torch/_inductor/codegen/{simd,cpp,common}.py, torch/_inductor/runtime/triton_heuristics.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import sympy
import torch

from minicompile.codegen import cpp_rules as _cpp_rules  # noqa: F401  registers its rules
from minicompile.codegen import cpp_units, triton
from minicompile.codegen import triton_rules as _triton_rules  # noqa: F401  registers its rules
from minicompile.codegen.legalize import legalize
from minicompile.codegen.merge import check_in_place, merge, take_over
from minicompile.codegen.phases import barriers, cut
from minicompile.codegen.plan import (
    PLANS,
    REFERENCE,
    CppPlan,
    KernelArgument,
    KernelModule,
    KernelPlan,
    KernelSource,
    Language,
    Rival,
    Surroundings,
    plan_rule,
    rival_rule,
    template_plan,
)
from minicompile.errors import BackendError, OptionError, Unsupported, unknown
from minicompile.ops import plugins
from minicompile.ops.gates import allowed
from minicompile.ops.origin import Origin
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.scheduling.body import LoopBody, loop_level, numbers
from minicompile.scheduling.cost import cost_of
from minicompile.scheduling.nodes import FusedSchedulerNode, Schedule
from minicompile.shapes.expr import is_float

CodeGenerator = Callable[[Sequence[Any]], KernelModule]

code_generator: Registry[CodeGenerator] = Registry(
    "code_generator", "language -> function from kernel plans to a KernelModule"
)
generate_cpp = code_generator("cpp")(cpp_units.kernel_module)
code_generator("triton")(triton.kernel_module)


DEVICE_LANGUAGE: Mapping[str, Language] = {"cpu": "cpp", "cuda": "triton"}


def language_of(device: torch.device, options: Options) -> Language:
    """The language for a device: the one asked for, else C++ for CPUs and Triton for GPUs."""
    if options.device_codegen == "auto":
        if device.type not in DEVICE_LANGUAGE:
            raise BackendError(f"no code generator for {device.type} tensors: only cpu and cuda")
        return DEVICE_LANGUAGE[device.type]
    if options.device_codegen not in code_generator:
        known = ["'auto'", *map(repr, code_generator)]
        error = unknown("code generator", options.device_codegen, known)
        raise OptionError(str(error))  # in the midst of a call: the program may expect a KeyError
    if device.type == "cuda" and options.device_codegen == "cpp":
        raise OptionError("C++ kernels can't run on CUDA tensors: leave device_codegen at 'auto'")
    return options.device_codegen


def make_plans(schedule: Schedule, options: Options) -> dict[int, KernelPlan]:
    """The plan of each fused node, and of each operator with a template, by its position in the schedule."""
    plans: dict[int, KernelPlan] = {}
    templates = plugins.rules(template_plan, options.plugins)
    for position, node in enumerate(schedule.nodes):
        if isinstance(node, FusedSchedulerNode):
            language = language_of(node.nodes[0].buffer.layout.device, options)
            loops = partial("\n".join, (str(part.body) for part in node.nodes))
            text = partial(_text, plans, position)
            origins = partial(getattr, node, "origins")
            refused = not allowed("code generator", node.name, loops, text, origins)
            if refused and REFERENCE in code_generator:
                language = REFERENCE
            plans[position] = make_plan(node, schedule, language, options, position)
        elif (rule := templates.get(node.kernel.op)) is not None:
            language = language_of(node.kernel.views()[0].layout.device, options)
            try:
                plans[position] = rule(node, language, position)
            except Unsupported as refusal:
                node.kernel.reason = refusal.reason
    return plans


def _text(plans: Mapping[int, KernelPlan], position: int) -> str:
    return "\n".join(map(str, generate_kernels({position: plans[position]})))


def make_plan(
    node: FusedSchedulerNode,
    schedule: Schedule,
    language: Language,
    options: Options,
    position: int,
) -> KernelPlan:
    """The plan of one kernel. `position` is the node's number in the schedule: part of the name."""
    dtypes = schedule.dtypes
    merged, every = merge(node, schedule.memory.internal, dtypes)
    in_place = schedule.memory.in_place(position)
    cost = cost_of(merged, every, schedule)
    take_over(merged, in_place)
    legal = legalize(merged, dtypes)
    body = legal.body
    plan = PLANS.get(language, CppPlan)(
        name=f"{language}_fused_{operation_names(body)}_{position}",
        language=language,
        device=node.nodes[0].buffer.layout.device,
        node=node,
        body=body,
        phases=(),
        arguments=arguments_of(body, dtypes, schedule.memory.aliases),
        sizes=size_symbols(body),
        reduction="looped" if body.reduction_ranges else "none",
        loop=loop_level(body, {legal.new[v] for v in every}),
        in_place=in_place,
        hints=dict(schedule.graph.size_hints),
        cost=cost,
    )
    decide(plan, options, whole=True)
    plan.rivals = tuple(rivals(plan, schedule, options, position))
    for launch in plan.launches:
        decide(launch, options)
    return plan


def rivals(
    plan: KernelPlan, schedule: Schedule, options: Options, position: int
) -> Iterator[Rival]:
    """What else could do what a kernel does."""
    make = partial(make_plan, language=plan.language, options=options, position=position)
    around = Surroundings(schedule, position, options, make)
    for rule in plugins.rules(rival_rule, options.plugins).values():
        yield from rule(plan, around)


def decide(plan: KernelPlan, options: Options, whole: bool = False) -> None:
    """What rules decide about a `whole` kernel or a launch, and the phases that follow from it."""

    def text() -> str:
        return f"{plan}\n{plan.body}"

    rules = plugins.rules(plan_rule, options.plugins)
    for key in rules:
        language = str(key).partition(":")[0]
        if language not in (plan.language, "any") or (key in plan_rule.whole and not whole):
            continue
        if key in plan_rule.needed or allowed("plan rule", key, text, text, lambda: plan.origins):
            plan.take(key, rules[key], options)
    recompute = plan.reduction != "persistent"
    plan.phases = cut(plan.body, plan.loop, plan.stashed, recompute, plan.riders)
    plan.barriers = barriers(plan.phases, recompute, plan.in_place)
    order = (v for phase in plan.phases for v in phase.values)
    check_in_place(plan.name, order, plan.in_place)


NAMED = 4
"""Most operations in a kernel's name."""


def operation_names(body: LoopBody) -> str:
    """`add_gelu`: the user's operations in the kernel, in order, each once; never numbers or constants."""
    origins = dict[Origin, None]()
    for value in body.values:
        origins |= dict.fromkeys(sorted(value.origins))
    names = dict.fromkeys(origin.target.rpartition(".")[2].strip("_") for origin in origins)
    plain = dict.fromkeys(re.sub(r"\W", "_", name) for name in names if name)
    return "_".join(list(plain)[:NAMED]) or "kernel"


def arguments_of(
    body: LoopBody, dtypes: Mapping[str, torch.dtype], updated: Collection[str]
) -> tuple[KernelArgument, ...]:
    """Tensor parameters in the order of first use. `updated`: buffers that hold something already."""
    loaded, stored = ({v.buffer for v in values} for values in (body.loads, body.stores))
    found, counts = dict[str, KernelArgument](), Counter[str]()
    for value in body.values:
        name = value.buffer
        if value.op not in ("load", "store") or name in found:
            continue
        role: Literal["in", "out", "inout"] = "in"
        if name in stored:
            role = "inout" if name in loaded or name in updated else "out"
        prefix = {"in": "in_ptr", "out": "out_ptr", "inout": "in_out_ptr"}[role]
        found[name] = KernelArgument(f"{prefix}{counts[role]}", name, dtypes[name], role)
        counts[role] += 1
    return tuple(found.values())


def size_symbols(body: LoopBody) -> tuple[sympy.Symbol, ...]:
    """The size symbols in ranges, indices and bounds, sorted by name; floats come last."""
    own = set(body.all_ranges) | {v.symbol for v in body.values}
    found: set[sympy.Symbol] = set().union(*(sympy.sympify(n).free_symbols for n in numbers(body)))
    return tuple(sorted(found - own, key=lambda symbol: (is_float(symbol), str(symbol))))


def generate_kernels(plans: Mapping[int, KernelPlan]) -> list[KernelModule]:
    """One module per language. Kernels are found again by their names."""
    by_language: dict[Language, list[KernelPlan]] = {}
    for plan in plans.values():
        by_language.setdefault(plan.language, []).extend(plan.launches or (plan,))
    return [code_generator[language](group) for language, group in by_language.items()]


def by_position(
    plans: Mapping[int, KernelPlan], modules: Sequence[KernelModule]
) -> dict[int, list[KernelSource]]:
    """The kernels of each fused node, by its position in the schedule."""
    named = {kernel.name: kernel for module in modules for kernel in module.kernels}
    return {
        position: [named[launch.name] for launch in plan.launches or (plan,)]
        for position, plan in plans.items()
    }
