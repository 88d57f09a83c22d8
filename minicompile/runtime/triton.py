"""Loading Triton kernels: compiled ahead with a generated launcher on a GPU, interpreted elsewhere.

Triton's own `kernel[grid](...)` analyses every argument on every call, 8 to 12 microseconds. A kernel's
argument types are known here, so it is compiled before its first call, once per pattern of alignment, and
a launcher is generated that computes the grid, picks the version, and calls the driver (cuda_launch.c):

    def launch(in_ptr0, out_ptr0, s0):
        if current_device() != 0: ...
        in_ptr0 = in_ptr0.data_ptr()
        ...
        run = variants.get(key) or variant(key)
        run((1024*s0 + 1023) // 1024, stream(0), in_ptr0, out_ptr0, s0)

A graph's kernels compile side by side, equal ones once. Their machine code is kept on disk, under a key made
of everything that decides it: a later process only reads them.
The real compiler: torch/_inductor/runtime/triton_heuristics.py (CachingAutotuner), static_cuda_launcher.py.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import linecache
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from minicompile import compat
from minicompile.codegen.plan import KernelPlan, KernelSource, power_of_two
from minicompile.errors import BackendError
from minicompile.ops.build import cache_folder, load_extension, start_extension
from minicompile.ops.device import gpu_of
from minicompile.ops.dtypes import LOOP_DTYPES, short
from minicompile.ops.files import read_sealed, write_sealed
from minicompile.options import Options, triton_variables
from minicompile.shapes.expr import Size, floor_div, is_float, product, size_hint

Launcher = Callable[..., None]
"""`launcher(*tensors, *sizes)`, in the order of the plan's arguments and sizes."""

POINTER_TYPES = {dtype: f"*{short(dtype)}".replace("*f", "*fp") for dtype in LOOP_DTYPES}
POINTER_TYPES[torch.bool] = "*u8"
"""Bools are bytes in memory, and kernels read them as such."""

CUDA_LAUNCH = Path(__file__).with_name("cuda_launch.c")

ALIGNMENT = 16
"""Bytes of the widest load; also what Triton's divisibility hint promises."""


MOST_REGISTERS = 255
"""That a thread can have."""


@dataclass(frozen=True)
class Tiles:
    """Elements of the flattened x, r and y axes that one program holds, powers of two; and its warps."""

    x: int
    r: int = 1
    num_warps: int = 4
    y: int = 1


@dataclass(frozen=True)
class GpuKernel:
    """A kernel as text, and all that it takes to compile, load and launch it: what is kept of it on disk."""

    name: str
    """Without its place in the schedule, so that equal kernels compile once."""
    module: str
    types: dict[str, str]
    """Triton's type of each argument: pointers, integers, floats."""
    counts: list[int]
    """How many of each."""
    constants: dict[str, int]
    options: dict[str, Any]
    launcher: str
    device: int
    first: int
    """The pattern of alignment to expect (`CudaKernel.variant`)."""

    @property
    def key(self) -> str:
        return json.dumps(asdict(self))


def gpu_kernel(source: KernelSource, tiles: Tiles) -> GpuKernel:
    """What the launcher needs of a kernel."""
    plan, index = source.plan, source.plan.device.index
    here = plan.device.type == "cuda" and index is None
    device = torch.cuda.current_device() if here else index or 0
    pointers, integers = len(plan.arguments), len(plan.integers)
    sizes = [plan.hints.get(symbol, ALIGNMENT) for symbol in plan.integers]
    return GpuKernel(
        base_name(source),
        module_text(source),
        signature(plan),
        [pointers, integers, len(plan.sizes) - integers],
        blocks(plan, tiles),
        compiler_options(plan, tiles),
        launcher_text(plan, tiles, device),
        device,
        1 + sum(2 << i for i, n in enumerate(sizes) if n % ALIGNMENT == 0),
    )


