"""Scans in C++ and Triton give eager's values: rows, columns, long rows, fused neighbours, training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import minicompile as mc
from minicompile.debug.gpu_assembly import cross_compile
from tests.codegen.fusing import Program
from tests.codegen.triton_running import source_of
from tests.comparing import assert_same

F32, F64, BF16, I64 = torch.float32, torch.float64, torch.bfloat16, torch.int64
LANGUAGES = pytest.mark.parametrize("language", ["cpp", "triton"])
INF, NAN = math.inf, math.nan


def special(*size: int) -> Tensor:
    """Ties, NaN, infinities and signed zeros, along the rows and the columns."""
    x = (torch.randn(size, generator=torch.Generator().manual_seed(size[-1])) * 4).round() / 4
    x[1] = -INF
    x[2, size[1] // 2] = NAN
    x[3, size[1] // 3 :: 2] = INF
    x[4] = torch.tensor([0.0, -0.0]).repeat(size[1])[: size[1]]
    return x


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda x: x.cumsum(-1),
    "product": lambda x: (x / 4).cumprod(1),
    "product of columns": lambda x: (x / 4).cumprod(0),
    "integers": lambda x: [i.cumsum(1) for i in _integers(x)] + [_integers(x)[0].cumprod(0)],
    "bools": lambda x: (x > 0).cumsum(1),
    "before and after": lambda x: (x.exp().cumsum(1) + x).tanh(),
    "softmax": lambda x: x.softmax(1).cumsum(1),
    "shares": lambda x: (lambda c: c / c.sum(1, keepdim=True))(x.abs().cumsum(1)),
    "twice": lambda x: x.cumsum(1).exp().cumsum(1),
    "both ways": lambda x: x.cumsum(1).cumsum(0),
    "from the end": lambda x: x.flip(1).cumsum(1).flip(1),
    "turned": lambda x: x.t().cumsum(1) + x.t(),
    "repeated": lambda x: x[:1].expand(3, x.shape[1]).cumsum(0),
    "ones": lambda x: torch.ones_like(x).cumsum(1),
}


def _integers(x: Tensor) -> list[Tensor]:
    whole = x.nan_to_num(0, 3, -3).long()
    return [whole, whole.to(torch.int32), whole.abs().to(torch.uint8)]


@pytest.mark.long
@LANGUAGES
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_scans_equal_eager(name: str, language: str) -> None:
    fn = PROGRAMS[name]
    compiled = mc.compile(fn, fullgraph=True, options={"device_codegen": language})
    x = special(6, 40)
    for given in (x, x.double(), special(40, 6).t()):
        assert_same(compiled(given), fn(given))
    assert not mc.trace(compiled, x).loops.externs


@LANGUAGES
@pytest.mark.parametrize("name", ["sum", "product of columns"])
def test_half_types_round_where_eager_does(name: str, language: str) -> None:
    fn = PROGRAMS[name]
    compiled = mc.compile(fn, fullgraph=True, options={"device_codegen": language})
    for dtype in (BF16, torch.float16):
        x = special(6, 40).to(dtype)
        assert_same(compiled(x), fn(x), rtol=1e-2, atol=1e-2)


def test_long_rows_have_eagers_digits_in_cpp() -> None:
    compiled = mc.compile(lambda x: [x.cumsum(0), x.cumprod(0)], fullgraph=True)
    for dtype in (F32, F64, BF16, torch.float16):
        x = torch.full((50_000,), 1.1).to(dtype)
        assert_same(compiled(x), [x.cumsum(0), x.cumprod(0)], rtol=0, atol=0)


@pytest.mark.long
@LANGUAGES
@pytest.mark.parametrize("dim", [0, 1])
def test_one_version_serves_many_sizes(language: str, dim: int) -> None:
    def fn(x: Tensor) -> Any:
        shares = x.softmax(1).cumsum(1) * 2
        return shares, x.cumsum(0).sum(0), x.cumprod(dim).exp()

    options = {"device_codegen": language, "recompile_limit": 1}
    compiled = mc.compile(fn, fullgraph=True, dynamic=True, options=options)
    for size in ((7, 30), (5, 300), (300, 6), (2, 3)):
        x = torch.randn(size)
        assert_same(compiled(x), fn(x))


@pytest.mark.long
@LANGUAGES
def test_training_through_scans(language: str) -> None:
    def fn(x: Tensor) -> Tensor:
        a = x.cumsum(1) * x.cumprod(0)
        b = x.cumprod(1) + x.cumsum(0)
        return (a.tanh() * b + x.cumsum(-1).sin()).sum(0)

    compiled = mc.compile(fn, fullgraph=True, options={"device_codegen": language})
    x, weight = torch.randn(6, 9), torch.randn(9)
    found, want = (x.clone().requires_grad_() for _ in range(2))
    (compiled(found) * weight).sum().backward()
    (fn(want) * weight).sum().backward()
    torch.testing.assert_close(found.grad, want.grad, atol=1e-5, rtol=1e-4)


def test_a_long_row_is_scanned_by_one_thread() -> None:
    def fn(x: Tensor) -> Any:
        total = x.cumsum(0)
        return total, total.amax(), x.cumprod(0)

    compiled = mc.compile(fn, fullgraph=True)
    x = torch.randn(200_000)
    assert_same(compiled(x), fn(x))
    wide = torch.randn(3000, 16)
    assert_same(compiled(wide), fn(wide))


@pytest.mark.long
@pytest.mark.parametrize("length", [512, 100_000])
@pytest.mark.parametrize("dtype", [F32, I64], ids=str)
def test_triton_compiles_them_for_a_gpu(length: int, dtype: torch.dtype) -> None:
    p = Program()
    p.input("x", (64, length), dtype)
    for kind in ("sum", "prod"):
        load = lambda ops, i: ops.load("x", length * i[0] + i[1])  # noqa: E731
        p.scan(kind, (64, length), 1, kind, load, dtype)
    source = source_of(p)
    assert source.plan.reduction == ("persistent" if length == 512 else "looped")
    assembly = cross_compile(source)
    assert assembly.binary.startswith(b"\x7fELF") and "shfl" in assembly.levels["ptx"]
