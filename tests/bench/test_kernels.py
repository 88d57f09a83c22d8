"""Counting kernels by one rule for both compilers, and what the command makes of the counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import minicompile
from minicompile.bench.patterns import PATTERNS
from minicompile.errors import MinicompileError
from minicompile.shapes.expr import loop_symbol
from tests.bench import kernels
from tests.bench.kernels import Counts, Row, Touch, bytes_moved, loop_nests

pytestmark = pytest.mark.long

X, Y = loop_symbol("x"), loop_symbol("y")
LOOPS = {X: 8, Y: 100}

NESTED = """
int64_t kernel(float* a, float* b) {
    #pragma omp parallel for
    for (int64_t x = 0; x < 8; x++) {
        float tmp = mc_row_sum(a + 100*x, 100);
        for (int64_t y = 0; y < 100; y++) { a[y + 100*x] = tmp; }
        if (x) { b[x] = 0; }
    }
    return 0;
}
"""


@pytest.mark.parametrize(
    ("text", "nests"),
    [
        (NESTED, 1),
        (NESTED + NESTED.replace("kernel", "other"), 2),
        ("{ for (;;) a(); for (;;) for (;;) { b(); } c(); }", 2),
        ("float total = mc_row_sum(in_ptr0, 4096);", 1),
        ("{ if (small) { for (;;) { a(); } } else { for (;;) { b(); } } }", 2),
        (
            "{ for (int i = 0; i < n; i++)\n\n    { { a(); } { for (;;) { b(); } } }\n for (;;) {} }",
            2,
        ),
        ("int before(int fork) { return fork(2); }", 0),
    ],
)
def test_a_loop_nest_is_a_loop_in_no_other(text: str, nests: int):
    assert loop_nests(text) == nests


def touch(buffer: str, index: Any, written: bool = False, loops: Any = LOOPS) -> Touch:
    return Touch(buffer, written, index, loops, 800, 4)


@pytest.mark.parametrize(
    ("touches", "elements"),
    [
        ([touch("a", 100 * X + Y)], 800),
        ([touch("a", 100 * X + Y), touch("a", X + 8 * Y)], 800),  # the same elements
        ([touch("a", 100 * X + Y), touch("a", 100 * X + Y, written=True)], 1600),
        ([touch("a", X), touch("a", X + 8)], 16),
        ([touch("a", X), touch("b", X)], 16),
        ([touch("a", None, loops=None)], 800),  # a library call
        ([touch("a", None, loops={X: 8})], 8),  # places known only at run time
        ([touch("a", None, loops={X: 8000})], 800),
        ([touch("a", loop_symbol("loaded") + Y)], 800),
    ],
)
def test_bytes_are_those_of_distinct_elements(touches: list[Touch], elements: int):
    assert bytes_moved(touches) == 4 * elements


def traced(name: str, **options: Any) -> minicompile.pipeline_result.Trace:
    pattern = PATTERNS[name]
    compiled = minicompile.compile(pattern.fn, dynamic=False, options=options)
    return minicompile.trace(compiled, *pattern.make_inputs("cpu", torch.float32, "small"))


def test_without_fusion_more_is_counted():
    apart, fused = (kernels.count_ours(traced("softmax", fusion=on), 0) for on in (False, True))
    assert (fused.nests, fused.bytes) == (1, 2 * 4 * 2 * 2 * 16 * 16)
    assert apart.nests > 1 and apart.bytes > fused.bytes


def test_results_copied_into_inputs_are_counted():
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        x.copy_(y.t())

    x, y = torch.randn(8, 4), torch.randn(4, 8)
    found = kernels.count_ours(minicompile.trace(step, x, y), 1)
    assert found.nests >= 1 and found.bytes >= 2 * 4 * 32


@pytest.mark.parametrize(("extra", "code"), [(0, 0), (1, 1)])
def test_the_command_fails_where_more_is_needed(
    extra: int, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    def measure(name: str, device: str) -> Row:
        return Row(name, 0.0, Counts(2 + extra, 8, 1), Counts(2, 8))

    monkeypatch.setattr(kernels, "measure", measure)
    file = tmp_path / "found.json"
    given = ["softmax", "rope", "--json", str(file)]
    assert kernels.run(kernels.arguments(given)) == code
    assert f"{2 - 2 * extra} of 2" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [row["ours"]["nests"] for row in found["patterns"]] == [2 + extra] * 2


def test_a_pattern_that_fails_or_is_wrong_does_not_win():
    right, more = Counts(1, 8, 1), Counts(2, 8)
    assert Row("a", 0.0, right, more).wins(False)
    assert not Row("a", 0.0, right, more, "IndexError").wins(False)
    assert not Row("a", 1.0, right, more).wins(False)
    assert not Row("a", float("nan"), right, more).wins(False)
    assert not Row("a", 0.0, right, Counts(2, 7)).wins(False)
    with pytest.raises(MinicompileError, match="no pattern 'sofmax'"):
        kernels.run(kernels.arguments(["sofmax"]))
