"""Methods of `type` read through a class, and frames whose guards change while they are captured."""

from __future__ import annotations

import abc
import enum
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile as mc
from tests.dynamo.helpers import compiled, dispatcher, explained, lenient

x = torch.ones(2, 3)


class Base:
    pass


class Derived(Base):
    pass


class Abstract(abc.ABC):
    @abc.abstractmethod
    def size(self) -> int: ...


class Concrete(Abstract):
    def size(self) -> int:
        return 1


class Colour(enum.Enum):
    RED = 1


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "mro": lambda a: a + len(Derived.mro()),
    "mro of an enum": lambda a: a + len(Colour.mro()),
    "mro by getattr": lambda a: a + len(getattr(Derived, "mro")()),  # noqa: B009
    "instance check": lambda a: a + int(Base.__instancecheck__(Derived())),
    "instance check of a size": lambda a: a + int(int.__instancecheck__(a.shape[0])),
    "instance check of a tensor": lambda a: (a + 1, torch.Tensor.__instancecheck__(a)),
    "instance check of an abstract class": lambda a: a + int(Abstract.__instancecheck__(Concrete())),
    "a method is kept and called": lambda a: a + len((lambda read: read())(Base.mro)),
    "a method is returned": lambda a: (a + 1, Base.mro),
    "a method of an object of C is returned": lambda a: (a + 1, [].append, "a".upper),
    "prepare": lambda a: (a + 1, type.__prepare__("name", ())),
}  # fmt: skip


ADDRESS = re.compile(" at 0x[0-9a-f]+")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_method_of_type_is_part_of_the_graph_and_kept_for_later_calls(name: str) -> None:
    function = PROGRAMS[name]
    run = compiled(function)
    for _ in range(3):
        assert ADDRESS.sub("", repr(run(x))) == ADDRESS.sub("", repr(function(x)))
    found = explained(run)
    assert (found.graph_count, found.eager_calls) == (1, 0)


def test_an_attribute_that_is_new_at_each_read_breaks_the_graph() -> None:
    run = lenient(lambda a: (a + 1, torch.__eq__(torch)))
    for _ in range(2):
        assert run(x)[1] is True
    assert explained(run).breaks[0].id == "attribute-kind"
    assert explained(run).eager_calls == 0


# -- guards that change during capture

registry: dict[str, int] = {}


@functools.lru_cache
def register(name: str) -> int:
    return registry.setdefault(name, len(registry))


def test_a_frame_whose_capture_fills_a_cache_is_captured_again_at_once() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        known = len(registry)
        return a + known * 0 + register("name")

    for make in (lenient, compiled):
        register.cache_clear()
        registry.clear()
        run = make(function)
        for _ in range(3):
            torch.testing.assert_close(run(x), function(x))
        found = explained(run)
        assert (found.graph_count, found.eager_calls, len(found.breaks)) == (2, 0, 0)


counter = [0]


@functools.lru_cache(maxsize=0)
def count() -> int:
    counter[0] += 1
    return 1


def test_a_frame_whose_guards_never_hold_runs_in_eager_once_the_limit_is_reached() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        return a + counter[0] * 0 + count()

    run = mc.compile(function, backend="eager", options={"recompile_limit": 2})
    with pytest.warns(UserWarning, match="recompile_limit"):
        torch.testing.assert_close(run(x), x + 1)
    for _ in range(4):
        torch.testing.assert_close(run(x), x + 1)
    found = explained(run)
    assert found.eager_calls == 5
    assert [each.id for each in found.breaks] == ["recompile-limit"]
    assert len(dispatcher(run).misses) == 3
