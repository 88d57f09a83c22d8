"""`mode="max-autotune"`: of the tiles around the planned ones, those that run fastest on the device.

A kernel is measured at its first call, on the arguments it gets; what it writes is a copy meanwhile. The
choice is kept on disk, by the kernel's text, the sizes it was planned for, and the device. Each time is told
as it comes: MINICOMPILE_LOGS=autotuning says what was gained, a terminal how far it is.
The real compiler: CachingAutotuner in torch/_inductor/runtime/triton_heuristics.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from minicompile.codegen.plan import KernelModule, KernelSource, LibraryCall, TritonPlan
from minicompile.compat import triton_api
from minicompile.lowering.ir import Layout
from minicompile.ops.cache import Cache, digest
from minicompile.ops.device import gpu_of
from minicompile.ops.display import count_text
from minicompile.options import Options
from minicompile.runtime.gpu_kernel import Tiles, blocks, module_text, planned_tiles
from minicompile.runtime.load import tuner
from minicompile.runtime.triton import Launcher, load_kernel

EACH = range(2, 65)
"""How many elements of a tile a thread may have."""

REPEATS = 12

QUEUEING = 1e-3
"""Seconds that the GPU waits while Python queues what is timed, which may be several launches."""

MARGIN = 0.03
"""What a kernel of our own must save of the time of the library's product."""


@dataclass(frozen=True)
class Tuning:
    """What a kernel's candidates took so far, in milliseconds; infinity for one that doesn't compile."""

    source: KernelSource
    tried: list[Tiles]
    times: list[float]
    done: bool = False

    def described(self, tiles: Tiles) -> str:
        if tiles.way == "library":
            after = f", XBLOCK={tiles.x}, {count_text(tiles.num_warps, 'warp')}" * bool(tiles.x)
            return f"the library's product{after}"
        way = [tiles.way] * bool(tiles.way) + [f"{tiles.stages} stages"] * bool(tiles.stages)
        sizes = way + [f"{name}={size}" for name, size in blocks(self.source.plan, tiles).items()]
        return f"{', '.join(sizes)}, {count_text(tiles.num_warps, 'warp')}"

    def told(self, verbose: bool = False) -> str:
        """The best of the candidates, and by how much it beats the planned tiles; verbose: all of them."""
        name, pairs = self.source.name, list(zip(self.times, self.tried, strict=False))
        if not pairs:
            known = len(self.tried) == 1
            why = (
                f"{self.described(self.tried[0])}, as measured earlier" if known else "interrupted"
            )
            return f"{name}: {why}"
        (planned, _), (best, tiles) = pairs[0], pairs[fastest(self.tried[: len(pairs)], self.times)]
        usual = f"with {self.described(self.tried[0])}" if self.tried[0].way else "as planned"
        first = (
            f"{name}: {len(pairs)} candidates, {planned:.4f} ms {usual}, "
            f"{best:.4f} ms ({1 - best / planned:.0%} less) with {self.described(tiles)}"
        )
        lines = [f"  {time:.4f} ms: {self.described(tiles)}" for time, tiles in pairs]
        return "\n".join([first, *(lines if verbose else [])])


def candidates(source: KernelSource) -> list[Tiles]:
    """The planned tiles; then half, once and twice as much along each axis, and as many warps.

    Of a product the library's way, then what the plan lists, then its other rivals.
    """
    planned, plan = planned_tiles(source.plan), source.plan
    if plan.rivals:
        return product_candidates(source)
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


def product_candidates(source: KernelSource) -> list[Tiles]:
    """The ways to compute a product, the library's first: it is taken where nothing can be measured."""

    def listed(plan: TritonPlan, way: str = "") -> list[Tiles]:
        choices = [dict(choice) for choice in plan.choices]
        return [Tiles(num_warps=c.pop("warps"), way=way, **c) for c in choices]

    found = [Tiles(way="library"), *listed(source.plan)]
    for way, steps in source.rivals.items():
        for step in steps:
            if isinstance(step, KernelSource):
                found += listed(step.plan, way)
        if way == "library" and isinstance(step, KernelSource):
            found += [replace(tiles, way=way) for tiles in candidates(step)[1:]]
    return found


def milliseconds(launch: Launcher, arguments: list[Any]) -> float:
    """The median of runs in a row on the GPU, as in a program: none finds in the L2 cache what the one before
    left there, none waits for Python, which queues them while the GPU pauses, and the GPU is at work."""
    launch(*arguments)
    device = torch.device("cuda", torch.cuda.current_device())
    other = torch.empty(2 * gpu_of(device).l2_bytes, dtype=torch.uint8, device=device)
    events = []
    triton_api.gpu_pause(QUEUEING)
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        other.zero_()
        start.record()
        launch(*arguments)
        end.record()
        events.append((start, end))
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events)


