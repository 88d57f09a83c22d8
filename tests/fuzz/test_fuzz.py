"""A few random programs; and that the comparison would notice, and the shrinker shrink."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.ops.events import observer
from tests.fuzz.__main__ import as_test
from tests.fuzz.compare import (
    Given,
    arguments,
    compare,
    difference,
    differentiate,
    module_of,
    refused_steps,
    run,
    said,
    undecided,
)
from tests.fuzz.counting import Counting
from tests.fuzz.forms import FORMS, HALF, WRITES, blanks
from tests.fuzz.generator import PARAMETERS, PRELUDE, Program, Statement, generate, line, widened
from tests.fuzz.shrink import compiles, shrink

PLAIN = str(Program(0, [line("items.append(a + 1)"), line("return a * 2, items")]))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_a_random_program_behaves_as_in_python(seed: int) -> None:
    assert difference(str(generate(seed, size=5))) == ""


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_a_random_program_after_aot(seed: int) -> None:
    assert difference(str(generate(seed, size=4)), "aot_eager") == ""


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_a_random_program_in_interpreted_triton(seed: int) -> None:
    pytest.importorskip("triton")
    assert difference(str(generate(seed, size=3)), "triton") == ""


@pytest.mark.long
def test_it_is_counted_how_programs_ran() -> None:
    programs = {
        "compiled": "return a + 1",
        "in eager": "return (a.to_sparse() * 2).to_dense()",
        "nothing to compile": "return a",
    }
    for expected, text in programs.items():
        counting = Counting()
        with mc.scoped():
            observer("fuzz")(counting.listen)
            assert difference(str(Program(0, [line(text)])), "aot_eager") == ""
        counting.program()
        assert counting.how == {expected: 1}, counting


@pytest.mark.long
@pytest.mark.parametrize("wide", [False, True])
def test_a_failure_becomes_a_test_that_fails(wide: bool) -> None:
    program = Program(7, [line("return a * 2, items[:4]")], wide)
    text = as_test(program, "first call: expected 1, found 2", "eager")
    namespace: dict[str, Any] = {}
    exec(compile(text, "test_seed_7_eager.py", "exec"), namespace)
    namespace["test_seed_7_behaves_as_in_python"]()
    namespace["difference"] = lambda *_: "first call: other values"
    with pytest.raises(AssertionError):
        namespace["test_seed_7_behaves_as_in_python"]()


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


def test_exceptions_are_compared_by_their_words_but_where_eager_has_several() -> None:
    scalar = "index -1 is out of bounds for dimension 0 with size 0"
    assert said(scalar) == said("select() cannot be applied to a 0-dim tensor.")
    for words in ("index out of range in self", "select(): index 3 out of range for dimension 0"):
        assert said(words) == words


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


def twice(function: Any, *args: Any) -> Any:
    function(*args)
    return function(*args)


def talkative(function: Any, *args: Any) -> Any:
    print("here")
    return function(*args)


def copied(function: Any, *args: Any) -> Any:
    value, items = function(*args)
    return value, [*items]


def rounded(function: Any, *args: Any) -> Any:
    value, items = function(*args)
    return value + 1e-5, items


def detached(function: Any, *args: Any) -> Any:
    value, items = function(*args)
    return value.detach().requires_grad_(value.requires_grad), items


def swallowing(function: Any, *args: Any) -> Any:
    raise ValueError


@pytest.mark.long
@pytest.mark.parametrize("mistake", [twice, talkative, copied, rounded, detached, swallowing])
def test_a_mistake_would_be_noticed(mistake: Callable[..., Any]) -> None:
    assert compare(PLAIN, lambda function: function) == ""
    assert compare(PLAIN, lambda function: functools.partial(mistake, function)) != ""


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
