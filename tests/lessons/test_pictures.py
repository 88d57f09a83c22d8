"""Pictures of the lessons."""

from __future__ import annotations

import torch

import minicompile as mc
from minicompile.lessons.pictures import Walk
from minicompile.ops.display import to_html


def test_a_walk_lists_addresses_in_the_order_of_the_loops() -> None:
    trace = mc.trace(lambda x: x.t().reshape(6) + 1, torch.zeros(2, 3))
    walk = Walk(trace.schedule.before[0].body)
    assert str(walk).splitlines()[1:] == [
        "load x[(p0 // 2) + 3*(p0 % 2)]: 0 3 1 4 2 5",
        "store buf0[p0]: 0 1 2 3 4 5",
    ]
    assert "strided" in to_html(walk)
