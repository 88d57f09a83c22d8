"""Launches kernels by the CUDA driver (cuda_launch.c), from Python that is generated for each.

Triton's own launcher looks at every argument on every call, 8 to 12 microseconds. Here it is worked out once
for all calls of the same sizes what depends on these: the grid, and a version of the kernel for the facts
that make it faster.

    def launch(in_ptr0, out_ptr0, s0):
        if current_device() != 0: ...
        in_ptr0 = in_ptr0.data_ptr()
        ...
        run, grid = known.get((aligned, s0)) or prepare(aligned, s0)
        run(grid, stream(0), in_ptr0, out_ptr0, s0)

A graph's kernels compile side by side, equal ones once. Their machine code is kept on disk, under a key made
of everything that decides it: a later process only reads it.
The real compiler: torch/_inductor/runtime/static_cuda_launcher.py.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minicompile.codegen.plan import INT32_END, KernelModule, KernelSource, TritonPlan, size_text
from minicompile.compat import triton_api
from minicompile.errors import BackendError
from minicompile.ops.build import load_extension, start_extension
from minicompile.ops.cache import Cache, digest
from minicompile.options import Options, triton_variables
from minicompile.runtime.gpu_kernel import (
    ALIGNMENT,
    GpuKernel,
    Tiles,
    expected_sizes,
    for_row,
    gpu_kernel,
    integer_type,
    planned_tiles,
    programs,
    register_limit,
    registers,
)
from minicompile.runtime.load import tuner
from minicompile.runtime.triton import Launcher, compile_kernel, load_kernel, require_triton
from minicompile.shapes.expr import Size, floor_div, product, size_symbol

CUDA_LAUNCH = Path(__file__).with_name("cuda_launch.c")

MOST_SIZES = 4096
"""Of which a launcher remembers what they lead to."""


@dataclass(frozen=True)
class LaunchedKernel(GpuKernel):
    """A kernel and its launcher. Types, constants and options are those at the hints."""

    counts: list[int]
    """How many of its arguments are pointers, integers, floats."""
    registers: int
    """That a program may have, so that another fits beside it; 0: all."""
    launcher: str
    expected: list[int]
    """The integers to expect."""

    @property
    def pointers(self) -> list[str]:
        """What a launch passes first: the tensors."""
        return list(self.types)[: self.counts[0]]

    @property
    def integers(self) -> list[str]:
        """What a launch passes after the tensors, less the floats."""
        pointers, integers, _ = self.counts
        return list(self.types)[pointers:][:integers]


def launched_kernel(source: KernelSource, tiles: Tiles) -> LaunchedKernel:
    """What the launcher needs of a kernel."""
    plan, kernel = source.plan, gpu_kernel(source, tiles)
    pointers, integers = len(plan.arguments), len(plan.integers)
    return LaunchedKernel(
        **vars(kernel),
        counts=[pointers, integers, len(plan.sizes) - integers],
        registers=registers(plan),
        launcher=launcher_text(plan, tiles, kernel.device),
        expected=list(expected_sizes(plan).values()),
    )


class Version(NamedTuple):
    """What a compiled version of a kernel relies on."""

    aligned: bool
    """Every pointer is a multiple of ALIGNMENT."""
    divisible: tuple[bool, ...]
    """Of `LaunchedKernel.integers`: which are."""
    wide: bool
    """Indices are int64."""
    row: int
    """The tile of a row whose length varies; 0 where none does."""


def versioned(kernel: LaunchedKernel, version: Version) -> LaunchedKernel:
    """The kernel with the types, constants and options that follow from a version's facts."""
    types = kernel.types | dict.fromkeys(kernel.integers, integer_type(version.wide))
    constants, options = dict(kernel.constants), dict(kernel.options)
    if version.row:
        x, r, warps = constants["XBLOCK"], constants["RBLOCK"], options["num_warps"]
        tiles = for_row(Tiles(x, r, warps), version.row)
        constants |= {"XBLOCK": tiles.x, "RBLOCK": tiles.r}
        options.pop("maxnreg", None)
        shared = kernel.registers if tiles.r <= r else 0  # longer rows need more
        options |= {"num_warps": tiles.num_warps} | register_limit(shared, tiles.num_warps)
    return replace(kernel, types=types, constants=constants, options=options)


