"""The frame hook's promises, on the CPython that runs this, without torch: `python hook_checks.py ROOT`."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

sys.path.insert(0, sys.argv[1])

from minicompile.dynamo.hook import FrameHook, frame_hook


class Thing:
    pass


def replaced_by_layout(hook: FrameHook) -> None:
    """The entry gets the function and its bound parameters; closures and methods too."""
    k = 10

    def nested(y: int, *args: int, z: int = 3, **kw: int) -> Any:
        try:
            return y + k
        except TypeError:
            return "handler of a frame that never ran"

    def entry(function: FunctionType, *parameters: Any) -> Any:
        assert function.__closure__ is not None
        return function.__closure__[0].cell_contents, parameters

    class Owner:
        def method(self, x: int = 2) -> int:
            return x

    hook.redirect(nested.__code__, entry)
    hook.redirect(Owner.method.__code__, lambda function, self, x: (type(self).__name__, x))
    with hook.on():
        assert nested(1, 2, q=5) == (10, (1, 3, (2,), {"q": 5})), nested(1, 2, q=5)
        assert nested(y=1, z=4) == (10, (1, 4, (), {}))
        assert list(map(nested, [7])) == [(10, (7, 3, (), {}))]
        assert Owner().method() == ("Owner", 2)
    assert nested(1) == 11 and Owner().method() == 2


def callback_once(hook: FrameHook) -> None:
    asked: list[str] = []

    def callback(function: FunctionType) -> Any:
        asked.append(function.__name__)
        if function.__name__ == "caught":
            return lambda function, x: x + 100
        if function.__name__ == "refused":
            raise KeyError("from the callback")
        return None

    def caught(x: int) -> int:
        return x

    def passed(x: int) -> int:
        return caught(x) + 1

    def refused() -> None:
        raise AssertionError("its frame ran")

    hook.install(callback)
    with hook.on():
        assert [passed(1), passed(2), caught(3)] == [102, 103, 103]
        try:
            refused()
        except KeyError:
            asked.append("KeyError")
    assert [asked.count(n) for n in ("passed", "caught", "refused", "KeyError")] == [1] * 4, asked
    hook.forget(caught.__code__)
    with hook.on():
        assert caught(1) == 101 and asked.count("caught") == 2
    hook.leave_alone(caught)
    with hook.on():
        assert caught(1) == 1
    hook.install(lambda function: None)


def exceptions(hook: FrameHook) -> None:
    def guarded(x: int) -> Any:
        try:
            return x
        except ValueError:
            return "handler of a frame that never ran"

    def entry(function: FunctionType, x: int) -> Any:
        raise ValueError("from the entry")

    hook.redirect(guarded.__code__, entry)
    with hook.on():
        for _ in range(3):
            try:
                try:
                    raise KeyError("being handled")
                except KeyError:
                    guarded(1)
            except ValueError as error:
                names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
                assert names == ["exceptions", "entry"], names
                assert isinstance(error.__context__, KeyError)
            else:
                raise AssertionError("the entry's exception was lost")
        assert sys.exc_info() == (None, None, None)


def original(hook: FrameHook) -> None:
    offset = 5

    def function(a: int, /, b: int = 2, *args: int, c: int = 3, **kw: int) -> Any:
        a += offset
        return (lambda: (a, b, args, c, kw))()

    def entry(called: FunctionType, *parameters: Any) -> Any:
        return "eager", hook.original(called)(*parameters)

    hook.redirect(function.__code__, entry)
    with hook.on():
        assert function(1, 2, 9, c=4, d=5) == ("eager", (6, 2, (9,), 4, {"d": 5}))
        assert function(1) == ("eager", (6, 2, (), 3, {}))


def generators(hook: FrameHook) -> None:
    def numbers(n: int) -> Iterator[int]:
        try:
            yield from range(n)
        finally:
            seen.append("closed")

    seen: list[str] = []
    hook.install(lambda function: entries.get(function.__name__))
    entries: dict[str, Any] = {"numbers": lambda *a: "replaced", "coroutine": lambda *a: "replaced"}

    async def coroutine() -> int:
        return 3

    with hook.on():
        assert list(numbers(3)) == [0, 1, 2] and sum(i for i in numbers(3)) == 3
        running = numbers(2)
        next(running)
        try:
            running.throw(KeyError("in"))
        except KeyError:
            seen.append("thrown")
        try:
            coroutine().send(None)
        except StopIteration as stop:
            assert stop.value == 3
    assert seen == ["closed", "closed", "closed", "thrown"], seen
    hook.install(lambda function: None)


def recursion(hook: FrameHook) -> None:
    def depth(n: int) -> int:
        return 0 if n == 0 else 1 + depth(n - 1)

    def entry(function: FunctionType, n: int) -> int:
        return 0 if n == 0 else 1 + bounce(n - 1)

    def bounce(n: int) -> int:
        return -1

    hook.redirect(bounce.__code__, entry)
    with hook.on():
        assert depth(800) == 800 and bounce(400) == 400
        for _ in range(3):
            for function in (depth, bounce):
                try:
                    function(10**6)
                except RecursionError:
                    continue
                raise AssertionError("no RecursionError")
        assert depth(800) == 800 and bounce(400) == 400


def many_parameters(hook: FrameHook) -> None:
    scope: dict[str, Any] = {}
    names = ", ".join(f"a{i}" for i in range(100))
    exec(f"def wide({names}): return 0", scope)
    hook.redirect(scope["wide"].__code__, lambda function, *values: sum(values))
    with hook.on():
        assert scope["wide"](*range(100)) == sum(range(100))


def threads(hook: FrameHook) -> None:
    """On in one thread does not mean on in another; several at once don't disturb each other."""

    def value(x: int) -> int:
        return x

    def cell(x: int) -> int:
        return (lambda: x)()

    hook.redirect(value.__code__, lambda function, x: -x)
    wrong: list[Any] = []

    def work(sign: int) -> None:
        def loop() -> None:
            for i in range(5_000):
                if value(i) != sign * i or cell(i) != i:
                    wrong.append((sign, i))

        if sign < 0:
            with hook.on():
                loop()
        else:
            loop()

    with hook.on():
        workers = [threading.Thread(target=work, args=(sign,)) for sign in (1, -1, 1, -1)]
        for worker in workers:
            worker.start()
        assert value(2) == -2
        for worker in workers:
            worker.join()
    assert not wrong, wrong[:3]


