"""The kernels of the patterns for GPUs at their full size, compiled for GPUs that needn't be here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import minicompile as mc
from minicompile.bench.patterns import ON_GPU, PATTERNS, shape_of
from minicompile.codegen.plan import KernelSource
from minicompile.debug.gpu_assembly import cross_compile

BF16, F32 = torch.bfloat16, torch.float32
SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Most bytes of a block, by compute capability."""


def kernels_of(name: str, dtype: torch.dtype) -> Iterator[KernelSource]:
    """What the generator writes for a pattern. Its tensors are never touched, so they cost nothing."""
    base, training = name.partition(",")[::2]
    made, pattern = [], PATTERNS[base]
    for given in pattern.make_inputs.args[0]:
        size = shape_of(given.dims, "gpu")
        made.append(torch.empty(size, dtype=torch.int64 if given.below else dtype))
        made[-1].requires_grad_(bool(training) and not (given.below or given.constant))
    trace = mc.trace(mc.compile(pattern.fn, options={"device_codegen": "triton"}), *made)
    for stages in trace.graphs.values():
        yield from stages.kernels


@pytest.mark.long
@pytest.mark.parametrize("name", ON_GPU)
def test_kernels_fit_their_gpus(name: str) -> None:
    """No spills: float32 on Ampere, bfloat16 on Hopper. A block finds its registers and shared memory, and
    16-byte accesses are there."""
    found = {sm: list(kernels_of(name, dtype)) for sm, dtype in ((80, F32), (90, BF16))}
    assert all(found.values())
    tried = [(kernel, sm) for sm, kernels in found.items() for kernel in kernels]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda pair: cross_compile(pair[0], ("cuda", pair[1])), tried))
    for (kernel, sm), assembly in zip(tried, made, strict=True):
        where, ptx, sass = (
            f"{kernel.name} on sm_{sm}",
            assembly.levels["ptx"],
            assembly.levels["sass"],
        )
        threads = 32 * assembly.tiles.num_warps
        assert assembly.spilled_bytes == 0, where
        assert assembly.registers and assembly.registers * threads <= 2**16, where
        assert assembly.shared_bytes <= SHARED[sm], where
        assert f".target sm_{sm}" in ptx and f".reqntid {threads}" in ptx, where
        assert re.search(r"\bLDG\.", sass) and re.search(r"\b(STG|RED|ATOMG)\.", sass), where
    wide = any(re.search(r"(LDG|STG)\.E\S*\.128", assembly.levels["sass"]) for assembly in made)
    assert wide or name == "argmax"  # of rows that begin anywhere


@pytest.mark.long
def test_many_tensors_in_one_sweep_do_not_spill() -> None:
    """Which are not loaded all at once, where a thread hasn't registers for them."""

    def fn(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = [tensors[0]]
        for tensor in tensors[1:]:
            sums.append(sums[-1] + tensor)
        return *sums, sums[-1] - sums[-1].mean(-1, keepdim=True)

    given = [torch.empty(512, 9000) for _ in range(40)]
    trace = mc.trace(mc.compile(fn, options={"device_codegen": "triton"}), *given)
    (kernel,) = trace.graphs["forward"].kernels
    assert kernel.plan.reduction != "persistent"
    assert cross_compile(kernel, ("cuda", 90)).spilled_bytes == 0


@pytest.mark.parametrize(
    "name", ["gelu_bias", "softmax_16k", "layer_norm, training", "transposed_add", "embedding_sum"]
)
def test_an_amd_gpu_has_a_listing_too(name: str) -> None:
    for kernel in kernels_of(name, BF16):
        assembly = cross_compile(kernel, ("hip", "gfx942"))
        listing = assembly.levels["amdgcn"]
        # LLVM names the system in Triton 3.9 ("amd-amdhsa-unknown-gfx942"), not before
        assert re.search(r"\.amdgcn_target \"\w[\w.]*-amd-amdhsa-(unknown)?-gfx942\"", listing)
        assert assembly.shared_bytes <= 64 * 1024
        # its warps have 64 lanes, a block at most 1,024 threads
        threads = 64 * assembly.tiles.num_warps
        assert threads <= 1024 and f".max_flat_workgroup_size: {threads}" in listing
        lines = zip(listing.splitlines(), assembly.kernel_lines("amdgcn"), strict=True)
        loads = {n for text, n in lines if re.search(r"\t(global|buffer)_load", text)}
        texts = {kernel.lines[n].text for n in loads if n is not None}
        # an assertion loads the address that it reports to; Triton 3.9 shows this at its line
        texts = {text for text in texts if "tl.device_assert" not in text}
        # what is loaded a tile ahead may be loaded where it is first used
        found = ["tl.load" in text for text in texts]
        assert all(found) and found
