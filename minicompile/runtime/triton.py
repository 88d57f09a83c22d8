"""Loading Triton kernels: compiled ahead with a generated launcher on a GPU, interpreted elsewhere.

Triton's own `kernel[grid](...)` analyses every argument on every call, 8 to 12 microseconds. A kernel's
argument types are known here (gpu_kernel.py), so it is compiled before its first call, and a launcher is
generated that calls the driver (cuda_launch.c).

A graph's kernels compile side by side, equal ones once. Their machine code is kept on disk, under a key made
of everything that decides it: a later process only reads them.
The real compiler: torch/_inductor/runtime/triton_heuristics.py (CachingAutotuner), static_cuda_launcher.py.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minicompile.codegen.plan import KernelSource
from minicompile.compat import triton_api
from minicompile.errors import BackendError
from minicompile.ops.build import load_extension, start_extension
from minicompile.ops.cache import Cache, digest
from minicompile.options import Options, triton_variables
from minicompile.runtime.gpu_kernel import (
    GpuKernel,
    Tiles,
    Version,
    execute,
    gpu_kernel,
    planned_tiles,
    versioned,
)

Launcher = Callable[..., None]
"""`launcher(*tensors, *sizes)`, in the order of the plan's arguments and sizes."""


CUDA_LAUNCH = Path(__file__).with_name("cuda_launch.c")


def load_kernel(
    source: KernelSource, tiles: Tiles | None = None, options: Options | None = None
) -> Launcher:
    """A callable kernel. `tiles` overrides the plan's.

    CUDA kernels compile now; a tool interprets kernels for CPU tensors (debug/triton_interpreter.py). Raises
    BackendError when Triton or the GPU is missing.
    """
    require_triton()
    device = source.plan.device
    if device.type == "cpu":
        interpreted: Launcher = source.interpreted(tiles)
        return interpreted
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendError(f"Triton kernels for {device} need a CUDA GPU, and torch sees none.")
    kernel = gpu_kernel(source, tiles or planned_tiles(source.plan))
    return CudaKernel(kernel, options or Options()).launch


def start_kernels(
    kernels: Mapping[str, GpuKernel], options: Options
) -> Callable[[], dict[str, Launcher]]:
    """Start loading kernels by name, equal ones once. What comes back waits, and raises what went wrong.

    Threads do: Triton's passes and `ptxas` let others run.
    """
    require_triton()
    start_extension(CUDA_LAUNCH)
    device = torch.cuda.current_device()
    pool = ThreadPoolExecutor(
        os.cpu_count(), "minicompile triton", torch.cuda.set_device, (device,)
    )
    distinct = {kernel.key: kernel for kernel in kernels.values()}
    jobs = {key: pool.submit(CudaKernel, kernel, options) for key, kernel in distinct.items()}
    pool.shutdown(wait=False)

    def finish() -> dict[str, Launcher]:
        try:
            return {name: jobs[kernel.key].result().launch for name, kernel in kernels.items()}
        finally:  # after an error or Ctrl-C the others needn't begin
            for job in jobs.values():
                job.cancel()

    return finish


def require_triton() -> None:
    """Raise BackendError with the way out when Triton isn't installed."""
    if importlib.util.find_spec("triton") is None:
        raise BackendError(
            "Triton is not installed: `pip install triton` (Linux), or choose device_codegen='cpp'."
        )


def compile_kernel(kernel: GpuKernel, divisible: list[str], target: tuple[str, int | str]) -> Any:
    """Triton's compiled kernel, for arguments of which those in `divisible` are multiples of 16.

    A limit on registers holds from sm_90 on, where it was measured; code for sm_80 spills under some.
    """
    types = kernel.types | dict.fromkeys(kernel.constants, "constexpr")
    function, _ = execute(kernel.name, kernel.module)
    given, options = triton_api.gpu_target(*target), dict(kernel.options)
    if target[0] != "cuda" or int(target[1]) < 90:
        options.pop("maxnreg", None)
    return triton_api.triton_compile(function, types, kernel.constants, divisible, given, options)


