"""One engine for all tools: run a program with a part of the compiler off or replaced, and compare.

    Case          := target, calls, kwargs, check, options of what mc.compile returned
    Variant       := prepare: target -> what is called instead; rules that are registered meanwhile; Limit
    VariantRun    := what a variant gave: outputs, gradients, state, error, seconds, Report of its limit
    StageAccuracy := a run's errors against float64, beside those of eager, and a verdict

`mc.accuracy` compares the stages of the compiler, `mc.bisect` and `mc.minify` limits of it, `mc.what_if`
other options and wishes, `mc.compare_with_torch` two compilers. Each run works on copies, from
the same random state. The real compiler: torch/_dynamo/debug_utils.py (same_two_models).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from minicompile import api
from minicompile.debug.limit import Counting, Limit
from minicompile.debug.program_copies import Copier, same_random_state
from minicompile.dynamo.dispatch import Backend, Dispatcher
from minicompile.dynamo.module import behind, original_of
from minicompile.ops.display import Shown
from minicompile.ops.events import observer
from minicompile.ops.gates import gate
from minicompile.ops.registry import scoped
from minicompile.options import Options

Preparation = Callable[[Any], Callable[..., Any]]

REFERENCE, EAGER = "float64", "eager"
CLOSE, FAR = 2.0, 10.0
"""As accurate as eager up to this multiple of its error; wrong beyond that one."""
UNKNOWN = 100.0
"""Where eager itself is the reference: this many roundings of the largest value are still close."""
BAD = ("wrong", "far from eager", "raised")
FEWEST_CALLS, MOST_CALLS, SECONDS = 3, 200, 0.5
"""How often each run is timed: until the time is up, within these limits."""


@dataclass(frozen=True)
class Variant:
    """A way to run a program."""

    prepare: Preparation
    rules: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    limit: Limit | None = None
    wide: bool = False
    """Run it in float64. Other threads see that default dtype meanwhile."""


class CheckFailed(Exception):
    """The user's check of a result."""


@dataclass(frozen=True)
class Case:
    """A program: calls of a function or module. `check` says of each result whether it is right."""

    target: Any
    calls: Sequence[Sequence[Any]]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Any], object] | None = None
    options: Options = field(default_factory=Options)
    dynamic: bool | None = None

    @classmethod
    def of(
        cls,
        target: Any,
        calls: Sequence[Sequence[Any]],
        kwargs: Mapping[str, Any] | None = None,
        check: Callable[[Any], object] | None = None,
    ) -> Case:
        """Make a case of a function; one that `mc.compile` returned keeps its options."""
        options, dynamic = api.settings_of(target)
        return cls(original_of(target), calls, dict(kwargs or {}), check, options, dynamic)

    @property
    def name(self) -> str:
        return str(getattr(self.target, "__qualname__", type(self.target).__qualname__))

    def compiled(self, limit: Limit, **changes: Any) -> Variant:
        """The case compiled under a limit, with some options changed."""
        options = dataclasses.replace(self.options, **changes)
        compile = functools.partial(
            api.compile, backend=limit.backend, options=options, dynamic=self.dynamic
        )
        return Variant(compile, limit=limit)

    def by(self, backend: Backend) -> Variant:
        """The case compiled by a function of its captures."""
        make = functools.partial(
            Dispatcher, backend=backend, options=self.options, dynamic=self.dynamic
        )
        return Variant(lambda target: behind(target, make, api.compile))

    @functools.cached_property
    def baseline(self) -> dict[str, VariantRun]:
        """The program in float64 and in eager."""
        runs = {REFERENCE: Variant(lambda target: target, wide=True)}
        runs[EAGER] = Variant(lambda target: target)
        return {name: VariantRun(self, variant) for name, variant in runs.items()}

    def compare(self, runs: Mapping[str, VariantRun]) -> list[StageAccuracy]:
        """Judge the baseline and the runs. Raises what eager raised."""
        return judgements({**self.baseline, **runs})

    def failure(self, run: VariantRun) -> str:
        """How a run failed, "" where it is right."""
        if run.report.error or run.error is not None or self.check is not None:
            return run.report.error or described(run.error)
        *_, row = self.compare({"run": run})
        if row.verdict not in BAD:
            return ""
        shown = zip(("outputs", "gradients", "state"), row.cells()[1:4])
        far = (f"{what} off by {error}" for what, error in shown if error not in ("", "0"))
        return f"{row.verdict}: {', '.join(far) or row.note}"


