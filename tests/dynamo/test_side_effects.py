"""What a frame changes outside of itself is changed after the graph ran: once, and as in eager."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import minicompile as mc
from tests.dynamo.helpers import compiled, equal, explained, graphs, lenient

x = torch.randn(3, 4)


class Thing:
    __slots__ = ("__dict__", "slot")

    def __init__(self) -> None:
        self.n, self.items, self.table, self.slot = 0, [1], {"q": 1}, 0


def slot(thing: Thing, a: torch.Tensor) -> Any:
    thing.slot += 1
    return a + thing.slot


def temporarily(thing: Thing, a: torch.Tensor) -> Any:
    before = thing.n
    thing.n = 9
    thing.extra = 1  # type: ignore[attr-defined]
    try:
        return a * thing.n
    finally:
        thing.n = before
        del thing.extra  # type: ignore[attr-defined]


@pytest.mark.parametrize("function", [slot, temporarily])
def test_writes_to_objects(function: Callable[..., Any]) -> None:
    ours, theirs = Thing(), Thing()
    run = compiled(function)
    for _ in range(3):
        assert equal(run(ours, x), function(theirs, x))
        assert equal(vars(ours), vars(theirs)) and ours.slot == theirs.slot


def test_what_ends_as_it_began_is_not_written_and_needs_no_second_graph() -> None:
    run = compiled(temporarily)
    thing = Thing()
    run(thing, x)
    run(thing, x)
    assert graphs(run) == 1 and explained(run).captures[0].side_effects == ()


@pytest.mark.parametrize("members", [{1, 2}, {2, 5}])
def test_a_set_that_is_changed_breaks_the_graph(members: set[int]) -> None:
    def function(seen: set[int], a: torch.Tensor) -> Any:
        seen.add(5)
        seen.discard(1)
        return a + 1, len(seen)

    seen, expected, run = set(members), set(members), lenient(function)
    assert equal(run(seen, x), function(expected, x))
    assert seen == expected
    assert len(explained(run).breaks) == (2 if 1 in members else 0)


def test_a_generator_left_inside_try_is_closed_where_it_is_dropped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def numbers() -> Any:
        try:
            yield 1
            yield 2
        finally:
            print("closed")

    def first(a: torch.Tensor) -> torch.Tensor:
        for number in numbers():  # noqa: B007
            break
        print("after")
        return a * number

    run = mc.compile(first, backend="eager")
    for _ in range(3):
        assert torch.equal(run(torch.ones(2)), torch.ones(2))
        assert capsys.readouterr().out == "closed\nafter\n"


class Holder:
    kept: Any
    other: Any

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)


MODE: Any = None


def set_global(holder: Holder) -> None:
    global MODE
    MODE = None


def set_item(holder: Holder) -> None:
    holder.__dict__["kept"] = None


def set_attribute(holder: Holder) -> None:
    holder.kept = None


def set_object(holder: Holder) -> None:
    holder.kept = holder.other


def set_back(holder: Holder) -> None:
    before = holder.kept
    holder.kept = 5
    holder.kept = before


def set_and_deleted(holder: Holder) -> None:
    holder.kept = 5
    del holder.kept


WRITERS = set_global, set_item, set_attribute, set_object, set_back, set_and_deleted


@pytest.mark.parametrize("fn", WRITERS)
def test_what_is_written_where_it_stood_already_is_written_where_it_does_not(
    fn: Callable[[Holder], None],
) -> None:
    global MODE
    thing = Thing()

    def function(holder: Holder, a: torch.Tensor) -> torch.Tensor:
        fn(holder)
        return a + 1

    values = None, thing, 3, None, "absent"
    for run, kept in [
        *product([compiled(function)], values),
        *product([compiled(function)], values[1:]),
    ]:
        holder, MODE = Holder(other=thing), kept
        if kept != "absent" or fn is set_back:
            holder.kept = kept
        expected = Holder(**vars(holder))
        fn(expected)
        wanted, MODE = MODE, kept
        run(holder, x)
        assert vars(holder) == vars(expected)
        assert MODE is wanted


def test_equal_items_of_another_type_are_written() -> None:
    def function(items: Any, a: torch.Tensor) -> torch.Tensor:
        items.append(items.pop(0))
        return a + 1

    run = compiled(function)
    for items in ([1], [True], [1, 2], [1.0], [1, True], [2, 2.0]):
        expected = [*items[1:], items[0]]
        run(items, x)
        assert list(map(repr, items)) == list(map(repr, expected))
