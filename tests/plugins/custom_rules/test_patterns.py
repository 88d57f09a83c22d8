"""Patterns from users: what they match, what they must not, and numbers like eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from minicompile.errors import OptionError
from tests.aot.fired_passes import fired, leaf, rand, run
from tests.aot.test_passes import targets

aten = torch.ops.aten


def traced(fn, inputs, dynamic=None, **options):
    """The trace of a compiled function, whose values and gradients are eager's."""
    compiled = mc.compile(fn, fullgraph=True, dynamic=dynamic, options=options)
    wanted = [x for x in inputs if x.requires_grad]
    outputs, expected = compiled(*inputs), fn(*inputs)
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=1e-4, equal_nan=True)
    if wanted:
        sums = [
            sum(o.sum() for o in (out if isinstance(out, tuple) else (out,)))
            for out in (outputs, expected)
        ]
        for got, want in zip(*(torch.autograd.grad(total, wanted) for total in sums)):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    return mc.trace(compiled, *inputs)


SQUARE = torch.empty(3, 2)


def angle(x, y):
    return torch.sin(x) * torch.cos(x) + y


def double_angle(x, y):
    return y + torch.sin(x * 2) * 0.5


def register(name, search, replace, examples=(SQUARE, SQUARE), **given):
    mc.register_pattern(name, search=search, examples=examples, **given)(replace)


@pytest.mark.long
@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
@pytest.mark.parametrize("make", [rand, leaf])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_pattern_in_each_stage(stage, make, dynamic):
    """In training the backward reads sines and cosines: only an early pattern has them for itself."""
    with mc.scoped():
        register("angle", angle, double_angle, stage=stage)
        trace = traced(lambda x, y: angle(x, y * 2).exp(), [make(4, 5), make(4, 5)], dynamic)
    fires = f"{stage}.pattern:angle" in {r.name for r in trace.aot.passes if r.changed}
    assert fires or (make is leaf and stage == "joint")
    assert ("0.5" in str(trace.aot.forward)) == fires


def test_several_results_are_matched_together():
    def both(x, factor):
        return torch.tanh(x) * factor, torch.erf(x)

    with mc.scoped():
        register(
            "both", both, lambda x, f: (f * torch.tanh(x), -torch.erf(-x)), [torch.empty(2), 0.5]
        )
        fires = run(lambda x: torch.erf(x) + torch.tanh(x) * 3, [rand(4)])
        assert "pattern:both" in fired(fires) and aten.neg.default in targets(fires.forward)
        for fn in (
            lambda x: torch.erf(x.sin()) + torch.tanh(x) * 3,
            lambda x: torch.erf(torch.tanh(x) * 3),
            lambda x: torch.tanh(x) * 3,
        ):
            assert "pattern:both" not in fired(run(fn, [rand(4)]))


def test_numbers_are_the_patterns_own_unless_they_are_among_the_examples():
    def power(x, factor):
        return (x.abs() ** 2.0).sin() * factor

    with mc.scoped():
        register("power", power, lambda x, factor: (x * x).sin() * factor, [torch.empty(2), 2.0])
        assert "pattern:power" in fired(run(lambda x: 3 * (x.abs() ** 2.0).sin(), [rand(4)]))
        assert "pattern:power" not in fired(run(lambda x: 3.0 * (x.abs() ** 3.0).sin(), [rand(4)]))


@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
def test_a_number_that_occurs_twice_is_the_same_one(stage):
    def twice(x, number):
        return x * number + number

    ints, negative = torch.arange(4), -torch.rand(4)
    with mc.scoped():
        register("twice", twice, lambda x, n: (x + 1) * n, [torch.empty(2), 0.5], stage=stage)
        assert "pattern:twice" in fired(traced(lambda x: x * 3 + 3, [ints]).aot)
        for fn, x in (
            (lambda x: x * 3 + 3.0, ints),
            (lambda x: x * True + 1, ints > 2),
            (lambda x: x * 0.0 + -0.0, negative),
        ):
            assert "pattern:twice" not in fired(traced(fn, [x]).aot)
            got, want = mc.compile(fn)(x), fn(x)
            assert torch.equal(torch.signbit(got), torch.signbit(want))


