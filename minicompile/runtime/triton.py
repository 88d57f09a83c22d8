"""Loading Triton kernels: compiled and launched by Triton on a GPU, interpreted elsewhere.

The types of a kernel's arguments are known here (gpu_kernel.py), and Triton compiles it for these. A rule in
the registry `tuner` (load.py) may compile kernels sooner, and launch them faster.
The real compiler: torch/_inductor/runtime/triton_heuristics.py (CachingAutotuner).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Collection
from typing import Any

import torch

from minicompile.codegen.plan import KernelSource, count
from minicompile.compat import triton_api
from minicompile.errors import BackendError
from minicompile.runtime.gpu_kernel import (
    ALIGNMENT,
    GpuKernel,
    Tiles,
    blocks,
    execute,
    fitting,
    gpu_kernel,
    needs_int64,
    planned_tiles,
    programs,
)

Launcher = Callable[..., None]
"""`launcher(*tensors, *sizes)`, in the order of the plan's arguments and sizes."""


def load_kernel(source: KernelSource, tiles: Tiles | None = None) -> Launcher:
    """A callable kernel. `tiles` overrides the plan's.

    CUDA kernels compile when they are first called; a tool interprets kernels for CPU tensors
    (debug/triton_interpreter.py). Raises BackendError when Triton or the GPU is missing.
    """
    require_triton()
    device = source.plan.device
    if device.type == "cpu":
        interpreted: Launcher = source.interpreted(tiles)
        return interpreted
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendError(f"Triton kernels for {device} need a CUDA GPU, and torch sees none.")
    return triton_launcher(source, tiles or planned_tiles(source.plan))


def triton_launcher(source: KernelSource, tiles: Tiles) -> Launcher:
    """Launch a kernel by Triton's own means, in a version for each alignment, width and tile of rows."""
    plan, device = source.plan, gpu_kernel(source, tiles).device
    major, minor = torch.cuda.get_device_capability(device)

    @functools.cache
    def version(own: Tiles, wide: bool, divisible: tuple[str, ...]) -> Any:
        kernel = gpu_kernel(source, own, wide)
        return compile_kernel(kernel, divisible, ("cuda", 10 * major + minor))

    def launch(*given: Any) -> None:
        tensors = given[: len(plan.arguments)]
        sizes = dict(zip(plan.sizes, given[len(tensors) :], strict=True))
        numbers = {a.name: t.data_ptr() for a, t in zip(plan.arguments, tensors, strict=True)}
        numbers |= {str(symbol): sizes[symbol] for symbol in plan.integers}
        divisible = tuple(name for name, number in numbers.items() if number % ALIGNMENT == 0)
        own = fitting(plan, tiles, sizes)
        if grid := count([programs(plan, own)], sizes):
            with torch.cuda.device(device):
                kernel = version(own, needs_int64(plan, sizes), divisible)
                kernel[grid, 1, 1](*given, *blocks(plan, own).values())

    return launch


def require_triton() -> None:
    """Raise BackendError with the way out when Triton isn't installed."""
    if importlib.util.find_spec("triton") is None:
        raise BackendError(
            "Triton is not installed: `pip install triton` (Linux), or choose device_codegen='cpp'."
        )


def compile_kernel(
    kernel: GpuKernel, divisible: Collection[str], target: tuple[str, int | str]
) -> Any:
    """Triton's compiled kernel, for arguments of which those in `divisible` are multiples of 16.

    A limit on registers holds from sm_90 on, where it was measured; code for sm_80 spills under some.
    """
    types = kernel.types | dict.fromkeys(kernel.constants, "constexpr")
    function, _ = execute(kernel.name, kernel.module)
    given, options = triton_api.gpu_target(*target), dict(kernel.options)
    if target[0] != "cuda" or int(target[1]) < 90:
        options.pop("maxnreg", None)
    return triton_api.triton_compile(function, types, kernel.constants, divisible, given, options)