def launcher_text(plan: TritonPlan, tiles: Tiles, device: int) -> str:
    """Python source of `launch`; and of `prepare`, for sizes that it hasn't had before. Tensors without
    elements launch nothing."""
    pointers = [a.name for a in plan.arguments]
    parameters = ", ".join([*pointers, *map(str, plan.sizes)])
    key = ", ".join(["aligned", *map(str, plan.integers)])
    rows: Size = product(plan.ranges.values())
    if rows == 0:
        return f"def launch({parameters}):\n    pass\n\ndef prepare({key}):\n    pass"
    lines = [
        f"def launch({parameters}):",
        f"    if current_device() != {device}:",
        f"        with on_device({device}):",
        f"            return launch({parameters})",
        *(f"    {p} = {p}.data_ptr()" for p in pointers),
        f"    aligned = ({' | '.join(pointers)}) % {ALIGNMENT} == 0",
        f"    run, grid = known.get(({key})) or prepare({key})",
        f"    run(grid, stream({device}), {parameters})",
        "",
        f"def prepare({key}):",
    ]
    divisible = "".join(f"{n} % {ALIGNMENT} == 0, " for n in plan.integers)
    beyond = [f"{size_text(end)} >= {INT32_END}" for end in plan.index_reach]
    wide = " or ".join(beyond) or str(plan.index_dtype is torch.int64)
    grid, row = programs(plan, tiles), "0"
    if plan.varying and plan.reduction == "persistent":
        lines.append(f"    row = 1 << ({size_text(plan.length)} - 1).bit_length()")
        grid, row = -floor_div(-rows, size_symbol("XBLOCK")), "row"
    lines += [
        f"    version = aligned, ({divisible}), {wide}, {row}",
        "    run, XBLOCK = variants.get(version) or variant(*version)",
        f"    if len(known) == {MOST_SIZES}:",
        "        known.clear()",
        f"    known[{key}] = found = run, {size_text(grid)}",
        "    return found",
    ]
    return "\n".join(lines)


@tuner("fast")
def load_planned(
    kernels: Sequence[KernelSource], module: KernelModule, options: Options
) -> Callable[[], dict[str, Launcher]]:
    """Load kernels with the planned tiles."""
    return start_kernels(launched_kernels(kernels), options)


def launched_kernels(sources: Sequence[KernelSource]) -> dict[str, LaunchedKernel]:
    """By name, with the planned tiles."""
    return {source.name: launched_kernel(source, planned_tiles(source.plan)) for source in sources}


def load_fast(
    source: KernelSource, tiles: Tiles | None = None, options: Options | None = None
) -> Launcher:
    """A callable kernel, with the planned tiles or others. Those on CPU tensors are interpreted."""
    if source.plan.device.type != "cuda":
        return load_kernel(source, tiles)
    kernel = launched_kernel(source, tiles or planned_tiles(source.plan))
    return CudaKernel(kernel, options or Options()).launch


def start_kernels(
    kernels: Mapping[str, LaunchedKernel], options: Options
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
    distinct = {repr(kernel): kernel for kernel in kernels.values()}
    jobs = {key: pool.submit(CudaKernel, kernel, options) for key, kernel in distinct.items()}
    pool.shutdown(wait=False)

    def finish() -> dict[str, Launcher]:
        try:
            return {name: jobs[repr(k)].result().launch for name, k in kernels.items()}
        finally:  # after an error or Ctrl-C the others needn't begin
            for job in jobs.values():
                job.cancel()

    return finish


@dataclass(frozen=True)
class Binary:
    """A kernel's machine code, and what it takes to launch it. `shared`: bytes of dynamic shared memory."""

    name: str
    warps: int
    shared: int
    code: bytes


def kernel_binary(
    kernel: LaunchedKernel, divisible: list[str], target: tuple[str, int | str], options: Options
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

    def __init__(self, kernel: LaunchedKernel, options: Options) -> None:
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
