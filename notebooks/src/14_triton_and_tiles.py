# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 14 · And on a GPU?

# %% name="setup" tags=["setup"]
import importlib.util

import torch

import minicompile as mc
from minicompile.lessons.exercise import checks
from minicompile.lessons.gpu import on_gpu

check = checks("14")
if importlib.util.find_spec("triton") is None:
    print("Triton isn't installed here, and most cells of this lesson need it (Linux has it).")
else:
    import triton.language as tl


def row_softmax(x):
    return torch.softmax(x, dim=-1)


def gelu_bias(x, bias):
    return torch.nn.functional.gelu(x + bias)


# %% name="gpu-blocks" tags=["gpu"]
@on_gpu("14-blocks")
def blocks_measured() -> str:
    """A pointwise kernel with blocks of different sizes: what reaches the memory's speed?"""
    from triton.testing import do_bench

    from minicompile.runtime.triton import Tiles, load_kernel

    x, bias = torch.randn(4096, 8192, device="cuda"), torch.randn(8192, device="cuda")
    [kernel] = mc.trace(gelu_bias, x, bias).kernels
    out, expected = torch.empty_like(x), gelu_bias(x, bias)
    planned = kernel.plan.tiles["x"], kernel.plan.num_warps
    moved = kernel.plan.cost.bytes
    lines = [f"{kernel.name}, {moved / 2**20:.0f} MiB", "XBLOCK  warps  elements/thread    GB/s"]
    for block, warps in [
        (32, 1),
        (128, 4),
        (512, 16),
        (128, 1),
        (512, 4),
        (256, 1),
        (1024, 4),
        (4096, 4),
    ]:
        launch = load_kernel(kernel, Tiles(block, 1, warps))
        launch(x, bias, out)
        torch.testing.assert_close(out, expected)
        speed = moved / do_bench(lambda: launch(x, bias, out), return_mode="median") / 1e6
        mark = "  <- the plan's" if (block, warps) == planned else ""
        lines.append(f"{block:6} {warps:6} {block / (32 * warps):16g} {speed:7.0f}{mark}")
    eager = do_bench(lambda: gelu_bias(x, bias), return_mode="median")
    copied = 2 * x.nbytes / do_bench(lambda: out.copy_(x), return_mode="median") / 1e6
    lines.append(f"eager, two kernels: {moved / eager / 1e6:.0f} GB/s of the same bytes")
    return "\n".join([*lines, f"a copy of the tensor: {copied:.0f} GB/s"])


# %% name="gpu-tiles" tags=["gpu"]
@on_gpu("14-tiles")
def tiles_measured() -> str:
    """One softmax kernel with different tiles and warps: registers, spills, speed."""
    from triton.testing import do_bench

    from minicompile.runtime.assembly import cross_compile
    from minicompile.runtime.triton import Tiles, load_kernel

    x = torch.randn(8192, 8192, device="cuda")
    [kernel] = mc.trace(row_softmax, x).kernels
    out, expected = torch.empty_like(x), row_softmax(x)
    planned = kernel.plan.tiles["x"], kernel.plan.num_warps
    moved = kernel.plan.cost.bytes
    lines = [
        f"{kernel.name}, rows of 8192 held whole, {moved / 2**20:.0f} MiB",
        "rows  warps  registers  spilled    GB/s",
    ]
    for rows, warps in [(1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (2, 4), (2, 16), (4, 16)]:
        tiles = Tiles(rows, 8192, warps)
        assembly, launch = cross_compile(kernel, tiles=tiles), load_kernel(kernel, tiles)
        launch(x, out)
        torch.testing.assert_close(out, expected)
        speed = moved / do_bench(lambda: launch(x, out), return_mode="median") / 1e6
        mark = "  <- the plan's" if (rows, warps) == planned else ""
        used, spilled = assembly.registers, assembly.spilled_bytes
        lines.append(f"{rows:4} {warps:6} {used!s:>10} {spilled!s:>8} {speed:7.0f}{mark}")
    eager = do_bench(lambda: row_softmax(x), return_mode="median")
    return "\n".join([*lines, f"eager: {moved / eager / 1e6:.0f} GB/s"])


# %% name="gpu-sweeps" tags=["gpu"]
@on_gpu("14-sweeps")
def sweeps_measured() -> str:
    """Rows held whole against rows swept three times, for longer and longer rows."""
    from triton.testing import do_bench

    from minicompile.extension import plan_rule
    from minicompile.runtime.triton import load_kernel

    def speed(kernel, x):
        out = torch.empty_like(x)
        launch = load_kernel(kernel)
        launch(x, out)
        torch.testing.assert_close(out, row_softmax(x))
        milliseconds = do_bench(lambda: launch(x, out), return_mode="median")
        return kernel.plan.cost.bytes / milliseconds / 1e6

    lines = ["row length   held whole   swept   eager   (GB/s of one read and one write)"]
    for length in (256, 1024, 4096, 16384, 65536):
        x = torch.randn(2**26 // length, length, device="cuda")
        [planned] = mc.trace(row_softmax, x).kernels
        whole = f"{speed(planned, x):.0f}" if planned.plan.reduction == "persistent" else "too long"
        mc.reset()
        with mc.scoped():

            @plan_rule("triton:reduction")
            def always_swept(plan, options):
                """Leaves the plan's reduction as it begins: looped."""

            [looped] = mc.trace(row_softmax, x).kernels
        milliseconds = do_bench(lambda: row_softmax(x), return_mode="median")
        eager = planned.plan.cost.bytes / milliseconds / 1e6
        lines.append(f"{length:10} {whole:>12} {speed(looped, x):7.0f} {eager:7.0f}")
    return "\n".join(lines)
