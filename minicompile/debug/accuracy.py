"""`accuracy(fn, *args)`: every stage's results against float64, next to eager's own rounding errors.

    Accuracy      := name, stages: [StageAccuracy]
    StageAccuracy := stage, errors of outputs, gradients and state, ratio to eager's, verdict, note

A stage is a way to run the function: `accuracy_stage` registers one more. Each works on copies of its own,
from the same random state; float64 is the measure, because eager itself is only one way to round.
The real compiler: torch/_dynamo/debug_utils.py (same_two_models), torch/_dynamo/utils.py (same).
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minicompile import api
from minicompile.dynamo.module import original_of
from minicompile.ops.display import Shown, aligned
from minicompile.ops.registry import Registry

Preparation = Callable[[Any], Callable[..., Any]]

accuracy_stage: Registry[Preparation] = Registry(
    "accuracy_stage", "name, in order -> function from a copied target to what to call"
)
REFERENCE, EAGER = "float64", "eager"
CLOSE, FAR = 2.0, 10.0
"""As accurate as eager up to this multiple of its error; wrong beyond that one."""
UNKNOWN = 100.0
"""Where eager itself is the reference: this many roundings of the largest value are still close."""
FEWEST_CALLS, MOST_CALLS, SECONDS = 3, 200, 0.5
"""How often each run is timed: until the time is up, within these limits."""


def preparation(backend: str) -> Preparation:
    return lambda target: api.compile(target, backend=backend)


accuracy_stage(REFERENCE, EAGER)(lambda target: target)
accuracy_stage("captured")(preparation("eager"))
accuracy_stage("aot")(preparation("aot_eager"))
accuracy_stage("compiled")(preparation("inductor"))


@dataclass(frozen=True)
class StageAccuracy(Shown):
    """One stage's largest absolute errors; None where there is nothing to compare."""

    stage: str
    output_error: float | None = None
    gradient_error: float | None = None
    state_error: float | None = None
    """Of parameters, buffers and arguments after the call."""
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


@dataclass(frozen=True)
class Accuracy(Shown):
    """The stages of one function in order."""

    name: str
    stages: tuple[StageAccuracy, ...]

    HEAD = ("stage", "outputs", "gradients", "state", "x eager", "verdict", "note")

    @property
    def ok(self) -> bool:
        return not any(row.verdict in ("wrong", "far from eager", "raised") for row in self.stages)

    def __getitem__(self, stage: str) -> StageAccuracy:
        return next(row for row in self.stages if row.stage == stage)

    def __str__(self) -> str:
        rows = [self.HEAD, *(row.cells() for row in self.stages)]
        title = f"accuracy of {self.name}: largest errors against float64"
        return "\n".join([title, *aligned(rows, left=len(self.HEAD))])


def accuracy(target: Any, /, *args: Any, **kwargs: Any) -> Accuracy:
    """Run a function or module on these arguments in each stage and compare.

    Neither the target, nor the arguments, nor the random state change; what the function prints is printed
    by each stage. Other threads see the default dtype float64 while that stage runs.

    Raises what eager raises.
    """
    target = original_of(target)
    runs = {
        name: Measured(prepare, target, args, kwargs, name)
        for name, prepare in accuracy_stage.items()
    }
    return Accuracy(name_of(target), tuple(judgements(runs)))


def name_of(target: Any) -> str:
    return str(getattr(target, "__qualname__", type(target).__qualname__))


def judgements(runs: dict[str, Measured]) -> list[StageAccuracy]:
    """Each run beside float64's and eager's, which are among them. Raises what eager raised."""
    eager = runs[EAGER]
    if eager.error is not None:
        raise eager.error
    reference, why = runs[REFERENCE], ""
    if eager.drew:
        why = "not used: float64 draws other random numbers, so eager is the reference"
    elif reference.error is not None:
        why = f"not used, eager is the reference: {described(reference.error)}"
    elif any(a.keys() != b.keys() for a, b in zip(reference.groups, eager.groups)):
        why = "not used, eager is the reference: in float64 it gives something else"
    against = eager if why else reference
    return [
        StageAccuracy(name, verdict="unusable" if why else "reference", note=why)
        if name == REFERENCE
        else judged(name, run, eager, against)
        for name, run in runs.items()
    ]


# -- running


