"""The picture of the operator levels: one row a source line, one column a level."""

from __future__ import annotations

import torch
from torch.nn import functional as F

import minicompile as mc
from minicompile.lessons.levels import fall


def test_a_line_falls_through_the_levels() -> None:
    def activate(x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)

    shown = fall(mc.trace(mc.compile(activate, backend="aot_eager"), torch.randn(4)))
    assert str(shown).splitlines()[1:] == [
        "return F.silu(x)",
        "  Full ATen  1: silu",
        "  Core ATen  2: sigmoid mul",
        "  Prims      2: sigmoid mul",
    ]
    assert "sigmoid</span>" in shown._repr_mimebundle_()["text/html"]