def test_a_result_never_takes_the_memory_of_an_argument():
    def fn(x):
        y = x.neg().neg()
        z = y.exp().neg().neg()
        y.add_(1)
        return y, z, x.neg().neg()

    for stage in ("pre_grad", "joint"):
        with mc.scoped():
            register("negated", lambda x: x.neg().neg(), lambda x: x, [SQUARE], stage=stage)
            x = rand(3, 2)
            before = x.clone()
            results = mc.compile(fn)(x)
            for got, want in zip(results, fn(before)):
                torch.testing.assert_close(got, want)
            assert torch.equal(x, before) and len({r.data_ptr() for r in (x, *results)}) == 4


def test_a_value_that_is_read_in_between_is_no_obstacle():
    def between(x):
        x = x.clone()
        y = torch.sin(x)
        z = x.mul(2)
        return y * 3 + z

    with mc.scoped():
        register(
            "wave", lambda x: torch.sin(x) * 3, lambda x: 3 * torch.sin(x), [SQUARE],
            stage="pre_grad",
        )  # fmt: skip
        assert "pattern:wave" in fired(traced(between, [rand(4)]).aot)


def writes_through_a_view(x, w, i):
    y = torch.sin(x)
    v = x[0]
    v.add_(1)
    return y * 3


def writes_by_a_flag(x, w, i):
    y = torch.sin(x)
    F.relu(x, True)
    return y * 3


def renormalises(x, w, i):
    y = torch.sin(w)
    rows = F.embedding(i, w, max_norm=0.5)
    return y * 3 + rows.sum()


def writes_inside(x, w, i):
    y = torch.sin(x)
    y.mul_(2)
    return y * 3


def leaves_a_mode(x, w, i):
    with torch.no_grad():
        y = torch.sin(x)
    return y * 3


@pytest.mark.long
@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
@pytest.mark.parametrize(
    "fn",
    [
        writes_through_a_view,
        writes_by_a_flag,
        renormalises,
        writes_inside,
        leaves_a_mode,
    ],
)
def test_whatever_is_written_on_the_way_results_and_inputs_are_eagers(fn, stage):
    given = [rand(3, 3), rand(3, 3), torch.tensor([0, 1])]
    copies = [value.clone() for value in given]
    with mc.scoped():
        register(
            "wave", lambda x: torch.sin(x) * 3, lambda x: 3 * torch.sin(x), [SQUARE], stage=stage
        )
        torch.testing.assert_close(mc.compile(fn)(*given), fn(*copies))
        torch.testing.assert_close(given, copies)
        assert stage != "pre_grad" or not fired(mc.trace(fn, *given).aot) & {"pattern:wave"}


def writes(x):
    return x.add_(1) * 2


def fails(x):
    raise ValueError("no")


def ignores(x, y):
    return torch.sin(torch.cos(x))


def wave(x):
    return torch.sin(torch.cos(x))


@pytest.mark.parametrize(
    "search, replace, examples, why",
    [
        (lambda x: x, wave, [SQUARE], "returns an argument"),
        (writes, wave, [SQUARE], "writes into a tensor"),
        (fails, wave, [SQUARE], "can't be traced: ValueError: no"),
        (ignores, ignores, [SQUARE, SQUARE], "doesn't use"),
        (wave, lambda x: x.sum(0), [SQUARE], r"gives shape \[2\], not \[3, 2\]"),
        (wave, lambda x: (x, x), [SQUARE], "2 results replace 1"),
    ],
)
@pytest.mark.parametrize("stage", ["joint", "post_grad", "pre_grad"])
def test_a_bad_pattern_is_an_error_that_names_it_and_its_line(
    search, replace, examples, why, stage
):
    with mc.scoped():
        register("bad", search, replace, examples, stage=stage)
        with pytest.raises(
            OptionError, match=rf"pattern 'bad' \(.*test_patterns.py:\d+\): .*{why}"
        ):
            mc.compile(lambda x: torch.sin(torch.cos(x)))(rand(3, 2))
