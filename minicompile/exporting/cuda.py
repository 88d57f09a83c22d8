"""Packages for an NVIDIA GPU: Triton kernels as machine code for one compute capability, and their launches.

    on_one_device   the exported graph as one of CPU tensors, whichever it was exported with: kernels are
                    compiled for a GPU that needn't be here
    write_out       the library's attention in terms of operators that have kernels of our own
    machine_code    a cubin for each kernel, which holds for all sizes that the program takes
    CudaWriter      the wrapper's launches (c/cuda.c runs them, through the driver)

Where mc.compile makes a version of a kernel for aligned pointers, sizes that 16 divides, rows of a length,
a package has one that all calls can use: pointers are aligned, nothing is assumed of sizes.
The real compiler: torch/_inductor/codegen/cpp_wrapper_gpu.py, torch/csrc/inductor/aoti_runtime.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicompile import compat
from minicompile.codegen.plan import KernelPlan, KernelSource
from minicompile.errors import OptionError, Unsupported
from minicompile.exporting.c_wrapper import CWriter
from minicompile.lowering.ir import ExternKernel, View
from minicompile.ops.device import Gpu
from minicompile.ops.dtypes import TENSOR_CORES
from minicompile.ops.graph import Graph, user_line
from minicompile.options import Options
from minicompile.runtime.gpu_kernel import (
    GpuKernel,
    Tiles,
    Version,
    gpu_kernel,
    planned_tiles,
    programs,
    versioned,
)
from minicompile.runtime.triton import Binary, kernel_binary, require_triton
from minicompile.scheduling.nodes import ScheduledNode

CPU = torch.device("cpu")
Target = tuple[str, int]
"""("cuda", 90): as `trace.assembly` takes it."""

OPTIONS: dict[str, Any] = {
    "device_codegen": "triton", "library": False,
}  # fmt: skip
"""Triton for CPU tensors; no products of a library's."""

ATTENTIONS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention{where}").default
    for name, where in (("flash", "_for_cpu"), ("flash", ""), ("efficient", ""), ("cudnn", ""))
}


def target_of(target: Target | None, exported_on: set[torch.device]) -> Target | None:
    """What to compile for: None is the CPU. Raises OptionError, and Unsupported for several devices."""
    gpus = {device for device in exported_on if device.type != "cpu"}
    if any(device.type != "cuda" for device in gpus) or (len(exported_on) > 1 and gpus):
        found = ", ".join(sorted(map(str, exported_on)))
        raise Unsupported(f"a package runs on a CPU, or on a CUDA GPU: not on {found}")
    if target is None and gpus:
        major, minor = torch.cuda.get_device_capability(gpus.pop())
        return "cuda", 10 * major + minor
    if target is not None and (target[0] != "cuda" or target[1] not in range(70, 200)):
        raise OptionError(f'no target {target!r}: ("cuda", 90) is compute capability 9.0')
    return target


# -- the graph


def on_one_device(graph: Graph, fakes: Sequence[Tensor], mode: Any) -> list[Tensor]:
    """Put a graph's new tensors on the CPU, in place; gives its inputs there."""

    def moved(value: Any) -> Any:
        return CPU if isinstance(value, torch.device) else value

    for node in graph.nodes:
        node.args = compat.map_aggregate(node.args, moved)
        node.kwargs = compat.map_aggregate(node.kwargs, moved)
    return [compat.new_fake(mode, x.shape, x.stride(), x.dtype, CPU) for x in fakes]


def write_out(graph: Graph) -> None:
    """Put a function in place of the library's attention. Tracing goes through it."""
    for node in [n for n in graph.nodes if n.target in ATTENTIONS]:
        op: Any = node.target
        known: dict[str, Any] = {a.name: a.default_value for a in op._schema.arguments}
        known |= {**dict(zip(known, node.args)), **node.kwargs}
        if known["dropout_p"] or any(user.args[1] != 0 for user in node.users):
            what = "dropout" if known["dropout_p"] else "more results than one"
            raise Unsupported(f"a package has no attention with {what}", user_line(node))
        mask = known.get("attn_mask") or known.get("attn_bias")
        arguments = (*(known[n] for n in ("query", "key", "value")), mask, known["is_causal"])
        node.target, node.args, node.kwargs = step_by_step, (*arguments, known["scale"]), {}


def step_by_step(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor]:
    """Return softmax(q @ k^T * scale + mask) @ v, laid out as the library's, which gives 0 for a row whose
    every position is masked."""
    if q.shape[1] != k.shape[1] or q.dtype not in TENSOR_CORES:
        raise Unsupported(
            f"a package has no attention in {q.dtype} with {k.shape[1]} heads of keys"
        )
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.matmul(q.float(), k.float().mT) * factor
    if causal:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = torch.where(seen, scores, -math.inf)
    if mask is not None:
        choose = mask.dtype is torch.bool
        added = torch.where(mask, scores, -math.inf) if choose else scores + mask
        dead = (added == -math.inf).all(-1, keepdim=True)
        scores = torch.where(dead, 0.0, added)
    weights = torch.softmax(scores, -1)
    if mask is not None:
        weights = torch.where(dead, 0.0, weights)
    out = torch.matmul(weights, v.float()).to(q.dtype)
    return (out.transpose(1, 2).contiguous().transpose(1, 2),)