def replaced_while_running(hook: FrameHook) -> None:
    """An entry may take itself out of the slot, and the code object may die with its function."""

    def once(x: int) -> int:
        return x

    def entry(function: FunctionType, x: int) -> int:
        hook.leave_alone(function)
        return x + 1

    hook.redirect(once.__code__, entry)
    with hook.on():
        assert [once(1), once(1)] == [2, 1]
    for _ in range(100):
        scope: dict[str, Any] = {}
        exec("def short_lived(x): return x", scope)
        hook.redirect(scope["short_lived"].__code__, lambda function, x: x + 1)
        with hook.on():
            assert scope["short_lived"](1) == 2


def no_leak(hook: FrameHook) -> None:
    def first(a: Any, b: Any) -> Any:
        return (lambda: a)()

    def fails(a: Any, *b: Any) -> Any:
        return a

    def entry(function: FunctionType, a: Any, b: Any) -> Any:
        return b

    def raising(function: FunctionType, a: Any, b: Any) -> Any:
        raise ValueError

    hook.redirect(first.__code__, entry)
    hook.redirect(fails.__code__, raising)
    alive: list[weakref.ref[Any]] = []

    def calls() -> None:
        for _ in range(1_000):
            a, b = Thing(), Thing()
            alive.extend((weakref.ref(a), weakref.ref(b)))
            assert first(a, b) is b
            with contextlib.suppress(ValueError):
                fails(a, b)

    with hook.on():
        calls()
        gc.collect()
        alive.clear()
        watched = (first, first.__code__, entry, fails, raising, None)
        before = [sys.getrefcount(thing) for thing in watched]
        blocks = sys.getallocatedblocks()
        calls()
        gc.collect()
        assert not any(reference() for reference in alive)
        alive.clear()
    after = [sys.getrefcount(thing) for thing in watched]
    assert all(abs(x - y) < 100 for x, y in zip(before, after)), (before, after)
    assert sys.getallocatedblocks() - blocks < 1_000, sys.getallocatedblocks() - blocks


CHECKS: list[Callable[[FrameHook], None]] = [
    replaced_by_layout, callback_once, exceptions, original, generators, recursion, many_parameters,
    threads, replaced_while_running, no_leak,
]  # fmt: skip

if __name__ == "__main__":
    hook = frame_hook()
    hook.install(lambda function: None)
    for check in CHECKS:
        check(hook)
        print(check.__name__, flush=True)
    hook.remove()
    assert "torch" not in sys.modules