@dataclass(frozen=True)
class Binary:
    """A kernel's machine code, and what it takes to launch it. `shared`: bytes of dynamic shared memory."""

    name: str
    warps: int
    shared: int
    code: bytes


def kernel_binary(
    kernel: GpuKernel, divisible: list[str], target: tuple[str, int | str], options: Options
) -> Binary:
    """From the disk, else compiled and kept there."""
    facts = [kernel.module, kernel.types, kernel.constants, kernel.options, divisible, target]
    facts += [triton_api.triton_identity(), triton_variables(), [*Binary.__annotations__]]
    key, cache = digest(*facts), Cache(options, "triton", ".cubin")
    if (kept := cache.get(key)) is not None:
        head, _, code = kept.partition(b"\n")
        name, warps, shared = json.loads(head)
        return Binary(name, warps, shared, code)
    compiled = compile_kernel(kernel, divisible, target)
    about, code = compiled.metadata, compiled.asm["cubin"]
    if getattr(about, "global_scratch_size", 0):
        raise BackendError(f"{kernel.name} needs global memory of its own, which no launcher gives")
    numbers = json.dumps([about.name, about.num_warps, about.shared])
    cache.put(key, numbers.encode() + b"\n" + code)
    return Binary(about.name, about.num_warps, about.shared, code)


_opening = threading.Lock()


def cuda_driver() -> Any:
    """The extension that launches kernels. Raises BackendError without a C compiler or a driver."""
    with _opening:  # threads that come meanwhile wait
        return _cuda_driver()


@functools.cache
def _cuda_driver() -> Any:
    extension = load_extension(CUDA_LAUNCH)
    if extension is None:
        raise BackendError(
            "Launching GPU kernels needs a C compiler (apt-get install g++) and Python's headers."
        )
    try:
        extension.open("libcuda.so.1")
    except OSError as error:
        raise BackendError(f"The CUDA driver can't be loaded: {error}") from error
    return extension


class CudaKernel:
    """A kernel on one device: its compiled versions, and `launch`."""

    def __init__(self, kernel: GpuKernel, options: Options) -> None:
        self.kernel, self.options = kernel, options
        self.variants: dict[Version, tuple[Callable[..., None], int]] = {}
        current_device, stream = triton_api.cuda_launch_state()
        namespace: dict[str, Any] = {
            "current_device": current_device,
            "stream": stream,
            "on_device": torch.cuda.device,
            "known": {},
            "variants": self.variants,
            "variant": self.variant,
        }
        exec(compile(kernel.launcher, f"<launcher of {kernel.name}>", "exec"), namespace)
        self.launch: Launcher = namespace["launch"]
        namespace["prepare"](True, *kernel.expected)

    def variant(self, *facts: Any) -> tuple[Callable[..., None], int]:
        """What launches the version for a launch's facts, and its XBLOCK.

        It takes the number of programs, the stream, and the kernel's arguments.
        """
        version = Version(*facts)
        kernel = versioned(self.kernel, version)
        divisible = kernel.pointers if version.aligned else []
        pairs = zip(kernel.integers, version.divisible, strict=True)
        divisible += [name for name, divides in pairs if divides]
        major, minor = torch.cuda.get_device_capability(kernel.device)
        binary = kernel_binary(kernel, divisible, ("cuda", 10 * major + minor), self.options)
        try:
            run = cuda_driver().bind(
                binary.code,
                binary.name,
                kernel.device,
                32 * binary.warps,
                binary.shared,
                *kernel.counts,
                version.wide,
            )
        except RuntimeError as error:
            raise BackendError(
                f"{kernel.name} can't be loaded on {torch.cuda.get_device_name(kernel.device)}, with "
                f"{binary.warps} warps and {binary.shared} bytes of shared memory: {error}"
            ) from error
        self.variants[version] = run, kernel.constants["XBLOCK"]
        return self.variants[version]
