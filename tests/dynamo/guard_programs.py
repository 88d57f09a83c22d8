"""Programs whose outside changes between calls: a cached graph may be used only where it is right.

Each is a generator. It yields `function, arguments` for a first call and changes something between yields; a
later yield may give the same function other arguments. Arguments are made anew for each call.
`@program("equals")` names the kinds of guard that the program is the proof of: it fails without them.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

import minicompile as mc

x = torch.arange(12.0).reshape(3, 4) / 7
y = torch.arange(12.0).reshape(3, 4) - 5
NUMBER: Any = 2

Arguments = Callable[[], tuple[Any, ...]]
Program = Callable[[], Iterator[tuple[Any, Arguments]]]
PROGRAMS: dict[str, tuple[Program, frozenset[str], str]] = {}
"""Programs by name, with the kinds of guard that they prove, and the backend that shows it."""


def program(*kinds: str, backend: str = "eager") -> Callable[[Program], Program]:
    def register(make: Program) -> Program:
        PROGRAMS[make.__name__] = make, frozenset(kinds), backend
        return make

    return register


def same_x() -> tuple[Any, ...]:
    return (x,)


# -- values, globals, cells, defaults, code


@program("equals")
def a_global_number() -> Any:
    global NUMBER

    def run(a: torch.Tensor) -> Any:
        return a * NUMBER, repr(NUMBER)

    for value in (2, 3, 3.0, True, 1, 0.0, -0.0, float("nan"), 2):
        NUMBER = value
        yield run, same_x


@program("equals")
def constants_that_are_equal_but_not_the_same() -> Any:
    def run(a: torch.Tensor, k: Any) -> Any:
        return a, repr(k)

    values: list[Any] = [
        *(1, True, 1.0, 1 + 0j, complex(0.0, -0.0), complex(0.0, 0.0)),
        *((1,), (True,), (1.0,), frozenset({1}), frozenset({True}), frozenset({1.0})),
        *(slice(1), slice(True), range(1), range(0, 3, 2), range(0, 4, 2), "1", b"1", None),
        *((-0.0,), (0.0,), torch.Size([1])),
    ]
    for value in values:
        yield run, lambda value=value: (x, value)


@program("type")
def one_class_or_another_with_the_same_attributes() -> Any:
    class First:
        k = 1

        def scale(self, a: torch.Tensor) -> torch.Tensor:
            return a * 2

    class Second(First):
        def scale(self, a: torch.Tensor) -> torch.Tensor:
            return a * 3

    thing = First()

    def run(a: torch.Tensor, t: Any) -> torch.Tensor:
        return t.scale(a)

    yield run, lambda: (x, thing)
    yield run, lambda: (x, Second())
    thing.__class__ = Second
    yield run, lambda: (x, thing)


@program("absent")
def a_key_an_attribute_and_a_global_that_were_missing() -> Any:
    table: dict[str, int] = {}
    thing = types.SimpleNamespace()

    class Thing:
        pass

    other = Thing()

    def run(a: torch.Tensor) -> Any:
        try:
            late = LATE  # type: ignore[name-defined]
        except NameError:
            late = 1
        return a * table.get("k", 1), a * late, hasattr(thing, "k"), getattr(other, "k", None)

    yield run, same_x
    table["k"] = 5
    yield run, same_x
    other.k = 3  # type: ignore[attr-defined]
    yield run, same_x
    globals()["LATE"] = 7
    yield run, same_x
    del globals()["LATE"]
    thing.k = 2
    yield run, same_x


@program("identity")
def a_builtin_that_is_replaced() -> Any:
    import builtins

    def run(a: torch.Tensor) -> Any:
        return a * max(2, 3)

    yield run, same_x
    builtins.max, before = min, max  # type: ignore[assignment]
    try:
        yield run, same_x
    finally:
        builtins.max = before


@program("class")
def class_attributes_that_come_and_go() -> Any:
    class Base:
        pass

    class Thing(Base):
        scale = 2

    thing = Thing()

    def run(a: torch.Tensor) -> Any:
        return a * thing.scale, hasattr(thing, "extra")

    yield run, same_x
    Thing.scale = 3
    yield run, same_x
    Base.extra = 1  # type: ignore[attr-defined]
    yield run, same_x
    del Thing.scale
    Base.scale = 9  # type: ignore[attr-defined]
    yield run, same_x
    Thing.scale = property(lambda self: 4)  # type: ignore[assignment]
    yield run, same_x


@program("code")
def code_of_the_compiled_function() -> Any:
    def run(a: torch.Tensor) -> torch.Tensor:
        return a + 1

    yield run, same_x
    run.__code__ = (lambda a: a + 2).__code__
    yield run, same_x


@program("globals")
def one_code_with_other_globals() -> Any:
    def callee(a: torch.Tensor) -> torch.Tensor:
        return a * NUMBER

    other = types.FunctionType(callee.__code__, {"NUMBER": 31})
    yield lambda a, f: f(a), lambda: (x, callee)
    yield lambda a, f: f(a), lambda: (x, other)


@program("defaults")
def a_default_that_moves() -> Any:
    def callee(a: torch.Tensor, b: Any = 2, c: Any = 3) -> torch.Tensor:
        return a * b + c

    yield lambda a: callee(a, 4), same_x
    callee.__defaults__ = (2, 3, 9)
    yield lambda a: callee(a, 4), same_x


@program()
def defaults_seen_by_inspect() -> Any:
    import inspect

    def callee(a: int = 3) -> int:
        return a

    def run(a: torch.Tensor) -> Any:
        return a * inspect.signature(callee).parameters["a"].default

    yield run, same_x
    callee.__defaults__ = (8,)
    yield run, same_x


def own_default(a: torch.Tensor, b: Any = 2, *, c: Any = 3) -> torch.Tensor:
    return a * b + c


@program()
def defaults_of_the_compiled_function() -> Any:
    run = types.FunctionType(own_default.__code__, globals(), "run", (2,))
    run.__kwdefaults__ = {"c": 3}
    yield run, same_x
    run.__defaults__ = (5,)
    yield run, same_x
    run.__kwdefaults__["c"] = 1
    yield run, same_x
    run.__defaults__ = (x, 4)
    yield run, same_x
    run.__defaults__ = None
    yield run, same_x
    yield run, lambda: (x, 2)
    run.__kwdefaults__ = None
    yield run, lambda: (x, 2)


@program()
def a_cell_that_was_empty() -> Any:
    def run(a: torch.Tensor) -> Any:
        try:
            return a * late
        except NameError:
            return a

    yield run, same_x
    late = 3
    yield run, same_x


@program()
def a_slot_that_was_empty() -> Any:
    class Thing:
        __slots__ = ("k",)

    thing = Thing()
    yield lambda a: a * getattr(thing, "k", 1), same_x
    thing.k = 3
    yield lambda a: a * getattr(thing, "k", 1), same_x


def counter() -> tuple[Any, Any]:
    count = 1

    def add() -> None:
        nonlocal count
        count += 1

    def get() -> int:
        return count

    return add, get


def count_and_get(a: torch.Tensor, add: Any, get: Any) -> Any:
    add()
    return a * get()


@program("same")
def functions_that_share_a_cell() -> Any:
    yield count_and_get, lambda: (x, *counter())
    yield count_and_get, lambda: (x, counter()[0], counter()[1])


@program("distinct")
def functions_that_come_to_share_a_cell() -> Any:
    yield count_and_get, lambda: (x, counter()[0], counter()[1])
    yield count_and_get, lambda: (x, *counter())


# -- containers


@program("length")
def queues_and_tuples_of_other_lengths() -> Any:
    def run(a: torch.Tensor, items: Any) -> Any:
        return [a * item for item in items]

    for items in (collections.deque([1, 2]), collections.deque([1]), (1, 2), (1,), [1], [1, 2]):
        yield run, lambda items=items: (x, items)


@program("keys")
def keys_their_order_and_values() -> Any:
    table: dict[Any, Any] = {"a": 1, 1: 2}

    def run(a: torch.Tensor) -> Any:
        return [a * value for value in table.values()], list(map(repr, table))

    yield run, same_x
    table["b"] = 3
    yield run, same_x
    table["a"] = table.pop("a")
    yield run, same_x
    value = table.pop(1)
    table[True] = value
    yield run, same_x


@program("keys")
def keys_of_an_argument() -> Any:
    def run(a: torch.Tensor, table: Any) -> Any:
        return a, [repr(key) for key in table], table.get(1)

    for table in ({1: 1}, {True: 1}, {1.0: 1}, {"1": 1}, {1: 1, 2: 2}):
        yield run, lambda table=table: (x, table)


@program("keys")
def members_of_a_set() -> Any:
    def run(a: torch.Tensor, chosen: Any) -> Any:
        return 1 in chosen, [repr(item) for item in chosen], a * len(chosen)

    for members in ([1], [2], [1, 2], [True], [1.0], [8, 0], [0, 8], ["a"], [16, 8, 0], [0, 8, 16]):
        yield run, lambda members=members: (x, set(members))


@program("keys")
def the_order_of_a_set() -> Any:
    def run(a: torch.Tensor, chosen: Any) -> Any:
        return list(chosen), a

    shrunk = set(range(64))
    shrunk -= set(range(64)) - {7, 15, 23, 31}
    for chosen in ({7, 15, 23, 31}, {31, 23, 15, 7}, shrunk, {15, 7, 31, 23}, {0, 8}, {8, 0}):
        yield run, lambda chosen=chosen: (x, chosen)


# -- relations between inputs


@program("same")
def one_list_under_two_names() -> Any:
    def run(a: torch.Tensor, first: list[int], second: list[int]) -> Any:
        first.append(1)
        return a * len(second), first is second

    def shared() -> Any:
        items: list[int] = []
        return x, items, items

    yield run, shared
    yield run, lambda: (x, [], [])


@program("distinct")
def two_lists_that_become_one() -> Any:
    def run(a: torch.Tensor, first: list[int], second: list[int]) -> Any:
        first.append(1)
        second.append(2)
        return a * len(first) + len(second)

    def shared() -> Any:
        items: list[int] = []
        return x, items, items

    yield run, lambda: (x, [], [])
    yield run, shared


@program("distinct")
def a_dict_that_becomes_the_namespace_of_an_object() -> Any:
    class Thing:
        def __init__(self) -> None:
            self.k = 1

    def run(a: torch.Tensor, thing: Any, table: Any) -> Any:
        table["k"] = 5
        return a * thing.k

    def shared() -> Any:
        thing = Thing()
        return x, thing, thing.__dict__

    yield run, lambda: (x, Thing(), {"k": 1})
    yield run, shared


@program("distinct")
def two_objects_compared_with_is() -> Any:
    class Thing:
        pass

    one, two = Thing(), Thing()

    def run(a: torch.Tensor, first: Any, second: Any) -> Any:
        return a * 2 if first is second else a * 3

    yield run, lambda: (x, one, two)
    yield run, lambda: (x, two, two)


@program("different")
def one_tensor_under_two_names() -> Any:
    def run(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a + b if a is b else a * b

    yield run, lambda: (x, y)
    yield run, lambda: (x, x)
    yield run, lambda: (y, y)
    yield run, lambda: (y, x)


@program("memory", backend="aot_eager")
def inputs_that_share_memory() -> Any:
    def run(a: torch.Tensor, b: torch.Tensor) -> Any:
        a.add_(1)
        return a * b

    def overlapping() -> Any:
        base = torch.arange(5.0)
        return base[:4], base[1:]

    yield run, lambda: (torch.zeros(4), torch.ones(4))
    yield run, overlapping


@program("memory", backend="aot_eager")
def parameters_that_come_to_share_memory() -> Any:
    first, second = torch.zeros(4), torch.zeros(4)

    def run(a: torch.Tensor) -> Any:
        first.add_(1)
        return a + second

    def fresh() -> Any:
        first.zero_()
        second.zero_()
        return (torch.zeros(4),)

    yield run, fresh
    second.data = first.data
    yield run, fresh


@program("memory", backend="aot_eager")
def many_inputs_that_share_memory() -> Any:
    def run(tensors: Any) -> Any:
        for tensor in tensors:
            tensor.add_(1)
        return [tensor * 1 for tensor in tensors]

    def overlapping() -> Any:
        base = torch.arange(5.0)
        return ([torch.zeros(4), base[:4], base[1:]],)

    yield run, lambda: ([torch.zeros(4), torch.zeros(4), torch.zeros(4)],)
    yield run, overlapping


# -- sizes


def marked(*size: int) -> torch.Tensor:
    made = torch.arange(float(torch.Size(size).numel())).reshape(size)
    mc.mark_dynamic(made, range(len(size)))
    return made


@program("shape")
def a_size_that_decided() -> Any:
    def run(a: torch.Tensor) -> Any:
        return a * 2 if a.shape[0] > 3 else a * 3

    for size in (4, 5, 3, 2, 1, 0, 6):
        yield run, lambda size=size: (marked(size),)


@program("number")
def a_size_of_one() -> Any:
    def run(a: torch.Tensor) -> Any:
        return a * 2 if a.shape[0] > 1 else a * 3

    for size in (4, 5, 1, 0):
        yield run, lambda size=size: (marked(size, 3),)


@program("number")
def the_class_of_a_number() -> Any:
    def run(a: torch.Tensor, n: Any) -> Any:
        return a * n if isinstance(n, int) else a - n, n + 1

    for n in (2, 3, 3.0, 5, True, 1, 2**40, -7, 2.5, 3.5, 1e39, 4):
        yield run, lambda n=n: (x, n)


@program("same_size")
def two_sizes_that_were_equal() -> Any:
    def run(a: torch.Tensor, b: torch.Tensor) -> Any:
        return (a * 2 if a.shape[0] == b.shape[0] else a * 3), a.sum() + b.sum()

    for sizes in ((4, 4), (5, 5), (4, 5), (5, 4), (1, 1)):
        yield run, lambda sizes=sizes: (marked(sizes[0]), marked(sizes[1]))


@program("strides")
def another_memory_layout_of_symbolic_sizes() -> Any:
    def run(a: torch.Tensor) -> Any:
        return a.stride(), a.is_contiguous(), a * 2

    def turned(*size: int) -> torch.Tensor:
        made = marked(*size).t()
        mc.mark_dynamic(made, (0, 1))
        return made

    yield run, lambda: (marked(4, 5),)
    yield run, lambda: (turned(5, 4),)
    yield run, lambda: (marked(6, 7),)
    yield run, lambda: (turned(6, 7),)
