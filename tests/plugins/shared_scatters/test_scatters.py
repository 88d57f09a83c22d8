"""Which threads add what: each element sees its additions in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minicompile.codegen.cpp import print_kernel
from tests.codegen.fusing import Program
from tests.codegen.test_cpp_kernels import run, special

F32, I64 = torch.float32, torch.int64


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows, columns", [(2000, 24), (400, 50), (300, 1000), (3, 40000)])
@pytest.mark.parametrize("inner", [False, True])
def test_scatters_shared_by_threads_add_in_order(
    inner: bool, rows: int, columns: int, threads: int
) -> None:
    """Along rows each column, along columns each row has an owner: sums are the same to the last bit."""
    p = Program()
    p.input("target", (rows, columns))
    p.input("index", (rows, columns), I64)
    p.input("source", (rows, columns))
    at = columns if inner else rows

    def where(ops: Any, i: Any) -> Any:
        found = ops.indirect_indexing(ops.load("index", columns * i[0] + i[1]), at)
        return [i[0], found] if inner else [found, i[1]]

    p.scatter(
        "out", (rows, columns), (rows, columns), "target", where,
        lambda ops, i: ops.load("source", columns * i[0] + i[1]),
    )  # fmt: skip
    plan = p.plan()
    assert ("mc_share" in print_kernel(plan).text) == (not inner)
    assert "parallel for" in print_kernel(plan).text
    source, out = special(rows, columns), special(rows, columns) * 3
    index = torch.randint(min(at, 7), (rows, columns), generator=torch.Generator().manual_seed(1))
    expected = out.clone().scatter_add_(int(inner), index, source)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        run(plan, {"index": index, "source": source, "out": out})
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_scatter_whose_rows_can_meet_runs_on_one_thread() -> None:
    """`x[index[i] + i]`: no loop owns its elements."""
    p = Program()
    p.input("target", (50_000,))
    p.input("index", (30_000,), I64)

    def where(ops: Any, i: Any) -> Any:
        return [i[0] + ops.indirect_indexing(ops.load("index", i[0]), 20_000)]

    p.scatter("out", (50_000,), (30_000,), "target", where, lambda ops, i: ops.constant(1.0, F32))
    assert "parallel" not in print_kernel(p.plan()).text
