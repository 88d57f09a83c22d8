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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minicompile import compat
from minicompile.codegen.plan import KernelPlan, KernelSource, power_of_two
from minicompile.errors import BackendError
from minicompile.ops.build import cache_folder, load_extension, start_extension
from minicompile.ops.dtypes import LOOP_DTYPES, short
from minicompile.ops.files import read_private, write_private
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


@dataclass(frozen=True)
class Tiles:
    """Elements of the flattened x, r and y axes that one program holds, powers of two; and its warps."""

    x: int
    r: int = 1
    num_warps: int = 4
    y: int = 1


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
    return CudaKernel(source, tiles or planned_tiles(source.plan), options or Options()).launch


def start_kernels(
    sources: Sequence[KernelSource], options: Options
) -> Callable[[], dict[str, Launcher]]:
    """Start loading kernels for a GPU, equal ones once. What comes back waits, and raises what went wrong.

    Threads do: Triton's passes and `ptxas` let others run.
    """
    start_extension(CUDA_LAUNCH)
    device = torch.cuda.current_device()
    pool = ThreadPoolExecutor(
        os.cpu_count(), "minicompile triton", torch.cuda.set_device, (device,)
    )
    jobs: dict[Any, Future[Launcher]] = {}
    found: dict[str, Future[Launcher]] = {}
    for source in sources:
        plan = source.plan
        key = module_text(source), *signature(plan).items(), *plan.ranges.values(), plan.device
        if key not in jobs:
            jobs[key] = pool.submit(load_kernel, source, None, options)
        found[source.name] = jobs[key]
    pool.shutdown(wait=False)

    def finish() -> dict[str, Launcher]:
        try:
            return {name: job.result() for name, job in found.items()}
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


def module_file(source: KernelSource) -> str:
    """What line tables call the module: the same for the same text."""
    return f"<{base_name(source)} {hashlib.sha256(module_text(source).encode()).hexdigest()[:12]}>"


def execute(source: KernelSource) -> tuple[Any, dict[str, Any]]:
    """Run the kernel's module, which imports Triton: (the kernel's JITFunction, the module's namespace)."""
    text, name, filename = module_text(source), base_name(source), module_file(source)
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
    return {
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": False,
        "debug": any(v.op == "indirect" and v.check for v in plan.body.values),
        "sanitize_overflow": False,
        "enable_reflect_ftz": False,
    }


def compile_kernel(
    source: KernelSource, tiles: Tiles, divisible: list[str], target: tuple[str, int | str]
) -> Any:
    """Triton's compiled kernel, for arguments of which those in `divisible` are multiples of 16."""
    plan, constants = source.plan, blocks(source.plan, tiles)
    types = signature(plan) | dict.fromkeys(constants, "constexpr")
    function, options = execute(source)[0], compiler_options(plan, tiles)
    return compat.triton_compile(
        function, types, constants, divisible, compat.gpu_target(*target), options
    )


@dataclass(frozen=True)
class Binary:
    """A kernel's machine code, and what it takes to launch it. `shared`: bytes of dynamic shared memory."""

    name: str
    warps: int
    shared: int
    code: bytes


def kernel_binary(
    source: KernelSource,
    tiles: Tiles,
    divisible: list[str],
    target: tuple[str, int | str],
    options: Options,
) -> Binary:
    """From the disk, else compiled and kept there, behind a seal that says it is whole and what it is for."""
    plan, folder = source.plan, cache_folder(options, "triton")
    facts = [module_text(source), signature(plan), blocks(plan, tiles), divisible, target]
    facts += [compiler_options(plan, tiles), compat.triton_identity(), triton_variables()]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]

    def seal(content: bytes) -> bytes:
        return hashlib.sha256(key.encode() + content).digest()

    if folder is not None:
        with suppress(OSError):
            kept = read_private(folder / f"{key}.cubin")
            if kept[:32] == seal(kept[32:]):
                head, _, code = kept[32:].partition(b"\n")
                name, warps, shared = json.loads(head)
                return Binary(name, warps, shared, code)
    compiled = compile_kernel(source, tiles, divisible, target)
    about, code = compiled.metadata, compiled.asm["cubin"]
    assert not getattr(about, "global_scratch_size", 0), "the launcher passes no scratch memory"
    if folder is not None:
        line = json.dumps([about.name, about.num_warps, about.shared])
        content = line.encode() + b"\n" + code
        write_private(folder / f"{key}.cubin", seal(content) + content)
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

    def __init__(self, source: KernelSource, tiles: Tiles, options: Options) -> None:
        self.source, self.tiles, self.options = source, tiles, options
        index = source.plan.device.index
        self.device = torch.cuda.current_device() if index is None else index
        self.variants: dict[int, Callable[..., None]] = {}
        current_device, stream = compat.cuda_launch_state()
        namespace: dict[str, Any] = {
            "current_device": current_device,
            "stream": stream,
            "on_device": torch.cuda.device,
            "variants": self.variants,
            "variant": self.variant,
        }
        text = launcher_text(source.plan, tiles, self.device)
        exec(compile(text, f"<launcher of {source.name}>", "exec"), namespace)
        self.launch: Launcher = namespace["launch"]
        hints = source.plan.hints
        sizes = [hints.get(symbol, ALIGNMENT) for symbol in source.plan.integers]
        self.variant(1 + sum(2 << i for i, n in enumerate(sizes) if n % ALIGNMENT == 0))

    def variant(self, key: int) -> Callable[..., None]:
        """The version for a pattern: bit 0 for all pointers aligned, then one bit per divisible size.

        What it gives takes the number of programs, the stream, and the kernel's arguments.
        """
        plan = self.source.plan
        divisible = [a.name for a in plan.arguments] if key & 1 else []
        divisible += [str(s) for i, s in enumerate(plan.integers) if key >> (i + 1) & 1]
        major, minor = torch.cuda.get_device_capability(self.device)
        target = ("cuda", 10 * major + minor)
        binary = kernel_binary(self.source, self.tiles, divisible, target, self.options)
        counts = len(plan.arguments), len(plan.integers), len(plan.sizes) - len(plan.integers)
        wide = plan.index_dtype is torch.int64
        try:
            self.variants[key] = cuda_driver().bind(
                binary.code,
                binary.name,
                self.device,
                32 * binary.warps,
                binary.shared,
                *counts,
                wide,
            )
        except RuntimeError as error:
            raise BackendError(
                f"{self.source.name} can't be loaded on {torch.cuda.get_device_name(self.device)}, with "
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
