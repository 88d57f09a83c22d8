"""`mc.what_if(fn, *args).run(...)`: variants that are really compiled, with answers that are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.codegen.plan import KernelPlan
from minicompile.debug import variant
from minicompile.debug.experiment import Outcome
from minicompile.errors import OptionError
from minicompile.extension import plan_rule
from minicompile.ops.display import to_html
from minicompile.options import Options


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of each side are enough to see that they are timed."""
    monkeypatch.setattr(variant, "FEWEST_CALLS", 2)
    monkeypatch.setattr(variant, "SECONDS", 0.0)


def scores(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x) * 2, -1).sum(0)


def through_a_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.relu(x)
    return y @ w + y


SEEDED = torch.Generator().manual_seed(0)
X, W = torch.randn(64, 128, generator=SEEDED), torch.randn(128, 128, generator=SEEDED)


def kernels(outcome: Outcome, graph: str = "forward") -> tuple[int, int]:
    return tuple(len(side.graphs[graph].kernels) for side in (outcome.before, outcome.after))  # type: ignore[return-value]


def good(outcome: Outcome) -> bool:
    """Both sides ran compiled, with eager's answer but for rounding."""
    bad = ("wrong", "raised", "far from eager", "not compiled")
    return all(side.accuracy.verdict not in bad for side in (outcome.before, outcome.after))


def test_a_pair_kept_apart_is_two_kernels_that_run_and_cost_what_the_schedule_foretold() -> None:
    wished: dict[str, Any] = {"forbid": [("buf0", "buf1")]}
    outcome = mc.what_if(scores, X).run(**wished)
    assert kernels(outcome) == (2, 3) and good(outcome) and not outcome.refused
    foretold = mc.trace(scores, X).schedule.what_if(**wished)
    costs, code = outcome.graphs["forward"]
    assert costs.rows == foretold.rows
    assert [str(k) for k in costs.kernels[1]] == [str(k) for k in foretold.kernels[1]]
    assert [str(d) for d in costs.decisions[1]] == [str(d) for d in foretold.decisions[1]]
    assert [len(side) for side in code] == [1, 2]
    assert [len(seconds) for seconds in outcome.times] == [2, 2]
    assert all(second > 0 for seconds in outcome.times for second in seconds)


def test_what_would_be_wrong_is_refused_with_the_reason_of_the_schedule() -> None:
    wished: dict[str, Any] = {"fuse": [("buf0", "buf2")], "inline": "never"}
    outcome = mc.what_if(through_a_product, X, W).run(**wished)
    traced = mc.trace(mc.compile(through_a_product, options={"inline": "never"}), X, W)
    (refused,) = traced.schedule.what_if(fuse=wished["fuse"]).refused
    assert "cycle: buf1" in refused.headline
    assert outcome.refused == [refused.headline] and good(outcome)
    assert refused.headline in str(outcome) and "cycle: buf1" in to_html(outcome)


@pytest.mark.long
def test_what_the_policy_would_not_fuse_is_fused_on_demand() -> None:
    tight = mc.compile(scores, options={"max_kernel_operations": 1})
    found = mc.what_if(tight, X)
    assert kernels(found.run()) == (4, 4)
    outcome = found.run(fuse=[("buf0", "buf1")])
    assert kernels(outcome) == (4, 3) and good(outcome) and not outcome.refused


def test_wishes_are_about_one_graph() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.relu(x), -1).square().mean()

    x = X.clone().requires_grad_()
    found = mc.what_if(loss, x)
    plain = found.run()
    decision = next(d for d in plain.before.graphs["backward"].schedule.decisions if d.fused)
    pair = (decision.producers[0].name, decision.consumers[0].name)
    outcome = found.run(forbid=[pair], graph="backward")
    assert kernels(outcome, "forward") == kernels(plain, "forward") and good(outcome)
    apart = outcome.after.graphs["backward"].schedule
    assert apart.why(*pair).decision.cause == "wish"
    assert all(d.cause != "wish" for d in outcome.after.graphs["forward"].schedule.decisions)
    assert x.grad is None


def test_wishes_are_about_the_first_of_several_captures(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x, -1)
        print("between")
        return torch.softmax(y, -1)

    outcome = mc.what_if(broken, X).run(forbid=[("buf0", "buf1")])
    first, second = outcome.after.traces
    assert len(first.kernels) == len(second.kernels) + 1 and good(outcome)
    assert "2 graphs; print is called" in str(outcome)
    ways = 2 + 2  # in float64 and eager; compiled unchanged and with the wish
    assert capsys.readouterr().out == "between\n" * ways, "timed calls print nothing"


def test_backends_and_sizes_can_be_chosen() -> None:
    found = mc.what_if(scores, X)
    for backend, stages in (("eager", ["capture"]), ("aot_eager", ["capture", "aot"])):
        outcome = found.run(backend=backend)
        (traced,) = outcome.after.traces
        assert list(traced.stages) == stages and good(outcome) and not outcome.graphs
        assert f"backend = '{backend}'" in str(outcome)
        with pytest.raises(OptionError, match=f"backend '{backend}' there is no forward graph"):
            found.run(backend=backend, forbid=[("buf0", "buf1")])
    outcome = found.run(dynamic=True, inline="never")
    assert outcome.after.graphs["forward"].loops.size_hints and good(outcome)
    assert not outcome.before.graphs["forward"].loops.size_hints
    assert "dynamic = True, inline = 'never'" in outcome.title


def test_it_starts_from_the_options_of_a_compiled_function() -> None:
    outcome = mc.what_if(mc.compile(scores, options={"fusion": False}), X).run(fusion=True)
    assert kernels(outcome) == (4, 2) and "fusion = True" in outcome.title


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"forbid": [("buf0", "nowhere")]}, ValueError, "nowhere is not known; known: buf0"),
        ({"forbid": ("buf0", "buf1")}, OptionError, "fuse and forbid take pairs of names"),
        ({"nothing": 1}, OptionError, "no option 'nothing'"),
        ({"backend": "mine"}, OptionError, "no backend 'mine'"),
        ({"forbid": [("buf0", "buf1")], "graph": "backward"}, OptionError, "no backward graph"),
    ],
    ids=str,
)
def test_what_does_not_exist_is_refused(
    changes: dict[str, Any], error: type[Exception], told: str
) -> None:
    found = mc.what_if(scores, X)
    try:
        outcome = found.run(**changes)
    except error as raised:
        assert told in str(raised)
    else:
        assert outcome.after.accuracy.verdict == "raised" and told in outcome.rows[0][2]
        assert outcome.rows[1][2] == "none" and not outcome.times[1] and outcome.times[0]


def test_a_wrong_answer_is_called_wrong() -> None:
    with mc.scoped():

        @plan_rule("any:planted")
        def all_to_one_element(plan: KernelPlan, options: Options) -> None:
            if options.inline == "never":
                (store,) = (v for v in plan.body.values if v.op == "store")
                store.index = store.index * 0

        outcome = mc.what_if(lambda x: torch.softmax(x, 0), torch.randn(70, 301)).run(
            inline="never"
        )
    assert outcome.before.accuracy.verdict != "wrong" and outcome.after.accuracy.verdict == "wrong"
    assert "wrong" in outcome.rows[0][2]
