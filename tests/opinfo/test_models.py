"""The measure of errors finds what errs more than is allowed, and only that."""

from __future__ import annotations

import functools

import pytest
import torch

from minicompile.lowering.context import lowering
from minicompile.lowering.rules.common import aten
from tests.opinfo import models
from tests.opinfo.cases import Case, cases, database
from tests.opinfo.compare import Way, beyond, check, medians, typically
from tests.opinfo.test_opinfo import scaled


def noisy(bad: float) -> list[list[float]]:
    """Ratios of 400 small tensors whose errors are as eager's, but `bad` times those in tensor 7."""
    torch.manual_seed(0)
    times = torch.ones(400, 1, dtype=torch.float64)
    times[7] = bad
    draws = []
    for _ in range(9):
        exact, eager, ours = torch.randn(3, 400, 8, dtype=torch.float64)
        pair = exact + 1e-4 * eager, exact + 1e-4 * times * ours
        draws.append([beyond(a.float(), b.float(), c, 1) for a, b, c in zip(*pair, exact)])
    return draws


@pytest.mark.long
def test_chance_is_in_one_draw_and_four_times_the_error_in_one_tensor_is_in_most() -> None:
    fine, worse = noisy(1), noisy(4)
    assert max(fine[0]) > 1.5 and max(medians(fine)) < 1
    assert max(medians(worse)) > 1.5 and medians(worse).index(max(medians(worse))) == 7


@pytest.mark.long
def test_a_model_with_an_inexact_operator_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["models", "--models", "gpt2_block", "--draws", "3"]
    monkeypatch.setattr("sys.argv", chosen)
    assert models.main() == 0
    with lowering.scoped():
        op = aten.rsqrt.default
        lowering(op)(functools.partial(scaled, lowering[op]))
        assert models.main() == 1
    fine, wrong = capsys.readouterr().out.splitlines()
    assert "eager by ours 0." in fine and "result" in wrong


@pytest.mark.long
def test_a_sample_beyond_is_drawn_again() -> None:
    """The same calls of other numbers: an inexact operator is beyond in them as well, eager isn't."""

    def draw(seed: int) -> list[Case]:
        return list(cases(database()["exp"], ("function",), ("float",), 1, 0, seed))

    again = [case for seed in (1, 2, 3) for case in draw(seed)]
    assert {case.name for case in again} == {case.name for case in draw(0)}
    assert not any(torch.equal(case.args[0], draw(0)[0].args[0]) for case in again)
    with lowering.scoped():
        op = aten.exp.default
        lowering(op)(functools.partial(scaled, lowering[op]))
        verdict = check(draw(0)[0], "minicompile", Way("inductor"))
        assert verdict.ratio > 1
        typically(verdict, again, Way("inductor"))
    assert verdict.typical[0] > 1 > verdict.typical[1]
