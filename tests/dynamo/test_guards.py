"""How often a change captures again, what a failed guard tells, and that evaluating guards is harmless.

Whether answers stay right is the business of guard_programs.py.
"""

from __future__ import annotations

import collections
import datetime
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import minicompile as mc
from minicompile.dynamo import guards
from minicompile.dynamo.entry import MISS
from minicompile.plugins.guard_snapshot import facts
from tests.dynamo.helpers import compiled, dispatcher, equal, explained, graphs, lenient

x = torch.randn(3, 4)


def follows(function: Any, *changes: Callable[[], Any], args: tuple[Any, ...] = (x,)) -> Any:
    """Compiled and eager agree before and after each change. Gives the compiled function."""
    run = compiled(function, options={"recompile_limit": 32})
    assert equal(run(*args), function(*args))
    for number, change in enumerate(changes):
        change()
        assert equal(run(*args), function(*args)), f"after change {number}"
        assert equal(run(*args), function(*args))
    return run


class Doubled(nn.Linear):
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return super().forward(a) * 2


def module_changes(m: nn.Sequential) -> list[Callable[[], Any]]:
    hooks: list[Any] = []
    everywhere = nn.modules.module.register_module_forward_hook

    def halve() -> None:
        m[0].weight.data = m[0].weight.data / 2

    return [
        lambda: m.eval(),
        lambda: m.train(),
        halve,
        lambda: hooks.append(m[0].register_forward_hook(lambda module, args, out: out * 3)),
        lambda: hooks.pop().remove(),
        lambda: hooks.append(m[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))),
        lambda: hooks.pop().remove(),
        lambda: hooks.append(everywhere(lambda module, args, out: out + 1)),
        lambda: hooks.pop().remove(),
        lambda: setattr(m[0], "bias", None),
        lambda: setattr(m[0], "__class__", Doubled),
        lambda: setattr(m[0], "forward", lambda a: a * 0),
        lambda: delattr(m[0], "forward"),
        lambda: m.__setitem__(0, nn.Linear(4, 4)),
        lambda: m.append(nn.Tanh()),
        lambda: setattr(m[0], "weight", nn.Parameter(torch.zeros(4, 4))),
        lambda: m.requires_grad_(False),
        lambda: setattr(m[1], "p", 0.0),
    ]


