"""Timing several ways to do one thing in turns, and the most memory that one of them needs.

Machines are noisy, and so are two measurements made one after the other. In turns each round gives a ratio
whose two sides met the same machine; what is reported is the median of these, with its quartiles.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from minicompile.debug.variant import now
from minicompile.runtime.load import allocator

TURN_SECONDS = 5e-3
"""A turn calls as often as fits, at least once."""
LEAST_ROUNDS, MOST_ROUNDS = 5, 200


@dataclass(frozen=True)
class Ratio:
    """A median of ratios, and the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Ours by theirs, round by round."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Ratio(middle, low, high)


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], seconds: float
) -> dict[str, list[float]]:
    """Seconds of each call, one number a round, all in turns for about `seconds`; who begins rotates. What
    compiles must have done so before."""
    names, samples = list(calls), {name: list[float]() for name in calls}
    repeats = {}
    for name, call in calls.items():
        once = min(timed(call, 1) for _ in range(3))
        repeats[name] = max(1, int(TURN_SECONDS / once))
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        for turn in range(MOST_ROUNDS):
            if turn >= LEAST_ROUNDS and time.perf_counter() > end:
                break
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                samples[name].append(timed(calls[name], repeats[name]))
    finally:
        if collects:
            gc.enable()
    return samples


def timed(call: Callable[[], object], repeats: int) -> float:
    """Seconds a call, after everything queued on a GPU has finished."""
    start = now()
    for _ in range(repeats):
        call()
    return (now() - start) / repeats


def time_text(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.2f} us"


def peak_bytes(step: Callable[[], Any], device: str = "cpu") -> int:
    """How far above what was live before a step goes.

    On the CPU torch.profiler writes down each allocation and each release (the generated code's too: they go
    through the same allocator); on CUDA the allocator's own peak is read.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    for keeper in allocator.values():
        keeper.clear()  # what a step uses again counts as its own
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return peak_of([e["args"] for e in events if e.get("name") == "[memory]"])


def peak_of(changes: Sequence[dict[str, Any]]) -> int:
    """The peak of what the profiler saw; memory from before may be freed within, and doesn't count."""
    held: dict[int, int] = {}
    live = peak = 0
    for event in sorted(changes, key=lambda event: event["Ev Idx"]):
        size, address = event["Bytes"], event["Addr"]
        if size > 0:
            held[address] = size
        live += size if size > 0 else -held.pop(address, 0)
        peak = max(peak, live)
    return peak