def gpu_kernels(sources: Iterable[KernelSource]) -> dict[str, GpuKernel]:
    """By name, with the planned tiles."""
    return {source.name: gpu_kernel(source, planned_tiles(source.plan)) for source in sources}


def load_kernel(
    source: KernelSource, tiles: Tiles | None = None, options: Options | None = None
) -> Launcher:
    """A callable kernel. `tiles` overrides the plan's.

    CUDA kernels compile now; kernels for CPU tensors run in Triton's interpreter. Raises BackendError when
    Triton or the GPU is missing.
    """
    require_triton()
    device = source.plan.device
    if device.type == "cpu":
        from minicompile.runtime.interpreter import InterpretedKernel

        return InterpretedKernel(source, tiles)
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


def planned_tiles(plan: KernelPlan) -> Tiles:
    """The plan's tiles; a persistent row always fits its tile."""
    r = plan.tiles.get("r", 1)
    if plan.reduction == "persistent":
        r = power_of_two(size_hint(product(plan.reduction_ranges.values()), {}))
    return Tiles(plan.tiles["x"], r, plan.num_warps, plan.tiles.get("y", 1))


def module_text(source: KernelSource) -> str:
    """A module that holds the kernel: imports, helpers, the kernel.

    Its name doesn't tell its place in the schedule, so that equal kernels compile once.
    """
    return source.prelude + re.sub(
        r"^def (\w+)_\d+\(", r"def \1(", source.text, count=1, flags=re.M
    )


def base_name(source: KernelSource) -> str:
    """The kernel's name without its place."""
    return re.sub(r"_\d+$", "", source.name)


def module_file(name: str, text: str) -> str:
    """What line tables call a kernel's module: the same for the same text."""
    return f"<{name} {hashlib.sha256(text.encode()).hexdigest()[:12]}>"


def execute(name: str, text: str) -> tuple[Any, dict[str, Any]]:
    """Run a kernel's module, which imports Triton: (the kernel's JITFunction, the module's namespace)."""
    filename = module_file(name, text)
    # Triton reads functions' source back
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    namespace: dict[str, Any] = {"__name__": filename}
    exec(compile(text, filename, "exec"), namespace)
    return namespace[name], namespace


def blocks(plan: KernelPlan, tiles: Tiles) -> dict[str, int]:
    """The kernel's constants: its last parameters."""
    return {f"{axis.upper()}BLOCK": getattr(tiles, axis) for axis in plan.axes}


def programs(plan: KernelPlan, tiles: Tiles) -> Size:
    """How many programs run."""
    if plan.folds:
        return plan.parts
    loops = (
        (product(plan.axes[axis].values()), getattr(tiles, axis))
        for axis in plan.axes
        if axis != "r"
    )
    return product(-floor_div(-size, tile) for size, tile in loops)


def signature(plan: KernelPlan) -> dict[str, str]:
    """Triton's type of each argument."""
    integer = "i64" if plan.index_dtype is torch.int64 else "i32"
    types = {a.name: POINTER_TYPES[a.dtype] for a in plan.arguments}
    return types | {str(s): "fp64" if is_float(s) else integer for s in plan.sizes}


def compiler_options(plan: KernelPlan, tiles: Tiles) -> dict[str, Any]:
    """Multiply and add round apart and small numbers stay, as in eager; index checks stay in the code."""
    most = gpu_of(plan.device).registers // (2 * 32 * tiles.num_warps)
    limited = {"maxnreg": most} if plan.side_by_side and most < MOST_REGISTERS else {}
    return limited | {
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": False,
        "debug": any(v.op == "indirect" and v.check for v in plan.body.values),
        "sanitize_overflow": False,
        "enable_reflect_ftz": False,
    }


