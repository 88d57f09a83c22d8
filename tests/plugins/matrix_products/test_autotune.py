"""`mode="max-autotune"` measures tiles around the planned ones and remembers the fastest."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.options import Options
from minicompile.plugins.matrix_products.autotune import candidates, tuned
from minicompile.runtime.gpu_kernel import Tiles, planned_tiles
from minicompile.runtime.triton import load_kernel
from tests.codegen.fusing import Program, softmax
from tests.codegen.triton_running import source_of


def added(n: int = 4096) -> Program:
    p = Program()
    p.input("x", (n,))
    p.pointwise("y", (n,), lambda o, i: o.mul(o.load("x", i[0]), o.load("x", i[0])))
    return p


def test_candidates_lie_around_the_plan_and_keep_whole_rows() -> None:
    source = source_of(softmax(4096, 1024), ("amax", "total"))
    found = candidates(source)
    assert found[0] == planned_tiles(source.plan)
    assert len(found) == len(set(found)) > 4
    assert {tiles.r for tiles in found} == {1024}


class Fake:
    """Loads kernels that write down their tiles; `times` says how long they take."""

    def __init__(self, *broken: Tiles) -> None:
        self.loaded: list[Tiles] = []
        self.ran: list[tuple[Tiles, int]] = []
        self.broken = broken

    def load(self, source: Any, tiles: Tiles) -> Any:
        if tiles in self.broken:
            raise RuntimeError("out of resources")
        self.loaded.append(tiles)

        def launch(*arguments: torch.Tensor) -> None:
            self.ran.append((tiles, arguments[-1].data_ptr()))
            load_kernel(source, tiles)(*arguments)

        launch.tiles = tiles  # type: ignore[attr-defined]
        return launch

    def measure(self, launch: Any, arguments: list[Any]) -> float:
        launch(*arguments)
        return -launch.tiles.x - launch.tiles.num_warps


X = torch.randn(4096)
SOURCE = source_of(added())
TRIED = candidates(SOURCE)
BEST = max(TRIED, key=lambda t: t.x + t.num_warps)


def tune(fake: Fake, options: Options, times: int = 1) -> Fake:
    """Run the kernel with tiles that are measured at its first call."""
    run = tuned(SOURCE, options, fake.load, fake.measure)
    for _ in range(times):
        y, earlier = torch.zeros(4096), len(fake.ran)
        run(X, y)
        assert torch.equal(y, X * X)
        assert [place for _, place in fake.ran[earlier:]].count(y.data_ptr()) == 1
    return fake


def test_the_fastest_is_taken_and_found_again_on_disk(tmp_path) -> None:
    """Measuring leaves the result's memory alone: only the last launch writes there."""
    options = Options(cache_dir=str(tmp_path))
    fake = tune(Fake(), options, 2)
    assert set(fake.loaded) == set(TRIED)
    assert [tiles for tiles, _ in fake.ran[-2:]] == [BEST, BEST]
    assert tune(Fake(), options).loaded == [BEST]
    without = dataclasses.replace(options, disk_cache=False)
    assert len(tune(Fake(), without).loaded) == len(TRIED)


def test_what_does_not_compile_is_not_taken(tmp_path) -> None:
    fake = tune(Fake(BEST), Options(cache_dir=str(tmp_path)))
    assert BEST not in {tiles for tiles, _ in fake.ran}


@pytest.mark.long
@pytest.mark.parametrize("text", ["", "[]", '{"x": 3}', '{"x": 1048576, "num_warps": 1}'])
def test_a_damaged_file_is_measured_anew(tmp_path, text) -> None:
    options = Options(cache_dir=str(tmp_path))
    tune(Fake(), options)
    (file,) = (tmp_path / "tiles").iterdir()
    file.write_text(text)
    assert len(tune(Fake(), options).loaded) == len(TRIED)


@pytest.mark.long
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_sums_keep_their_tiles(tmp_path, deterministic) -> None:
    rows, fake = source_of(softmax(64, 256), ("amax", "total")), Fake()
    x, options = torch.randn(64, 256), Options(cache_dir=str(tmp_path))
    torch.use_deterministic_algorithms(deterministic)
    try:
        tuned(rows, options, fake.load, fake.measure)(x, torch.empty_like(x))
        assert set(tune(Fake(), options).loaded) == set(TRIED)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (set(fake.loaded) == set(candidates(rows))) == (not deterministic)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_tuned_kernels_give_the_same(tmp_path) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.softmax(-1), x.sum(0), x.t() + 1

    x = torch.randint(-8, 8, (4096, 512), device="cuda").float()  # sums are exact in any order
    out = io.StringIO()
    with mc.logs("autotuning", file=out):
        found = mc.compile(fn, mode="max-autotune", options={"cache_dir": str(tmp_path)})(x)
    torch.testing.assert_close(found, fn(x))
    assert all(" candidates, " in line for line in out.getvalue().splitlines()) and out.getvalue()
    assert list((tmp_path / "tiles").iterdir())
