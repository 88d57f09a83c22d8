"""Rows that are swept in a loop: where tiles begin, and what stays in the cache."""

from __future__ import annotations

import re

import pytest
import torch

from minicompile.debug.gpu_assembly import cross_compile
from minicompile.plugins.long_rows.choose import LONG_ROWS, granule
from minicompile.runtime.gpu_kernel import Tiles
from tests.codegen.fusing import softmax
from tests.codegen.test_long_rows import looped as looped  # every row is swept, however short
from tests.codegen.test_long_rows import special_rows
from tests.codegen.triton_running import devices, run, source_of

F32, BF16 = torch.float32, torch.bfloat16
INTERNAL = ("amax", "total")


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
