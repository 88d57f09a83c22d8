"""`mode="max-autotune"`: of the tiles around the planned ones, those that run fastest on the device.

A kernel is measured at its first call, on the arguments it gets; what it writes is a copy meanwhile. The
choice is kept on disk, by the kernel's text, the sizes it was planned for, and the device.
The real compiler: CachingAutotuner in torch/_inductor/runtime/triton_heuristics.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch

from minicompile.codegen.plan import KernelSource
from minicompile.ops.build import cache_folder
from minicompile.options import Options
from minicompile.runtime.triton import Launcher, Tiles, load_kernel, module_text, planned_tiles

LEAST, MOST = 2, 64
"""Elements of a tile that a thread may have."""

REPEATS = 5


def candidates(source: KernelSource) -> list[Tiles]:
    """The planned tiles first; then half, once and twice as much along each axis, and as many warps."""
    planned, plan = planned_tiles(source.plan), source.plan
    names = [a for a in plan.axes if a != "r" or plan.reduction != "persistent"]
    found = [planned]
    for scales in itertools.product((1, 2, 4), repeat=len(names) + 1):
        pairs = zip([*names, "num_warps"], scales, strict=True)
        tiles = replace(planned, **{n: max(getattr(planned, n) * s // 2, 1) for n, s in pairs})
        each = math.prod(getattr(tiles, axis) for axis in plan.axes) // (32 * tiles.num_warps)
        if LEAST <= each <= MOST and tiles.num_warps <= 32 and tiles not in found:
            found.append(tiles)
    return found


def milliseconds(launch: Launcher, arguments: list[Any]) -> float:
    """The least of a few runs on the GPU, after one that doesn't count."""
    times = []
    for _ in range(REPEATS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch(*arguments)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return min(times[1:])


class TunedKernel:
    """A kernel that measures its candidates when it is called for the first time."""

    def __init__(
        self,
        source: KernelSource,
        options: Options,
        load: Callable[[KernelSource, Tiles], Launcher] = load_kernel,
        measure: Callable[[Launcher, list[Any]], float] = milliseconds,
    ) -> None:
        self.source, self.load, self.measure = source, load, measure
        plan, folder = source.plan, cache_folder(options)
        device = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else ""
        facts = (module_text(source), plan.rows, plan.row_length, device, planned_tiles(plan))
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()
        self.file = folder / f"tiles-{digest[:32]}.json" if folder is not None else None
        self.launch: Launcher | None = None
        with contextlib.suppress(OSError, ValueError, TypeError):
            if self.file is not None:
                self.launch = load(source, Tiles(**json.loads(self.file.read_text())))

    def __call__(self, *arguments: Any) -> None:
        if self.launch is None:
            self.launch = self.tuned(list(arguments))
        self.launch(*arguments)

    def tuned(self, arguments: list[Any]) -> Launcher:
        """The fastest launcher, kept on disk. One that doesn't compile is none."""
        for i, argument in enumerate(self.source.plan.arguments):
            if argument.role != "in":
                arguments[i] = arguments[i].clone()

        def compiled(tiles: Tiles) -> Launcher | None:
            with contextlib.suppress(Exception):
                return self.load(self.source, tiles)
            return None

        tried = candidates(self.source)
        with ThreadPoolExecutor() as pool:
            launchers = list(pool.map(compiled, tried))
        times = {
            tiles: (self.measure(launch, arguments), launch)
            for tiles, launch in zip(tried, launchers, strict=True)
            if launch is not None
        }
        if not times:
            return self.load(self.source, planned_tiles(self.source.plan))
        best = min(times, key=lambda tiles: times[tiles][0])
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.write_text(json.dumps(asdict(best)))
        return times[best][1]
