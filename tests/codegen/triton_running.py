"""Printing and running a program's kernel, interpreted on CPU tensors or compiled on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from minicompile.codegen.plan import KernelPlan, KernelSource
from minicompile.codegen.triton import print_triton
from minicompile.runtime.gpu_kernel import Tiles
from minicompile.runtime.triton import load_kernel
from tests.codegen.fusing import Program

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
        ],
    ),
]

devices = pytest.mark.parametrize("device", DEVICES)


def source_of(p: Program, internal: Sequence[str] = (), device: str = "cpu") -> KernelSource:
    plan = p.plan(internal, language="triton")
    if device == "cuda":
        plan.device = torch.device("cuda", 0)
    return print_triton(plan)


def call(
    source: KernelSource,
    tensors: dict[str, torch.Tensor],
    sizes: dict[str, int] | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Load the kernel and run it on tensors by buffer name."""
    plan: KernelPlan = source.plan
    arguments: list[Any] = [tensors[a.buffer] for a in plan.arguments]
    arguments += [(sizes or {})[str(s)] for s in plan.sizes]
    load_kernel(source, tiles)(*arguments)


def empty_outputs(p: Program, device: str = "cpu") -> dict[str, torch.Tensor]:
    """A tensor for each computed buffer of static size, filled with a value that no test expects."""
    made = {}
    for buffer in p.schedule().graph.operations:
        layout = buffer.layout
        made[buffer.name] = torch.full(layout.size, 77, dtype=layout.dtype, device=device)
    return made


def run(
    p: Program,
    inputs: dict[str, torch.Tensor],
    internal: Sequence[str] = (),
    device: str = "cpu",
    tiles: Tiles | None = None,
) -> dict[str, torch.Tensor]:
    """Run a program of static sizes; gives every computed buffer that reaches memory."""
    source = source_of(p, internal, device)
    tensors = {name: t.to(device) for name, t in inputs.items()}
    outputs = empty_outputs(p, device)
    call(source, {**outputs, **tensors}, None, tiles)
    return {name: t for name, t in outputs.items() if name not in internal}