@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize("with_compiler", [True, False])
def test_everything_about_a_module(
    with_compiler: bool, itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled itself, or called by a compiled function."""
    if not with_compiler:
        monkeypatch.setattr(facts, "load_extension", lambda source: None)
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Sigmoid())
    follows(m if itself else lambda a: m(a), *module_changes(m))


class Buffered:
    """No module, but it has a table of the same name."""

    def __init__(self) -> None:
        self._buffers = {frozenset({datetime.date(2020, 1, 1)}): 2, "n": 3}


def test_a_table_called_buffers_that_is_no_modules() -> None:
    key = frozenset({datetime.date(2020, 1, 1)})
    owner = Buffered()

    def f(a: torch.Tensor) -> torch.Tensor:
        return a * owner._buffers[key]

    run = compiled(f)
    assert equal(run(x), x * 2)
    owner._buffers[key] = 5
    assert equal(run(x), x * 5)


def test_whether_two_tensors_are_one_place_in_memory() -> None:
    run, a, b = lenient(lambda a, b: a.is_set_to(b)), torch.ones(3), torch.ones(3)
    assert run(a, a) and not run(a, b) and run(a[:], a) and not run(b, a)


def test_function_modes_run_in_eager() -> None:
    function = lambda a: a + torch.zeros(4)  # noqa: E731
    run = lenient(function)
    with torch.device("meta"):
        assert run(x.to("meta")).device.type == "meta"
    assert "mode is active" in explained(run).breaks[0].reason


def heard(answer: Any) -> Callable[..., Any]:
    """A method in Python, which `calls_of_methods` sees."""

    def method(self: Any, *args: Any) -> Any:
        return answer(self, *args)

    return method


def calls_of_methods(action: Callable[[], Any]) -> list[str]:
    """The names of what `heard` made and the action called."""
    seen: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is method:
            seen.append(repr(frame.f_locals["answer"]))

    method = heard(len).__code__
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return seen


def loud(base: Any, *names: str) -> Any:
    """A subclass that defines methods in Python."""
    body = {name: heard(getattr(base, name)) for name in names if hasattr(base, name)}
    return type("Loud", (base,), body)


class LoudMeta(type):
    __eq__ = heard(lambda cls, other: cls is other)
    __hash__ = heard(lambda cls: 1)  # type: ignore[assignment]


class LoudObject(metaclass=LoudMeta):
    k = 2
    __eq__ = heard(lambda self, other: True)
    __hash__ = heard(lambda self: 5)  # type: ignore[assignment]
    __bool__ = heard(lambda self: True)
    __len__ = heard(lambda self: 3)
    __repr__ = heard(lambda self: "loud")
    __getattr__ = heard(lambda self, name: object.__getattribute__(self, name))

    def __init__(self) -> None:
        self.j = 3
        self.items = [1, 2]


class LoudModule(nn.Module):
    __eq__ = heard(lambda self, other: True)
    __hash__ = heard(lambda self: 5)  # type: ignore[assignment]
    __len__ = heard(lambda self: 3)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a * 2


ITEMS = "__getitem__", "__len__", "__iter__", "__eq__", "__contains__"
LOUD: list[tuple[Any, Any]] = [
    (lambda a, thing: a * thing.j, LoudObject),
    (lambda a, thing: a * thing.k, LoudObject),
    (lambda a, thing: a * sum(thing.items), LoudObject),
    (lambda a, thing: a if type(thing) is LoudObject else a * 2, LoudObject),
    (lambda a, things: a * things[0].j, lambda: [LoudObject()]),
    (
        lambda a, things: a if things[0] is things[1] else a * 2,
        lambda: [LoudObject(), LoudObject()],
    ),
    (lambda a, cls: a * cls.k, lambda: LoudObject),
    (lambda a, module: module(a), LoudModule),
    (lambda a, table: a * table["a"], lambda: loud(dict, *ITEMS, "keys", "items")(a=1)),
    (lambda a, table: [a * v for v in table.values()], lambda: loud(dict, *ITEMS)(a=1)),
    (lambda a, table: a * table.get("q", 1), lambda: loud(dict, *ITEMS)(a=1)),
    (lambda a, items: a * items[0], lambda: loud(list, *ITEMS)([1, 2])),
    (lambda a, items: [a * item for item in items], lambda: loud(tuple, *ITEMS)([1, 2])),
    (lambda a, items: a if 1 in items else a * 2, lambda: loud(set, *ITEMS)([1, 2])),
]


@pytest.mark.parametrize("number", range(len(LOUD)))
def test_evaluating_guards_runs_no_user_code(number: int) -> None:
    function, make = LOUD[number]
    run = compiled(function)
    thing = make()
    run(x, thing)
    (entry,) = dispatcher(run).entries
    others = [make(), LoudObject(), [LoudObject()], {"a": LoudObject()}, 1, {1}, LoudModule()]

    def evaluate() -> None:
        assert entry.misfit(dispatcher(run).values((x, thing)))[0] is None
        for other in others:
            failure, _ = entry.misfit(dispatcher(run).values((x, other)))
            if failure is not None:
                assert str(failure) and entry.call(x, other) is MISS

    assert calls_of_methods(evaluate) == []


class Filling(dict[str, int]):
    """Stores what it is asked for and doesn't hold."""

    def __missing__(self, key: str) -> int:
        self[key] = 1
        return 1


FILLING = [Filling, lambda **items: collections.defaultdict(lambda: 1, items), collections.Counter]


@pytest.mark.parametrize("make", FILLING)
def test_evaluating_guards_asks_no_dict_for_what_it_does_not_hold(make: Any) -> None:
    def take(a: torch.Tensor, table: Any) -> torch.Tensor:
        return a * dict.pop(table, "n")

    run = compiled(take)
    equal(run(x, make(n=1)), x)
    empty = make()
    with pytest.raises(KeyError):
        run(x, empty)
    assert not empty


class Plain:
    k = 2


def test_what_is_referred_to_weakly_can_die() -> None:
    thing = Plain()
    reference = weakref.ref(thing)
    function = lambda a: a if reference() is None else a * reference().k  # noqa: E731
    run = lenient(function)
    assert equal(run(x), x * 2) and equal(run(x), x * 2)
    del thing
    gc.collect()
    assert equal(run(x), x)


def test_no_argument_of_a_call_is_kept_alive() -> None:
    def function(a: torch.Tensor, thing: Any, callee: Any) -> torch.Tensor:
        return callee(a) * thing.k + thing.tensor

    def arguments(size: int) -> tuple[Any, ...]:
        k, thing = 3, LoudObject()
        thing.tensor, a = torch.ones(size), torch.ones(size)  # type: ignore[attr-defined]
        return a, thing, lambda a: a * k

    run = compiled(function)
    references = []
    for size in (2, 3):
        given = arguments(size)
        run(*given)
        references += [weakref.ref(value) for value in given]
        del given
    gc.collect()
    assert graphs(run) == 2 and [reference() for reference in references] == [None] * 6


def test_a_guard_kind_plugged_in_from_outside_decides() -> None:
    with mc.scoped():

        @guards.guard_rules("equals")
        def never(code: Any, guard: Any, values: list[str]) -> str:
            return f"{values[0]} == {guard.expected!r} or {values[0]} == 99"

        run = compiled(lambda a, k: a * k)
        run(x, 2)
        assert equal(run(x, 99), x * 2)
        assert graphs(run) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ],
)
def test_a_tensor_of_another_kind_runs_in_eager(make: Callable[[], torch.Tensor]) -> None:
    run = lenient(lambda a: a.clone())
    assert repr(run(make())) == repr(make().clone())
    assert [stop.id for stop in explained(run).breaks] == ["tensor-kind"]


def test_an_attribute_that_hides_a_parameter_and_another_module_as_key_are_noticed() -> None:
    def function(a: torch.Tensor, module: nn.Linear, table: dict[nn.Module, int]) -> torch.Tensor:
        return a * module.bias * table[module]

    run, modules = lenient(function), [nn.Linear(3, 3) for _ in range(3)]
    table, a = dict(zip(modules, (1, 2, 3))), torch.ones(3)
    for module in modules:
        assert equal(run(a, module, table), function(a, module, table))
    modules[2].__dict__["bias"] = a * 7
    assert equal(run(a, modules[2], table), a * 21)


def test_the_recompile_limit_raises_where_the_whole_frame_was_asked_for() -> None:
    run = compiled(lambda a: a + 1, options={"recompile_limit": 1})
    run(torch.ones(2))
    with pytest.raises(mc.Unsupported, match="recompile_limit"):
        run(torch.ones(2, 2))
