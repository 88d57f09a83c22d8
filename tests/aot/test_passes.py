"""Each graph pass: where it fires, where it must not, and its numbers against eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import minicompile as mc
from minicompile import compat
from minicompile.aot.passes.cleanup import fold_constants
from minicompile.errors import OptionError
from minicompile.passes.manager import graph_pass
from tests.aot.fired_passes import FIRST, checked, fired, leaf, rand, run

aten = torch.ops.aten


def targets(graph):
    return [n.target for n in graph.nodes if n.op == "call_function"]


# Cleaning


def test_no_ops():
    checked(
        "remove_no_ops",
        (lambda x: ((x * 1).exp() / 1 - 0).sin(), [leaf(3, 4)]),
        (lambda x: (x + 0, x * 2, x.clone()), [leaf(3, 4)]),
        FIRST,
    )


@pytest.mark.parametrize(
    "fn, x",
    [
        (lambda x: torch.signbit(x - -0.0), torch.tensor([-0.0, 0.0])),
        (lambda x: torch.signbit(x + 0.0), torch.tensor([-0.0, 0.0])),
        (lambda x: (x * 1).abs(), torch.tensor([complex(float("inf"), 0.0)])),
        (lambda x: torch.view_as_real(x / 1).sum(), torch.tensor([complex(float("inf"), 1.0)])),
        (lambda x: (x * 1).neg(), torch.tensor([float("nan"), -0.0])),
        (lambda x: (x / 1) * 2, torch.arange(3)),
        (lambda x: (x * True) * 2, torch.tensor([True, False])),
        (lambda x: torch._neg_view(torch.ones(2)) * x, torch.tensor([1.0, 2.0])),
    ],
)
def test_special_values_survive_the_cleaning(fn, x):
    run(fn, [x])


def test_folded_constants():
    checked(
        "fold_constants",
        (lambda x: x * (torch.full((3, 1), 2.0) * 3).exp() + torch.ones(3, 4), [leaf(3, 4)]),
        (lambda x: x * torch.arange(4.0), [leaf(3, 4)]),
    )
    run(lambda x: x * torch.full((x.shape[0], 1), 2.0), [leaf(3, 4)], FIRST)


def test_a_constant_is_made_on_the_device_that_it_goes_to():
    """As `x[:, :3] = -5.0` makes one: else each call would wait for a copy."""
    with compat.fake_mode() as mode:
        x = torch.empty(4, 3, device="cuda")
        graph = make_fx(lambda x: x + torch.full((), -5.0).to(x.device).expand(4, 3).clone())(x)
        for node in graph.graph.nodes:
            node.meta.setdefault("origins", frozenset())
    assert "_to_copy" in graph.code
    assert fold_constants(graph, mode)
    graph.recompile()
    assert "_to_copy" not in graph.code and "-5.0" in graph.code
    assert "device(type='cpu')" not in graph.code


def test_common_subexpressions():
    checked(
        "cse",
        (lambda x: x.sin() * 2 + x.sin() * 3, [leaf(3, 4)]),
        (lambda x: (x.sin(), x.cos()), [rand(3, 4)]),
        FIRST,
    )


@pytest.mark.parametrize(
    "fn",
    [
        torch.sin,
        lambda x: x.sort(0).values,
        lambda x: x.topk(2).indices,
        lambda x: torch.nn.functional.max_pool1d(x[None], 2),
        lambda x: torch.nn.functional.embedding_bag(torch.tensor([[0, 1]]), x),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_equal_results_have_memory_of_their_own(fn, grad):
    first, second = mc.compile(lambda x: (fn(x), fn(x)))(leaf(3, 4).requires_grad_(grad))
    before = second.clone()
    with torch.no_grad():
        first.add_(1)
    assert torch.equal(second, before)


def test_dead_code():
    with mc.scoped():

        @graph_pass("leave_a_node", stage="prims", order=80)
        def leave(gm, mode):
            (sin,) = [n for n in gm.graph.nodes if n.target is aten.sin.default]
            with gm.graph.inserting_after(sin):
                dead = gm.graph.call_function(aten.cos.default, (sin,))
            dead.meta.update(sin.meta)
            return 1

        result = run(lambda x: x.sin() * 2, [leaf(3, 4)], FIRST)
        assert "dead_code" in fired(result) and aten.cos.default not in targets(result.forward)
    assert "dead_code" not in fired(run(lambda x: x.sin() * 2, [leaf(3, 4)]))


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


# Patterns from outside

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


def test_passes_and_patterns_go_by_name():
    program = (lambda x: F.relu(F.relu(x)).sin() + F.relu(F.relu(x)).sin(), [rand(3)])
    with mc.scoped():
        register("relus", lambda x: F.relu(F.relu(x)), F.relu, [SQUARE])
        for names in (("cse", "pattern:relus"), ("prims.cse", "joint.pattern:relus")):
            assert not fired(run(*program, disable_passes=names))
        with mc.without("pass:prims.cse", "pass:joint.pattern:relus"):
            assert not fired(run(*program))
        assert fired(run(*program)) == {"cse", "pattern:relus"}
        compiled = mc.compile(program[0], options={"disable_passes": ("csee",)})
        with pytest.raises(OptionError, match=r"no pass 'csee'; known: .*cse"):
            compiled(rand(3))


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
        with pytest.raises(OptionError, match=rf"pattern 'bad' \(.*test_passes.py:\d+\): .*{why}"):
            mc.compile(lambda x: torch.sin(torch.cos(x)))(rand(3, 2))