class VariantRun:
    """The results of running a variant of a case on copies of its arguments: float64 values, by place."""

    error: Exception | None = None
    note = ""
    compiled = True
    """Whether any of it ran compiled."""
    breaks: Sequence[str] = ()
    """Why not all of it did."""
    seconds = 0.0
    """Of the last call, with its backward pass."""

    def __init__(self, case: Case, variant: Variant) -> None:
        copier = Copier()
        self.case, self.variant = case, variant
        target, self.calls, self.kwargs = copier([case.target, list(case.calls), dict(case.kwargs)])
        self.inputs = copier.tensors()
        for tensor in self.inputs:
            if variant.wide and tensor.is_floating_point():
                tensor.data = tensor.data.double()
        self.counting = Counting(variant.limit or Limit())
        self.call = variant.prepare(target)
        outputs: dict[str, Any] = {}
        with same_random_state() as drew:
            try:
                outputs = self.again()
            except Exception as error:
                self.error = error
            self.drew = drew()
            """Whether it used random numbers."""
        self.report = self.counting.report()
        gradients = {str(n): t.grad for n, t in enumerate(self.inputs) if t.grad is not None}
        groups = (outputs, gradients, dict(places(self.inputs)))
        self.groups = [{place: plain(value) for place, value in g.items()} for g in groups]
        dispatcher = api.dispatcher_of(self.call)
        if dispatcher is not None:
            explained = dispatcher.explanation()
            self.compiled = explained.op_count > 0 and explained.compiled_calls > 0
            self.breaks = list(dict.fromkeys(f"{b.reason} [{b.id}]" for b in explained.breaks))
            if self.breaks:
                self.note = "; ".join([f"{explained.graph_count} graphs", *self.breaks])

    def again(self) -> dict[str, Any]:
        """Call it (once more), on the copies as they are by now; gives what it returns by place."""
        for tensor in self.inputs:
            tensor.grad = None
        default = torch.get_default_dtype()
        with self.rules():
            try:
                if self.variant.wide:
                    torch.set_default_dtype(torch.float64)
                begun, results = now(), list[Any]()
                for args in self.calls:
                    results.append(self.call(*args, **self.kwargs))
                    if self.case.check is not None and not self.case.check(results[-1]):
                        raise CheckFailed("the check of the result failed")
                outputs = dict(places(results))
                differentiate(outputs)
                self.seconds = now() - begun
            finally:
                torch.set_default_dtype(default)
        return outputs

    @contextlib.contextmanager
    def rules(self) -> Iterator[None]:
        """The registries as the variant wants them: a later call may compile too."""
        with scoped(), warnings.catch_warnings(), self.variant.rules():
            if self.variant.limit is not None:
                warnings.simplefilter("ignore")
                observer.records.pop("dump", None)  # an error that is looked for needs no report
                gate("variant")(self.counting)
                observer("variant")(self.counting.listen)
            yield


