"""A few random programs; and that the comparison would notice, and the shrinker shrink."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fuzz.compare import (
    Given,
    arguments,
    compare,
    difference,
    differentiate,
    module_of,
    refused_steps,
    run,
    undecided,
)
from tests.fuzz.forms import FORMS, HALF, WRITES, blanks
from tests.fuzz.generator import PARAMETERS, PRELUDE, Program, Statement, generate, line, widened
from tests.fuzz.shrink import compiles, shrink

PLAIN = str(Program(0, [line("items.append(a + 1)"), line("return a * 2, items")]))


RUNS = [
    *(("eager", 5, seed) for seed in range(10)),
    *(("aot_eager", 4, seed) for seed in range(2)),
    *(("triton", 3, seed) for seed in range(2)),
]
"""Backends, and sizes and seeds of the programs that are run."""


@pytest.mark.long
@pytest.mark.parametrize(("backend", "size", "seed"), RUNS)
def test_a_random_program_behaves_as_in_python(backend: str, size: int, seed: int) -> None:
    assert difference(str(generate(seed, size)), backend) == ""


def test_a_backward_that_eager_refuses_is_no_difference() -> None:
    changed = Program(0, [line("t = a / b.abs(); print(t.shape); b[0] = 2; return t")])
    assert differentiate([torch.ones(2, requires_grad=True) * 2]) == ""
    assert difference(str(changed), "aot_eager") == ""


@pytest.mark.long
def test_a_branch_on_numbers_that_cancel_hangs_on_rounding_and_nothing_else_does() -> None:
    cancel = "t = torch.cat([a * {0}, a * -{0}]).sum(); return (a if t > 0 else b), len(items)"
    for text, hangs in ((cancel.format("1e19"), True), ("return a.sum(), b.mean(0) > 0", False)):
        assert undecided(str(Program(0, [line(text)])), "inductor", "first call: other") == hangs
    assert not undecided(str(generate(3)), "inductor", "other rows: other values")
    assert not undecided(cancel.format("1e19"), "eager", "first call: other")


@pytest.mark.long
def test_gradients_that_a_write_unseen_by_autograd_spoils_are_not_compared() -> None:
    for text, spoilt in (
        ("t = a.exp(); t.data.add_(1); return t, b", True),
        ("t = a.exp(); b.data.add_(1); return t, b", False),
        ("*_, t = a; t = t / (t.abs() + 1); a.data.add_(1); return t, b", True),
    ):
        program = Program(0, [line(text)])
        seen = run(str(program).replace(".data.", ".detach()."), lambda f: f)
        assert ("first call" in refused_steps(seen)) == spoilt
        assert difference(str(program), "aot_eager") == ""


def test_programs_follow_from_the_seed_and_are_python() -> None:
    texts = {str(generate(seed)) for seed in range(60)}
    assert texts == {str(generate(seed)) for seed in range(60)} and len(texts) == 60
    assert sum(map(compiles, texts)) >= 57


@pytest.mark.long
@pytest.mark.parametrize("table", [*(table for _, table in FORMS.values()), HALF, WRITES])
@pytest.mark.parametrize("prelude", [PRELUDE, widened(PRELUDE)])
def test_forms_fit_the_arguments(table: tuple[str, ...], prelude: str) -> None:
    """All but one at most: another is there for its exception."""
    raised, module = [], module_of(prelude)
    wide = prelude != PRELUDE
    for form in table:
        given = dict(zip(PARAMETERS, arguments(module, Given(), module.Net())))
        try:
            text = form.format(**blanks("a", "b", "n", lambda *among: among[-1]))
            exec(widened(text) if wide else text, vars(module) | given)
        except (RuntimeError, IndexError):
            raised.append(form)
    assert len(raised) <= 1, raised


MISTAKES: dict[str, Callable[[Any, Any], Any]] = {
    "called twice": lambda call, result: call(),
    "printed": lambda call, result: print("here") or result,
    "a copied list": lambda call, result: (result[0], [*result[1]]),
    "rounded": lambda call, result: (result[0] + 1e-5, result[1]),
    "detached": lambda call, result: (
        result[0].detach().requires_grad_(result[0].requires_grad),
        result[1],
    ),
    "an exception": lambda call, result: call("too many"),
}
"""What is done with a call, and with the result that it gave."""


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_would_be_noticed(name: str) -> None:
    def mistaken(function: Any) -> Any:
        def call(*args: Any) -> Any:
            again = functools.partial(function, *args)
            return MISTAKES[name](again, again())

        return call

    assert compare(PLAIN, lambda function: function) == ""
    assert compare(PLAIN, mistaken) != ""


def test_rounding_does_not_add_up_over_calls() -> None:
    """It is allowed in a gradient, which trains the parameters that the next call reads."""
    waves = "torch.sin(net.linear.weight.detach() * 1e7)"
    program = str(Program(0, [line(f"return net(a.float()), {waves}")]))

    def rounded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            y, same = function(*args)
            return y * (1 + 1e-5), same

        return call

    assert compare(program, rounded, tolerance=1e-3) == ""


def test_failures_are_made_small() -> None:
    program = generate(3)
    deep = Statement([("if flag:", [line("COUNT += 7"), line("COUNT += 1")])])
    program.body[1:1] = [Statement([("for i in range(2):", [line("n += 1"), deep])])]
    small = shrink(program, lambda text: "COUNT += 7" in text, most=300).function
    assert [text.strip() for text in small.split("\n") if text.strip()] == [
        "def program(a, b, n, flag, items, table, box, net):",
        "global COUNT",
        "COUNT += 7",
    ]
