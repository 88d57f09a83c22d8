"""Small functions to cut anywhere: (function, argument lists). They write what they do to `LOG`."""

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


@program((4,), (0,))
def while_loop(a):
    while a > -3:
        a -= 1
        if a < 0 and (a < -2 or not a):
            break
        LOG.append(a)
    else:
        a = "else"
    return a


@program((1,), (5,))
def nested_with(a):
    with Manager("a"):
        with Manager("b") as q:
            z = a + 1
            if z > 3:
                LOG.append((q.name, z))
            w = z * 2
    return w


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


@program((1, 5, 6),)
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


@program((2,))
def comprehension_unbound(n):
    out = [x for x in range(n)]
    try:
        return x
    except NameError as e:
        return type(e).__name__, str(e), out


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
                return chain, third is second, third.__context__ is first, sys.exc_info()[1] is third


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


@program((5,), (1,))
def recursion(n):
    return 1 if n < 2 else n * recursion(n - 1)


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


@program((3,))
def decorated(n):
    @functools.lru_cache(maxsize=None)
    def cached(k, *, extra=n):
        LOG.append(k)
        return k + extra

    @staticmethod
    def plain(x: int, y: "str" = "d") -> int:
        return x, y

    return cached(1), cached(1), plain(2), plain.__func__.__annotations__, functools.reduce(max, [1, n])


@contextlib.contextmanager
def managed(name):
    LOG.append(("in", name))
    try:
        yield name * 2
    except ValueError:
        LOG.append("swallowed")
    finally:
        LOG.append(("out", name))


@program((1,), (0,))
def generator_manager(n):
    with managed("m") as got, contextlib.suppress(KeyError):
        LOG.append(got)
        if n:
            raise KeyError
        raise ValueError
    return got


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


class Descriptor:
    def __get__(self, owner, kind):
        LOG.append("get")
        return lambda *a, **k: (a, k, owner is None)

    def __set__(self, owner, value):
        LOG.append(("set", value))


class Dynamic:
    described = Descriptor()

    def __getattr__(self, name):
        LOG.append(name)
        if name.startswith("no"):
            raise AttributeError(name)
        return lambda *a: (name, a)

    def __call__(self, *args, **kwargs):
        return args, kwargs

    def __bool__(self):
        LOG.append("bool")
        return False

    def __iter__(self):
        return iter("it")

    def __lt__(self, other):
        LOG.append("lt")
        return self

    def __contains__(self, item):
        LOG.append("contains")
        return item == 1


@program(())
def dynamic_attributes():
    d = Dynamic()
    d.described = 3
    out = [d.described(1, k=2), d.anything(4), d(5, z=6), Dynamic.described()]
    if d < 3:
        out.append("true")
    if not d or d.x:
        out.append("false")
    a, b = d
    return out, 1 in d, a, b, d.nothing(1)


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


@program((3,))
def long_chain(n):
    return "-".join(str(i) for i in sorted({n, 1, 2}, reverse=True)).replace("-", "+").encode().hex()


@program((2,))
def lambdas(n):
    make = lambda k: lambda v=k: v * n
    return [make(i)() for i in range(2)], (lambda *a, **k: (a, k))(1, z=2), make(3)(4)


@program((1,), (0,))
def unpack_errors(n):
    try:
        a, b = [1] * (n + 2)
        return a, b
    except ValueError as e:
        return str(e)


@program(())
def wrong_call():
    LOG.append("before")
    return weighted(1, 2, bad=1, **{"bad": 2})


@program((4,))
def prints(n):
    print("a", n, sep=":", file=Writer())
    return [print(i, end="", file=Writer()) for i in range(2)]


class Writer:
    def write(self, text):
        LOG.append(text)


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


@program((1,), (0,))
def loop_over_closure(n):
    fs = []
    for i in range(3):

        def f(x, i=i):
            return x + i + j

        fs.append(f)
        j = i * n
    return [f(1) for f in fs]


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


@program((2,), (11,))
def conditional_expressions(n):
    x = None if n > 10 else n
    if x is None:
        return "none"
    if x is not None and (y := x * 2) and y != 3:
        x = y
    return x if x else -1, x and y, x or y


def wide(count: int) -> Any:
    """A function whose slots and jumps need EXTENDED_ARG."""
    names = [f"v{i}" for i in range(count)]
    text = f"""def big(n):
    for r in range(2):
        {', '.join(names)} = range(n, n + {count})
        if {names[-1]} == n: break
    return v0 + {names[-1]}, sum([{', '.join(names)}])"""
    scope: dict[str, Any] = {}
    exec(text, scope)
    return scope["big"]


WIDE = wide(300)
"""Too long to cut everywhere; a sample of its points is enough."""

CANNOT: list[Callable[..., Any]] = [numbers, delegating, Derived.deleted_self]
"""Functions that refuse, at least at some points."""

if sys.version_info >= (3, 12):
    scope: dict[str, Any] = {"LOG": LOG}
    exec(
        "def typed(n):\n    type Pair[T] = tuple[T, T]\n    def first[T](x: T) -> T:\n        return x\n"
        "    return first(n), Pair.__name__, f'{'nested' + f'{n}'}'\n",
        scope,
    )
    program((1,))(scope["typed"])
