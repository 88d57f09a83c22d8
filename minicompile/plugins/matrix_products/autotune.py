"""`mode="max-autotune"`: the tiles of a matrix product that run fastest on the device, or the library.

A kernel is measured at its first call, on the arguments it gets; what it writes is a copy meanwhile. The
choice is kept on disk, by the kernel's text, the sizes it was planned for, and the device. Each time is told
as it comes: MINICOMPILE_LOGS=autotuning says what was gained, a terminal how far it is.
The real compiler: CachingAutotuner in torch/_inductor/runtime/triton_heuristics.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from minicompile.codegen.plan import KernelModule, KernelSource, LibraryCall
from minicompile.codegen.triton import print_triton
from minicompile.compat import triton_api
from minicompile.lowering.ir import Layout
from minicompile.ops.cache import Cache, digest
from minicompile.ops.device import gpu_of
from minicompile.ops.display import count_text
from minicompile.options import Options
from minicompile.plugins.fast_launcher.launch import launched_kernels, load_fast, start_kernels
from minicompile.runtime.gpu_kernel import Tiles, blocks, module_text
from minicompile.runtime.load import tuner
from minicompile.runtime.triton import Launcher

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
            return "the library's product"
        sizes = [f"{name}={size}" for name, size in blocks(self.source.plan, tiles).items()]
        sizes = [f"{tiles.stages} stages", *sizes, count_text(tiles.num_warps, "warp")]
        return ", ".join(sizes)

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
        first = (
            f"{name}: {len(pairs)} candidates, {planned:.4f} ms with {self.described(self.tried[0])}, "
            f"{best:.4f} ms ({1 - best / planned:.0%} less) with {self.described(tiles)}"
        )
        lines = [f"  {time:.4f} ms: {self.described(tiles)}" for time, tiles in pairs]
        return "\n".join([first, *(lines if verbose else [])])


def candidates(source: KernelSource) -> list[Tiles]:
    """The ways to compute a product, the library's first: it is taken where nothing can be measured."""
    choices = [dict(choice) for choice in source.plan.choices]
    return [Tiles(way="library"), *(Tiles(num_warps=c.pop("warps"), **c) for c in choices)]


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
    """Which candidate is taken: one of our own, after the library's, where it gains more than noise."""
    best = times.index(min(times))
    return best if times[best] < (1 - MARGIN) * times[0] else 0


def load_candidate(source: KernelSource, tiles: Tiles, options: Options | None = None) -> Launcher:
    """Load a kernel with some tiles, or what runs the library's steps on the kernel's own arguments."""
    if not tiles.way:
        return load_fast(source, tiles, options)
    plan, (rival,) = source.plan, source.plan.rivals
    names = [a.buffer for a in plan.arguments]
    runs = [
        (
            step,
            None if isinstance(step, LibraryCall) else load_fast(print_triton(step), None, options),
        )
        for step in rival.steps
    ]

    def launch(*arguments: Any) -> None:
        memory = dict(zip(names, arguments, strict=True))
        memory |= {old: memory[new] for new, old in plan.in_place.items()}
        for name, layout in rival.workspace.items():
            memory[name] = torch.empty_strided(
                layout.size, layout.stride, dtype=layout.dtype, device=plan.device
            )
        for step, run in runs:
            if isinstance(step, LibraryCall):
                given = [look(memory[view.buffer], view.layout) for view in step.operands]
                function = getattr(torch, step.op.overloadpacket.__name__)
                function(*given, out=look(memory[step.result], step.layout))
            elif run is not None:
                run(*(memory[a.buffer] for a in step.arguments))

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
    """Load kernels, of which matrix products look for their best tiles, with mode="max-autotune"."""
    products = [kernel for kernel in kernels if kernel.plan.rivals]
    if not products or not options.mode.startswith("max-autotune"):
        return None
    load = partial(load_candidate, options=options)
    tune = partial(tuned, options=options, load=load, tell=module.tell)
    others = launched_kernels([kernel for kernel in kernels if not kernel.plan.rivals])
    wait = start_kernels(others, options)
    return lambda: wait() | {kernel.name: tune(kernel) for kernel in products}