class Measured:
    """What one stage gave on copies of its own, in float64, by place."""

    error: Exception | None = None
    note = ""
    compiled = True
    """Whether any of it ran compiled."""
    breaks: Sequence[str] = ()
    """Why not all of it did."""
    seconds = 0.0
    """What the last call took, with its backward pass."""

    def __init__(
        self, prepare: Preparation, target: Any, args: Any, kwargs: Any, name: str
    ) -> None:
        copier = Copier()
        target, args, kwargs = copier(target), copier(args), copier(kwargs)
        tensors = copier.tensors()
        for tensor in tensors:
            tensor.grad = None
            if name == REFERENCE and tensor.is_floating_point():
                tensor.data = tensor.data.double()
        run, default = prepare(target), torch.get_default_dtype()
        outputs: dict[str, Any] = {}

        def call() -> dict[str, Any]:
            for tensor in tensors:
                tensor.grad = None
            begun = now()
            found = leaves(run(*args, **kwargs))
            forward = now() - begun
            self.seconds = forward + differentiate(found)
            return found

        self.again = call
        """Calls it once more, on the copies as they are by now."""
        with same_random_state() as drew:
            try:
                if name == REFERENCE:
                    torch.set_default_dtype(torch.float64)
                outputs = call()
            except Exception as error:
                self.error = error
            finally:
                torch.set_default_dtype(default)
            self.drew = drew()
            """Whether it used random numbers."""
        grads = {str(i): tensor.grad for i, tensor in enumerate(tensors)}
        gradients = {place: grad for place, grad in grads.items() if grad is not None}
        state = {str(i): tensor for i, tensor in enumerate(tensors)}
        self.groups = [
            {place: plain(value) for place, value in group.items()}
            for group in (outputs, gradients, state)
        ]
        dispatcher = api.dispatcher_of(run)
        if dispatcher is not None:
            told = dispatcher.explanation()
            self.compiled = told.op_count > 0 and told.compiled_calls > 0
            self.breaks = list(dict.fromkeys(f"{b.reason} [{b.id}]" for b in told.breaks))
            if self.breaks:
                self.note = "; ".join([f"{told.graph_count} graphs", *self.breaks])


@contextlib.contextmanager
def same_random_state() -> Iterator[Callable[[], bool]]:
    """Random numbers are as before, afterwards; gives a function that says whether any were drawn."""
    numpy = sys.modules.get("numpy")
    kept = random.getstate(), numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        begun = torch.get_rng_state()

        def drew() -> bool:
            return random.getstate() != kept[0] or not torch.equal(torch.get_rng_state(), begun)

        try:
            yield drew
        finally:
            random.setstate(kept[0])
            if numpy is not None:
                numpy.random.set_state(kept[1])


