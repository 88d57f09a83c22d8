"""A case run by eager and by a compiler: `check(case)` gives a `Verdict`, what differed and what compiled.

How far floating point may be from eager: no number is written down for an operator. Values are equal bit for
bit, or each is at most as far from the result in double precision as

    twice eager's own largest error in the tensor + 4 roundings of the value
    + one rounding of the tensor's largest value (at least that of float32 at 1)

where a rounding is the dtype's `eps`. Integers, bools, dtypes, strides and shared memory must be the same.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import types
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from minicompile import pipeline
from minicompile.dynamo.dispatch import Dispatcher
from minicompile.dynamo.result import Capture
from minicompile.lowering.ir import ExternKernel, Operation, Reduction, Scan, Scatter
from minicompile.options import Options
from minicompile.pipeline_result import Trace
from minicompile.shapes.expr import Size, product
from tests.opinfo.cases import METADATA_ONLY, Case, Outcome, run, tensors

BACKENDS = {"aot_eager": pipeline.aot_eager, "inductor": pipeline.compile_capture}


@dataclass
class Graphs:
    """What ran compiled, and why not more did."""

    operators: set[str] = field(default_factory=set)
    breaks: list[str] = field(default_factory=list)
    kernels: int = 0
    """Of them and their backward graphs, where the backend makes kernels."""
    externs: set[str] = field(default_factory=set)
    """ATen operators that they leave to a library."""
    length: int = 1
    """The most numbers that one element of a buffer is made of."""


def operators_in(graph: torch.fx.Graph) -> set[str]:
    """Names of the torch functions, methods and operators that a captured graph calls."""
    found = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        name = node.target if isinstance(node.target, str) else node.target.__name__
        part = name == "getitem" and not isinstance(value_of(node.args[0]), torch.Tensor)
        writes = value_of(node) is None and bool(node.all_input_nodes)
        if not part and (writes or tensors(value_of(node))):
            found.add(str(node.args[1]) if name == "getattr" else str(name))
    return found


def value_of(node: Any) -> Any:
    """A node's value at compile time, here or in torch.compile's graphs."""
    return node.meta.get("val", node.meta.get("example_value"))


def entry(case: Case) -> types.FunctionType:
    """A new function that makes the call, with code of its own: nothing is remembered of other samples."""
    call = case.call

    def fn(args: Any, kwargs: Any) -> Any:
        return call(*args, **kwargs)

    fn.__code__ = fn.__code__.replace(co_name=f"fn_{next(_numbers)}")
    return fn  # type: ignore[return-value]


_numbers = itertools.count()


@dataclass(frozen=True)
class Way:
    """How we compile."""

    backend: str = "aot_eager"
    dynamic: bool | None = None
    options: Options = field(default_factory=lambda: Options(verify=True))
    """The C compiler's flags are everybody's: -O1 would save 13 ms of the 350 that a call takes here."""


def compile_ours(
    case: Case, graphs: Graphs, way: Way
) -> tuple[Callable[..., Any], Callable[[], None]]:
    """The call under mc.compile, and what reads the breaks afterwards."""

    def compiled(capture: Capture) -> Callable[[list[Any]], Any]:
        trace = Trace.watching(capture)
        made = BACKENDS[way.backend](capture, way.options)
        found = operators_in(capture.graph.gm.graph)

        def call(inputs: list[Any]) -> Any:
            results = made(inputs)
            graphs.operators |= found
            for stages in trace.graphs.values():
                graphs.kernels += len(stages.kernels)
                graphs.externs |= {str(extern.op) for extern in stages.loops.externs}
                graphs.length = max([graphs.length, *map(length_of, stages.loops.operations)])
            return results

        return call

    make = functools.partial(Dispatcher, backend=compiled, options=way.options, dynamic=way.dynamic)
    dispatcher = make(entry(case))

    def finish() -> None:
        told = dispatcher.explanation()
        graphs.breaks = [f"{b.id}: {b.reason}" for b in told.breaks]

    return dispatcher.entrance, finish


def length_of(operation: Operation) -> int:
    """How many numbers are reduced to one; in a library the longest dimension."""
    if isinstance(operation, ExternKernel):
        sizes = [size for view in operation.views() for size in view.layout.size]
        return max([1, *(size for size in sizes if isinstance(size, int))])
    loops = operation.loops
    found: Size = 1
    if isinstance(loops, Reduction):
        found = product(loops.reduction_ranges)
    elif isinstance(loops, Scan):
        found = product(loops.ranges[loops.dim : loops.dim + 1])
    elif isinstance(loops, Scatter):
        found = product(loops.ranges)
    return found if isinstance(found, int) else 1


def compile_theirs(case: Case, graphs: Graphs) -> tuple[Callable[..., Any], Callable[[], None]]:
    """The same under torch.compile(backend="aot_eager"): what is in its graphs with any backend."""
    import torch._dynamo
    from torch._dynamo.backends.debugging import aot_eager

    if case.number == 0:
        torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10**6

    def backend(gm: Any, inputs: Any) -> Callable[..., Any]:
        compiled = aot_eager(gm, inputs)
        found = operators_in(gm.graph)

        def call(*args: Any) -> Any:
            results = compiled(*args)
            graphs.operators |= found
            return results

        return call

    def finish() -> None:
        graphs.breaks = list(torch._dynamo.utils.counters["graph_break"])

    return torch.compile(entry(case), backend=backend), finish


# Comparing ---------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What a compiler made of a case."""

    case: str
    variant: str
    dtype: str
    wrong: str = ""
    """What differs from eager; empty if nothing."""
    in_graph: bool | None = None
    """Whether the operator was in a graph that ran compiled; None: not asked."""
    breaks: list[str] = field(default_factory=list)
    theirs: bool | None = None
    """The same of torch.compile."""
    eager_raises: bool = False
    gradients: int = 0
    exact: bool = True
    kernels: int = 0
    externs: list[str] = field(default_factory=list)
    """ATen operators in its graphs that a library runs."""
    length: int = 1
    ratio: float = 0.0
    """The worst error as a multiple of what `beyond` says is allowed, forward and backward."""
    eagers: float = 0.0
    """The same with eager judged by ours."""
    typical: tuple[float, float] = (0.0, 0.0)
    """Where the ratio is above 1, the medians of both in other draws of the sample's numbers."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


OWN_FAULTS = "internal-error", "missing-tool"
"""Reasons of ours that are mistakes: an exception in a room, a kernel that the C compiler refuses."""


def check(case: Case, sides: str = "both", way: Way = Way()) -> Verdict:
    """Compare `case` with eager, and say whether the operator was in a graph."""
    verdict = Verdict(case.name, case.variant, str(case.dtype)[6:])
    eager = run(case, entry(case))
    verdict.eager_raises = bool(eager.raised)
    wrapped = {"clone"} if case.variant == "inplace_grad" else set()
    if sides in ("minicompile", "both"):
        graphs = Graphs()
        function, finish = compile_ours(case, graphs, way)
        ours = run(case, function)
        finish()
        verdict.in_graph, verdict.breaks = bool(graphs.operators - wrapped), graphs.breaks
        verdict.gradients = sum(g is not None for g in ours.gradients)
        verdict.kernels, verdict.externs = graphs.kernels, sorted(graphs.externs)
        verdict.length = graphs.length
        faults = [reason for reason in graphs.breaks if reason.startswith(OWN_FAULTS)]
        verdict.wrong = difference(case, eager, ours, verdict) or "; ".join(faults)
    if sides in ("torch", "both"):
        graphs = Graphs()
        function, finish = compile_theirs(case, graphs)
        run(case, function)
        finish()
        verdict.theirs = bool(graphs.operators - wrapped)
    return verdict


def typically(verdict: Verdict, draws: Iterable[Case], way: Way) -> None:
    """What is beyond in one draw by chance isn't in most: judge a verdict by the same call of others."""
    found = [check(case, "minicompile", way) for case in draws if case.name == verdict.case]
    ours, eagers = medians([[v.ratio, v.eagers] for v in found])
    verdict.typical = ours, eagers