# -- kernels


@dataclass(frozen=True)
class Cubin:
    """A kernel's number in the package, and what its machine code was made of."""

    number: int
    tiles: Tiles
    kernel: GpuKernel
    binary: Binary

    @property
    def file(self) -> str:
        return f"{self.number:04}_{self.kernel.name}.cubin"


def machine_code(
    sources: Iterable[KernelSource], target: Target, options: Options
) -> dict[str, Cubin]:
    """By kernel name; equal kernels once. Raises Unsupported for one that finds no room on the GPU."""
    require_triton()
    keys: dict[str, str] = {}
    jobs: dict[str, Any] = {}
    with ThreadPoolExecutor(os.cpu_count(), "minicompile triton") as pool:
        for source in sources:
            tried = [(tiles, for_all_sizes(source, tiles)) for tiles in tiles_of(source.plan)]
            key = keys[source.name] = tried[0][1].key
            if key not in jobs:
                jobs[key] = pool.submit(fitting, tried, target, options)
    made = {key: Cubin(number, *job.result()) for number, (key, job) in enumerate(jobs.items())}
    return {name: made[key] for name, key in keys.items()}


def tiles_of(plan: KernelPlan) -> list[Tiles]:
    """The planned tiles first."""
    return [Tiles.of(choice) for choice in plan.choices] or [planned_tiles(plan)]


def for_all_sizes(source: KernelSource, tiles: Tiles) -> GpuKernel:
    """The version of a kernel that nothing is assumed for but that pointers are aligned."""
    plan, kernel = source.plan, gpu_kernel(source, tiles)
    if plan.varying and plan.reduction == "persistent":
        raise Unsupported(f"{plan.name} holds rows of a varying length")
    wide = plan.index_dtype is torch.int64 or bool(plan.index_reach)
    unknown = (False,) * len(kernel.integers)
    return versioned(kernel, Version(True, unknown, wide, row=0, whole=False, granule=1))


def fitting(
    tried: Sequence[tuple[Tiles, GpuKernel]], target: Target, options: Options
) -> tuple[Tiles, GpuKernel, Binary]:
    """The first that finds its shared memory."""
    room = Gpu(capability=divmod(target[1], 10)).shared_bytes
    for tiles, kernel in tried:
        binary = kernel_binary(kernel, kernel.pointers, target, options)
        if binary.scratch:
            raise Unsupported(f"a package has no scratch memory, which {kernel.name} needs")
        if binary.shared <= room:
            return tiles, kernel, binary
    raise Unsupported(
        f"{kernel.name} needs {binary.shared} bytes of shared memory; the GPU has {room}"
    )


def write_kernels(
    folder: Path, cubins: Iterable[Cubin], target: Target
) -> tuple[str, dict[str, int]]:
    """The files; the text of kernels.c, which lists them, and the numbers that c/cuda.c must know."""
    files = {cubin.file: cubin.binary for cubin in cubins}
    lines = [
        "// The machine code of what is in kernels.py: file, function, bytes, checksum,",
        "// threads of a program, bytes of its shared memory.",
        "", '#include "model.h"', "", "const mc_kernel mc_kernels[] = {",
    ]  # fmt: skip
    for file, made in sorted(files.items()):
        (folder / file).write_bytes(made.code)
        facts = [len(made.code), f"{zlib.crc32(made.code)}u", 32 * made.warps, made.shared]
        lines.append(f'    {{"{file}", "{made.name}", {", ".join(map(str, facts))}}},')
    major, minor = divmod(target[1], 10)
    text = "\n".join([*lines, "    {0},", "};", ""])
    return text, {"MC_KERNELS": len(files), "MC_MAJOR": major, "MC_MINOR": minor}


# -- the wrapper


@dataclass
class CudaWriter(CWriter):
    """Writes launches where a CPU's wrapper calls functions."""

    cubins: Mapping[str, Cubin] = field(default_factory=dict)

    def launch(self, kernel: KernelSource, node: ScheduledNode) -> None:
        plan, cubin = kernel.plan, self.cubins[kernel.name]
        given = [f"(int64_t){self.variables[a.buffer]}" for a in plan.arguments]
        given += [self.length(size) for size in (*plan.sizes, *plan.derived.values())]
        grid, values = (
            self.length(programs(plan, cubin.tiles)),
            f"(int64_t[]){{{', '.join(given)}}}",
        )
        self.lines += [
            f"    if (mc_launch(model, {cubin.number}, {grid},  // {kernel.name}",
            f"            {values}, {len(given)})) return 1;",
        ]

    def _operator(self, kernel: ExternKernel) -> None:
        hint = "write it with other operators, or export it for a CPU"
        raise Unsupported(f"a package for a GPU has no {kernel.op}: {kernel.reason}", hint=hint)

    def _result(self, number: int, output: Any) -> None:
        if isinstance(output, View) and not output.layout.is_contiguous():
            raise Unsupported(f"a package for a GPU gives rows without gaps, not {output.layout}")
        super()._result(number, output)