class Copier:
    """Deep copies that share what the originals share; also of what functions close over."""

    def __init__(self) -> None:
        self.memo: dict[int, Any] = {}
        self.kept: list[Any] = []

    def tensors(self) -> list[torch.Tensor]:
        """The copied tensors that are leaves, in the order of copying."""
        found = (v for v in self.memo.values() if isinstance(v, torch.Tensor))
        return list({id(tensor): tensor for tensor in found if tensor.is_leaf}.values())

    def __call__(self, value: Any, depth: int = 0) -> Any:
        self.prepare(value, depth)
        return copy.deepcopy(value, self.memo)

    def prepare(self, value: Any, depth: int = 0) -> None:
        """Copy beforehand what deepcopy would not: results of autograd, and functions."""
        if id(value) in self.memo or depth > MAX_DEPTH:
            return
        if isinstance(value, torch.Tensor):
            if not value.is_leaf:
                self.remember(value, value.detach().clone().requires_grad_())
        elif isinstance(value, types.FunctionType):
            self.remember(value, self.function(value, depth))
        elif isinstance(value, types.MethodType):
            copies = (self(part, depth + 1) for part in (value.__func__, value.__self__))
            self.remember(value, types.MethodType(*copies))
        elif isinstance(value, list | tuple | set | frozenset | dict):
            for item in value.values() if isinstance(value, dict) else value:
                self.prepare(item, depth + 1)

    def remember(self, value: Any, made: Any) -> None:
        self.memo[id(value)] = made
        self.kept.append(value)

    def function(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        """The same function over copies of the tensors, modules and functions that it reads. Its code is a
        copy too, since torch.compile keeps what it made with the code."""
        if str(function.__module__).partition(".")[0] in ("torch", "minicompile"):
            return function
        names = {**function.__globals__}
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        made = types.FunctionType(
            *(function.__code__.replace(), names, function.__name__, function.__defaults__, cells)
        )
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update(function.__dict__)
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        self.remember(function, made)
        for name in names_used(function.__code__):
            if isinstance(names.get(name), COPIED):
                names[name] = self(names[name], depth + 1)
        for old, new in zip(function.__closure__ or (), cells):
            with contextlib.suppress(ValueError):  # an empty cell
                inside = old.cell_contents
                copied = isinstance(inside, COPIED)
                new.cell_contents = self(inside, depth + 1) if copied else inside
        return made


MAX_DEPTH = 50
COPIED = (torch.Tensor, torch.nn.Module, types.FunctionType, list, dict, set)
"""What functions may change or differentiate."""


def names_used(code: types.CodeType) -> set[str]:
    """Global names in a function and in those that it defines."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(names_used, inner))


def leaves(value: Any, place: str = "") -> dict[str, Any]:
    """Every tensor and number inside a result, by its place."""
    if isinstance(value, dict):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"[{number}]", item) for number, item in enumerate(value)]
    elif hasattr(value, "__dict__") and not isinstance(
        value, torch.Tensor | torch.nn.Module | type
    ):
        items = [(f".{name}", item) for name, item in vars(value).items()]
    else:
        return {place: value}
    found: dict[str, Any] = {}
    for name, item in items:
        found.update(leaves(item, place + name))
    return found


def differentiate(outputs: dict[str, Any]) -> float:
    """Seconds of backward from all outputs, each element weighted differently: a plain sum hides errors."""
    tensors = [v for v in outputs.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    weights = []
    for tensor in tensors:
        count = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device)
        weights.append(torch.cos(count).reshape(tensor.shape).to(tensor.dtype))
    begun = now()
    if tensors:
        torch.autograd.backward(tensors, weights)
    return now() - begun


def now() -> float:
    """The clock, after everything queued on a GPU has finished."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(runs: Sequence[Measured]) -> list[list[float]]:
    """Seconds of later calls of each, made in turns; none where one raises."""
    samples: list[list[float]] = [[] for _ in runs]
    failed = {number for number, run in enumerate(runs) if run.error is not None}
    end = time.perf_counter() + SECONDS
    with same_random_state():
        for turn in range(MOST_CALLS):
            if turn >= FEWEST_CALLS and time.perf_counter() > end:
                break
            for number, run in enumerate(runs):
                if number in failed:
                    continue
                try:
                    run.again()
                    samples[number].append(run.seconds)
                except Exception:  # of what the calls before left behind
                    failed.add(number)
                    samples[number].clear()
    return samples


# -- comparing


@dataclass(frozen=True)
class Values:
    """A tensor in double precision, and the rounding of its own dtype."""

    data: torch.Tensor
    rounding: float


def plain(value: Any) -> Any:
    if isinstance(value, int | float | complex):
        return Values(torch.tensor([value], dtype=torch.complex128), 0.0)
    if not isinstance(value, torch.Tensor):
        return value
    exact = not (value.is_floating_point() or value.is_complex())
    wide = torch.complex128 if value.is_complex() else torch.float64
    return Values(value.detach().to(wide).clone(), 0.0 if exact else torch.finfo(value.dtype).eps)


def distance(value: Any, reference: Any) -> float:
    """The largest absolute difference; infinite where values can't be compared."""
    if not isinstance(value, Values) or not isinstance(reference, Values):
        return 0.0 if type(value) is type(reference) else float("inf")
    if value.data.shape != reference.data.shape:
        return float("inf")
    same = (value.data == reference.data) | (value.data.isnan() & reference.data.isnan())
    apart = torch.where(same, 0.0, (value.data - reference.data).abs())
    return float(apart.nan_to_num(float("inf"), float("inf")).max()) if apart.numel() else 0.0


def worst(found: dict[str, Any], reference: dict[str, Any]) -> float | None:
    if found.keys() != reference.keys():
        return float("inf")
    return max((distance(found[place], reference[place]) for place in found), default=None)


def rounding(value: Values) -> float:
    """One rounding of the largest finite element."""
    top = value.data.abs().nan_to_num(0, 0, 0)
    return float(top.max()) * value.rounding if top.numel() else 0.0


def judged(name: str, run: Measured, eager: Measured, reference: Measured) -> StageAccuracy:
    if run.error is not None:
        return StageAccuracy(name, verdict="raised", note=described(run.error))
    errors = [worst(found, true) for found, true in zip(run.groups, reference.groups)]
    ratios: list[float] = []
    for error, theirs, true in zip(errors, eager.groups, reference.groups):
        if error is not None:
            roundings = (rounding(v) for v in theirs.values() if isinstance(v, Values))
            unit = max([worst(theirs, true) or 0.0, *roundings])
            ratios.append(error / unit if unit else float("inf") if error else 0.0)
    ratio, verdict = max(ratios, default=None), "baseline"
    if name != EAGER:
        same = not any(worst(found, theirs) for found, theirs in zip(run.groups, eager.groups))
        verdict = verdict_of(run, ratio or 0.0, same, measured=reference is not eager)
    outputs, gradients, state = errors
    return StageAccuracy(name, outputs, gradients, state, ratio, verdict, run.note)


def verdict_of(run: Measured, ratio: float, same: bool, measured: bool) -> str:
    """`measured`: by float64. Else nobody knows how far eager's own rounding goes."""
    if ratio > FAR and measured:
        return "wrong"
    if not run.compiled:
        return "not compiled"
    if same:
        return "same as eager"
    if not measured:
        return "close to eager" if ratio <= UNKNOWN else "far from eager"
    return "as accurate as eager" if ratio <= CLOSE else "less accurate than eager"


def described(error: Exception | None) -> str:
    """An exception in a line; "" for none."""
    if error is None:
        return ""
    error = getattr(error, "inner_exception", error)  # in torch.compile's
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