def places(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every tensor and number inside a result, with its place."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    elif not isinstance(value, torch.Tensor | torch.nn.Module | type):
        items = getattr(value, "__dict__", {}).items()
    if not items:
        yield place, value
    for name, item in items:
        yield from places(item, f"{place}[{name!r}]")


def differentiate(outputs: Mapping[str, Any]) -> None:
    """Run backward from all outputs, each element weighted differently: a plain sum hides errors."""
    tensors = [v for v in outputs.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    weights = []
    for tensor in tensors:
        count = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device)
        weights.append(torch.cos(count).reshape(tensor.shape).to(tensor.dtype))
    if tensors:
        torch.autograd.backward(tensors, weights)


def now() -> float:
    """The clock, after everything queued on a GPU has finished."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(runs: Sequence[VariantRun]) -> list[list[float]]:
    """Seconds of later calls of each that didn't raise, made in turns."""
    samples: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + SECONDS
    with same_random_state():
        for turn in range(MOST_CALLS):
            if turn >= FEWEST_CALLS and time.perf_counter() > end:
                break
            for run, seconds in zip(runs, samples):
                if run.error is None:
                    run.again()
                    seconds.append(run.seconds)
    return samples


# -- comparing


@dataclass(frozen=True)
class StageAccuracy(Shown):
    """One stage's largest absolute errors; None where there is nothing to compare."""

    stage: str
    output_error: float | None = None
    gradient_error: float | None = None
    state_error: float | None = None
    """Errors of parameters, buffers and arguments as they are after the call."""
    ratio: float | None = None
    """The worst of the three, each divided by eager's own (at least one rounding of the largest value)."""
    verdict: str = ""
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        errors = (self.output_error, self.gradient_error, self.state_error)
        ratio = "" if self.ratio is None else f"{self.ratio:.3g}"
        return self.stage, *map(error_text, errors), ratio, self.verdict, self.note

    def __str__(self) -> str:
        return " ".join(filter(None, self.cells()))


def error_text(error: float | None) -> str:
    return "" if error is None else f"{error:.2e}" if error else "0"


def judgements(runs: Mapping[str, VariantRun]) -> list[StageAccuracy]:
    """Judge each run beside float64's and eager's, which are among them. Raises what eager raised."""
    eager, reference, why = runs[EAGER], runs[REFERENCE], ""
    if eager.error is not None:
        raise eager.error
    if eager.drew:
        why = "float64 draws other random numbers"
    elif reference.error is not None:
        why = described(reference.error)
    elif any(a.keys() != b.keys() for a, b in zip(reference.groups, eager.groups)):
        why = "in float64 it gives something else"
    note = f"not used, eager is the reference: {why}" if why else ""
    head = StageAccuracy(REFERENCE, verdict="unusable" if why else "reference", note=note)
    against = eager if why else reference
    rest = ((name, run) for name, run in runs.items() if name != REFERENCE)
    return [head, *(judged(name, run, eager, against) for name, run in rest)]


@dataclass(frozen=True)
class Values:
    """A tensor in double precision, and one rounding, in its own dtype, of its largest finite element."""

    data: torch.Tensor
    rounding: float


def plain(value: Any) -> Any:
    if isinstance(value, int | float | complex):
        return Values(torch.tensor([value], dtype=torch.complex128), 0.0)
    if not isinstance(value, torch.Tensor):
        return value
    exact = not (value.is_floating_point() or value.is_complex())
    wide = value.detach().to(torch.complex128 if value.is_complex() else torch.float64).clone()
    top = wide.abs().nan_to_num(0, 0, 0).max() if wide.numel() else 0.0
    return Values(wide, 0.0 if exact else float(top) * torch.finfo(value.dtype).eps)


def distance(value: Any, reference: Any) -> float:
    """The largest absolute difference; infinite where values can't be compared."""
    if not isinstance(value, Values) or not isinstance(reference, Values):
        return 0.0 if type(value) is type(reference) else float("inf")
    if value.data.shape != reference.data.shape:
        return float("inf")
    same = (value.data == reference.data) | (value.data.isnan() & reference.data.isnan())
    apart = torch.where(same, 0.0, (value.data - reference.data).abs())
    return float(apart.nan_to_num(float("inf"), float("inf")).max()) if apart.numel() else 0.0


def worst(group: Mapping[str, Any], reference: Mapping[str, Any]) -> float | None:
    if group.keys() != reference.keys():
        return float("inf")
    return max((distance(group[place], reference[place]) for place in group), default=None)


def judged(name: str, run: VariantRun, eager: VariantRun, reference: VariantRun) -> StageAccuracy:
    if run.error is not None:
        return StageAccuracy(name, verdict="raised", note=described(run.error))
    errors = [worst(group, true) for group, true in zip(run.groups, reference.groups)]
    ratios: list[float] = []
    for error, theirs, true in zip(errors, eager.groups, reference.groups):
        if error is not None:
            roundings = (v.rounding for v in theirs.values() if isinstance(v, Values))
            unit = max([worst(theirs, true) or 0.0, *roundings])
            ratios.append(error / unit if unit else float("inf") if error else 0.0)
    ratio = max(ratios, default=0.0)
    measured = reference is not eager  # else nobody knows how far eager's own rounding goes
    if name == EAGER:
        verdict = "baseline"
    elif ratio > FAR and measured:
        verdict = "wrong"
    elif not run.compiled:
        verdict = "not compiled"
    elif not any(worst(group, theirs) for group, theirs in zip(run.groups, eager.groups)):
        verdict = "same as eager"
    elif not measured:
        verdict = "close to eager" if ratio <= UNKNOWN else "far from eager"
    else:
        verdict = "as accurate as eager" if ratio <= CLOSE else "less accurate than eager"
    outputs, gradients, state = errors
    ratio_or_none = ratio if ratios else None
    return StageAccuracy(name, outputs, gradients, state, ratio_or_none, verdict, run.note)


def described(error: Exception | None) -> str:
    """An exception in a line; "" for none."""
    if error is None:
        return ""
    error = getattr(error, "inner_exception", error)  # in torch.compile's
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
