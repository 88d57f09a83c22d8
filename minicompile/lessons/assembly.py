"""What a C compiler makes of a kernel: its instructions, each beside the kernel line it came from.

    CppAssembly := source: KernelSource, [instruction or label], the kernel line of each

Compiled with the flags of the real build and a table of lines, so that what is seen is what runs.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from minicompile.codegen.plan import KernelSource
from minicompile.errors import BackendError
from minicompile.ops.display import Shown, count_text
from minicompile.ops.toolchain import find_compiler
from minicompile.options import Options
from minicompile.pipeline_result import Trace
from minicompile.show.explorer import Explorer, Pane, below
from minicompile.show.html import box, columns, shows, text
from minicompile.show.listing import code_listing, listing, stripe

PACKED = re.compile(
    r"^(\w+p[sd]\s.*[xyz]mm\d|v?(?:p(?!insr|extr)\w+|movdq\w+)\s.*[xyz]mm\d|\w+\s+\{?v\d+\.\d+[bhsd])"
)
"""Instructions on whole vector registers, of x86 and of ARM: floats, integers, moves."""

SCALAR = re.compile(r"^(v?\w+s[sd]\s.*xmm\d|f\w+\s+[sd]\d+)")
"""Floating-point instructions on one element of a register."""

WIDTHS = {"zmm": 64, "ymm": 32, "xmm": 16}
"""Bytes of x86's vector registers; those of ARM's have 16."""


@dataclass(frozen=True)
class Instruction:
    """A line of assembly, its kernel line (from 0; None: a helper's, or nobody's), and what it works on."""

    text: str
    line: int | None
    width: int
    """Bytes that it works on at once: of a vector register, or of one float."""

    @property
    def packed(self) -> bool:
        return self.width >= 16


@dataclass(eq=False)
class CppAssembly(Shown):
    """A C kernel and its instructions."""

    source: KernelSource
    instructions: list[Instruction]

    @property
    def levels(self) -> dict[str, str]:
        return {
            "asm": "\n".join(
                i.text if ":" in i.text else f"    {i.text}" for i in self.instructions
            )
        }

    def kernel_lines(self, level: str) -> list[int | None]:
        """For each line of assembly the index of the kernel line that it came from."""
        return [i.line for i in self.instructions]

    @property
    def widest(self) -> int:
        """Bytes of the widest vector in use, 0 if there is none."""
        return max((i.width for i in self.instructions if i.packed), default=0)

    def counts(self, name: str = "") -> Counter[str]:
        """How many instructions with `name` in theirs are packed, and how many work on one float."""
        chosen = [i for i in self.instructions if i.width and name in i.text.split()[0]]
        return Counter("packed" if i.packed else "scalar" for i in chosen)

    def __str__(self) -> str:
        found = self.counts()
        title = (
            f"{self.source.name}: {count_text(found['packed'], 'vector instruction')} of up to "
            f"{self.widest} bytes, {found['scalar']} on single floats"
        )
        return "\n".join([title, *(f"  {line}" for line in self.levels["asm"].splitlines())])


def cpp_assembly(kernel: KernelSource, flags: Sequence[str] = (), prelude: str = "") -> CppAssembly:
    """The instructions of a C kernel, perhaps with other text before it.

    Raises BackendError where the compiler fails or is missing.
    """
    prelude = prelude or f"{kernel.prelude}\n"
    compiler = find_compiler(Options(cpp_flags=tuple(flags)))
    command = [*compiler.command, *compiler.flags, "-g1", "-S", "-o", "-", "-"]
    done = subprocess.run(
        command, input=prelude + kernel.text, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BackendError(f"the compiler fails on {kernel.name}:\n{done.stderr[:2000]}")
    first = prelude.count("\n") + 1
    return CppAssembly(kernel, list(read(done.stdout, range(first, first + len(kernel.lines)))))


def read(assembly: str, own: range) -> list[Instruction]:
    """The instructions and labels of a compiler's output; `own`: the lines of the kernel's text."""
    found: list[Instruction] = []
    at: int | None = None
    for raw in assembly.splitlines():
        line = " ".join(raw.split("#")[0].split()) if not raw.startswith("#") else ""
        if raw.lstrip().startswith((".section", ".text")):
            at = None
        if mark := re.match(r"\s*\.loc\s+\d+\s+(\d+)", raw):
            number = int(mark[1])
            at = number - own.start if number in own else None
        if not line or (line.startswith(".") and not re.match(r"\.L\d+:", line)):
            continue
        found.append(Instruction(line, at, width_of(line)))
    used = " ".join(i.text for i in found if not i.text.endswith(":"))
    return [i for i in found if not i.text.startswith(".L") or i.text[:-1] in used]


def width_of(instruction: str) -> int:
    """Bytes that a floating-point or vector instruction works on; 0 for all others."""
    if SCALAR.match(instruction):
        return 4
    if not PACKED.match(instruction):
        return 0
    return max((w for name, w in WIDTHS.items() if name in instruction), default=16)


@shows(CppAssembly)
def assembly_view(found: CppAssembly) -> str:
    """Kernel and assembly side by side; instructions on whole vectors are lit."""
    kernel, counts, rows = found.source, found.counts(), []
    section = below(kernel, "", "asm", found)
    for instruction, piece, number in zip(found.instructions, section.pieces, section.of):
        content = text(piece.text)
        if instruction.packed:
            content = f'<b style="background:#fde68a;color:#111827">{content}</b>'
        rows.append(stripe(content, piece.lines, number or None, piece.detail))
    about = (
        f"C kernel · what the compiler makes of it: {counts['packed']} instructions on vectors of up to "
        f"{found.widest} bytes, lit; {counts['scalar']} on single floats"
    )
    left = code_listing(kernel.lines, kernel.language, first=1)
    return box(kernel.name, about, columns(left, listing(rows)))


def explore_assembly(trace: Trace) -> Explorer:
    """`trace.explore()` with one pane more: the assembly of its C kernels."""
    found = trace.explore()
    sections = [
        below(kernel, graph, "asm", cpp_assembly(kernel))
        for graph, compiled in trace.graphs.items()
        for kernel in compiled.kernels
        if kernel.language == "cpp"
    ]
    found.panes.append(Pane("asm", "Assembly", "of this machine's compiler", 1.2, sections))
    found.open = ("source", "kernels", "asm")
    return found
