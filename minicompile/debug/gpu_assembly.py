"""Cross-compiling a Triton kernel, and following its assembly back to kernel lines. No GPU is needed.

Triton lowers in levels: TTIR (blocks), TTGIR (blocks with layouts over threads), LLVM IR, then PTX and a
binary, which disassembles to SASS. Each level keeps the position in the kernel's text as debug locations.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

from minicompile.codegen.plan import KernelSource, TritonPlan
from minicompile.compat import triton_api
from minicompile.errors import MinicompileError
from minicompile.ops.display import Several, Shown, method
from minicompile.pipeline_result import Trace
from minicompile.runtime.gpu_kernel import (
    ALIGNMENT,
    Tiles,
    expected_sizes,
    gpu_kernel,
    module_file,
    planned_tiles,
)
from minicompile.runtime.triton import compile_kernel, require_triton

BINARIES = ("cubin", "hsaco")


@dataclass(eq=False)
class Assembly(Shown):
    """Everything a kernel became on its way to a GPU's instructions."""

    source: KernelSource
    target: str
    """"cuda 90"."""
    tiles: Tiles
    levels: dict[str, str]
    """Text by level, in order: ttir, ttgir, llir, ptx, sass (or amdgcn)."""
    binary: bytes
    file: str
    """What line tables call the kernel's text."""
    shared_bytes: int
    """Dynamic shared memory of a block."""
    registers: int | None
    """Per thread; None where no disassembler is at hand."""
    spilled_bytes: int | None
    """Local memory per thread: registers that didn't fit. NVIDIA only, as `registers`."""

    def kernel_lines(self, level: str) -> list[int | None]:
        """For each line of a level's text, the index in `source.lines` that it came from."""
        first = self.source.prelude.count("\n") + 1
        inside = range(first, first + len(self.source.lines))
        place = re.compile(re.escape(self.file) + r'"?(?::|, line )(\d+)')

        def outermost(text: str) -> int | None:
            numbers = place.findall(text)
            return int(numbers[-1]) if numbers else None

        numbers = LINE_TRACERS.get(level, _ptx_lines)(self.levels[level], outermost)
        return [n - first if n is not None and n in inside else None for n in numbers]

    def __str__(self) -> str:
        resources = f"{self.tiles.num_warps} warps, {self.shared_bytes} bytes of shared memory"
        if self.registers is not None:
            resources += f", {self.registers} registers, {self.spilled_bytes} bytes spilled"
        lines = [f"  {level}: {text.count(chr(10))} lines" for level, text in self.levels.items()]
        return "\n".join([f"{self.source.name} for {self.target}: {resources}", *lines])


