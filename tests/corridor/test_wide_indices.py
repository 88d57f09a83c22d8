"""Index arithmetic beyond 2**31 with symbolic sizes: expanded tensors are large without much memory."""

from __future__ import annotations

import pytest
import torch

import minicompile as mc

FAR = 3_000_000_000
LINE = torch.zeros(1).expand(FAR)
ROWS = torch.arange(7.0)[:, None].expand(7, FAR)
CUBE = torch.arange(3.0)[:, None, None].expand(3, 70_000, 70_000)
FEW = torch.arange(33.0).reshape(11, 3)

PROGRAMS = {
    "positions times a number": (FEW, lambda x: torch.arange(x.shape[0]) * 1_000_000_000),
    "positions from far away": (
        FEW,
        lambda x: torch.arange(x.shape[0] * 10**9, x.shape[0] * 10**9 + 3),
    ),
    "positions times a size": (LINE, lambda x: torch.arange(4) * x.numel()),
    "compared with a size": (LINE, lambda x: torch.arange(4) * x.shape[0] > 2_500_000_000),
    "chosen by a size": (
        LINE,
        lambda x: torch.where(torch.arange(3) * x.shape[0] >= x.shape[0], x[-3:], x[:3] + 1),
    ),
    "the end of long rows": (ROWS, lambda x: x[:, -2:] * 2),
    "flat positions": (ROWS, lambda x: torch.arange(x.shape[0]) * x.shape[1] + x[:, 5].long()),
    "a loaded position": (
        ROWS,
        lambda x: x[torch.arange(2), torch.arange(2) + (x.shape[1] - 2)] + 1,
    ),
    "the end of a large plane": (CUBE, lambda x: x[:, -1, -4:].long() + x.shape[1] * x.shape[2]),
}


@pytest.mark.long
@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_positions_beyond_32_bits_are_right(name, language):
    x, f = PROGRAMS[name]
    compiled = mc.compile(
        f, dynamic=True, fullgraph=True, options={"device_codegen": language, "recompile_limit": 1}
    )
    torch.testing.assert_close(compiled(x), f(x), rtol=0, atol=0)


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_kernels_compiled_for_a_small_size_are_right_at_a_large_one(language):
    def f(x):
        return torch.arange(x.shape[1] - 2, x.shape[1]) * 3 + x[:, -2:].long()

    limit = 2 if language == "triton" else 1  # a guard holds as long as int32 does
    options = {"device_codegen": language, "recompile_limit": limit}
    compiled = mc.compile(f, dynamic=True, fullgraph=True, options=options)
    for size in (5, 2**31 - 1, 2**31 + 5, FAR):
        x = torch.arange(7.0)[:, None].expand(7, size)
        torch.testing.assert_close(compiled(x), f(x), rtol=0, atol=0)