def fastest(tried: Sequence[Tiles], times: Sequence[float]) -> int:
    """Which candidate is taken: one of our own products only where it gains more than noise."""
    best = times.index(min(times))
    library = [i for i, tiles in enumerate(tried) if tiles.way == "library"]
    usual = min(library, key=times.__getitem__, default=best)
    return best if times[best] < (1 - MARGIN) * times[usual] else usual


def load_candidate(source: KernelSource, tiles: Tiles, options: Options | None = None) -> Launcher:
    """Load a kernel with some tiles, or what runs the steps of a rival on the kernel's own arguments."""
    if not tiles.way:
        return load_kernel(source, tiles, options)
    plan = source.plan
    (rival,) = (rival for rival in plan.rivals if rival.name == tiles.way)
    names, steps = [a.buffer for a in plan.arguments], source.rivals[tiles.way]
    own = replace(tiles, way="") if tiles.x else None
    ours = [step for step in steps if isinstance(step, KernelSource)]
    chosen = next((step for step in ours if step.plan.reduction == "product"), [None, *ours][-1])
    runs: list[Launcher | None] = [
        load_kernel(step, own if step is chosen else None, options)
        if isinstance(step, KernelSource)
        else None
        for step in steps
    ]

    def launch(*arguments: Any) -> None:
        memory = dict(zip(names, arguments, strict=True))
        memory |= {old: memory[new] for new, old in plan.in_place.items()}
        for name, layout in rival.workspace.items():
            memory[name] = torch.empty_strided(
                layout.size, layout.stride, dtype=layout.dtype, device=plan.device
            )
        for step, run in zip(steps, runs, strict=True):
            if isinstance(step, LibraryCall):
                given = [look(memory[view.buffer], view.layout) for view in step.operands]
                function = getattr(torch, step.op.overloadpacket.__name__)
                function(*given, out=look(memory[step.result], step.layout))
            elif run is not None:
                run(*(memory[a.buffer] for a in step.plan.arguments))

    return launch


def look(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A buffer's memory with a layout."""
    offset = tensor.storage_offset() + layout.offset
    return torch.as_strided(tensor, layout.size, layout.stride, offset)


def tuned(
    source: KernelSource,
    options: Options,
    load: Callable[[KernelSource, Tiles], Launcher] = load_candidate,
    measure: Callable[[Launcher, list[Any]], float] = milliseconds,
    tell: Callable[[str, Any], None] = lambda kind, made: None,
) -> Launcher:
    """A kernel that looks for its best tiles when it is called for the first time."""
    plan, tried = source.plan, candidates(source)
    if plan.reduction_ranges and torch.are_deterministic_algorithms_enabled():
        return load(source, tried[0])  # others sum in another order
    device = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else ""
    key = digest(module_text(source), plan.rows, plan.row_length, device, tried[0])
    cache = Cache(options, "tiles")
    chosen: list[Launcher] = []
    if (kept := cache.get(key)) is not None:
        known = Tiles(**json.loads(kept))
        chosen += [load(source, known)] if known in tried else []
    if chosen:
        tell("autotuning", Tuning(source, [known], [], done=True))

    def choose(arguments: list[Any]) -> Launcher:
        """A candidate that doesn't compile is none."""
        for i, argument in enumerate(plan.arguments):
            if argument.role != "in":
                arguments[i] = arguments[i].clone()

        def loaded(tiles: Tiles) -> Launcher | None:
            with contextlib.suppress(Exception):
                return load(source, tiles)
            return None

        times: list[float] = []
        try:
            tell("autotuning", Tuning(source, tried, []))
            with ThreadPoolExecutor() as pool:
                launchers = list(pool.map(loaded, tried))
            for launch in launchers:
                times.append(math.inf if launch is None else measure(launch, arguments))
                tell("autotuning", Tuning(source, tried, list(times)))
        finally:
            tell("autotuning", Tuning(source, tried, times, done=True))
        best = fastest(tried, times)
        cache.put(key, json.dumps(asdict(tried[best])).encode())
        return launchers[best] or load(source, tried[0])

    def launch(*arguments: Any) -> None:
        if not chosen:  # nothing can be measured while a graph is recorded
            recording = plan.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            chosen.append(load(source, tried[0]) if recording else choose(list(arguments)))
        chosen[0](*arguments)

    return launch


@tuner("tiles")
def load_tuned(
    kernels: Sequence[KernelSource], module: KernelModule, options: Options
) -> Callable[[], dict[str, Launcher]] | None:
    """Load kernels that look for their best tiles, with mode="max-autotune"."""
    if not options.mode.startswith("max-autotune"):
        return None
    load = partial(load_candidate, options=options)
    tune = partial(tuned, options=options, load=load, tell=module.tell)
    return lambda: {kernel.name: tune(kernel) for kernel in kernels}
