"""What lessons show of kernels: their instructions, the cache lines they fetch, their launches replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.lessons.assembly import cpp_assembly, explore_assembly
from minicompile.lessons.cache import lines_fetched
from minicompile.lessons.replay import launching
from minicompile.ops.display import to_html


def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * y + 1)


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w) @ w


def test_instructions_are_linked_to_the_lines_of_their_kernel():
    trace = mc.trace(scaled, torch.randn(8, 256), torch.randn(256))
    found = cpp_assembly(trace.kernels[0])
    lines = [trace.kernels[0].lines[i.line].text for i in found.instructions if i.line is not None]
    assert any("tmp0 * tmp1" in line for line in lines)
    assert found.counts()["packed"] > 0 and found.widest >= 16
    assert len(found.kernel_lines("asm")) == len(found.levels["asm"].splitlines())
    assert "lit" in to_html(found)
    explorer = explore_assembly(trace)
    assert explorer.pane("asm").lines == len(found.instructions)
    assert "cpp_fused_mul_add_relu_0" in to_html(explorer)


def test_squares_fetch_fewer_lines_than_rows_of_a_transpose():
    a, b = torch.randn(64, 1024), torch.randn(1024, 64)
    plan = mc.trace(lambda a, b: a + b.t(), a, b).plans[0]
    squares = lines_fetched(plan)
    plan.tiles = {}
    assert squares < lines_fetched(plan) / 3
    straight = mc.trace(scaled, a, a).plans[0]
    with pytest.raises(ValueError, match="values to unpack"):
        lines_fetched(straight)


def test_launches_of_a_graph_go_through_the_given_function():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    run, done = launching(mc.trace(chain, x, w)), []

    def do(function: Any, *args: Any, **named: Any) -> Any:
        done.append(function)
        return function(*args, **named)

    (result,) = run([x, w], do)
    torch.testing.assert_close(result, chain(x, w))
    assert [getattr(f, "__name__", "kernel") for f in done] == ["mm", "kernel", "mm"]
