"""Functions without tensors: exceptions, scopes and cells, and functions that can't be cut."""

# ruff: noqa
from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from plain_programs import (
    LOG,
    Base,
    Derived,
    Manager,
    Point,
    delegating,
    fails,
    numbers,
    program,
    say,
    weighted,
)


@program((0,), (1,), (2,), (3,))
def exceptions(n):
    try:
        try:
            if n == 0:
                raise ValueError("zero")
            if n == 1:
                fails(KeyError, "one")
            if n == 2:
                return "two"
        except ValueError as e:
            raise RuntimeError("from zero") from e
        except KeyError:
            LOG.append(sys.exc_info()[0].__name__)
            raise
        else:
            LOG.append("else")
        finally:
            LOG.append(("finally", n))
    except RuntimeError as e:
        return str(e), str(e.__cause__)
    return "end"


@program((0,), (1,))
def context_of_exceptions(n):
    try:
        1 // n
        raise LookupError("first")
    except Exception as first:
        try:
            {}[n]
        except KeyError as second:
            chain = (type(first).__name__, type(second.__context__).__name__)
            say(chain)
            try:
                raise
            except KeyError as third:
                return (
                    chain,
                    third is second,
                    third.__context__ is first,
                    sys.exc_info()[1] is third,
                )


@program(())
def bare_raise_without_exception():
    LOG.append(str(sys.exc_info()))
    raise


@program((0,), (1,))
def finally_returns(n):
    for i in range(3):
        try:
            if n:
                raise ValueError(i)
            return "try"
        finally:
            if i < 2:
                LOG.append(i)
                continue
            return "finally"


@program((1,), (0,))
def exception_in_handler(n):
    try:
        try:
            raise ValueError("v")
        except ValueError:
            with Manager("h", bool(n)):
                LOG.append(sys.exc_info()[0].__name__)
                raise KeyError("k")
            LOG.append(sys.exc_info()[0].__name__)
            fails(TypeError, "t")
    except (KeyError, TypeError) as e:
        found = e.__context__
        return type(e).__name__, type(found).__name__, sys.exc_info()[1] is e


@program((1,), (2,), (3,))
def groups(n):
    try:
        errors = [ValueError(1), KeyError(2), OSError(3)][:n]
        raise ExceptionGroup("g", errors)
    except* ValueError as e:
        LOG.append(("v", len(e.exceptions)))
    except* (KeyError, TypeError) as e:
        LOG.append(("k", repr(e.exceptions)))
    return "unreachable" if n > 2 else "done"


@program((1,), (0,))
def unbound(n):
    if n:
        x = 1
    else:
        y = 2
    del n
    try:
        return x
    except UnboundLocalError as e:
        return str(e)


@program((1,), (0,))
def unbound_cell(n):
    if n:
        x = 1
    f = lambda: x
    try:
        LOG.append(x)
    except UnboundLocalError as e:
        LOG.append(str(e))
    try:
        return f()
    except NameError as e:
        return type(e).__name__, str(e)


def outer_variable(n):
    free = n

    def drop():
        nonlocal free
        del free

    def reads(m):
        nonlocal free
        free = 5
        LOG.append(free + m)
        if m:
            drop()
        return free

    return reads


@program((0,), (1,))
def free_variables(n):
    reads = outer_variable(5)
    try:
        return reads(n)
    except NameError as e:
        return type(e).__name__, str(e)


program((0,), (1,))(outer_variable(5))


@program((3,))
def globals_and_imports(n):
    global counter
    counter = n
    counter += 1
    import collections.abc as abc
    from math import floor, pi as circle

    return counter, abc.Sized.__name__, floor(circle)


@program(([1, 2, 3],))
def subscripts(xs):
    ys = xs[:]
    ys[0] += 5
    ys[1:2] = [7, 8]
    del ys[-1]
    p = Point(1)
    p.x **= 3
    p.y, (a, *b), ys[0] = 4, "xyz", ys[-1]
    d = {"k": {}}
    d["k"]["j"] = d.setdefault("n", 3)
    del p.x
    return ys, p.y, a, b, d, hasattr(p, "x"), {*ys, 3}, (*ys, *b)


@program((2,), (0,))
def local_names(n):
    a = n
    f = lambda: a
    if n:
        late = f()
    names = sorted(locals())
    return names, locals()["a"], [sorted(vars()) for _ in range(1)] and "vars"


