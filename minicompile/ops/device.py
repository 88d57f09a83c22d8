"""How fast a device can be: what a kernel's bytes and operations are held against.

Of a CUDA device by its properties, of a CPU by two short measurements, once per process.
"""

from __future__ import annotations

import functools
import timeit
from dataclasses import dataclass

import torch

from minicompile import compat
from minicompile.errors import OptionError

F32 = torch.float32
CORES = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
"""fp32 units of a multiprocessor by compute capability; 128 where it isn't listed."""
SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227}
"""KiB of shared memory that a program can have; 99 where it isn't listed."""
COPIED = 32 * 2**20
"""Bytes, more than caches hold."""
SIDE = 512
"""Of the square matrices whose product is timed."""


@dataclass(frozen=True)
class DeviceSpec:
    """Peak memory bandwidth, peak fp32 arithmetic, and where the two numbers are from."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    source: str = "given"

    @property
    def ridge(self) -> float:
        """Operations for each byte from which on arithmetic is the limit."""
        return self.flops_per_second / self.bytes_per_second

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.bytes_per_second / 1e9:,.1f} GB/s, "
            f"{self.flops_per_second / 1e9:,.1f} GFLOP/s ({self.source})"
        )


@functools.cache
def device_spec(device: torch.device) -> DeviceSpec:
    """The speed of a device. Raises OptionError for other kinds than CPU and CUDA."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        cores = found.multi_processor_count * CORES.get((found.major, found.minor), 128)
        bandwidth = 2e3 * found.memory_clock_rate * found.memory_bus_width / 8  # kHz, two per cycle
        return DeviceSpec(found.name, bandwidth, 2e3 * cores * found.clock_rate, "its properties")
    if device.type != "cpu":
        raise OptionError(f"no speeds known for {device.type} devices")
    with compat.no_dispatch_modes():
        source, target = (torch.full((COPIED // 4,), 1.0, dtype=F32, device=device) for _ in "ab")
        square = source[: SIDE * SIDE].view(SIDE, SIDE)
        copying = min(timeit.repeat(lambda: target.copy_(source), number=1, repeat=3))
        multiplying = min(timeit.repeat(lambda: square @ square, number=1, repeat=3))
    threads = torch.get_num_threads()
    return DeviceSpec(
        f"CPU, {threads} thread{'s' * (threads > 1)}",
        2 * COPIED / copying,
        2 * SIDE**3 / multiplying,
        "measured: a copy and a matrix product",
    )


@dataclass(frozen=True)
class Gpu:
    """What the plans of GPU kernels rest on. Without a GPU at hand, an H100's."""

    multiprocessors: int = 132
    registers: int = 2**16
    """Of 32 bits, each multiprocessor."""
    bytes_per_second: float = 3e12
    launch_seconds: float = 3e-6
    """What one more kernel costs, until its first programs have loaded."""
    l2_bytes: int = 50 * 2**20
    """Of the cache that all multiprocessors share."""
    capability: tuple[int, int] = (9, 0)
    """Major and minor: what instructions there are, and how much shared memory."""

    @property
    def shared_bytes(self) -> int:
        """Memory for tiles on their way that a program can have."""
        return SHARED.get(self.capability, 99) * 1024

    @property
    def copies_tiles(self) -> bool:
        """Has it an engine that copies tiles between memories, which descriptors tell it of?"""
        return self.capability >= (9, 0)


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU that kernels for a device are planned for."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Gpu()
    found = torch.cuda.get_device_properties(device)
    registers = getattr(found, "regs_per_multiprocessor", Gpu.registers)  # not in every torch
    bandwidth = 0.9 * device_spec(device).bytes_per_second
    cache = getattr(found, "L2_cache_size", Gpu.l2_bytes)
    kind = found.major, found.minor
    return Gpu(found.multi_processor_count, registers, bandwidth, l2_bytes=cache, capability=kind)