def difference(case: Case, eager: Outcome, ours: Outcome, verdict: Verdict) -> str:
    """The first difference in words; "" if there is none."""
    if eager.raised != ours.raised:
        return f"raises {ours.raised or 'nothing'} ({ours.message}), eager {eager.raised}"
    if eager.raised:
        return ""
    reference = functools.cache(functools.partial(in_double, case))
    values = case.op.partition(".")[0] not in METADATA_ONLY
    found = compare_trees(eager.result, ours.result, "result", values)
    found = found or compare_all(eager.inputs, ours.inputs, "input", values)
    if found.startswith("close?"):
        found = nearer(verdict, eager, ours, reference())
        verdict.exact = False
    if found:
        return found
    one, other = aliases(eager), aliases(ours)
    if one != other:
        return f"memory is shared as {other}, eager {one}"
    if eager.backward_raised != ours.backward_raised:
        return (
            f"backward raises {ours.backward_raised or 'nothing'} ({ours.message}), "
            f"eager {eager.backward_raised or 'nothing'}"
        )
    found = compare_all(eager.gradients, ours.gradients, "gradient", True, strides=False)
    if found.startswith("close?"):
        found = nearer(verdict, eager, ours, reference())
        verdict.exact = False
    return found


def compare_trees(one: Any, other: Any, what: str, values: bool) -> str:
    """Results: containers, tensors and numbers."""
    ones, shape = pytree.tree_flatten(one)
    others, other_shape = pytree.tree_flatten(other)
    if shape != other_shape:
        return f"{what}: a {other_shape}, eager a {shape}"
    return compare_all(ones, others, what, values)


