"""gcc shares loops among torch's threads."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import minicompile as mc
from minicompile.ops import toolchain
from minicompile.ops.build import Module, start_build
from minicompile.options import Options

SOURCE = """
#include <stdint.h>
int omp_get_thread_num(void);
void one(int64_t* out, int64_t n, int64_t least) {
    #pragma omp parallel for if(parallel: n > least)
    for (int64_t i = 0; i < n; i++) out[i] += 1 + omp_get_thread_num();
}
"""


@pytest.fixture(scope="module", params=["g++", "clang++"])
def compiler(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if shutil.which(name) is None:
        pytest.skip(f"no {name} here")
    return name


@pytest.fixture(scope="module")
def library(compiler: str) -> Module:
    if "-fopenmp-simd" in toolchain.find_compiler(Options(cpp_compiler=compiler)).flags:
        pytest.skip("clang's code runs on one thread")
    return start_build(SOURCE, Options(cpp_compiler=compiler)).result()


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 100])
def test_each_iteration_is_done_once_by_the_threads_that_torch_was_given(
    library: Module, threads: int, n: int
) -> None:
    out = torch.zeros(n, dtype=torch.int64)
    library.one(ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(n), ctypes.c_int64(2))
    share, longer = divmod(n, threads)
    expected = [1 + i for i in range(threads) for _ in range(share + (i < longer))]
    assert out.tolist() == (expected if n > 2 else [1] * n)


def test_compiled_functions_agree_with_eager(compiler: str, threads: int, tmp_path: Path) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = torch.softmax(x * y, -1)
        return z, z.double().amax(-1) - y.double().amax(0).sum(), x.t() + 1, (x > y).any(0)

    x, y = torch.randn(200, 300), torch.randn(200, 300)
    y[:, 5] = float("-inf")
    y[7] = float("nan")
    options = {"cpp_compiler": compiler}
    torch.testing.assert_close(
        mc.compile(function, fullgraph=True, options=options)(x, y),
        function(x, y),
        equal_nan=True,
    )
