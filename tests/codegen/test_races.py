"""No thread of a C++ kernel writes where others do: the observer "races" of `tests/conftest.py` looks at the
kernels of every test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.codegen import cpp_units
from minicompile.codegen.plan import KernelModule
from minicompile.extension import code_generator, scoped
from tests.codegen.races import loop_nests, shared_writes

SAFE = """
#pragma omp parallel for collapse(2) if(parallel)
for (int64_t x0 = 0; x0 < 8; x0++) {
    for (int64_t x1_start = 0; x1_start < 64; x1_start += 16) {
        float tmp0_tile[16];
        for (int64_t x1 = x1_start; x1 < x1_start + 16; x1++) {
            tmp0_tile[x1 - x1_start] = in_ptr0[x1];
            out_ptr0[64*x0 + x1] = tmp0_tile[x1 - x1_start];
        }
    }
}
total = 0;
"""

WRITES = {
    "out_ptr0[64*x0 + x1] =": "out_ptr0[j] =",
    "float tmp0_tile[16];": "tmp1 = 0;",
    "float tmp0_tile[16]": "tmp1_tile[0] = 1",
}


def test_writes_to_what_threads_share_are_seen() -> None:
    assert shared_writes(SAFE) == []
    for old, new in WRITES.items():
        assert len(shared_writes(SAFE.replace(old, new))) >= 1


def test_what_a_region_declares_belongs_to_a_thread() -> None:
    region = "#pragma omp parallel\n{\nfloat* __restrict row = f();\n#pragma omp for nowait\n"
    loop = "for (int64_t x0 = 0; x0 < 8; x0++) {\nrow[0] = 1;\nsum += row[0];\n}\n}\n"
    assert [line.split(": ")[1] for line in shared_writes(region + loop)] == ["sum += row[0];"]
    assert shared_writes(region.replace("nowait", "reduction(+:sum)") + loop) == []


def test_kernels_of_every_test_are_watched(races: list[str]) -> None:
    def misprint(plans: Any) -> KernelModule:
        module = cpp_units.kernel_module(plans)
        for kernel in module.kernels:
            kernel.lines = [
                replace(k, text=k.text.replace("[x0] =", "[0] =")) for k in kernel.lines
            ]
        return module

    with scoped():
        code_generator("cpp")(misprint)
        mc.compile(torch.sin)(torch.rand(100_000))
    assert races
    races.clear()


@pytest.mark.parametrize(
    ("text", "nests"),
    [
        ("for (;;) { float t = mc_row_sum(a, 100); for (;;) { a(); } } mc_row_sum(b, 9);", 2),
        ("{ for (;;) a(); for (;;) for (;;) { b(); } c(); }", 2),
        ("{ if (small) { for (;;) { a(); } } else { for (;;) { b(); } } }", 2),
        ("int before(int fork) { return fork(2); }", 0),
    ],
)
def test_a_loop_nest_is_a_loop_in_no_other(text: str, nests: int):
    assert loop_nests(text) == nests
