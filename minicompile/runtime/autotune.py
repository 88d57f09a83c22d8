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
from minicompile.options import Options
from minicompile.runtime.triton import Launcher, Tiles, load_kernel, module_text, planned_tiles

EACH = range(2, 65)
"""How many elements of a tile a thread may have."""

REPEATS = 5


def candidates(source: KernelSource) -> list[Tiles]:
    """The planned tiles; then half, once and twice as much along each axis, and as many warps."""
    planned, plan = planned_tiles(source.plan), source.plan
    names = [a for a in plan.axes if a != "r" or plan.reduction != "persistent"] + ["num_warps"]
    found = [planned]
    for scales in itertools.product((1, 2, 4), repeat=len(names)):
        sizes = {
            n: max(getattr(planned, n) * s // 2, 1) for n, s in zip(names, scales, strict=True)
        }
        tiles = replace(planned, **sizes)
        each = math.prod(getattr(tiles, axis) for axis in plan.axes) // (32 * tiles.num_warps)
        if each in EACH and tiles.num_warps <= 32 and tiles not in found:
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


def tuned(
    source: KernelSource,
    options: Options,
    load: Callable[[KernelSource, Tiles], Launcher] = load_kernel,
    measure: Callable[[Launcher, list[Any]], float] = milliseconds,
) -> Launcher:
    """A kernel that looks for its best tiles when it is called for the first time."""
    plan, tried = source.plan, candidates(source)
    device = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else ""
    facts = repr((module_text(source), plan.rows, plan.row_length, device, tried[0]))
    file = options.cache_folder / "tiles" / f"{hashlib.sha256(facts.encode()).hexdigest()}.json"
    chosen: list[Launcher] = []
    if options.disk_cache:
        with contextlib.suppress(OSError, ValueError, TypeError):
            known = Tiles(**json.loads(file.read_text()))
            chosen += [load(source, known)] if known in tried else []

    def choose(arguments: list[Any]) -> Launcher:
        """A candidate that doesn't compile is none."""
        for i, argument in enumerate(plan.arguments):
            if argument.role != "in":
                arguments[i] = arguments[i].clone()

        def timed(launch: Launcher | None) -> float:
            return math.inf if launch is None else measure(launch, arguments)

        def loaded(tiles: Tiles) -> Launcher | None:
            with contextlib.suppress(Exception):
                return load(source, tiles)
            return None

        with ThreadPoolExecutor() as pool:
            launchers = list(pool.map(loaded, tried))
        times = list(map(timed, launchers))
        best = times.index(min(times))
        if options.disk_cache:
            with contextlib.suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(asdict(tried[best])))
        return launchers[best] or load(source, tried[0])

    def launch(*arguments: Any) -> None:
        if not chosen:  # nothing can be measured while a graph is recorded
            recording = plan.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            chosen.append(load(source, tried[0]) if recording else choose(list(arguments)))
        chosen[0](*arguments)

    return launch
