"""Functions without tensors, to run by the plain machine and to cut anywhere: (function, argument lists).

They write what they do to `LOG`.
"""

# ruff: noqa
from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

LOG: list[Any] = []
PROGRAMS: list[tuple[Callable[..., Any], list[tuple[Any, ...]]]] = []
counter = 0


def program(*cases: tuple[Any, ...]) -> Callable[[Any], Any]:
    def register(function: Any) -> Any:
        PROGRAMS.append((function, list(cases)))
        return function

    return register


class Manager:
    """Logs; `swallow` is what `__exit__` gives, or it raises."""

    def __init__(self, name: str, swallow: Any = False) -> None:
        self.name, self.swallow = name, swallow

    def __enter__(self):
        LOG.append(("enter", self.name))
        if self.name == "refuse":
            raise KeyError("refuse")
        return self

    def __exit__(self, kind, error, trace):
        LOG.append(("exit", self.name, kind and kind.__name__, str(error)))
        if self.swallow == "raise":
            raise OSError(self.name)
        return self.swallow


def say(value: Any, **options: Any) -> Any:
    LOG.append((value, options) if options else value)
    return value


def fails(kind: type, text: str) -> None:
    LOG.append("fails")
    raise kind(text)


def weighted(a, b=1, *rest, scale=2, **others):
    total = 0
    for value in (a, b, *rest):
        with Manager(f"w{value}"):
            total += value * scale
            if value == 7:
                raise ValueError(f"seven of {total}")
    return total + len(others)


