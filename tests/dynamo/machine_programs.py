"""Run by each CPython that is present, without torch: the plain machine against CPython itself.

`python machine_programs.py ROOT` exits with 0 if every program agrees and every opcode in a sample of the standard library is known.
"""

# ruff: noqa
import sys

sys.path.insert(0, sys.argv[1])

import contextlib
import dataclasses
import inspect
import json
import os
import re
import statistics
import textwrap
import types
from pathlib import Path

import minicompile.dynamo.opcodes
from minicompile.dynamo.bytecode import decode
from minicompile.dynamo.interpreter import bytecode
from plain_machine import PlainMachine

assert "torch" not in sys.modules


def generators():
    out = []

    def inner(n):
        try:
            for i in range(n):
                got = yield i
                if got:
                    out.append(got)
        finally:
            out.append("closed")
        return "result"

    def outer():
        result = yield from inner(3)
        out.append(result)

    out += list(outer())
    running = outer()
    next(running)
    out.append(running.send("sent"))
    running.close()
    running = inner(3)
    next(running)
    try:
        running.throw(KeyError("thrown"))
    except KeyError as error:
        out.append(str(error))
    return out


def classes():
    x = 1

    class A:
        y = x

        def __init__(self):
            self.z = [x for _ in range(2)]

        def f(self):
            return super().__repr__()[:1], __class__.__name__

    return (
        A().f(),
        A.y,
        A().z,
        [(lambda: i)() for i in range(3)],
        {i: j for i, j in zip("ab", [1, 2])},
    )


def exceptions():
    seen = []
    for i in range(5):
        try:
            try:
                if i == 0:
                    continue
                if i == 1:
                    raise ValueError(i)
                if i == 2:
                    1 / 0
                if i == 3:
                    break
            except ValueError as error:
                seen.append(repr(error))
            finally:
                seen.append(("finally", i))
        except ZeroDivisionError as error:
            seen.append(str(error))
    else:
        seen.append("else")
    return seen


def managers():
    @contextlib.contextmanager
    def manager(seen):
        seen.append("in")
        try:
            yield seen
        except KeyError:
            seen.append("caught")
        finally:
            seen.append("out")

    seen = []
    with manager(seen) as same, contextlib.suppress(ValueError):
        same.append(1)
        raise KeyError
    with contextlib.suppress(ValueError):
        raise ValueError
    return seen


def expressions(*a, b=2, **k):
    x, *y, z = a
    text = f"{x!r:>4}{z:03d}{b}"
    total = (n := len(a))
    match a:
        case [1, *rest]:
            matched = rest
        case _:
            matched = None
    match {"key": a, "more": 1}:
        case {"key": [p, *_], **others}:
            matched.append((p, others))
    assert a, "no"
    table = {**k, "q": 1}
    both = [*a, *a]
    part = a[1:]
    del both[0]
    both[0:1] = [9]
    return (
        x,
        y,
        z,
        text,
        total,
        n,
        matched,
        table,
        both,
        part,
        1 < n < 10,
        not n,
        -n,
        ~n,
        n if n else 0,
        a is not None,
        1 in a,
    )


def dataclass_made_in_the_frame():
    @dataclasses.dataclass(order=True)
    class P:
        x: int
        y: list = dataclasses.field(default_factory=list)

    return P(1) < P(2), P(1, [2]), dataclasses.asdict(P(3)), sorted([P(2), P(1)])


def return_in_finally():
    def f():
        try:
            return 1
        finally:
            return 2

    def g():
        for i in range(3):
            try:
                return i
            finally:
                if i == 0:
                    break
        return "broke"

    return f(), g()


def cells():
    def counter():
        n = 0

        def step():
            nonlocal n
            n += 1
            return n

        return step

    step = counter()
    step()
    made = [lambda i=i: (i, step()) for i in range(2)]
    try:
        undefined
    except NameError as error:
        message = str(error)
    return [f() for f in made], message


PROGRAMS = [
    *[
        (f, ())
        for f in (
            generators,
            classes,
            exceptions,
            managers,
            dataclass_made_in_the_frame,
            return_in_finally,
            cells,
        )
    ],
    (expressions, (1, 2, 3)),
    (json.dumps, ({"a": [1, {"b": None}]},)),
    (json.loads, ('{"a": [1, 2.5, "x"]}',)),
    (textwrap.fill, ("hello world " * 9, 30)),
    (statistics.stdev, ([1, 2, 4.5],)),
    (re.split, ("a|b", "xaybz")),
]
REFUSED = {
    *(
        "ASYNC_GEN_WRAP",
        "BEFORE_ASYNC_WITH",
        "GET_AWAITABLE",
        "GET_AITER",
        "GET_ANEXT",
        "END_ASYNC_FOR",
        "IMPORT_STAR",
    ),
    *("CHECK_EG_MATCH", "PREP_RERAISE_STAR", "CALL_INTRINSIC_1", "CALL_INTRINSIC_2"),
}


def opnames(code):
    """What functions consist of; Python runs modules and class bodies."""
    if code.co_flags & inspect.CO_OPTIMIZED:
        yield from (instruction.opname for instruction in decode(code).instructions)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from opnames(constant)


def main():
    for function, args in PROGRAMS:
        want, got = function(*args), PlainMachine().call(function, args, {})
        assert repr(want) == repr(got), (function.__name__, want, got)
    found = set()
    for path in sorted(Path(os.__file__).parent.glob("*.py"))[::4]:
        found.update(opnames(compile(path.read_bytes(), str(path), "exec")))
    unknown = found - set(bytecode) - REFUSED
    assert not unknown, unknown
    print(f"{len(PROGRAMS)} programs, {len(found)} opcodes")


main()