@program((3,), (-1,))
def asserting(n):
    assert n > 0, f"not {n}"
    assert n
    return n


@program((10,), (3,))
def chained(n):
    a = 1 < n < 5 or n == 10 and "ten"
    b = n if n > 5 else None
    c = b is None and n != 3 or b
    return a, b, c, not (a and c), n in (3, 4), n not in [10]


@program((2,), (4,))
def return_inside(n):
    for i in range(n):
        with Manager(str(i)):
            try:
                if i == 3:
                    return "three"
                if i % 2:
                    continue
                LOG.append(i)
            finally:
                LOG.append("f")
    return "end"


@program((3,))
def iterators(n):
    it = iter(range(n))
    a = next(it)
    rest = [*it]
    pairs = list(zip("ab", map(lambda v: v + n, [1, 2])))
    made = []
    calls = iter(lambda: made.append(1) or len(made), n)
    return a, rest, pairs, [v for v in calls][:4], [*reversed([1, 2])], dict(enumerate("xy"))


@program((1,), (2,))
def positional_only(a, /, b=2, *, c=3):
    a, b = b, a
    a, b, c = c, a, b
    return a, b, c


@program(("x",))
def many_kinds(*args, **kwargs):
    kwargs["n"] = len(args)
    args += (1,)
    return args, kwargs, [*args, *kwargs], {**kwargs, "a": 1}


@program((2,))
def lambdas(n):
    make = lambda k: lambda v=k: v * n
    return [make(i)() for i in range(2)], (lambda *a, **k: (a, k))(1, z=2), make(3)(4)


@program((0,), (3,))
def nested_functions(n):
    def even(k):
        return True if k == 0 else odd(k - 1)

    def odd(k):
        return False if k == 0 else even(k - 1)

    class Holder:
        value = n

        def bump(self, by=1):
            nonlocal n
            n += by
            self.value += n
            return self

    return even(n), Holder().bump().bump(by=2).value, n


@program((3,))
def inner_exception_variable(n):
    e = "kept"
    try:
        fails(ValueError, "x")
    except ValueError as e:
        LOG.append(str(e))
        del e
    try:
        return e
    except UnboundLocalError:
        return "gone"


async def awaited(n):
    async def inner(k):
        return k + 1

    return await inner(n) * 2


@program((3,))
def drives_coroutine(n):
    running = awaited(n)
    try:
        running.send(None)
    except StopIteration as stop:
        return stop.value


@program((5,), (0,), (2,))
def break_out_of_finally(n):
    while True:
        try:
            with Manager("loop") as m:
                n -= 1
                if n < 0:
                    break
                if n == 1:
                    return m.name
        except KeyError:
            return "never"
        else:
            LOG.append(n)
        finally:
            LOG.append("finally")
            if n == 3:
                n = 2
    return "broke"


@program((3,), (0,))
def targets(n):
    box = {}
    for box["k"], (a, *box["r"]) in [(1, "abc"), (2, "d")]:
        say(sorted(box))
    with Manager("t") as box["m"]:
        box[n] = box.pop("m").name
    i: int = n
    j: "unused"
    del box["k"], a
    return box, i, {**box}.keys() ^ {n}, n if n else (yes := 2) and yes


def wide(count: int) -> Any:
    """A function whose slots and jumps need EXTENDED_ARG."""
    names = [f"v{i}" for i in range(count)]
    text = f"""def big(n):
    for r in range(2):
        {", ".join(names)} = range(n, n + {count})
        if {names[-1]} == n: break
    return v0 + {names[-1]}, sum([{", ".join(names)}])"""
    scope: dict[str, Any] = {}
    exec(text, scope)
    return scope["big"]


WIDE = wide(300)
"""Too long to cut everywhere; a sample of its points is enough."""

CANNOT: list[Callable[..., Any]] = [numbers, delegating, awaited, Derived.deleted_self]
"""Functions that refuse, at least at some points."""

if sys.version_info >= (3, 12):
    scope: dict[str, Any] = {"LOG": LOG}
    exec(
        "def typed(n):\n    type Pair[T] = tuple[T, T]\n    def first[T](x: T) -> T:\n        return x\n"
        "    return first(n), Pair.__name__, f'{'nested' + f'{n}'}'\n",
        scope,
    )
    program((1,))(scope["typed"])
