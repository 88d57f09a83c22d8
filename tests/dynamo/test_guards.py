"""A cached graph is used exactly when it gives what eager gives: a test for each thing capture relies on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import minicompile as mc
from minicompile.dynamo import guards, snapshot
from tests.dynamo.helpers import compiled, equal, explained, graphs, lenient

x = torch.randn(3, 4)
NUMBER: Any = 2
NUMBERS = [1, 2, 3]
TABLE: dict[str, Any] = {"a": 1}
TENSOR = torch.ones(4)


@pytest.fixture(autouse=True)
def fresh_globals() -> Any:
    before = NUMBER, list(NUMBERS), dict(TABLE), TENSOR
    yield
    globals().update(NUMBER=before[0], NUMBERS=before[1], TABLE=before[2], TENSOR=before[3])


def follows(function: Any, *changes: Callable[[], Any], args: tuple[Any, ...] = (x,)) -> Any:
    """Compiled and eager agree before and after each change. Gives the compiled function."""
    run = compiled(function, options={"recompile_limit": 32})
    assert equal(run(*args), function(*args))
    for number, change in enumerate(changes):
        change()
        assert equal(run(*args), function(*args)), f"after change {number}"
        assert equal(run(*args), function(*args))
    return run


def assign(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().__setitem__(name, value)


def test_global_value_and_type() -> None:
    run = follows(
        lambda a: a * NUMBER,
        assign("NUMBER", 3),
        assign("NUMBER", 3.0),
        assign("NUMBER", torch.ones(4)),
    )
    assert graphs(run) == 4


def test_global_list_length_and_items() -> None:
    follows(
        lambda a: a * sum(NUMBERS) + len(NUMBERS),
        lambda: NUMBERS.append(5),
        lambda: NUMBERS.__setitem__(0, 9),
    )


def test_dict_keys_order_and_values() -> None:
    follows(
        lambda a: [[a * value for value in TABLE.values()], list(TABLE)],
        lambda: TABLE.update(b=3),
        lambda: TABLE.update(a=7),
        lambda: (TABLE.pop("a"), TABLE.update(a=7)),
    )


def test_key_that_was_absent() -> None:
    follows(lambda a: a * TABLE.get("q", 1), lambda: TABLE.update(q=5))


def test_global_tensor_changed_in_place_or_replaced() -> None:
    run = follows(
        lambda a: a + TENSOR,
        lambda: TENSOR.add_(1),
        assign("TENSOR", torch.zeros(4)),
        assign("TENSOR", torch.zeros(1)),
    )
    assert graphs(run) == 2  # another tensor of the same layout is just another input


def test_closure_cell() -> None:
    k = 2

    def inner(a: torch.Tensor) -> torch.Tensor:
        return a * k

    def change(value: int) -> Callable[[], None]:
        def assign_cell() -> None:
            nonlocal k
            k = value

        return assign_cell

    follows(inner, change(5))
    follows(lambda a: inner(a) + 1, change(7))


def with_defaults(a: torch.Tensor, b: Any = 2, *, c: Any = 3) -> torch.Tensor:
    return a * b + c


def test_defaults_of_an_inlined_function() -> None:
    def callee(a: torch.Tensor, b: Any = 2, *, c: Any = 3) -> torch.Tensor:
        return a * b + c

    follows(
        lambda a: callee(a),
        lambda: setattr(callee, "__defaults__", (5,)),
        lambda: setattr(callee, "__kwdefaults__", {"c": 9}),
        lambda: callee.__kwdefaults__.update(c=1),
    )


def test_defaults_of_the_compiled_function_itself() -> None:
    function = copy.copy(with_defaults)
    function = type(with_defaults)(with_defaults.__code__, globals(), "own", (2,))
    function.__kwdefaults__ = {"c": 3}
    follows(
        function,
        lambda: setattr(function, "__defaults__", (5,)),
        lambda: function.__kwdefaults__.update(c=1),
    )


def test_code_of_an_inlined_function() -> None:
    def callee(a: torch.Tensor) -> torch.Tensor:
        return a + 1

    follows(lambda a: callee(a), lambda: setattr(callee, "__code__", (lambda a: a + 2).__code__))


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


@pytest.mark.parametrize("with_compiler", [True, False])
def test_everything_about_a_module(with_compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_compiler:
        monkeypatch.setattr(snapshot, "load_extension", lambda source: None)
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Sigmoid())
    follows(lambda a: m(a), *module_changes(m))


@pytest.mark.parametrize("with_compiler", [True, False])
def test_everything_about_the_compiled_module_itself(
    with_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_compiler:
        monkeypatch.setattr(snapshot, "load_extension", lambda source: None)
    m = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Sigmoid())
    run = compiled(m, options={"recompile_limit": 32})
    for change in [lambda: None, *module_changes(m)]:
        change()
        assert equal(run(x), m(x))
        assert equal(run(x), m(x))


def test_dtype_of_parameters() -> None:
    m = nn.Linear(4, 4)
    follows(lambda a: m(a.to(m.weight.dtype)), lambda: m.double(), lambda: m.half())


def test_a_method_replaced_on_the_class() -> None:
    class Model(nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return a * 2

    m = Model()
    follows(lambda a: m(a), lambda: setattr(Model, "forward", lambda self, a: a * 5))


def test_a_class_attribute_and_an_instance_attribute_that_hides_it() -> None:
    class Thing:
        scale = 2

    thing = Thing()
    follows(
        lambda a: a * thing.scale,
        lambda: setattr(Thing, "scale", 3),
        lambda: setattr(thing, "scale", 7),
        lambda: delattr(thing, "scale"),
    )


def test_an_attribute_that_was_missing() -> None:
    class Thing:
        pass

    thing = Thing()
    follows(
        lambda a: a * 2 if hasattr(thing, "k") else a,
        lambda: setattr(thing, "k", 1),
        lambda: delattr(thing, "k"),
        lambda: setattr(Thing, "k", 1),
    )


def test_two_arguments_that_are_one_tensor() -> None:
    y = torch.randn(3, 4)
    function = lambda a, b: a + b if a is b else a * b  # noqa: E731
    run = compiled(function)
    for args in ((x, y), (x, x), (y, x), (y, y)):
        assert equal(run(*args), function(*args))
    assert graphs(run) == 2


@pytest.mark.parametrize(
    "values",
    [
        (0.0, -0.0, 1.0, 1),
        (2, True, 3),
        (float("nan"), float("nan"), 1.5),
        ("a", None, b"a"),
        ((1,), (True,), (1.0,)),
    ],
)
def test_constants_by_type_and_value(values: tuple[Any, ...]) -> None:
    seen: list[str] = []

    def function(a: torch.Tensor, k: Any) -> Any:
        return a, repr(k)

    run = compiled(function)
    for value in values:
        assert run(x, value)[1] == repr(value)
        seen.append(repr(value))
    assert graphs(run) == len(set(seen))


@pytest.mark.parametrize(
    "make",
    [
        lambda: x,
        lambda: x.t(),
        lambda: x.double(),
        lambda: x[:2],
        lambda: x.clone().requires_grad_(),
        lambda: nn.Parameter(x.clone()),
        lambda: torch.randn(0, 4),
        lambda: torch.tensor(1.0),
        lambda: x.to(torch.bfloat16),
        lambda: x > 0,
    ],
)
def test_tensor_facts(make: Callable[[], torch.Tensor]) -> None:
    function = lambda a: (a.sum(), a.shape, a.stride(), str(a.dtype), a.requires_grad, type(a))  # noqa: E731
    run = compiled(function)
    for value in (
        torch.randn(3, 4, dtype=torch.float64).t(),
        make(),
        torch.zeros(2, dtype=torch.int64),
        make(),
    ):
        assert equal(run(value), function(value))


def test_global_state() -> None:
    function = lambda a: (a @ a.t(), torch.zeros(2), torch.is_grad_enabled())  # noqa: E731
    run = compiled(function)
    contexts = [
        lambda: torch.no_grad(),
        lambda: torch.inference_mode(),
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
    ]
    a = x.clone().requires_grad_()
    assert equal(run(a), function(a))
    for context in contexts:
        with context():
            assert equal(run(a), function(a))
    torch.set_default_dtype(torch.float64)
    try:
        assert equal(run(a), function(a))
    finally:
        torch.set_default_dtype(torch.float32)
    assert equal(run(a), function(a))
    assert graphs(run) == 6


def test_function_modes_run_in_eager() -> None:
    function = lambda a: a + torch.zeros(4)  # noqa: E731
    run = lenient(function)
    with torch.device("meta"):
        assert run(x.to("meta")).device.type == "meta"
    assert "mode is active" in explained(run).breaks[0].reason


def test_inputs_that_share_memory_while_one_is_changed() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + b

    run = lenient(function)
    for _ in range(2):
        assert equal(run(torch.zeros(3), torch.zeros(3)), torch.ones(3))
    ours, theirs = torch.zeros(4), torch.zeros(4)
    assert equal(run(ours[:3], ours[1:]), function(theirs[:3], theirs[1:]))
    assert "shares memory" in explained(run).breaks[0].reason


def test_lists_that_become_one_list() -> None:
    def function(first: list[int], second: list[int], a: torch.Tensor) -> Any:
        first.append(1)
        second.append(2)
        return len(first) + len(second), a

    run = compiled(function)
    run([], [], x)
    shared: list[int] = []
    assert run(shared, shared, x)[0] == 4
    assert shared == [1, 2]


def test_evaluating_guards_runs_no_user_code() -> None:
    class Loud:
        calls = 0

        def __init__(self) -> None:
            self.k = 2

        def __eq__(self, other: object) -> bool:
            Loud.calls += 1
            return True

        def __hash__(self) -> int:
            Loud.calls += 1
            return 1

        def __getattr__(self, name: str) -> Any:
            Loud.calls += 1
            raise AttributeError(name)

    loud = Loud()
    run = compiled(lambda a, thing: a * thing.k)
    run(x, loud)
    before = Loud.calls
    for other in (loud, Loud()):
        assert equal(run(x, other), x * 2)
    assert Loud.calls == before


def test_a_failed_guard_is_reported_with_old_and_new_value_and_line() -> None:
    run = compiled(lambda a, k: a * k)
    run(x, 2)
    run(x, 3)
    (failure,) = explained(run).failures
    assert failure.guard.kind == "equals" and failure.guard.expected == 2 and failure.found == 3
    assert failure.guard.user_line is not None and failure.guard.user_line.file == __file__
    assert "k == 2" in str(failure) and "found 3" in str(failure)


def test_a_kind_of_guard_can_be_taken_away() -> None:
    """The registry decides what is checked: without rules for values, a changed constant goes unnoticed."""
    with mc.without("guard:equals"):
        run = compiled(lambda a, k: a * k)
        run(x, 2)
        assert equal(run(x, 3), x * 2)
    assert "equals" in guards.guard_rules


def test_a_guard_kind_plugged_in_from_outside_decides() -> None:
    with mc.scoped():

        @guards.guard_rules("equals")
        def never(code: Any, guard: Any, values: list[str]) -> str:
            return f"{values[0]} == {guard.expected!r} or {values[0]} == 99"

        run = compiled(lambda a, k: a * k)
        run(x, 2)
        assert equal(run(x, 99), x * 2)
        assert graphs(run) == 1
