"""`mode="max-autotune"` measures tiles around the planned ones and remembers the fastest."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.ops.events import Compilation, Watch
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


def test_the_fastest_is_taken_and_found_again_on_disk(tmp_path) -> None:
    source, options = source_of(added()), Options(cache_dir=str(tmp_path))
    tried = candidates(source)
    best = max(tried, key=lambda t: t.x + t.num_warps)
    x, fake = torch.randn(4096), Fake()
    run = tuned(source, options, fake.load, fake.measure)
    for _ in range(2):
        y = torch.zeros(4096)
        run(x, y)
        assert torch.equal(y, x * x)
    assert set(fake.loaded) == set(tried)
    assert [tiles for tiles, _ in fake.ran[-2:]] == [best, best]
    again = Fake()
    tuned(source, options, again.load, again.measure)(x, torch.zeros(4096))
    assert again.loaded == [best]
    without, other = dataclasses.replace(options, disk_cache=False), Fake()
    tuned(source, without, other.load, other.measure)(x, torch.zeros(4096))
    assert len(other.loaded) == len(tried)


def test_measuring_leaves_the_results_memory_alone(tmp_path) -> None:
    source, fake = source_of(added()), Fake()
    x, y = torch.randn(4096), torch.zeros(4096)
    tuned(source, Options(cache_dir=str(tmp_path)), fake.load, fake.measure)(x, y)
    assert [place == y.data_ptr() for _, place in fake.ran] == [False] * (len(fake.ran) - 1) + [
        True
    ]


def test_what_does_not_compile_is_not_taken(tmp_path) -> None:
    source = source_of(added())
    best = max(candidates(source), key=lambda t: t.x + t.num_warps)
    fake = Fake(best)
    tuned(source, Options(cache_dir=str(tmp_path)), fake.load, fake.measure)(
        torch.randn(4096), torch.zeros(4096)
    )
    assert best not in {tiles for tiles, _ in fake.ran}


@pytest.mark.long
@pytest.mark.parametrize("text", ["", "[]", '{"x": 3}', '{"x": 1048576, "num_warps": 1}'])
def test_a_damaged_file_is_measured_anew(tmp_path, text) -> None:
    source, options, fake = source_of(added()), Options(cache_dir=str(tmp_path)), Fake()
    tuned(source, options, fake.load, fake.measure)(torch.randn(4096), torch.zeros(4096))
    (file,) = (tmp_path / "tiles").iterdir()
    file.write_text(text)
    again = Fake()
    tuned(source, options, again.load, again.measure)(torch.randn(4096), torch.zeros(4096))
    assert len(again.loaded) == len(candidates(source))


def told(channel: str, run: Any) -> list[str]:
    """The lines of a log channel while `run` gets a compilation's options and what tells of it."""
    out = io.StringIO()
    with mc.logs(channel, file=out):
        run(Watch(Compilation(3, 0, "fn", Options())).tell)
    return out.getvalue().splitlines()


def test_what_is_gained_is_one_line_for_each_kernel(tmp_path) -> None:
    source, fake, options = source_of(added()), Fake(), Options(cache_dir=str(tmp_path))
    tried = candidates(source)
    fake.broken = (tried[1],)

    def measure(launch: Any, arguments: list[Any]) -> float:
        return {tried[0]: 0.5, tried[-1]: 0.4}.get(launch.tiles, 0.75)

    def run(tell: Any) -> None:
        launch = tuned(source, options, fake.load, measure, tell)
        for _ in range(3):
            launch(torch.randn(4096), torch.zeros(4096))

    best = f"XBLOCK={tried[-1].x}, {tried[-1].num_warps} warps"
    line = f"[3/0] autotuning: {source.name}: "
    gained = f"{len(tried)} candidates, 0.5000 ms as planned, 0.4000 ms (20% less) with {best}"
    assert told("autotuning", run) == [line + gained]
    assert told("autotuning", run) == [line + f"{best}, as measured earlier"]
    options = dataclasses.replace(options, disk_cache=False)
    first, *others = told("+autotuning", run)
    assert first == line + gained
    assert len(others) == len(tried) and sum(" inf ms: " in other for other in others) == 1
    assert told("perf", run) == []


@pytest.mark.long
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_sums_keep_their_tiles(tmp_path, deterministic) -> None:
    options, loaded = Options(cache_dir=str(tmp_path)), []
    rows = source_of(softmax(64, 256), ("amax", "total"))
    torch.use_deterministic_algorithms(deterministic)
    try:
        for source, x in ((rows, torch.randn(64, 256)), (source_of(added()), torch.randn(4096))):
            fake = Fake()
            tuned(source, options, fake.load, fake.measure)(x, torch.empty_like(x))
            loaded.append(set(fake.loaded) == set(candidates(source)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert loaded == [not deterministic, True]


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
