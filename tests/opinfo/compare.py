"""A case run by eager and by us: `check(case)` says what differed and whether it was in a graph.

How far floating point may be from eager: no number is written down for an operator. Values are equal bit for
bit, or each is at most as far from the result in double precision as

    twice eager's own largest error in the tensor + 4 roundings of the value
    + one rounding of the tensor's largest value (at least that of float32 at 1)

where a rounding is the dtype's `eps`. Integers, bools, dtypes, strides and shared memory must be the same.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from minicompile import pipeline
from minicompile.dynamo.dispatch import Dispatcher
from minicompile.dynamo.result import Capture
from minicompile.options import Options
from tests.comparing import Answer, alias_pattern, answer, strides_of, tensors
from tests.opinfo.cases import METADATA_ONLY, Case

BACKENDS = {"aot_eager": pipeline.aot_eager, "inductor": pipeline.compile_capture}


@dataclass(frozen=True)
class Way:
    """How we compile."""

    backend: str = "aot_eager"
    dynamic: bool | None = None
    options: Options = field(default_factory=lambda: Options(verify=True))


@dataclass
class Verdict:
    """What a compiler made of a case."""

    case: Case
    wrong: str = ""
    """What differs from eager; empty if nothing."""
    operators: set[str] = field(default_factory=set)
    """Torch functions, methods and operators in graphs that ran compiled."""
    breaks: list[str] = field(default_factory=list)

    @property
    def in_graph(self) -> bool:
        return bool(self.operators - ({"clone"} if self.case.variant == "inplace_grad" else set()))


def operators_in(graph: torch.fx.Graph) -> set[str]:
    """Names of what a captured graph calls on tensors."""
    names = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        name = node.target if isinstance(node.target, str) else node.target.__name__
        part = name == "getitem" and not isinstance(node.args[0].meta.get("val"), torch.Tensor)
        writes = node.meta.get("val") is None and bool(node.all_input_nodes)
        if not part and (writes or tensors(node.meta.get("val"))):
            names.add(str(node.args[1]) if name == "getattr" else str(name))
    return names


def entry(case: Case) -> types.FunctionType:
    """A new function that makes the call, with code of its own: nothing is remembered of other samples."""
    call = case.call

    def fn(args: Any, kwargs: Any) -> Any:
        return call(*args, **kwargs)

    fn.__code__ = fn.__code__.replace(co_name=f"fn_{next(_numbers)}")
    return fn  # type: ignore[return-value]


_numbers = itertools.count()


def run(case: Case, function: Callable[..., Any]) -> Answer:
    return answer(function, [case.args, case.kwargs], outputs_of=case.process)


OWN_FAULTS = "internal-error", "missing-tool"
"""Reasons of ours that are mistakes: an exception in a room, a kernel that the C compiler refuses."""


def check(case: Case, way: Way = Way()) -> Verdict:
    """Compare `case` with eager, and say whether the operator was in a graph."""
    verdict = Verdict(case)

    def compiled(capture: Capture) -> Callable[[list[Any]], Any]:
        run_graph = BACKENDS[way.backend](capture, way.options)
        operators = operators_in(capture.graph.gm.graph)

        def call(inputs: list[Any]) -> Any:
            verdict.operators |= operators
            return run_graph(inputs)

        return call

    eager = run(case, entry(case))
    dispatcher = Dispatcher(entry(case), backend=compiled, options=way.options, dynamic=way.dynamic)
    ours = run(case, dispatcher.entrance)
    verdict.breaks = [f"{b.id}: {b.reason}" for b in dispatcher.explanation().breaks]
    faults = [reason for reason in verdict.breaks if reason.startswith(OWN_FAULTS)]
    verdict.wrong = difference(case, eager, ours) or "; ".join(faults)
    return verdict


# Comparing ---------------------------------------------------------------------------------------


def difference(case: Case, eager: Answer, ours: Answer) -> str:
    """The first difference in words; "" if there is none."""
    if type(eager.raised) is not type(ours.raised):
        return f"raises {ours.raised!r}, eager {eager.raised!r}"
    if eager.raised:
        return ""
    one, other = (pytree.tree_flatten(outcome.results)[1] for outcome in (eager, ours))
    if one != other:
        return f"result: a {other}, eager a {one}"
    reference = functools.cache(functools.partial(in_double, case))
    for what, eagers in groups(eager).items():
        for i, (one, other) in enumerate(zip(eagers, groups(ours)[what], strict=True)):
            text = compare(one, other, strides=what != "gradient")
            if not text and what != "gradient" and case.op.partition(".")[0] in METADATA_ONLY:
                continue
            if not text and isinstance(one, torch.Tensor) and not equal(one, other):
                double = dict(enumerate(groups(reference())[what])).get(i, one)
                if not near(one, other, one if double is None else double):
                    text = f"values {shown(other)}, eager {shown(one)}"
            if text:
                return f"{what} {i}: {text}"
    one, other = aliases(eager), aliases(ours)
    return f"memory is shared as {other}, eager {one}" if one != other else ""


def groups(outcome: Answer) -> dict[str, list[Any]]:
    return {
        "result": pytree.tree_leaves(outcome.results),
        "input": outcome.written,
        "gradient": outcome.gradients,
    }


def aliases(outcome: Answer) -> list[tuple[Any, ...]]:
    """How the tensors of arguments and result share memory."""
    return alias_pattern([*outcome.written, *tensors(outcome.results)])


def facts(value: torch.Tensor, strides: bool) -> dict[str, Any]:
    """What must agree besides the values. The stride of a dimension of size 1 says nothing."""
    known = {"class": type(value), "dtype": value.dtype, "shape": tuple(value.shape)}
    known |= {"layout": value.layout, "requires grad": value.requires_grad}
    if strides and value.layout is torch.strided:
        known |= {"strides": strides_of(value), "offset": value.storage_offset()}
        known["conjugate, negative"] = value.is_conj(), value.is_neg()
    return known


def compare(one: Any, other: Any, strides: bool) -> str:
    """How all but the values of tensors differs."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        same = type(one) is type(other) and (one == other or (one != one and other != other))
        return "" if same else f"{other!r}, eager {one!r}"
    ours, eagers = facts(other, strides), facts(one, strides)
    return next((f"{k} {ours[k]}, eager {v}" for k, v in eagers.items() if ours[k] != v), "")


def shown(value: torch.Tensor) -> str:
    text = " ".join(str(value.detach()).split())
    return text if len(text) < 160 else text[:160] + "..."


def plain(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    value = value if value.layout is torch.strided else value.to_dense()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit; NaN equals NaN."""
    one, other = plain(one), plain(other)
    return bool(((one == other) | ((one != one) & (other != other))).all())


def in_double(case: Case) -> Answer:
    """Eager's outcome with all numbers in double precision."""
    wide = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)
    wide |= dict.fromkeys((torch.complex64, torch.complex32), torch.complex128)

    def widened(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return wide.get(value, value)
        if isinstance(value, torch.Tensor) and value.dtype in wide:
            return value.detach().to(wide[value.dtype]).requires_grad_(value.requires_grad)
        return value

    args, kwargs = pytree.tree_map(widened, (case.args, case.kwargs))
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # what integers become
    try:
        return run(replace(case, args=args, kwargs=kwargs), entry(case))
    finally:
        torch.set_default_dtype(usual)


def near(eager: torch.Tensor, ours: torch.Tensor, double: torch.Tensor) -> bool:
    """No farther from the result in double precision than the module's docstring says."""
    if eager.layout is not torch.strided or not (eager.is_floating_point() or eager.is_complex()):
        return False
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