def compare_all(
    ones: list[Any], others: list[Any], what: str, values: bool, strides: bool = True
) -> str:
    if len(ones) != len(others):
        return f"{len(others)} {what}s, eager {len(ones)}"
    found = [
        compare(a, b, f"{what} {i}", values, strides) for i, (a, b) in enumerate(zip(ones, others))
    ]
    return min(filter(None, found), key=lambda text: text.startswith("close?"), default="")


def aliases(outcome: Outcome) -> list[int]:
    """For each tensor of arguments and result the first in the same memory; negative: the same object."""
    found, memory, objects = [], {}, {}
    for index, value in enumerate((*outcome.inputs, *tensors(outcome.result))):
        same = objects.setdefault(id(value), index)
        if same != index:
            found.append(-1 - same)
        elif value.layout is not torch.strided or value.numel() == 0:
            found.append(index)
        else:
            found.append(memory.setdefault(value.untyped_storage()._cdata, index))
    return found


def facts(value: torch.Tensor, strides: bool) -> dict[str, Any]:
    """What must agree besides the values. The stride of a dimension of size 1 says nothing."""
    known = {"class": type(value), "dtype": value.dtype, "shape": tuple(value.shape)}
    known |= {"layout": value.layout, "requires grad": value.requires_grad}
    if strides and value.layout is torch.strided:
        known["strides"] = tuple(
            0 if size == 1 or value.numel() == 0 else step
            for size, step in zip(value.shape, value.stride())
        )
        known["offset"] = value.storage_offset()
        known["conjugate, negative"] = value.is_conj(), value.is_neg()
    return known


def compare(one: Any, other: Any, what: str, values: bool, strides: bool) -> str:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        same = type(one) is type(other) and (one == other or (one != one and other != other))
        return "" if same else f"{what}: {other!r}, eager {one!r}"
    ours, eagers = facts(other, strides), facts(one, strides)
    for key, expected in eagers.items():
        if ours[key] != expected:
            return f"{what}: {key} {ours[key]}, eager {expected}"
    if not values or equal(one, other):
        return ""
    if not (one.is_floating_point() or one.is_complex()) or one.layout is not torch.strided:
        return f"{what}: values {shown(other)}, eager {shown(one)}"
    return f"close? {what}: values {shown(other)}, eager {shown(one)}"