def cross_compile(
    source: KernelSource,
    target: tuple[str, int | str] = ("cuda", 90),
    tiles: Tiles | None = None,
    aligned: bool = True,
) -> Assembly:
    """Compile for a GPU that needn't be here: `("cuda", 80)`, `("hip", "gfx942")`.

    `aligned`: pointers, and sizes whose hints say so, are multiples of 16. Raises BackendError without
    Triton.
    """
    require_triton()
    plan, gpu = source.plan, triton_api.gpu_target(*target)
    if tiles is None:  # plans count warps of 32 threads
        tiles = planned_tiles(plan)
        tiles = replace(tiles, num_warps=max(tiles.num_warps * 32 // gpu.warp_size, 1))
    kernel = gpu_kernel(source, tiles)
    divisible = kernel.pointers + planned_divisible(plan)
    compiled = compile_kernel(kernel, divisible if aligned else [], target)
    levels = {name: text for name, text in compiled.asm.items() if isinstance(text, str)}
    levels.pop("source", None)
    binary = next(compiled.asm[name] for name in BINARIES if name in compiled.asm)
    if sass := _tool_output(binary, "nvdisasm", "-g", "-c"):
        levels["sass"] = sass
    usage = re.search(
        r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", _tool_output(binary, "cuobjdump", "-res-usage")
    )
    registers, stack, local = map(int, usage.groups()) if usage else (None, 0, 0)
    spilled = None if registers is None else stack + local
    name, file = f"{target[0]} {target[1]}", module_file(kernel.name, kernel.module)
    shared = compiled.metadata.shared
    return Assembly(source, name, tiles, levels, binary, file, shared, registers, spilled)


def planned_divisible(plan: TritonPlan) -> list[str]:
    """Numbers that are multiples of 16, at the hints."""
    return [str(s) for s, size in expected_sizes(plan).items() if size % ALIGNMENT == 0]


@method(Trace, "assembly")
def assembly(trace: Trace, target: tuple[str, int | str] = ("cuda", 90)) -> Several[Assembly]:
    """Return what each Triton kernel becomes on a GPU that needn't be here: TTIR, TTGIR, LLVM IR, PTX, SASS.

    Raises MinicompileError where no kernel is Triton's, BackendError without Triton.
    """
    kernels = [kernel for compiled in trace.graphs.values() for kernel in compiled.kernels]
    ours = [kernel for kernel in kernels if kernel.language == "triton"]
    if not ours:
        how = "trace mc.compile(fn, options={'device_codegen': 'triton'}) and they are"
        raise MinicompileError(f"no kernel of {trace.name} is Triton's, which have PTX: {how}")
    return Several(cross_compile(kernel, target) for kernel in ours)


def _tool_output(binary: bytes, tool: str, *flags: str) -> str:
    """Return what one of NVIDIA's tools prints; "" where it isn't here or the binary is for another GPU."""
    path = triton_api.nvidia_tool(tool)
    if path is None:
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [path, *flags, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout


Place = Callable[[str], int | None]
"""The line number that an annotation names: the outermost, where code was inlined."""


def _ptx_lines(text: str, place: Place) -> list[int | None]:
    """`.loc` holds until the next one. Inlined code names the call in the comment (Triton 3.6), or refers to
    the `.loc` before it (3.9)."""
    mark = re.compile(r"\s*\.loc\s+(\d+ \d+ \d+)(?:.*inlined_at (\d+ \d+ \d+))?")
    outermost: dict[str, int | None] = {}
    current: int | None = None
    lines: list[int | None] = []
    inline = False
    for line in text.splitlines():
        if line.lstrip().startswith(("// begin inline asm", "// end inline asm")):
            inline = "begin" in line  # whose lines Triton 3.9 counts on from the true one
        if not inline and (match := mark.match(line)):
            where, call = match.groups()
            current = outermost[where] = outermost.get(call) if call else place(line)
        lines.append(current if line.startswith("\t") else None)
    return lines


def _sass_lines(text: str, place: Place) -> list[int | None]:
    """Comments before an instruction give its line, then the lines it was inlined at, innermost first."""
    current: int | None = None
    found: list[int | None] = []
    for line in text.splitlines():
        if line.lstrip().startswith("//##"):
            current = place(line) or current
        found.append(current)
    return found


def _mlir_lines(text: str, place: Place) -> list[int | None]:
    """`loc(#loc7)` at a line's end; `#loc7 = loc("file":12:5)`, or named, or `callsite(#loc3 at #loc5)`."""
    definitions = dict(re.findall(r"^(#loc\w*) = loc\((.*)\)$", text, re.MULTILINE))

    def resolve(where: str) -> int | None:
        names = re.findall(r"#loc\w*", where)
        return place(where) or (resolve(definitions.get(names[-1], "")) if names else None)

    ends = (re.search(r"^[^#].*loc\((.*)\)$", line) for line in text.splitlines())
    return [resolve(end.group(1)) if end else None for end in ends]


LINE_TRACERS = {"ttir": _mlir_lines, "ttgir": _mlir_lines, "sass": _sass_lines}
"""level -> function of its text; the others annotate like PTX."""
