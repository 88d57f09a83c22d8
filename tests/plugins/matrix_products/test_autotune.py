"""`mode="max-autotune"` measures tiles of a product and the library's way, and remembers the fastest."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.ops.events import Compilation, Watch
from minicompile.options import Options
from minicompile.plugins.matrix_products.autotune import candidates, load_candidate, tuned
from minicompile.runtime.gpu_kernel import Tiles
from tests.plugins.matrix_products.test_specification import given, stages

X, W = given((64, 64), (64, 64))
(SOURCE,) = stages(torch.mm, X, W).kernels
TRIED = candidates(SOURCE)
BEST = TRIED[1]


class Fake:
    """Loads kernels that write down their tiles; of those that are not broken BEST is the fastest."""

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
            load_candidate(source, TRIED[0])(*arguments)

        launch.tiles = tiles  # type: ignore[attr-defined]
        return launch

    def measure(self, launch: Any, arguments: list[Any]) -> float:
        launch(*arguments)
        return {TRIED[0]: 0.5, BEST: 0.4}.get(launch.tiles, 0.75)


def tune(fake: Fake, options: Options, times: int = 1, *tell: Any) -> Fake:
    """Run the kernel with tiles that are measured at its first call."""
    run = tuned(SOURCE, options, fake.load, fake.measure, *tell)
    for _ in range(times):
        y, earlier = torch.zeros(64, 64), len(fake.ran)
        run(X, W, y)
        torch.testing.assert_close(y, X @ W)
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
    assert fake.ran[-1][0] == TRIED[0]


@pytest.mark.long
@pytest.mark.parametrize("text", ["", "[]", '{"x": 3}'])
def test_a_damaged_file_is_measured_anew(tmp_path, text) -> None:
    options = Options(cache_dir=str(tmp_path))
    tune(Fake(), options)
    (file,) = (tmp_path / "tiles").iterdir()
    file.write_text(text)
    assert len(tune(Fake(), options).loaded) == len(TRIED)


def test_what_is_gained_is_one_line_for_each_kernel(tmp_path) -> None:
    options, out = Options(cache_dir=str(tmp_path)), io.StringIO()
    with mc.logs("autotuning", file=out):
        for _ in range(2):
            tune(Fake(), options, 1, Watch(Compilation(3, 0, "fn", Options())).tell)
    first, again = out.getvalue().splitlines()
    line = f"[3/0] autotuning: {SOURCE.name}: "
    measured = (
        f"{len(TRIED)} candidates, 0.5000 ms with the library's product, 0.4000 ms (20% less) with "
    )
    assert first.startswith(line + measured) and f"YBLOCK={BEST.y}" in first
    assert again == line + first.removeprefix(line + measured) + ", as measured earlier"


def test_deterministic_sums_keep_their_tiles(tmp_path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert tune(Fake(), Options(cache_dir=str(tmp_path))).loaded == TRIED[:1]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_tuned_kernels_give_the_same(tmp_path) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x @ w).relu(), x.sum(0)

    x = torch.randint(-8, 8, (512, 512), device="cuda").half()  # sums are exact in any order
    out = io.StringIO()
    with mc.logs("autotuning", file=out):
        found = mc.compile(fn, mode="max-autotune", options={"cache_dir": str(tmp_path)})(x, x)
    torch.testing.assert_close(found, fn(x, x))
    assert len(out.getvalue().splitlines()) == 1
    assert list((tmp_path / "tiles").iterdir())
