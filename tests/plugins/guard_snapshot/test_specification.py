"""Guards checked all at once, in C: facts about held objects notice every change that a guard could."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from minicompile import compat
from minicompile.compat import settings
from minicompile.dynamo.result import Guard, Source
from minicompile.dynamo.variables import class_facts
from minicompile.plugins.guard_snapshot.facts import Facts, extension
from minicompile.plugins.guard_snapshot.held import settings_hold

needs_compiler = pytest.mark.skipif(extension() is None, reason="no C compiler")
kinds = pytest.mark.parametrize("use_native", [True, False])


class Thing:
    kind = 1
    __slots__ = ("__dict__", "slot")

    def __init__(self) -> None:
        self.number, self.items, self.table, self.slot = 1, [4, 5], {"a": 1}, 3

    def method(self, a: int = 1, *, b: int = 2) -> int:
        return a + b


def facts_about(thing: Any) -> Facts:
    """Everything a guard may look at, on one object."""
    root = Source("held", "thing")
    cls = Source("held", "Thing")
    function = Source("class_attribute", "method", cls)
    facts = Facts({root: thing, cls: Thing})
    attribute, table = Source("attribute", "items", root), Source("attribute", "table", root)
    for kind, source, expected in [
        ("type", root, Thing),
        ("equals", Source("attribute", "number", root), 1),
        ("length", attribute, 2),
        ("equals", Source("item", 1, attribute), 5),
        ("keys", table, ("a",)),
        ("equals", Source("item", "a", table), 1),
        ("absent", Source("namespace", None, root), "missing"),
        ("equals", Source("slot", "slot", root), 3),
        ("code", function, None),
        ("equals", Source("default", 0, function), 1),
        ("equals", Source("keyword_default", "b", function), 2),
        ("equals", Source("class_attribute", "kind", cls), 1),
        ("class", cls, class_facts(Thing)),
    ]:
        facts.cover(Guard((source,), kind, expected, ""))
    return facts


CHANGES: list[Callable[[Any], Any]] = [
    lambda t: setattr(t, "number", 2),
    lambda t: t.items.append(1),
    lambda t: t.items.__setitem__(1, 6),
    lambda t: t.table.update(b=1),
    lambda t: t.table.update(a=7),
    lambda t: setattr(t, "missing", 1),
    lambda t: setattr(t, "slot", 4),
    lambda t: setattr(t, "__class__", type("Other", (Thing,), {"__slots__": ()})),
    lambda t: setattr(t, "__dict__", dict(t.__dict__)),
]


@needs_compiler
@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_change_is_noticed(number: int) -> None:
    thing = Thing()
    snapshot = facts_about(thing).snapshot()
    assert snapshot.unchanged() and snapshot.unchanged()
    CHANGES[number](thing)
    assert not snapshot.unchanged()


@needs_compiler
def test_changes_of_functions_and_classes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    method: Any = Thing.method
    for owner, name, value in [
        (method, "__defaults__", (9,)),
        (method, "__code__", (lambda self: 0).__code__),
        (Thing, "kind", 2),
        (Thing, "other", 2),
        (method.__kwdefaults__, "b", 9),
    ]:
        snapshot = facts_about(Thing()).snapshot()
        assert snapshot.unchanged()
        with monkeypatch.context() as change:
            if isinstance(owner, dict):
                change.setitem(owner, name, value)
            else:
                change.setattr(owner, name, value, raising=False)
            assert not snapshot.unchanged()


@needs_compiler
def test_a_write_by_specialised_bytecode_is_noticed() -> None:
    """CPython 3.13 stores an attribute that way without a new version of the object's dict."""

    class Plain:
        number: int

    def write(value: int) -> None:
        plain.number = value

    plain, root = Plain(), Source("held", "plain")
    for _ in range(100):
        write(1)
    facts = Facts({root: plain})
    facts.cover(Guard((Source("attribute", "number", root),), "equals", 1, ""))
    snapshot = facts.snapshot()
    assert snapshot.unchanged()
    write(2)
    assert not snapshot.unchanged()
    write(1)
    assert snapshot.unchanged()


@needs_compiler
def test_writing_back_the_same_value_is_no_change() -> None:
    thing = Thing()
    snapshot = facts_about(thing).snapshot()
    thing.number = 1
    thing.table["a"] = 1
    assert snapshot.unchanged()


def test_tensor_checks_see_every_fact() -> None:
    a, b = torch.randn(3, 4), nn.Parameter(torch.randn(2))
    check = compat.tensor_guards([a, b])
    assert check(torch.randn(3, 4), nn.Parameter(torch.randn(2)))
    others: list[Any] = [
        torch.randn(4, 3).t(), torch.randn(3, 4).double(), torch.randn(3, 4, requires_grad=True),
        torch.randn(3, 4, device="meta"), torch.randn(3, 4, 1), nn.Parameter(torch.randn(3, 4)), None,
    ]  # fmt: skip
    for other in others:
        assert not check(other, b)
    assert not compat.tensor_guards([a, torch.randn(3, 4)])(a, a)


@kinds
def test_global_state_checks_agree_in_cpp_and_python(
    use_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not use_native:
        monkeypatch.setattr(settings, "GlobalStateGuard", None)
    check = settings_hold(settings.global_facts())
    assert check()
    autocast = torch.autocast("cpu", torch.bfloat16)
    for other in (torch.no_grad(), autocast, torch.inference_mode(), torch.device("meta")):
        with other:
            assert not check()
    assert check()
