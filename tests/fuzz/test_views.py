"""Random programs of views and writes; and that the comparison notices a wrong compiler."""

from __future__ import annotations

import pytest

from minicompile.aot import joint, runtime
from tests.fuzz.views import REFUSED, run

LEFT_TO_EAGER = (
    "changes the shape of an input",
    "_` of a tensor is used",
    "several inputs share memory that is written to",
    "was made without grad mode",
    "the conjugate or the negative",
    "come from an input with a history",
    "is not computed from the gradient",
)
"""Reasons of which these programs have more than people's."""


@pytest.mark.long
@pytest.mark.parametrize("start", range(0, 60, 20))
def test_random_programs_equal_eager(start):
    outcomes = [run(seed) for seed in range(start, start + 20)]
    assert [outcome for outcome in outcomes if outcome.difference] == []


@pytest.mark.long
def test_few_programs_are_refused():
    refused = [o for o in map(run, range(200, 240)) if o.reasons and not o.excused]
    others = [o for o in refused if not any(text in o.reasons[0] for text in LEFT_TO_EAGER)]
    assert len(others) <= REFUSED * 40 + 1, others


@pytest.mark.parametrize("start", [0])
def test_random_programs_through_all_rooms(start):
    outcomes = [run(seed, "inductor") for seed in range(start, start + 20)]
    assert [outcome for outcome in outcomes if outcome.difference] == []


def no_copy(value, before):
    return value.clone().detach().zero_()


def no_history(value, before):
    return value.detach()


make_view = runtime.view_maker


def copied(spec, positions):
    view = make_view(spec, positions)
    return lambda base, results: view(base, results).clone()


FAULTS = {
    "new contents are not copied back": (joint, "new_contents", no_copy),
    "autograd does not see writes to inputs": (joint, "new_contents", no_history),
    "views are rebuilt as copies": (runtime, "view_maker", copied),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    assert any(run(seed).difference for seed in range(60))
