"""Kernels of answers run again: in a process of their own, on numbers that no answer has seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from minicompile.lessons.confine import landlock_version
from minicompile.lessons.exercise import Run, Wrong

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

HEAD = "#include <stdint.h>\n#include <stdio.h>\n"
TWICE = (
    HEAD
    + """int64_t twice(const float* x, float* y) {
    for (int i = 0; i < 6; i++) y[i] = 2 * x[i];
    return 0;
}"""
)
READS = (
    HEAD
    + """int64_t twice(const float* x, float* y) {
    for (int i = 0; i < 6; i++) y[i] = 2 * x[i];
    FILE* file = fopen("PATH", "r");
    if (file) y[0] = 7;
    return 0;
}"""
)


def rerun(text: str) -> None:
    Run([]).rerun((text, "twice"), lambda x: 2 * x, [torch.ones(2, 3)], "twice(x)")


def test_a_kernel_that_computes_what_it_should_passes():
    rerun(TWICE)


@pytest.mark.parametrize(
    "text, got",
    [
        (TWICE.replace("2 *", "3 *"), r"got float32\[2, 3\]"),
        (TWICE.replace("2 * x[i]", "i"), r"got float32\[2, 3\]"),  # numbers of another run
        (TWICE.replace("x[i]", "lost(x[i])"), "got no result: .*undefined symbol: lost"),
        (TWICE.replace("return 0", "*(int*)0 = 1"), "got no result: exit code -11"),
        ("int main", "got no result: "),
    ],
)
def test_another_kernel_is_wrong_though_eager_code_would_step_in_for_it(text: str, got: str):
    with pytest.raises(
        Wrong, match=r"twice\(x\), its kernel run again.*: expected float32.*" + got
    ):
        rerun(text)


@pytest.mark.skipif(not landlock_version(), reason="a Linux without Landlock")
def test_a_kernel_that_runs_again_reads_no_file_of_the_user(tmp_path: Path):
    (tmp_path / "secret").write_text("x")
    rerun(READS.replace("PATH", str(tmp_path / "secret")))
