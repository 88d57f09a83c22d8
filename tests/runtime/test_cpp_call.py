"""Calling a C kernel from Python, with the extension module and with ctypes."""

from __future__ import annotations

import gc
import struct
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minicompile.codegen.cpp_units import kernel_module
from minicompile.codegen.plan import KernelPlan
from minicompile.ops import build
from minicompile.ops.build import Module, load_extension, start_build
from minicompile.options import Options
from minicompile.runtime import cpp
from minicompile.runtime.cpp import FAST_CALL, bind, bind_ctypes
from minicompile.shapes.expr import float_symbol, size_symbol
from tests.codegen.fusing import Program

I64 = torch.int64


def gather() -> KernelPlan:
    """out[i] = x[index[i]] for s0 indices."""
    s0 = size_symbol("s0")
    p = Program(hints={s0: 8})
    p.input("x", (5,))
    p.input("index", (s0,), I64)
    load = lambda ops, i: ops.load("x", ops.indirect_indexing(ops.load("index", i[0]), 5))  # noqa: E731
    p.pointwise("out", (s0,), load)
    return p.plan()


@pytest.fixture(scope="module", params=[bind, bind_ctypes])
def kernel(request: Any) -> Callable[..., None]:
    plan = gather()
    text = kernel_module([plan]).text
    found: Callable[..., None] = request.param(start_build(text, Options()).result(), plan)
    return found


X = torch.arange(5.0)


def test_tensors_come_first_and_sizes_after(kernel: Any) -> None:
    out = torch.empty(3)
    assert kernel(torch.tensor([4, 0, -1]), X, out, 3) is None
    assert out.tolist() == [4.0, 0.0, 4.0]


def test_an_error_code_becomes_an_exception_and_the_next_call_works(kernel: Any) -> None:
    with pytest.raises(IndexError, match="out of range"):
        kernel(torch.tensor([9]), X, torch.empty(1), 1)
    out = torch.empty(1)
    kernel(torch.tensor([2]), X, out, 1)
    assert out.item() == 2.0


@pytest.mark.parametrize("how", [bind, bind_ctypes])
def test_floats_follow_the_sizes_bit_by_bit(how: Any) -> None:
    s0, f0, f1 = size_symbol("s0"), float_symbol("f0"), float_symbol("f1")
    p = Program(hints={s0: 8, f0: 0.5, f1: 0.5})
    p.pointwise(
        "out",
        (s0,),
        lambda ops, i: ops.sub(
            ops.index_expr(f0, torch.float64), ops.index_expr(f1, torch.float64)
        ),
        torch.float64,
    )
    plan = p.plan()
    kernel = how(start_build(kernel_module([plan]).text, Options()).result(), plan)
    out = torch.empty(3, dtype=torch.float64)
    for a, b in ((0.1, 0.3), (float("nan"), 1.0), (-1.0, 1e300), (float("inf"), -0.0)):
        kernel(out, 3, a, b)
        torch.testing.assert_close(out, torch.full_like(out, a - b), rtol=0, atol=0, equal_nan=True)
    with pytest.raises((TypeError, struct.error)):
        kernel(out, 3, 0.1, "0.3")


def test_kernels_run_in_several_threads(kernel: Any) -> None:
    outs = [torch.empty(1000) for _ in range(4)]
    index = torch.arange(1000) % 5
    threads = [threading.Thread(target=kernel, args=(index, X, out, 1000)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, X[index]) for out in outs)


def test_without_headers_ctypes_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    options = Options(cache_dir=str(tmp_path))
    monkeypatch.setattr(build, "start_extension", build.start_extension.__wrapped__)
    without = load_extension.__wrapped__
    assert without(FAST_CALL) is None
    monkeypatch.setattr(cpp, "load_extension", without)
    plan = gather()
    text = kernel_module([plan]).text
    out = torch.empty(1)
    bind(start_build(text, options).result(), plan)(torch.tensor([3]), X, out, 1)
    assert out.item() == 3.0


def test_a_released_kernel_leaves_nothing_behind() -> None:
    plan = gather()
    text = kernel_module([plan]).text
    module: Module = start_build(text, Options()).result()
    before = sys.getrefcount(plan)
    for _ in range(100):
        bind(module, plan)
    gc.collect()
    assert sys.getrefcount(plan) <= before + 1