def shown(value: torch.Tensor) -> str:
    text = " ".join(str(value.detach()).split())
    return text if len(text) < 160 else text[:160] + "..."


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit; NaN equals NaN."""
    one, other = one.detach(), other.detach()
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_complex():
        one, other = (
            torch.view_as_real(one.resolve_conj()),
            torch.view_as_real(other.resolve_conj()),
        )
    return bool(((one == other) | ((one != one) & (other != other))).all())


def in_double(case: Case) -> Outcome:
    """Eager's outcome with all numbers in double precision."""
    wide = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
    halves = (torch.float32, torch.float16, torch.bfloat16)
    wide |= dict.fromkeys(halves, torch.float64)

    def widened(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return wide.get(value, value)
        if isinstance(value, torch.Tensor) and value.dtype in wide:
            found = value.detach().to(wide[value.dtype])
            return found.requires_grad_(value.requires_grad)
        return value

    args, kwargs = pytree.tree_map(widened, (case.args, case.kwargs))
    double = Case(
        case.op, case.variant, case.dtype, case.number, case.call, args, kwargs, case.process
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # what integers become
    try:
        return run(double, entry(double))
    finally:
        torch.set_default_dtype(usual)


def nearer(verdict: Verdict, eager: Outcome, ours: Outcome, reference: Outcome) -> str:
    """Roundings: no farther from the result in double precision than twice eager's own error, or within
    the rounding of a few operations of the dtype."""
    groups = [("result", tensors(eager.result), tensors(ours.result), tensors(reference.result))]
    groups += [("input", eager.inputs, ours.inputs, reference.inputs)]
    groups += [("gradient", eager.gradients, ours.gradients, reference.gradients)]
    for what, eagers, mine, doubles in groups:
        for index, (one, other) in enumerate(zip(eagers, mine)):
            if one is None or equal(one, other):
                continue
            double = doubles[index] if index < len(doubles) else one
            double = one if double is None else double
            verdict.ratio = max(verdict.ratio, beyond(one, other, double, verdict.length))
            verdict.eagers = max(verdict.eagers, beyond(other, one, double, verdict.length))
            if not near(one, other, double):
                return f"{what} {index}: values {shown(other)}, eager {shown(one)}"
    return ""


def near(eager: torch.Tensor, ours: torch.Tensor, double: torch.Tensor) -> bool:
    if double.shape != eager.shape:
        double = eager
    wide = torch.complex128 if eager.is_complex() else torch.float64
    one, other, exact = (x.detach().resolve_conj().to(wide) for x in (eager, ours, double))
    finite = torch.isfinite(one) & torch.isfinite(other)
    if not torch.equal(torch.isnan(one), torch.isnan(other)):
        return False
    if not equal(one.masked_fill(finite, 0), other.masked_fill(finite, 0)):  # infinities
        return False
    step = torch.finfo(eager.dtype).eps
    scale = exact.abs().masked_fill(~torch.isfinite(exact), 0)
    largest = scale.max() if scale.numel() else 0
    error = (one - exact).abs().masked_fill(~finite, 0)
    # errors of sums are as large as their summands: the largest element, or an argument near 1
    rest = max(float(step * largest), torch.finfo(torch.float32).eps)
    allowed = 2 * (error.max() if error.numel() else 0) + 4 * step * scale + rest
    return bool((((other - exact).abs() <= allowed) | ~finite).all())


def beyond(eager: torch.Tensor, ours: torch.Tensor, double: torch.Tensor, length: int) -> float:
    """The largest error of an element as a multiple of what is allowed: the larger of twice eager's own
    in the tensor, and 2 units in the element's last place times the square root of the length of sums, as
    roundings grow that are as often up as down (Higham and Mary, A new approach to probabilistic rounding
    error analysis, 2019).
    """
    if double.shape != eager.shape or eager.numel() == 0:
        return 0.0
    wide = torch.complex128 if eager.is_complex() else torch.float64
    one, other, exact = (x.detach().resolve_conj().to(wide) for x in (eager, ours, double))
    finite = torch.isfinite(one) & torch.isfinite(other) & torch.isfinite(exact)
    if not finite.any():
        return 0.0
    one, other, exact = one[finite], other[finite], exact[finite]
    about = torch.finfo(eager.dtype)
    place = exact.abs().log2().floor().exp2() * about.eps
    allowed = 2 * length**0.5 * place.clamp(min=about.tiny * about.eps)
    allowed = allowed.maximum(2 * (one - exact).abs().max())
    return float(((other - exact).abs() / allowed).max())


def medians(ratios: list[list[float]]) -> list[float]:
    """Of each tensor the median of its ratios over draws of the numbers, one list a draw: what is beyond in
    one draw by chance isn't in most; an operator that errs more than is allowed is."""
    return [statistics.median(of_one) for of_one in zip(*ratios, strict=True)]
