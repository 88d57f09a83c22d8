"""The frame hook alone, for a Python without torch: `python hook_programs.py ROOT`.

Each check compares what a function gives when the hook looks on with what it gives alone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

sys.path.insert(0, sys.argv[1])
from minicompile.plugins.nested_frames import hook
from minicompile.plugins.nested_frames.hook import LEAVE, NEVER, QUIET


class Watch:
    """Gives the decisions of a table by function name, LEAVE where it has none, and notes the questions."""

    def __init__(self, **table: Any) -> None:
        self.table, self.asked = table, list[str]()
        self.serial = hook.next_serial()

    def decide(self, function: FunctionType) -> Any:
        self.asked.append(function.__name__)
        return self.table.get(function.__name__, LEAVE)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return hook.watched(self.decide, self.serial, function)(*args, **kwargs)


def inner(y: Any, /, a: Any = 1, *args: Any, z: Any = 3, **kwargs: Any) -> Any:
    return y, a, args, z, kwargs


def caller(y: Any) -> Any:
    return inner(y, 5, 6, z=4, q=7), inner(y)


def stand_in(function: FunctionType, *values: Any) -> Any:
    return (function.__name__, *values)


def parameters_arrive_as_locals() -> None:
    watch = Watch(inner=stand_in)
    first, second = watch.run(caller, 1)
    assert first == ("inner", 1, 5, 4, (6,), {"q": 7}), first
    assert second == ("inner", 1, 1, 3, (), {}), second
    assert watch.asked == ["inner"]
    assert caller(1) == ((1, 5, (6,), 4, {"q": 7}), (1, 1, (), 3, {}))


def cells_and_closures() -> None:
    def outer(k: Any) -> Any:
        def add(a: Any, b: Any) -> Any:
            return lambda: a + b + k

        return add

    def use(k: Any) -> Any:
        return outer(k)(1, 2)

    def entry(function: FunctionType, a: Any, b: Any) -> Any:
        return a, b, function.__closure__[0].cell_contents  # type: ignore[index]

    assert Watch(add=entry).run(use, 10) == (1, 2, 10)
    assert Watch().run(use, 10)() == 13


def an_entry_can_leave_one_call() -> None:
    def entry(function: FunctionType, y: Any, *rest: Any) -> Any:
        return LEAVE if y == 1 else "answered"

    watch = Watch(inner=entry)
    assert watch.run(caller, 1) == caller(1)
    assert watch.run(caller, 2) == ("answered", "answered")


def names_of(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def exceptions_are_the_entrys() -> None:
    def guarded(y: Any) -> Any:
        try:
            return y
        except ValueError:
            return "a handler of a frame that never ran"

    def fails(function: FunctionType, y: Any) -> Any:
        raise ValueError("from the entry")

    def call(y: Any) -> Any:
        return guarded(y)

    for _ in range(3):
        try:
            Watch(guarded=fails).run(call, 1)
        except ValueError as error:
            assert names_of(error)[-2:] == ["call", "fails"], names_of(error)
        else:
            raise AssertionError("no exception")


def raises_below(y: Any) -> Any:
    return inner(y, y=1), y.missing


def call_raises(y: Any) -> Any:
    return raises_below(y)


def tracebacks_of_frames_left_alone() -> None:
    try:
        call_raises(1)
    except AttributeError as error:
        alone = names_of(error)
    try:
        Watch().run(call_raises, 1)
    except AttributeError as error:
        assert names_of(error)[-2:] == alone[-2:] == ["call_raises", "raises_below"]


def never_and_quiet() -> None:
    def leaf() -> int:
        return 1

    def middle() -> int:
        return leaf()

    def top() -> int:
        return middle()

    first = Watch(middle=QUIET)
    assert first.run(top) == 1 and first.asked == ["middle"]
    second = Watch()
    assert second.run(top) == 1 and second.asked == []  # quiet for everybody
    fourth, fifth = Watch(leaf=NEVER), Watch(leaf=stand_in)
    assert fourth.run(lambda: leaf()) == 1 and fourth.asked == ["leaf"]
    assert fifth.run(lambda: leaf()) == 1 and fifth.asked == []


def each_serial_has_its_own_decisions() -> None:
    one, two = Watch(inner=stand_in), Watch()
    for _ in range(3):
        assert one.run(caller, 1)[1][0] == "inner"
        assert two.run(caller, 1) == caller(1)


def a_dropped_entry_is_asked_for_again() -> None:
    watch = Watch(inner=lambda *values: "first")
    assert watch.run(caller, 1) == ("first", "first")
    del watch.table["inner"]
    assert watch.run(caller, 1) == caller(1)
    assert watch.asked == ["inner", "inner"]


def below_an_entry_only_enter_switches_on() -> None:
    def helper() -> int:
        return 1

    def answered() -> int:
        return 0

    def entry(function: FunctionType) -> Any:
        return helper(), watch.run(lambda: helper())

    watch = Watch(answered=entry)
    assert watch.run(lambda: (answered(), helper())) == ((1, 1), 1)
    assert watch.asked == ["answered", "helper"]


def generators_classes_and_comprehensions_run() -> None:
    def numbers(n: int) -> Iterator[int]:
        for i in range(n):
            yield from [i, (yield i)]

    def everything(n: int) -> Any:
        class Local:
            value = n

        squares = [i * i for i in numbers(n) if i is not None]
        return (
            squares,
            Local.value,
            sum(i for i in range(n)),
            {i: j + 1 for i, j in zip("ab", (1, 2))},
        )

    watch = Watch()
    assert watch.run(everything, 4) == everything(4)
    assert "numbers" not in watch.asked and "Local" not in watch.asked


def other_threads_are_left_alone() -> None:
    found: list[Any] = []

    def spawn() -> Any:
        thread = threading.Thread(target=lambda: found.append(caller(1)))
        thread.start()
        thread.join()
        return caller(1)

    watch = Watch(inner=stand_in)
    assert watch.run(spawn)[0][0] == "inner" and found == [caller(1)]


def threads_at_once() -> None:
    wrong: list[Any] = []

    def work(number: int) -> None:
        watch = Watch(inner=lambda function, y, *rest: (number, y))
        for i in range(2_000):
            if number % 2:
                if watch.run(caller, i) != ((number, i), (number, i)):
                    wrong.append((number, i))
            elif caller(i)[1][0] != i:
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:5]


class Tracked:
    pass


def nothing_leaks() -> None:
    def identity(a: Any, b: Any) -> Any:
        return a

    def entry(function: FunctionType, a: Any, b: Any) -> Any:
        return b

    def fails(function: FunctionType, a: Any, b: Any) -> Any:
        raise KeyError

    def loop(count: int) -> list[Any]:
        alive = []
        for _ in range(count):
            a, b = Tracked(), Tracked()
            alive += [weakref.ref(a), weakref.ref(b)]
            with contextlib.suppress(KeyError):
                identity(a, b)
            del a, b
        return alive

    for decision in (entry, fails, lambda *values: LEAVE):
        watch = Watch(identity=decision)
        alive = watch.run(loop, 1_000)
        assert not any(reference() for reference in alive)
        counted = (identity, identity.__code__, Tracked, decision, KeyError)
        before = [sys.getrefcount(value) for value in counted]
        blocks = sys.getallocatedblocks()
        watch.run(loop, 20_000)
        gc.collect()
        assert [sys.getrefcount(value) for value in counted] == before
        assert sys.getallocatedblocks() - blocks < 1_000


def decisions_go_with_their_code() -> None:
    def entry(function: FunctionType, a: int) -> int:
        return a + 1

    watch = Watch(made=entry)

    def make_many() -> None:
        for i in range(2_000):
            names: dict[str, Any] = {}
            exec(f"def made(a): return a * {i}", names)
            assert names["made"](1) == 2

    before = sys.getrefcount(entry)
    watch.run(make_many)
    del watch
    gc.collect()
    assert sys.getrefcount(entry) <= before


def depth_of(function: Callable[..., Any]) -> int:
    """How often the function calls itself before Python says stop."""
    reached = 0

    def count() -> None:
        nonlocal reached
        reached += 1

    with contextlib.suppress(RecursionError):
        function(count)
    return reached


def recursive(count: Callable[[], None]) -> None:
    count()
    recursive(count)


def recursion_ends_where_it_would() -> None:
    alone = depth_of(recursive)
    assert abs(Watch().run(depth_of, recursive) - alone) <= 2

    def entry(function: FunctionType, count: Callable[[], None]) -> Any:
        return between(function, count)

    def between(function: FunctionType, count: Callable[[], None]) -> Any:
        return watch.run(function, count)  # as a compiled function does that runs in eager

    watch = Watch(recursive=entry)
    answered = watch.run(depth_of, recursive)
    assert abs(answered - alone) <= 2, (answered, alone)


def down(n: int) -> int:
    return 0 if n == 0 else 1 + down(n - 1)


def deep_recursion_needs_no_c_stack() -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(200_000)
    try:
        assert Watch().run(down, 100_000) == 100_000
        watch = Watch(down=lambda function, n: LEAVE)
        assert watch.run(down, 100_000) == 100_000
        watch = Watch(down=lambda function, n: watch.run(function, n))
        assert watch.run(down, 100_000) == 100_000
        found: list[int] = []

        def elsewhere() -> None:
            thread = threading.Thread(target=lambda: found.append(down(100_000)))
            thread.start()
            thread.join()

        Watch().run(elsewhere)
        assert found == [100_000]
    finally:
        sys.setrecursionlimit(before)


def a_forked_child_runs_without_it() -> None:
    watch, alone = Watch(inner=stand_in), caller(1)

    def fork() -> tuple[int, Any]:
        return os.fork(), caller(1)

    child, found = watch.run(fork)
    if child == 0:  # it goes on, and can switch the hook on again
        right = found == alone and caller(1) == alone and watch.run(caller, 1) != alone
        os._exit(0 if right and caller(1) == alone else 1)
    assert os.waitpid(child, 0)[1] == 0 and found != alone


def a_tracer_sees_the_users_frames() -> None:
    seen: list[str] = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        seen.append(frame.f_code.co_name)

    def traced(y: Any) -> Any:
        sys.settrace(trace)
        try:
            return inner(y)
        finally:
            sys.settrace(None)

    assert Watch(inner=stand_in).run(traced, 1) == inner(1)
    assert "inner" in seen


def unfinished_calls_switch_off() -> None:
    watch = Watch(inner=stand_in)
    for call in (lambda: inner(), lambda: 1 / 0):  # type: ignore[call-arg]
        with contextlib.suppress(TypeError, ZeroDivisionError):
            watch.run(call)
        assert caller(1)[1] == inner(1)
    with contextlib.suppress(TypeError):
        watch.run(inner)  # its own frame never begins
    assert watch.run(caller, 1)[1][0] == "inner"


def an_interrupt_while_deciding_arrives() -> None:
    def interrupted(function: FunctionType) -> Any:
        raise KeyboardInterrupt

    try:
        hook.watched(interrupted, hook.next_serial(), caller)(1)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("swallowed")


CHECKS = [
    value
    for value in list(globals().values())
    if isinstance(value, FunctionType)
    and value.__module__ == __name__
    and value.__code__.co_argcount == 0
]


if __name__ == "__main__":
    assert hook.load_hook() is not None, "no hook"
    for check in CHECKS:
        check()
    assert "torch" not in sys.modules
    print(f"{len(CHECKS)} checks")
