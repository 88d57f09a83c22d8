"""Loading Triton kernels: compiled ahead with a generated launcher on a GPU, interpreted elsewhere.

Triton's own `kernel[grid](...)` analyses every argument on every call, 8 to 12 microseconds. A kernel's
argument types are known here, so it is compiled before its first call, and a launcher is generated that
calls the driver (cuda_launch.c). What depends on sizes it works out once for all calls of those sizes: the
grid, and the version, of which there is one for each `Version` of facts that make a kernel faster.

    def launch(in_ptr0, out_ptr0, s0):
        if current_device() != 0: ...
        in_ptr0 = in_ptr0.data_ptr()
        ...
        run, grid = known.get((aligned, s0)) or prepare(aligned, s0)
        run(grid, stream(0), in_ptr0, out_ptr0, s0)

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import sympy
import torch

from minicompile import compat
from minicompile.codegen.plan import (
    INT32_END,
    KernelPlan,
    KernelSource,
    LibraryProduct,
    granule_of,
    power_of_two,
)
from minicompile.errors import BackendError
from minicompile.lowering.ir import Layout
from minicompile.ops.build import cache_folder, load_extension, start_extension
from minicompile.ops.device import gpu_of
from minicompile.ops.dtypes import LOOP_DTYPES, short
from minicompile.ops.files import read_sealed, write_sealed
from minicompile.options import Options, triton_variables
from minicompile.shapes.expr import Size, floor_div, is_float, product, size_hint, size_symbol

Launcher = Callable[..., None]
"""`launcher(*tensors, *sizes)`, in the order of the plan's arguments and sizes."""

POINTER_TYPES = {dtype: f"*{short(dtype)}".replace("*f", "*fp") for dtype in LOOP_DTYPES}
POINTER_TYPES[torch.bool] = "*u8"
"""Bools are bytes in memory, and kernels read them as such."""

CUDA_LAUNCH = Path(__file__).with_name("cuda_launch.c")

MOST_SIZES = 4096
"""Of which a launcher remembers what they lead to."""

ALIGNMENT = 16
"""Bytes of the widest load; also what Triton's divisibility hint promises."""


MOST_REGISTERS = 255
"""That a thread can have."""

MOST_ROWS = 64
"""That a program holds side by side if they turn out to be short."""


@dataclass(frozen=True)
class Tiles:
    """Elements of the flattened x, r and y axes that one program holds, powers of two; and its warps."""

    x: int = 0
    r: int = 1
    num_warps: int = 4
    y: int = 1
    stages: int = 0
    """How many of a loop's tiles are on their way from memory at once; 0: as Triton likes."""
    way: str = ""
    """The rival that runs instead of the kernel, if any (KernelPlan.rivals): tiles are those of its product,
    or of its last kernel."""


@dataclass(frozen=True)
class GpuKernel:
    """A kernel as text, and all that it takes to compile, load and launch it: what is kept of it on disk.

    Types, constants and options are those at the hints; `versioned` has them for other sizes.
    """

    name: str
    """Without its place in the schedule, so that equal kernels compile once."""
    module: str
    types: dict[str, str]
    """Triton's type of each argument: pointers, integers, floats, numbers derived from sizes."""
    counts: list[int]
    """How many of each."""
    constants: dict[str, int]
    options: dict[str, Any]
    registers: int
    """That a program may have, so that another fits beside it; 0: all."""
    launcher: str
    device: int
    expected: list[int]
    """The integers to expect."""

    @property
    def key(self) -> str:
        return json.dumps(asdict(self))

    @property
    def integers(self) -> list[str]:
        """What a launch passes after the tensors, less the floats."""
        pointers, integers, floats, _ = self.counts
        names = list(self.types)[pointers:]
        return names[:integers] + names[integers + floats :]


