"""The GPU that kernels are planned for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227}
"""KiB of shared memory that a program can have; 99 where it isn't listed."""


@dataclass(frozen=True)
class Gpu:
    """What the plans of GPU kernels rest on. Without a GPU at hand, an H100's."""

    multiprocessors: int = 132
    registers: int = 2**16
    """Of 32 bits, each multiprocessor."""
    bytes_per_second: float = 3e12
    l2_bytes: int = 50 * 2**20
    """Of the cache that all multiprocessors share."""
    capability: tuple[int, int] = (9, 0)
    """Major and minor: what instructions there are, and how much shared memory."""

    @property
    def shared_bytes(self) -> int:
        """Memory for tiles on their way that a program can have."""
        return SHARED.get(self.capability, 99) * 1024


def memory_bandwidth(properties: Any) -> float:
    """Bytes a second of a CUDA device, by its clock: two transfers a cycle."""
    return float(2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8)


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU that kernels for a device are planned for."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Gpu()
    found = torch.cuda.get_device_properties(device)
    registers = getattr(found, "regs_per_multiprocessor", Gpu.registers)  # not in every torch
    bandwidth = 0.9 * memory_bandwidth(found)
    cache = getattr(found, "L2_cache_size", Gpu.l2_bytes)
    kind = found.major, found.minor
    return Gpu(found.multi_processor_count, registers, bandwidth, l2_bytes=cache, capability=kind)
