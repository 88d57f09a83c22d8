"""Attributes of objects that look them up in ways of their own are never said to be missing."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import operator
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import minicompile as mc

x = torch.ones(2)


class PerThread(threading.local):
    k = 6

    def __init__(self) -> None:
        self.v = 5


class Plain:
    k = 4

    def method(self) -> int:
        return 1

    method.tag = 7  # type: ignore[attr-defined]

    @property
    def raises(self) -> Any:
        raise AttributeError("inner")


class Fallback:
    @property
    def raises(self) -> Any:
        return self.nothing

    def __getattr__(self, name: str) -> Any:
        if name in ("raises", "v"):
            return 9
        raise AttributeError(name)


class Answering(type):
    """A metaclass that answers for its classes."""

    z = 11

    def __getattr__(cls, name: str) -> Any:
        if name == "v":
            return 8
        raise AttributeError(name)

    @property
    def k(cls) -> int:
        return 1

    @property
    def raises(cls) -> Any:
        raise AttributeError("none")


class Answered(metaclass=Answering):
    k = 2


class Deciding(type):
    def __getattribute__(cls, name: str) -> Any:
        return 12 if name == "v" else super().__getattribute__(name)


class Decided(metaclass=Deciding):
    pass


class Slots:
    __slots__ = ("v",)


class Items(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "v":
            return 13
        raise AttributeError(name)


class Refusing:
    def __get__(self, owner: Any, cls: Any) -> Any:
        raise AttributeError("none")


class Hidden:
    v = Refusing()

    def __getattr__(self, name: str) -> int:
        return 21


class Twice:
    def __getattribute__(self, name: str) -> Any:
        if name == "v":
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        return 22 if name == "v" else object.__getattribute__(self, name)


class Color(enum.Enum):
    v = 1


@dataclasses.dataclass
class Record:
    v: int = 1


@functools.lru_cache
def cached(a: Any) -> Any:
    return a


def local() -> Any:
    made = threading.local()
    made.v, made.t = 3, torch.ones(2)
    return made


def generator() -> Any:
    yield 1


plain = Plain()
Pair = collections.namedtuple("Pair", "v")
OBJECTS: dict[str, Any] = {
    "threading.local": local(),
    "its subclass": PerThread(),
    "weakref.proxy": weakref.proxy(plain),
    "proxy of a function": weakref.proxy(cached),
    "weak reference": weakref.ref(plain),
    "class with an answering metaclass": Answered,
    "class with a deciding metaclass": Decided,
    "plain object": plain,
    "bound method": plain.method,
    "__getattr__": Fallback(),
    "descriptor that refuses": Hidden(),
    "__getattribute__ and __getattr__": Twice(),
    "empty slots": Slots(),
    "dict with __getattr__": Items(v=2),
    "module with __getattr__": Lazy("lazy"),
    "enum": Color,
    "enum member": Color.v,
    "namespace": types.SimpleNamespace(v=1),
    "cached function": cached,
    "partial": functools.partial(cached, 1),
    "named tuple": Pair(3),
    "dataclass": Record(),
    "alias": list[int],
    "tensor": torch.ones(2),
    "module": torch.nn.Linear(2, 2),
    "exception": ValueError("v"),
    "mapping proxy": types.MappingProxyType({"v": 1}),
}
NAMES = [
    "v",
    "k",
    "t",
    "tag",
    "raises",
    "z",
    "nothing",
    "__name__",
    "__wrapped__",
    "__self__",
    "__class__",
    "__len__",
    "weight",
]
FORMS = (
    "r = hasattr(o, '{}')",
    "r = getattr(o, '{}', 'none')",
    "try: r = o.{}\n    except AttributeError: r = 'missing'",
)


def asking(form: str, name: str) -> Any:
    """A function that asks its second argument for an attribute."""
    scope: dict[str, Any] = {}
    exec(f"def ask(x, o):\n    y = x + 1\n    {form.format(name)}\n    return y, r", scope)
    return scope["ask"]


def answer(function: Callable[..., Any], owner: Any) -> Any:
    try:
        y, found = function(x, owner)
    except Exception as error:
        return type(error).__name__
    plain = isinstance(found, int | str | bool | None)
    return y.tolist(), type(found).__name__, found if plain else None


@pytest.mark.long
@pytest.mark.parametrize("kind", OBJECTS)
def test_an_attribute_is_there_or_missing_as_in_python(kind: str) -> None:
    for name in NAMES:
        for form in FORMS:
            function = asking(form, name)
            compiled = mc.compile(function, backend="eager")
            expected = answer(function, OBJECTS[kind])
            assert [answer(compiled, OBJECTS[kind]) for _ in range(2)] == [expected] * 2, (
                name,
                form,
            )
            mc.reset()


def test_a_local_of_the_thread_is_asked_at_every_call() -> None:
    """Another thread, or a later change, is asked again."""
    mine = threading.local()
    mine.v = 3

    def scaled(a: torch.Tensor) -> torch.Tensor:
        return a * (mine.v if hasattr(mine, "v") else 100)

    compiled = mc.compile(scaled, backend="eager")
    seen = [compiled(x).tolist()]
    thread = threading.Thread(target=lambda: seen.append(compiled(x).tolist()))
    thread.start()
    thread.join()
    mine.v = 4
    seen.append(compiled(x).tolist())
    assert seen == [[3, 3], [100, 100], [4, 4]]


def test_a_local_of_the_thread_is_written_outside_of_the_graph() -> None:
    mine, other = threading.local(), PerThread()

    def count(a: torch.Tensor) -> torch.Tensor:
        mine.n = getattr(mine, "n", 0) + 1
        other.v += 1
        return a * mine.n

    compiled = mc.compile(count, backend="eager")
    assert [compiled(x).tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert (mine.n, other.v) == (3, 8)


def test_attributes_of_a_generator_are_a_generators() -> None:
    def ask(a: torch.Tensor) -> Any:
        made = generator()
        return a + 1, [hasattr(made, name) for name in ("send", "gi_frame", "frame", "native")]

    assert mc.compile(ask, backend="eager")(x)[1] == [True, True, False, False]


def test_attrgetter_reads_a_tensors_own_attributes():
    read = mc.compile(lambda a: READ(a))  # noqa: F821
    for name in ("__doc__", "shape"):
        globals()["READ"] = operator.attrgetter(name)
        assert read(x) == getattr(x, name)
