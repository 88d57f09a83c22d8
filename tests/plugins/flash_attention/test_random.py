"""Random attention through the template of kernels; the long run is `python -m tests.fuzz attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from minicompile.plugins.flash_attention import kernels
from minicompile.plugins.flash_attention.recognise import EarlierWrites
from tests.plugins.flash_attention.programs import wrong

pytest.importorskip("triton")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_random_attention_is_right(seed: int) -> None:
    assert wrong(seed) == ""


def all_whole(
    other: int, low: Any, high: Any, ends_of: Callable[..., list[str]] = kernels.ends_of
) -> list[str]:
    """Tiles at the band's edges are not masked."""
    begin, _, _, end = ends_of(other, low, high)
    return [begin, "left = 0", f"right = {other}", end]


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "edges": (kernels, "ends_of", all_whole),
    "write": (EarlierWrites, "spare", lambda self, node: True),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_would_be_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MISTAKES[name])
    assert any(map(wrong, range(60)))
