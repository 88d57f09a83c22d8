"""Are guards on sizes sound? `python -m tests.shapes.soundness --programs 2000 --seed 0 --backend inductor`

Each random program is compiled at one size and called at ten others; results, changed arguments, gradients
and exceptions must be those of eager. Prints each program that differs, made smaller. Exit code 1 if any
does. `--seed N --programs 1` runs one again.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import faulthandler
import linecache
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

import minicompile as mc
from tests.shapes.programs import Program, Sizes, generate

BACKENDS = ("eager", "aot_eager", "inductor")
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Of values computed by other kernels; relative to the largest one."""
STRICTER = ("modified by an inplace operation", "not implemented for")
"""Where only eager need raise: a compiled function saves other tensors, and has kernels for more dtypes."""
SLOW = 120
"""Seconds after which a program's stack is printed."""


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
    file = "<sound>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "sound"}
    exec(compile(text, file, "exec"), names)
    made: Callable[..., Any] = names["f"]
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
    return {
        k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in shown.items()
    } | {f"{k} strides": steps(v) for k, v in shown.items() if "gradient" not in k}


def steps(tensor: Any) -> list[int]:
    """The strides that say where elements are: those of dimensions with several."""
    if not isinstance(tensor, torch.Tensor):
        return []
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in strides if size > 1 and tensor.numel()]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed")
    parser.add_argument("--backend", choices=BACKENDS, default="inductor")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # torch reports operators that raise on fakes
    total, wrong = Counter[str](), 0
    for seed in range(options.seed, options.seed + options.programs):
        faulthandler.dump_traceback_later(SLOW)
        program = generate(seed)
        found = run(program, options.backend)
        total.update({name: n for name, n in vars(found).items() if name != "why"})
        if found.why:
            wrong += 1
            program, why = shrink(program, options.backend, found.why)
            print(f"\nseed {seed}: {why}\n{program}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"{options.programs} programs on {options.backend}, {wrong} wrong: {dict(total)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
