"""Rows that are swept in a loop: where tiles begin, and what stays in the cache."""

from __future__ import annotations

import math
import re

import pytest
import torch

from minicompile.codegen.phases import riders
from minicompile.codegen.plan import KernelPlan, plan_rule
from minicompile.debug.gpu_assembly import cross_compile
from minicompile.ops.registry import scoped
from minicompile.options import Options
from minicompile.plugins.long_rows.choose import LONG_ROWS, granule
from minicompile.runtime.gpu_kernel import Tiles
from minicompile.shapes.expr import size_symbol
from tests.codegen.fusing import softmax
from tests.codegen.test_long_rows import best, special_rows
from tests.codegen.triton_running import call, devices, run, source_of

F32, BF16 = torch.float32, torch.bfloat16
INTERNAL = ("amax", "total")
S0, S1 = size_symbol("s0"), size_symbol("s1")


@pytest.fixture(autouse=True)
def looped():
    """Every row is swept in a loop, however short."""
    with scoped():

        @plan_rule("triton:reduction")
        def looped(plan: KernelPlan, options: Options) -> None:
            if plan.reduction_ranges:
                plan.reduction = "looped"
                plan.riders = riders(plan.body, plan.loop, "max")

        @plan_rule("triton:split")
        def whole(plan: KernelPlan, options: Options) -> None:
            """One program takes a row."""

        yield


# Tiles that begin where loads are wide -------------------------------------------------------------


@pytest.mark.long
@devices
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("n", [97, 331, 130, 67])
@pytest.mark.parametrize(
    "tiles", [Tiles(1, 32), Tiles(4, 64), Tiles(1, 256), Tiles(2, 16)], ids=str
)
def test_rows_may_begin_anywhere(n, dtype, tiles, device):
    source = source_of(softmax(8, n, dtype), INTERNAL)
    assert source.plan.reduction == LONG_ROWS and granule(source.plan) == 16 // dtype.itemsize
    x = special_rows(n).to(dtype)
    found = run(softmax(8, n, dtype), {"x": x}, INTERNAL, device, tiles)["softmax"].cpu()
    torch.testing.assert_close(found, x.softmax(1), equal_nan=True)


def test_their_loads_and_stores_are_wide():
    ptx = cross_compile(source_of(softmax(1024, 50257, BF16), INTERNAL)).levels["ptx"]
    assert set(re.findall(r"ld\.global\S*?(v\d|[bu]16)", ptx)) == {"v4"}
    assert re.search(r"st\.global\S*\.v4", ptx)


@pytest.mark.parametrize(
    ("rows", "n", "why"),
    [
        (3, 97, "the last load would go beyond the tensor's end"),
        (8, 96, "every row begins where a wide load does"),
    ],
)
def test_tiles_begin_with_their_rows_where(rows, n, why):
    assert granule(source_of(softmax(rows, n), INTERNAL).plan) == 1, why


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("n", [97, 101])
def test_the_first_of_several_best_elements_is_found_where_rows_begin_anywhere(kind, n):
    p = best(kind, n)
    assert source_of(p).plan.reduction == LONG_ROWS
    x = special_rows(n)
    x[5, n // 3 :: 7] = -1e30 if kind == "min" else 2e30
    x[0] = -math.inf if kind == "max" else math.inf
    for tiles in (Tiles(1, 16), Tiles(4, 32), Tiles(2, 128)):
        found = run(p, {"x": x}, tiles=tiles)
        assert torch.equal(found[f"arg{kind}"], getattr(x, kind)(1).indices)


def test_rows_of_varying_length_begin_with_their_tiles():
    source = source_of(softmax(S0, S1, BF16, hints={S0: 16, S1: 97}), INTERNAL)
    assert granule(source.plan) == 1
    for rows, n in ((16, 97), (3, 130), (8, 1)):
        x = special_rows(max(n, 36))[:rows, :n].to(BF16).contiguous()
        found = torch.full_like(x, 77)
        call(source, {"x": x, "softmax": found}, {"s0": x.shape[0], "s1": n}, Tiles(2, 16))
        torch.testing.assert_close(found, x.softmax(1), equal_nan=True)


# The cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "n", "warps", "tile"),
    [(BF16, 65536, 16, 8192), (F32, 65536, 32, 16384), (F32, 2**20, None, None)],
    ids=str,
)
def test_as_many_rows_are_in_work_as_the_cache_holds(dtype, n, warps, tile):
    source = source_of(softmax(1024, n, dtype), INTERNAL)
    assert source.plan.reduction == (LONG_ROWS if warps else "looped")
    policies = re.findall(r"evict_(\w+)", source.text)
    assert policies == (["last", "first", "first"] if warps else [])
    if warps:
        assert (source.plan.num_warps, source.plan.tiles["r"]) == (warps, tile)
