"""Are guards on sizes sound? Random programs of `sizes.py`, compiled at one size and called at ten others.

Results, changed arguments, gradients and exceptions must be those of eager.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import minicompile as mc
from tests.comparing import strides_of
from tests.fuzz.running import namespace_of
from tests.fuzz.sizes import Program, Sizes

TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Of values computed by other kernels; relative to the largest one."""
STRICTER = ("modified by an inplace operation", "not implemented for")
"""Where only eager need raise: a compiled function saves other tensors, and has kernels for more dtypes."""


@dataclasses.dataclass
class Finding:
    """What running one program showed. `why` is empty if nothing differs."""

    why: str = ""
    calls: int = 0
    captures: int = 0
    eager_calls: int = 0
    raised: int = 0
    """Calls that raise in eager."""


def function_of(text: str) -> Callable[..., Any]:
    made: Callable[..., Any] = namespace_of(text, "sound")["f"]
    return made


def called(function: Callable[..., Any], program: Program, sizes: Sizes) -> dict[str, Any]:
    """What a call shows: results, arguments afterwards, gradients; or the exception's type."""
    torch.manual_seed(0)
    arguments, leaves = [], []
    for given in program.inputs:
        tensor = given.make(sizes)
        if program.trained and tensor.is_floating_point():
            leaves.append(tensor.requires_grad_())
            tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            tensor = tensor.copy_(leaves[-1]) if given.layout != "expanded" else leaves[-1] * 1.0
        if not program.dynamic:
            mc.mark_dynamic(tensor, given.marked)
        arguments.append(tensor)
    try:
        results = function(*arguments)
        shown = {f"result {i}": value for i, value in enumerate(results)}
        shown |= {f"argument {i}": value for i, value in enumerate(arguments)}
        ends = [
            value.double().square().sum() / max(value.numel(), 1)
            for value in results
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        if ends:
            grads = torch.autograd.grad(sum(ends), leaves, allow_unused=True)
            shown |= {f"gradient {i}": value for i, value in enumerate(grads)}
    except Exception as error:
        return {"raised": type(error).__name__, "text": str(error)}
    lies = {
        f"{name} strides": strides_of(value)
        for name, value in shown.items()
        if isinstance(value, torch.Tensor) and "gradient" not in name
    }
    return lies | {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in shown.items()
    }


def difference(got: dict[str, Any], want: dict[str, Any], exact: bool) -> str:
    """The first thing that is not the same."""
    if any(text in want.get("text", "") for text in STRICTER) and "raised" not in got:
        return ""
    if "raised" in want or "raised" in got:
        same = want.get("raised") == got.get("raised")
        return "" if same else f"raised {outcome(got)}, not {outcome(want)}"
    if got.keys() != want.keys():
        return f"{[*got]} instead of {[*want]}"
    for name, expected in want.items():
        value = got[name]
        if type(value) is not type(expected):
            return f"{name}: a {type(value).__name__}, not a {type(expected).__name__}"
        if not isinstance(expected, torch.Tensor):
            same = value == expected or (value != value and expected != expected)
        else:
            same = (value.dtype, value.shape) == (expected.dtype, expected.shape)
            same = same and close(value, expected, exact)
        if not same:
            return f"{name}: {value}, not {expected}"
    return ""


def outcome(shown: dict[str, Any]) -> str:
    return f"{shown['raised']} ({shown['text'][:200]})" if "raised" in shown else "nothing"


def close(value: torch.Tensor, expected: torch.Tensor, exact: bool) -> bool:
    """Equal up to rounding, relative to the largest finite value."""
    if exact or expected.dtype not in TOLERANCES:
        return torch.allclose(value, expected, 0, 0, True) if expected.numel() else True
    finite = expected[expected.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    tolerance = TOLERANCES[expected.dtype]
    return torch.allclose(value, expected, tolerance, tolerance * scale, True)


def run(program: Program, backend: str) -> Finding:
    """Compile at the first sizes and call at all, comparing with eager each time."""
    mc.reset()
    found = Finding()
    text = program.function()
    plain = function_of(text)
    compiled = mc.compile(
        function_of(text),
        dynamic=True if program.dynamic else None,
        backend=backend,
        options={"recompile_limit": 16},
    )
    for number, sizes in enumerate(program.calls):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            want = called(plain, program, sizes)
            got = called(compiled, program, sizes)
        found.calls += 1
        found.raised += "raised" in want
        why = difference(got, want, backend == "eager")
        for warning in caught:
            if "internal error" in str(warning.message):
                why = why or str(warning.message)
        if why:
            found.why = f"call {number} at {sizes}: {why}"
            break
    story = compiled._minicompile.explanation()
    found.captures, found.eager_calls = len(story.captures), story.eager_calls
    return found


def smaller(program: Program) -> Iterator[Program]:
    """The program with one thing less."""
    for i in reversed(range(len(program.body))):
        yield dataclasses.replace(program, body=program.body[:i] + program.body[i + 1 :])
    if len(program.returned) > 1:
        for i in range(len(program.returned)):
            rest = program.returned[:i] + program.returned[i + 1 :]
            yield dataclasses.replace(program, returned=rest)
    for i in reversed(range(1, len(program.calls))):
        yield dataclasses.replace(program, calls=program.calls[:i] + program.calls[i + 1 :])
    if program.trained:
        yield dataclasses.replace(program, trained=False)
    for i in range(len(program.inputs)):
        if program.inputs[i].layout != "plain":
            inputs = copy.copy(program.inputs)
            inputs[i] = dataclasses.replace(inputs[i], layout="plain")
            yield dataclasses.replace(program, inputs=inputs)
        yield dataclasses.replace(program, inputs=program.inputs[:i] + program.inputs[i + 1 :])


def kind(why: str) -> str:
    """What a difference is about, so that making a program smaller keeps to one mistake."""
    what = why.partition("}: ")[2]
    return what[:30] if what.startswith(("raised", "internal")) else what.partition(" ")[0]


def shrink(program: Program, backend: str, why: str) -> tuple[Program, str]:
    """A smaller program that goes wrong in the same way."""
    while True:
        for candidate in smaller(program):
            if not candidate.inputs or not candidate.returned:
                continue
            if "NameError" in str(
                called(function_of(candidate.function()), candidate, program.calls[0])
            ):
                continue
            found = run(candidate, backend)
            if kind(found.why) == kind(why):
                program, why = candidate, found.why
                break
        else:
            return program, why
