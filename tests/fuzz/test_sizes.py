"""Some of the random programs that check guards on sizes; and that a missing guard would be noticed."""

from __future__ import annotations

import math

import pytest
import torch

import minicompile as mc
from minicompile.shapes.env import ShapeEnv
from tests.fuzz.size_checks import run, shrink
from tests.fuzz.sizes import Input, Program, generate

PROGRAMS = {"eager": range(24), "aot_eager": range(24, 36), "inductor": range(36, 40)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "seed"), [(backend, seed) for backend, seeds in PROGRAMS.items() for seed in seeds]
)
def test_a_random_program_is_right_at_other_sizes(backend: str, seed: int) -> None:
    program = generate(seed)
    assert run(program, backend).why == "", program


def test_programs_follow_from_the_seed_and_compile_dynamically() -> None:
    texts = [str(generate(seed)) for seed in range(40)]
    assert texts == [str(generate(seed)) for seed in range(40)] and len(set(texts)) == 40
    found = [run(generate(seed), "eager") for seed in range(8)]
    calls, captures = sum(f.calls for f in found), sum(f.captures for f in found)
    assert sum(f.eager_calls for f in found) < calls / 4 and captures < calls


BRANCH = Program(
    [Input("x", ("a", "b"), "float32", "plain", (0, 1))],
    [{"a": 4, "b": 3}, {"a": 7, "b": 3}, {"a": 5, "b": 5}],
    dynamic=True,
    trained=False,
    body=["t0 = x * 2", "n0 = x.shape[0] * 3", "t1 = x + 1 if x.shape[0] % 4 else x - 1"],
    returned=["t0", "t1", "n0"],
)


def test_a_missing_guard_is_noticed_and_the_program_made_smaller(monkeypatch) -> None:
    assert run(BRANCH, "eager").why == ""
    monkeypatch.setattr(ShapeEnv, "evaluate", lambda env, expr, reason="": env.hint(expr))
    found = run(BRANCH, "eager")
    assert found.why.startswith("call 1 at {'a': 7, 'b': 3}: result 1: ")
    small, why = shrink(BRANCH, "eager", found.why)
    assert small.body == BRANCH.body[2:] and small.returned == ["t1"]
    assert len(small.calls) == 2 and "}: result 0: " in why


FLOATS = {
    "rounds": lambda n: int(n * 0.29 * 100),
    "cancels": lambda n: n / 49 * 49 == n,
    "a root": lambda n: int(math.sqrt(n)) + math.ceil(n**0.5),
    "a quotient": lambda n: math.floor(n / 3) + round(n * 0.5),
    "a remainder": lambda n: n % -3 + (-n) % 4 + n // -2 + (-n) // 3,
    "an exact guard": lambda n: round(n / 3, 5) if n / 3 > 1.3333333333333333 else n / 3,
    "text": lambda n: int(str(n)) + len(f"{n / 2}"),
    "a divisor that may be 0": lambda n: 7 // (n - 5) + 7 % (n - 5),
}


@pytest.mark.parametrize("name", FLOATS)
def test_numbers_made_of_sizes_are_those_of_python(name: str) -> None:
    number = FLOATS[name]

    def f(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x * number(x.shape[0]), number(x.shape[0])

    compiled = mc.compile(f, backend="eager", dynamic=True, options={"recompile_limit": 16})
    for size in (4, 9, 49, 3, 5, 100):
        x = torch.ones(size)
        try:
            want = f(x)
        except ZeroDivisionError:
            with pytest.raises(ZeroDivisionError):
                compiled(x)
            continue
        got = compiled(x)
        assert torch.equal(got[0], want[0]) and got[1] == want[1] and type(got[1]) is type(want[1])


def test_an_index_into_a_dimension_of_size_0_raises() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x[torch.tensor([0, -1])] * 2

    compiled = mc.compile(f, dynamic=True)
    assert torch.equal(compiled(torch.ones(3, 3)), f(torch.ones(3, 3)))
    with pytest.raises(IndexError):
        compiled(torch.ones(0, 0))
