"""The story of memory: versions of each storage, and what each value shows of it."""

from __future__ import annotations

import torch

import minicompile as mc
from minicompile.lessons.storages import memory_story


def test_a_write_through_a_view_is_a_new_version_of_the_whole_memory() -> None:
    def double_left(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[:, :1].mul_(2)
        return y + 1

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    story = memory_story(mc.trace(double_left, x), x)
    _, _, written = str(story).partition("a write")
    assert "mul_" in written
    assert written.splitlines()[2:5] == [
        "  x, version 0: 1 2 3 4",
        "  clone, version 0: 1 2 3 4",
        "  clone, version 1: 2 2 6 4",
    ]
    assert x.tolist() == [[1, 2], [3, 4]]
    assert "version 1" in story._repr_mimebundle_()["text/html"]
