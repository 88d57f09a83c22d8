"""Merging the bodies of a fused node: what is handed over, shared and dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minicompile.codegen.merge import merge
from minicompile.debug.verify import verify_body
from minicompile.errors import VerifyError
from minicompile.scheduling.body import loop_level
from tests.codegen.fusing import Program

F32, I64 = torch.float32, torch.int64


def merged(p: Program, internal: tuple[str, ...] = ()) -> Any:
    body, every = merge(p.fused(), internal, p.dtypes)
    verify_body(body)
    return body, every


def test_loading_another_element_than_the_stored_one_is_an_error() -> None:
    p = Program()
    p.input("x", (8,))
    p.pointwise("a", (8,), lambda ops, i: ops.load("x", i[0]))
    p.pointwise("b", (8,), lambda ops, i: ops.load("a", 7 - i[0]))
    with pytest.raises(VerifyError, match="can't share a kernel"):
        merge(p.fused(), (), p.dtypes)


def test_a_scatter_that_runs_for_every_element_stays_at_loop_level() -> None:
    """Its index has no reduction variable, but each (x, r) must add once."""
    p = Program()
    p.input("x", (4, 6))
    p.input("counts", (4,))
    p.reduce("total", (4,), (6,), "sum", lambda ops, i, r: ops.load("x", 6 * i[0] + r[0]))
    p.scatter(
        "counted", (4,), (4, 6), "counts", lambda ops, i: [i[0]], lambda ops, i: ops.constant(1.0, F32)
    )  # fmt: skip
    body, every = merged(p)
    (scatter,) = [v for v in body.stores if v.kind == "atomic_add"]
    assert scatter in every and scatter in loop_level(body, every)
    assert scatter not in loop_level(body)
