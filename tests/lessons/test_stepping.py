"""A capture, one instruction a slide."""

from __future__ import annotations

import re

import torch

from minicompile.dynamo.world import World
from minicompile.lessons.stepping import bytecode_steps
from minicompile.ops.display import to_html


def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2


def test_each_instruction_is_a_slide_with_the_stack_and_the_graph_after_it():
    step = World.step
    *_, before, text, _ = str(bytecode_steps(doubled, torch.ones(3))).split("\n--- ")
    assert re.match(r"\d+ BINARY_OP \*: return torch.relu\(x\) \* 2\n", text)
    assert "\u25b6 BINARY_OP *" in text and "mul: f32[3]" in text
    assert "mul = operator.mul(relu, 2)" in text and "mul" not in before
    assert World.step is step


def test_a_capture_is_shown_with_a_slider_and_columns():
    page = to_html(bytecode_steps(doubled, torch.ones(3)))
    assert "capture of doubled" in page and "font-family:monospace" in page