@program((1, 2), (3, -3))
def arithmetic(a, b):
    c = a + b * 2 - (a // (b or 1)) ** 2
    c += a @ Matrix(b) if a > 2 else a % 5
    c <<= 1
    return -c, ~a, not c, +b, a < b <= c, a is b, a is not None, [a] == [b]


class Matrix:
    def __init__(self, value):
        self.value = value

    def __rmatmul__(self, other):
        LOG.append("matmul")
        return other * self.value


@program((6,), (0,), (15,))
def loops(n):
    total = 0
    for i in range(n):
        if i % 2:
            total += i
            continue
        for j, k in enumerate([i, i + 1]):
            total += j * k
        if total > 50:
            break
    else:
        total = -total
    return total


@program((0,), (1,), (2,), (5,))
def with_and_try(a):
    with Manager("s", True):
        x = 1 // a
    try:
        with Manager("t"):
            y = 10 // a
            z = [1, 2][a]
    except ZeroDivisionError as e:
        return ("zero", str(e))
    except (IndexError, KeyError):
        return "index"
    finally:
        LOG.append("finally")
    return y + z


@program((1,), (2,))
def two_managers(a):
    with Manager("first", True) as m, Manager("second", "raise" if a == 1 else False):
        say(m.name)
        a.missing
    return "out"


@program(())
def refused_entry():
    try:
        with Manager("outer"), Manager("refuse"):
            LOG.append("never")
    except KeyError as e:
        return e.args


@program(
    (1, 5, 6),
)
def closures(a, *args):
    c = a

    def inner(q):
        nonlocal c
        c += q
        return c * k

    k = 3
    r = [inner(i) for i in range(3)]
    d = {"z": c, **dict(u=9)}
    return r, d, sorted(args, key=lambda v: -v), c, inner(1), c


@program((4,), (9,))
def strings(a):
    s = f"{a:>4}{a!r}|{a!s:<{a}}|{a=}"
    t = "%s-%d" % ("x", a)
    return s, t, "{}{k}".format(1, k=2), s.upper().strip()[1:-1].split("|"), f"{'é'!a}{s}"


@program(([1, 0, 2],), ([],))
def try_in_loop(xs):
    out = []
    for x in xs:
        try:
            out.append(1 / x)
        except ZeroDivisionError:
            continue
        finally:
            out.append("f")
    first, *rest = out
    return first, rest, out[1:3], xs[-1] if xs else None


class Base:
    kind = "base"

    def method(self, x):
        return x + 1

    @property
    def prop(self):
        return say(self.kind)

    @classmethod
    def make(cls, *args):
        return cls()


class Derived(Base):
    kind = "derived"

    @program(("self", 3))
    def method(self, x):
        y = super().method(x)
        z = super().method(y)
        return y * z, super(Derived, self).method(0), super().prop, __class__.__name__

    @program(("self", 3))
    def cell_self(self, x):
        get = lambda: (self, x)
        first = super().method(x)
        kept = self
        self = Derived()
        self.kind = "other"
        return first, super().method(1), super().prop, get()[0] is self, kept is self

    @program(("self", 1))
    def explicit(self, x):
        parent = super()
        return parent.method(x), parent.kind, type(self).make().kind, Base.make().prop

    @program(("self",))
    def deleted_self(self):
        del self
        return super().kind


@program((1, 2, 3), (7, 7, 8))
def keyword_calls(a, b, c):
    first = weighted(a, b=b)
    second = weighted(a, scale=b, x=1, y=2)
    third = weighted(*[a, b], c, **{"scale": 3, "w": 0})
    return first, second, third, say(a, key=b), dict(a=1, **{"b": 2})


@program((2,), (7,), (6,))
def catches_callee(n):
    out = []
    for q in (n, n + 1):
        try:
            with Manager("o"):
                out.append(1 + weighted(q, 2) * 2)
        except ValueError as e:
            out.append(str(e))
    return out


@program((3,), ([1, 2, 3],), ({"a": 1, "b": [2]},), ("text",), ((4, 5),), (None,), (2.5,))
def matching(x):
    match x:
        case 3 | 4:
            return "small"
        case [1, *rest] if rest:
            return rest
        case {"a": int(n), **others}:
            return n, others
        case str() as s:
            return s + "!"
        case (a, b):
            return a * b
        case None:
            return "none"
        case _:
            return "other"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


@program((1, 2), (0, 5), (3, 3))
def matching_class(x, y):
    match Point(x, y):
        case Point(0, y=q):
            return q
        case Point(x=a, y=b) if a == b:
            return "diagonal"
        case Point() as p:
            return dataclasses.astuple(p)


@program(([3, 1, 2],), ([],))
def walrus(items):
    if (n := len(items)) > 2:
        LOG.append(n)
    while items and (top := items[0]) < 5:
        items = items[1:]
        LOG.append(top)
    return n, [last := i for i in range(n)], "last" in dir()


@program((3,), (0,))
def comprehensions(n):
    a = [i * j for i in range(n) for j in range(i) if j]
    b = {i: say(i) for i in range(n)}
    c = {len(str(i)) for i in a}
    d = sum(i for i in a)
    return a, b, c, d, [[k for k in range(m)] for m in range(n)], n


@program((3,))
def comprehension_cells(n):
    i = "outer"
    fs = [lambda: (i, n) for i in range(n)]
    gs = [(lambda q: q + i)(1) for i in range(n)]
    return [f() for f in fs], gs, i


@program((0,), (2,))
def comprehension_raises(n):
    i = 5
    try:
        return [10 // (i - 1) for i in range(n)], i
    except ZeroDivisionError:
        return "caught", i


def numbers(n):
    try:
        for i in range(n):
            got = yield i
            if got:
                LOG.append(("got", got))
    finally:
        LOG.append("closed")
    return "done"


def delegating(n):
    result = yield from numbers(n)
    yield result


@program((3,), (0,))
def consumes_generators(n):
    out = list(delegating(n))
    g = numbers(n)
    out.append(next(g, "none"))
    for v in g:
        out.append(v)
        if v == 1:
            break
    g.close()
    return out, sum(numbers(n)), list(map(str, numbers(2))), [*numbers(2)]


@program((2,))
def sends(n):
    g = numbers(n)
    next(g)
    try:
        g.send("hello")
        g.send("again")
    except StopIteration as stop:
        return stop.value


@program((1,))
def class_bodies(a):
    class Made(Base, metaclass=type):
        x = a
        y = [x for _ in range(2)] if a else 0

        def get(self):
            return self.x + a, __class__.__name__

    made = Made()
    return made.get(), Made.y, made.method(1), made.prop
