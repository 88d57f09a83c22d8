"""What scheduling and code generation make of random loop programs, against the reference interpreter.

Every result's rounding error is bounded from what its step does, so that a program may be long: results
without one must be equal to the last bit.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import sympy
import torch

from minicompile.codegen import cpp_rules
from minicompile.codegen.generate import by_position, generate_kernels, make_plans
from minicompile.codegen.wrapper import generate_wrapper
from minicompile.debug.reference import run_reference
from minicompile.lowering.ir import (
    LoopGraph,
)
from minicompile.options import Options
from minicompile.plugins.column_reductions import choose
from minicompile.plugins.transposed_tiles import choose as squares
from minicompile.runtime.load import kernel_loader, load_wrapper
from minicompile.scheduling.schedule import schedule
from tests.codegen.races import shared_writes
from tests.comparing import fresh
from tests.fuzz.loop_functions import F64, SLOPES
from tests.fuzz.loops import Program, Step
from tests.scheduling.building import (
    compiled,
    dirty_empty,
    example_inputs,
)

# -- how far two ways to compute may be apart


def magnitude(value: torch.Tensor) -> float:
    """The largest absolute value, NaN apart."""
    if value.numel() == 0:
        return 0.0
    return float(value.to(F64).nan_to_num(0, math.inf, -math.inf).abs().max())


def error_bounds(program: Program, values: Sequence[torch.Tensor]) -> list[float]:
    """For each step's result, by how much an element may differ."""
    errors: dict[Step, tuple[float, torch.Tensor]] = {}
    for step, found in zip(program.steps, values, strict=True):
        errors[step] = 0.0, found
        if step.exact:
            continue
        given = [(error, magnitude(value), value) for error, value in map(errors.get, step.sources)]
        dtypes = [step.dtype, *(v.dtype for _, _, v in given if v.is_floating_point())]
        unit = max(torch.finfo(dtype).eps for dtype in dtypes)
        rounding, carried = 8 * unit * magnitude(found), sum(error for error, _, _ in given)
        (error, most, source), (other_error, other, _) = given[0], given[:2][-1]
        multiplied = error * (other + other_error) + other_error * most
        if step.what == "map":
            carried *= SLOPES[step.name]
            if step.name in ("mul", "fma", "truediv"):
                carried = multiplied + sum(e for e, _, _ in given[2:])
                rounding += 8 * unit * (most * other if step.name == "fma" else 0)
        elif step.what == "mm":
            (count,) = source.shape[1:]
            carried = count * (multiplied + 4 * unit * most * other)
        elif step.what == "scatter_add":
            carried = (len(source) + 1) * (error + unit * (most + abs(step.numbers[1])))
        elif step.name == "sum":
            count = source.numel() // max(found.numel(), 1) + 1
            count = found.shape[step.numbers[0]] if step.what == "scan" else count
            carried = count * (error + unit * most)
        errors[step] = carried + rounding, found
    return [error for error, _ in errors.values()]


def difference(have: Any, want: torch.Tensor, error: float) -> str | None:
    """What is wrong with a result; None if nothing is."""
    for name in ("dtype", "shape"):
        if getattr(have, name) != getattr(want, name):
            return f"{name} {getattr(have, name)}, not {getattr(want, name)}"
    if want.numel() and have.stride() != want.stride():
        return f"strides {have.stride()}, not {want.stride()}"
    if not math.isfinite(error):
        return None
    if not want.is_floating_point():
        wrong = have != want
    else:
        a, b = have.to(F64), want.to(F64)
        nan = a.isnan() & b.isnan()
        wrong = ~(((a - b).abs() <= error) | (a == b) | nan)
    if bool(wrong.any()):
        at = tuple(int(i) for i in wrong.nonzero()[0])
        count = int(wrong.sum())
        told = f"{count} of {wrong.numel()} wrong, at {at}: {have[at]}, not {want[at]}"
        return f"{told} (error at most {error:.1e})"
    return None


# -- running

LANGUAGES = {
    backend: Options(verify=True, device_codegen=language)
    for backend, language in (("inductor", "cpp"), ("triton", "triton"))
}


SMALL_LIMITS: dict[Any, dict[str, int]] = {
    cpp_rules: {
        "PARALLEL_NANOSECONDS": 0, "STASH_BYTES": 64,
    },
    squares: {
        "SQUARE": 16, "TURNED": 5,
    },
    choose: {
        "FEW_ROWS": 8, "LONG_ROW": 8, "CHUNK": 4, "MOST_CHUNKS": 3,
        "WIDEST_TILE": 16, "COLUMN_CHUNK": 2, "MOST_COLUMN_CHUNKS": 3, "PARALLEL_NANOSECONDS": 0,
    },
}  # fmt: skip
"""Limits of the C++ plans at which small programs use what otherwise large ones do."""