def gpu_kernel(source: KernelSource, tiles: Tiles) -> GpuKernel:
    """What the launcher needs of a kernel."""
    plan, index = source.plan, source.plan.device.index
    here = plan.device.type == "cuda" and index is None
    device = torch.cuda.current_device() if here else index or 0
    pointers, integers, sizes = len(plan.arguments), len(plan.integers), expected_sizes(plan)
    registers = gpu_of(plan.device).registers // 2 if plan.side_by_side else 0
    return GpuKernel(
        base_name(source),
        module_text(source),
        signature(plan, needs_int64(plan, sizes)),
        [pointers, integers, len(plan.sizes) - integers, len(plan.derived)],
        constants(plan, tiles, plan.rows, plan.row_length),
        compiler_options(plan, tiles) | register_limit(registers, tiles.num_warps),
        registers,
        launcher_text(plan, tiles, device),
        device,
        list(sizes.values()),
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
    if tiles is not None and tiles.way:
        return load_rival(source, tiles, options)
    device = source.plan.device
    if device.type == "cpu":
        from minicompile.runtime.interpreter import InterpretedKernel

        return InterpretedKernel(source, tiles)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise BackendError(f"Triton kernels for {device} need a CUDA GPU, and torch sees none.")
    kernel = gpu_kernel(source, tiles or planned_tiles(source.plan))
    return CudaKernel(kernel, options or Options()).launch


def load_rival(source: KernelSource, tiles: Tiles, options: Options | None) -> Launcher:
    """What runs the steps of one of a kernel's rivals on the kernel's own arguments."""
    plan = source.plan
    (rival,) = (rival for rival in plan.rivals if rival.name == tiles.way)
    names, steps = [a.buffer for a in plan.arguments], source.rivals[tiles.way]
    otherwise = load_kernel(source, Tiles(way="library"), options) if rival.aligned else None
    own = replace(tiles, way="") if tiles.x else None
    ours = [step for step in steps if isinstance(step, KernelSource)]
    chosen = next((step for step in ours if step.plan.product is not None), [None, *ours][-1])
    runs: list[Launcher | None] = [
        load_kernel(step, own if step is chosen else None, options)
        if isinstance(step, KernelSource)
        else None
        for step in steps
    ]

    def launch(*arguments: Any) -> None:
        if otherwise is not None and any(t.data_ptr() % ALIGNMENT for t in arguments):
            otherwise(*arguments)
            return
        memory = dict(zip(names, arguments, strict=True))
        memory |= {old: memory[new] for new, old in plan.in_place.items()}
        for name, layout in rival.workspace.items():
            memory[name] = torch.empty_strided(
                layout.size, layout.stride, dtype=layout.dtype, device=plan.device
            )
        for step, run in zip(steps, runs, strict=True):
            if isinstance(step, LibraryProduct):
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
    persistent = plan.reduction == "persistent"
    r = power_of_two(plan.row_length) if persistent else plan.tiles.get("r", 1)
    return Tiles(
        plan.tiles["x"], r, plan.num_warps, plan.tiles.get("y", 1), plan.tiles.get("stages", 0)
    )


def for_row(tiles: Tiles, r: int) -> Tiles:
    """Tiles for rows of another length: about as many elements, and warps for them."""
    most = tiles.x * tiles.r
    x = min(max(most // r, 1), max(tiles.x, MOST_ROWS))
    warps = min(max(x * r * tiles.num_warps // most, 1), 32)
    return replace(tiles, x=x, r=r, num_warps=warps)


def expected_sizes(plan: KernelPlan) -> dict[sympy.Symbol, int]:
    """The hints; integers without one are taken for multiples of 16."""
    return {symbol: plan.hints.get(symbol, ALIGNMENT) for symbol in plan.integers}


def planned_divisible(plan: KernelPlan) -> list[str]:
    """Numbers that are multiples of 16, at the hints."""
    sizes = expected_sizes(plan)
    numbers = {symbol: symbol for symbol in sizes} | plan.derived
    return [str(s) for s, expr in numbers.items() if size_hint(expr, sizes) % ALIGNMENT == 0]


def needs_int64(plan: KernelPlan, known: Mapping[sympy.Symbol, int]) -> bool:
    """Are a launch's indices int64?"""
    ends = (size_hint(end, known) for end in plan.index_reach)
    return plan.index_dtype is torch.int64 or any(end >= INT32_END for end in ends)


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
    """The tiles as a kernel knows them."""
    return {f"{axis.upper()}BLOCK": getattr(tiles, axis) for axis in plan.axes}


def constants(plan: KernelPlan, tiles: Tiles, rows: int, length: int) -> dict[str, int]:
    """The kernel's constants for so many rows of a length: its last parameters."""
    found = blocks(plan, tiles)
    if plan.varying:
        found["WHOLE"] = fills(length, tiles)
    if plan.granule_varies:
        found["WIDE"] = granule_of(plan.granule, rows, length)
    return found


def fills(length: int, tiles: Tiles) -> bool:
    """A row fills its tiles."""
    return 0 == length % tiles.r < length


def programs(plan: KernelPlan, tiles: Tiles) -> Size:
    """How many programs run."""
    if plan.folds:
        return plan.parts
    loops = (
        (product(plan.axes[axis].values()), getattr(tiles, axis))
        for axis in plan.axes
        if axis != "r"
    )
    return product([*plan.batch.values(), *(-floor_div(-size, tile) for size, tile in loops)])


def integer_type(wide: bool) -> str:
    return "i64" if wide else "i32"


def signature(plan: KernelPlan, wide: bool) -> dict[str, str]:
    """Triton's type of each argument."""
    types = {a.name: POINTER_TYPES[a.dtype] for a in plan.arguments}
    numbers = [*plan.sizes, *plan.derived]
    return types | {str(s): "fp64" if is_float(s) else integer_type(wide) for s in numbers}


def register_limit(registers: int, warps: int) -> dict[str, int]:
    """Each thread's share of a program's registers."""
    most = registers // (32 * warps)
    return {"maxnreg": most} if 0 < most < MOST_REGISTERS else {}


def compiler_options(plan: KernelPlan, tiles: Tiles) -> dict[str, Any]:
    """Multiply and add round apart and small numbers stay, as in eager; index checks stay in the code.
    Attention's kernels round as they like."""
    if plan.reduction == "attention":
        return {"num_warps": tiles.num_warps, "num_stages": tiles.stages}
    return {
        "num_warps": tiles.num_warps,
        "enable_fp_fusion": False,
        "debug": any(v.op == "indirect" and v.check for v in plan.body.values),
        "sanitize_overflow": False,
        "enable_reflect_ftz": False,
    } | ({"num_stages": tiles.stages} if tiles.stages else {})


def compile_kernel(kernel: GpuKernel, divisible: list[str], target: tuple[str, int | str]) -> Any:
    """Triton's compiled kernel, for arguments of which those in `divisible` are multiples of 16.

    A limit on registers holds from sm_90 on, where it was measured; code for sm_80 spills under some.
    """
    types = kernel.types | dict.fromkeys(kernel.constants, "constexpr")
    function, _ = execute(kernel.name, kernel.module)
    given, options = compat.gpu_target(*target), dict(kernel.options)
    if target[0] != "cuda" or int(target[1]) < 90:
        options.pop("maxnreg", None)
    return compat.triton_compile(function, types, kernel.constants, divisible, given, options)


@dataclass(frozen=True)
class Binary:
    """A kernel's machine code, and what it takes to launch it. `shared`: bytes of dynamic shared memory."""

    name: str
    warps: int
    shared: int
    scratch: int
    """Bytes of memory for each program."""
    code: bytes


def kernel_binary(
    kernel: GpuKernel, divisible: list[str], target: tuple[str, int | str], options: Options
) -> Binary:
    """From the disk, else compiled and kept there."""
    facts = [kernel.module, kernel.types, kernel.constants, kernel.options, divisible, target]
    facts += [compat.triton_identity(), triton_variables(), [*Binary.__annotations__]]
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    folder = cache_folder(options, "triton")
    if folder is not None and (kept := read_sealed(folder / f"{key}.cubin", key)) is not None:
        head, _, code = kept.partition(b"\n")
        name, warps, shared, scratch = json.loads(head)
        return Binary(name, warps, shared, scratch, code)
    compiled = compile_kernel(kernel, divisible, target)
    about, code = compiled.metadata, compiled.asm["cubin"]
    scratch = getattr(about, "global_scratch_size", 0)
    if folder is not None:
        line = json.dumps([about.name, about.num_warps, about.shared, scratch])
        write_sealed(folder / f"{key}.cubin", key, line.encode() + b"\n" + code)
    return Binary(about.name, about.num_warps, about.shared, scratch, code)


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


class Version(NamedTuple):
    """What a compiled version of a kernel relies on."""

    aligned: bool
    """Every pointer is a multiple of ALIGNMENT."""
    divisible: tuple[bool, ...]
    """Of `GpuKernel.integers`: which are."""
    wide: bool
    """Indices are int64."""
    row: int
    """The tile of a row whose length varies; 0 where none does."""
    whole: bool
    """Such a row, or one that is swept, fills its tiles."""
    granule: int = 1
    """Where tiles begin, if that varies."""


def versioned(kernel: GpuKernel, version: Version) -> GpuKernel:
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
    if "WHOLE" in constants:
        constants["WHOLE"] = version.whole
    if "WIDE" in constants:
        constants["WIDE"] = version.granule
    return replace(kernel, types=types, constants=constants, options=options)


class CudaKernel:
    """A kernel on one device: its compiled versions, and `launch`."""

    def __init__(self, kernel: GpuKernel, options: Options) -> None:
        self.kernel, self.options = kernel, options
        self.variants: dict[Version, tuple[Callable[..., None], int]] = {}
        current_device, stream = compat.cuda_launch_state()
        namespace: dict[str, Any] = {
            "current_device": current_device,
            "stream": stream,
            "on_device": torch.cuda.device,
            "granule_of": granule_of,
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
        divisible = list(kernel.types)[: kernel.counts[0]] if version.aligned else []
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
                *kernel.counts[:-1],
                kernel.counts[-1] + (binary.scratch > 0),
                version.wide or binary.scratch > 0,
            )
        except RuntimeError as error:
            raise BackendError(
                f"{kernel.name} can't be loaded on {torch.cuda.get_device_name(kernel.device)}, with "
                f"{binary.warps} warps and {binary.shared} bytes of shared memory: {error}"
            ) from error
        if binary.scratch:
            run = with_scratch(run, binary.scratch, kernel.device)
        self.variants[version] = run, kernel.constants["XBLOCK"]
        return self.variants[version]


def with_scratch(run: Launcher, each: int, device: int) -> Launcher:
    """A launch with memory for each program, which Triton's kernels take after their own arguments."""

    def launch(grid: int, stream: int, *arguments: Any) -> None:
        memory = torch.empty(grid * each, dtype=torch.uint8, device=torch.device("cuda", device))
        run(grid, stream, *arguments, memory.data_ptr())

    return launch


def python(size: Size) -> str:
    return str(size).replace("Max(", "max(").replace("Min(", "min(")


def launcher_text(plan: KernelPlan, tiles: Tiles, device: int) -> str:
    """Python source of `launch`; and of `prepare`, for sizes that it hasn't had before. Tensors without
    elements launch nothing."""
    pointers = [a.name for a in plan.arguments]
    parameters = ", ".join([*pointers, *map(str, plan.sizes)])
    key = ", ".join(["aligned", *map(str, plan.integers)])
    rows: Size = product(plan.ranges.values())
    if rows == 0:
        return f"def launch({parameters}):\n    pass\n\ndef prepare({key}):\n    pass"
    derived = "".join(f", {name}" for name in plan.derived)
    lines = [
        f"def launch({parameters}):",
        f"    if current_device() != {device}:",
        f"        with on_device({device}):",
        f"            return launch({parameters})",
        *(f"    {p} = {p}.data_ptr()" for p in pointers),
        f"    aligned = ({' | '.join(pointers)}) % {ALIGNMENT} == 0",
        f"    run, grid{derived} = known.get(({key})) or prepare({key})",
        f"    run(grid, stream({device}), {parameters}{derived})",
        "",
        f"def prepare({key}):",
        *(f"    {name} = {python(expr)}" for name, expr in plan.derived.items()),
    ]
    divisible = "".join(f"{n} % {ALIGNMENT} == 0, " for n in (*plan.integers, *plan.derived))
    beyond = [f"{python(end)} >= {INT32_END}" for end in plan.index_reach]
    wide = " or ".join(beyond) or str(plan.index_dtype is torch.int64)
    grid, row, whole, granule = programs(plan, tiles), "0", "False", "1"
    if plan.varying:
        tile = str(tiles.r)
        lines.append(f"    rnumel = {python(plan.length)}")
        if plan.reduction == "persistent":
            lines.append("    RBLOCK = 1 << (rnumel - 1).bit_length()")
            row = tile = "RBLOCK"
            grid = plan.parts if plan.folds else -floor_div(-rows, size_symbol("XBLOCK"))
        lines.append(f"    WHOLE = rnumel % {tile} == 0 < rnumel")
        whole = "WHOLE"
    if plan.granule_varies:
        granule = f"granule_of({plan.granule}, {python(rows)}, {python(plan.length)})"
    lines += [
        f"    version = aligned, ({divisible}), {wide}, {row}, {whole}, {granule}",
        "    run, XBLOCK = variants.get(version) or variant(*version)",
        f"    if len(known) == {MOST_SIZES}:",
        "        known.clear()",
        f"    known[{key}] = found = run, {python(grid)}{derived}",
        "    return found",
    ]
    return "\n".join(lines)
