"""Every line of GPT-2's training that computes, loads or stores leads back to source; so do PTX and SASS."""

from __future__ import annotations

from collections import Counter

import pytest

from minicompile.pipeline_result import Trace
from tests.bench.origins import assemblies, instructions, kernels, kinds, training

pytestmark = pytest.mark.long

pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["cpp", "triton"])
def trace(request) -> Trace:
    return training(request.param, layers=1)


def test_every_line_of_gpt2s_training_that_computes_has_origins(trace):
    found = kinds(line for kernel in kernels(trace) for line in kernel.lines)
    assert found["with origins"] > 300 and found["without"] == 0
    for stages in trace.graphs.values():
        assert kinds(stages.wrapper.lines)["without"] == 0


def test_few_instructions_have_no_kernel_line(trace):
    sources = [kernel for kernel in kernels(trace) if kernel.language == "triton"]
    if not sources:
        pytest.skip("C++ kernels")
    pytest.importorskip("triton")
    totals = {"ptx": Counter[str](), "sass": Counter[str]()}
    for assembly in assemblies(sources[::6]):
        for level in totals.keys() & assembly.levels.keys():
            totals[level] += instructions(assembly, level)
    for level, found in totals.items():
        if found or level == "ptx":
            named = found["with origins"] + found["scaffold"]
            assert named >= 0.95 * (named + found["without"]), (level, found)
            assert found["line 0"] <= 0.1 * named  # where the line table has none