@dataclass
class Prepared:
    """A program up to its kernels' plans."""

    program: Program
    graph: LoopGraph
    scheduled: Any
    plans: dict[int, Any]


def prepare(program: Program, options: Options) -> Prepared:
    graph = program.build()
    scheduled = schedule(graph, options)
    small = program.seed % 2 == 1 and options.device_codegen == "cpp"
    with ExitStack() as stack:
        for module, limits in SMALL_LIMITS.items() if small else ():
            stack.enter_context(patch.multiple(module, **limits))
        plans = make_plans(scheduled, options)
    for plan in plans.values():
        plan.name = f"p{program.seed}_{plan.name}"
    return Prepared(program, graph, scheduled, plans)


def load(group: Sequence[Prepared], options: Options) -> list[Callable[[list[Any]], Any]]:
    """The calls of several programs, their kernels compiled together. New memory is never zero."""
    together = {(n, p): plan for n, one in enumerate(group) for p, plan in one.plans.items()}
    modules = generate_kernels(together)
    assert not [line for module in modules for line in shared_writes(module.text)]
    kernels = by_position(together, modules)
    namespace: dict[str, Any] = {"empty_strided_cpu": dirty_empty}
    for finish in [kernel_loader[module.language](module, options) for module in modules]:
        namespace.update(finish())
    calls = []
    for number, one in enumerate(group):
        own = {p: kernels[number, p] for p in one.plans}
        calls.append(load_wrapper(generate_wrapper(one.scheduled, own), namespace))
    return calls


def other_sizes(program: Program) -> list[dict[sympy.Symbol, int]]:
    """The sizes that a program is run with."""
    found = [program.hints]
    if program.hints:
        found.append({symbol: hint * 2 + 1 for symbol, hint in program.hints.items()})
        found.append(dict.fromkeys(program.hints, 1))
    return found


def compare(
    program: Program,
    call: Callable[[list[Any]], Any],
    bodies: Callable[[list[Any]], Any] | None = None,
) -> str | None:
    """What is wrong with a compiled program's results; None if nothing is.

    `bodies` runs the scheduled kernels' bodies in torch, which sees loads that leave their memory.
    """
    reference = program.build(whole=True)
    graph = program.build()
    for number, sizes in enumerate(other_sizes(program)):
        inputs = example_inputs(graph, sizes, program.seed + number)
        kept = fresh(inputs)
        try:
            values = run_reference(reference, kept)
        except (IndexError, RuntimeError) as e:
            if not isinstance(e, IndexError) and "non-zero size" not in str(e):
                raise
            continue  # eager would refuse these inputs, too
        errors = error_bounds(program, values)
        for name, run in (("", call), (" by its bodies", bodies if number == 0 else None)):
            have = run(list(inputs)) if run is not None else ()
            for output, found in zip(program.outputs, have):
                if wrong := difference(found, values[output], errors[output]):
                    return f"%{output}{name} at sizes {sizes}: {wrong}"
        for given, before in zip(inputs, kept, strict=True):
            if isinstance(given, torch.Tensor) and not equal(given, before):
                return "an input was overwritten"
    return None


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        torch.equal(a.nan_to_num(3), b.nan_to_num(3))
        if a.is_floating_point()
        else torch.equal(a, b)
    )


def failure(program: Program, options: Options) -> str | None:
    """How a program alone fails; None if it doesn't."""
    try:
        prepared = prepare(program, options)
        (call,) = load([prepared], options)
        return compare(program, call, compiled(prepared.scheduled))
    except Exception as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        return f"{type(e).__name__}: {str(e)[:500]} ({where.name}, line {where.lineno})"


def failures(programs: Sequence[Program], options: Options) -> dict[int, str]:
    """How programs fail, by their seeds; all are compiled together if possible."""
    found: dict[int, str] = {}
    group: list[Prepared] = []
    for program in programs:
        try:
            group.append(prepare(program, options))
        except Exception:
            found[program.seed] = failure(program, options) or "fails only at times"
    try:
        calls = load(group, options)
    except Exception:
        return found | {p.program.seed: w for p in group if (w := failure(p.program, options))}
    for one, call in zip(group, calls, strict=True):
        try:
            why = compare(one.program, call, compiled(one.scheduled))
        except Exception:
            why = failure(one.program, options) or "fails only among others"
        if why:
            found[one.program.seed] = why
    return found
