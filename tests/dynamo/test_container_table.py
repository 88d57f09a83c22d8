"""Containers of the caller and of the frame behave as in Python, whatever is done to them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import minicompile as mc
from tests.dynamo.container_table import KINDS, cells, chosen
from tests.dynamo.helpers import explained

counts: Counter[str] = Counter()
"""Cells that ran, and how."""


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_operations_do_what_python_does(kind: str) -> None:
    for cell, theirs in chosen(kind):
        compiled: list[Any] = []

        def wrap(function: Any, compiled: list[Any] = compiled) -> Any:
            compiled.append(mc.compile(function, backend="eager"))
            return compiled[0]

        assert list(cell.shown(wrap)) == theirs, cell
        raises = theirs[0][2][0][0] == "str"
        breaks = explained(compiled[0]).breaks
        assert not any(stop.id == "internal-error" for stop in breaks), cell
        counts["cells"] += 1
        counts["answers"] += not raises
        counts["without a break"] += not raises and not breaks
        mc.reset()


def test_the_table_is_large_and_mostly_compiled() -> None:
    """After the others of this file in one process: they fill the counts."""
    if counts["cells"] and len(KINDS) * 20 < counts["cells"]:
        print(dict(counts))
        assert counts["without a break"] > 0.65 * counts["answers"]
    assert sum(1 for kind in KINDS for _ in cells(kind)) > 7000
    assert sum(1 for kind in KINDS for _ in chosen(kind)) >= 2000


@pytest.mark.parametrize("kind", ["list", "Scaled", "OrderedDict", "Tags", "deque"])
def test_a_lost_write_would_be_noticed(kind: str) -> None:
    """A program that works on a copy shows something else in some cells."""

    def on_copies(function: Any) -> Any:
        def run(x: Any, c: Any, box: Any, table: Any, other: Any) -> Any:
            return function(x, KINDS[kind](), box, table, other)

        return run

    assert any(list(cell.shown(on_copies)) != theirs for cell, theirs in chosen(kind))
