"""Threads share chunks of few long rows."""

from __future__ import annotations

import pytest
import torch

from tests.codegen.kernels import REFERENCE, one_reduction, special
from tests.codegen.test_cpp_kernels import F32, I64, run


@pytest.mark.parametrize("kind", ["sum", "max", "argmin", "argmax"])
def test_few_long_rows_are_split_into_chunks(kind: str) -> None:
    result = I64 if kind.startswith("arg") else F32
    plan = one_reduction(kind, 2, 100_003, F32, result, False).plan()
    assert plan.tiles["r"] > 0 and plan.parallel
    x = special(2, 100_003)
    x[1, 70_000] = float("nan") if kind in ("max", "argmax") else -99.0
    x[1, 70_100] = x[1, 70_000]
    out = torch.empty(2, dtype=result)
    run(plan, {"x": x, "out": out})
    torch.testing.assert_close(out, REFERENCE[kind](x), equal_nan=True)


def test_split_sum_does_not_depend_on_the_number_of_threads() -> None:
    plan = one_reduction("sum", 1, 300_000, F32, F32, False).plan()
    x, found = special(1, 300_000), []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = torch.empty(1)
        run(plan, {"x": x, "out": out})
        found.append(out.item())
    torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]