def compile_kernel(kernel: GpuKernel, divisible: list[str], target: tuple[str, int | str]) -> Any:
    """Triton's compiled kernel, for arguments of which those in `divisible` are multiples of 16."""
    types = kernel.types | dict.fromkeys(kernel.constants, "constexpr")
    function, _ = execute(kernel.name, kernel.module)
    return compat.triton_compile(
        function, types, kernel.constants, divisible, compat.gpu_target(*target), kernel.options
    )


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
    facts += [compat.triton_identity(), triton_variables()]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    folder = cache_folder(options, "triton")
    if folder is not None and (kept := read_sealed(folder / f"{key}.cubin", key)) is not None:
        head, _, code = kept.partition(b"\n")
        name, warps, shared = json.loads(head)
        return Binary(name, warps, shared, code)
    compiled = compile_kernel(kernel, divisible, target)
    about, code = compiled.metadata, compiled.asm["cubin"]
    assert not getattr(about, "global_scratch_size", 0), "the launcher passes no scratch memory"
    if folder is not None:
        line = json.dumps([about.name, about.num_warps, about.shared])
        write_sealed(folder / f"{key}.cubin", key, line.encode() + b"\n" + code)
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
    """A kernel on one device: its compiled versions by alignment, and `launch`."""

    def __init__(self, kernel: GpuKernel, options: Options) -> None:
        self.kernel, self.options = kernel, options
        self.variants: dict[int, Callable[..., None]] = {}
        current_device, stream = compat.cuda_launch_state()
        namespace: dict[str, Any] = {
            "current_device": current_device,
            "stream": stream,
            "on_device": torch.cuda.device,
            "variants": self.variants,
            "variant": self.variant,
        }
        exec(compile(kernel.launcher, f"<launcher of {kernel.name}>", "exec"), namespace)
        self.launch: Launcher = namespace["launch"]
        self.variant(kernel.first)

    def variant(self, key: int) -> Callable[..., None]:
        """The version for a pattern: bit 0 for all pointers aligned, then one bit per divisible size.

        What it gives takes the number of programs, the stream, and the kernel's arguments.
        """
        kernel, (pointers, integers, _) = self.kernel, self.kernel.counts
        names = list(kernel.types)
        divisible = names[:pointers] if key & 1 else []
        divisible += [names[pointers + i] for i in range(integers) if key >> (i + 1) & 1]
        major, minor = torch.cuda.get_device_capability(kernel.device)
        binary = kernel_binary(kernel, divisible, ("cuda", 10 * major + minor), self.options)
        try:
            self.variants[key] = cuda_driver().bind(
                binary.code,
                binary.name,
                kernel.device,
                32 * binary.warps,
                binary.shared,
                *kernel.counts,
                "i64" in kernel.types.values(),
            )
        except RuntimeError as error:
            raise BackendError(
                f"{kernel.name} can't be loaded on {torch.cuda.get_device_name(kernel.device)}, with "
                f"{binary.warps} warps and {binary.shared} bytes of shared memory: {error}"
            ) from error
        return self.variants[key]


def launcher_text(plan: KernelPlan, tiles: Tiles, device: int) -> str:
    """Python source of the launcher. Tensors without elements launch nothing."""
    pointers = [a.name for a in plan.arguments]
    sizes = [str(s) for s in plan.sizes]
    rows: Size = product(plan.ranges.values())
    lines = [f"def launch({', '.join(pointers + sizes)}):"]
    if rows == 0:
        return "\n".join([*lines, "    return"])
    lines += [
        f"    if current_device() != {device}:",
        f"        with on_device({device}):",
        f"            return launch({', '.join(pointers + sizes)})",
    ]
    lines += [f"    {p} = {p}.data_ptr()" for p in pointers]
    key = [f"(({' | '.join(pointers)}) % {ALIGNMENT} == 0)"]
    key += [f"({s} % {ALIGNMENT} == 0) << {i + 1}" for i, s in enumerate(plan.integers)]
    grid = str(programs(plan, tiles)).replace("Max(", "max(").replace("Min(", "min(")
    lines += [
        f"    key = {' | '.join(key)}",
        "    run = variants.get(key) or variant(key)",
        f"    run({grid}, stream({device}), {', '.join(pointers + sizes)})",
    ]
    return "\n".join(lines)
