"""Cuts every program at every unit that it executes, and compares with plain execution.

`python break_fuzzer.py ROOT` runs without torch and prints counts; exit code 1 if anything differs.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

sys.path[:0] = [sys.argv[1], str(Path(__file__).parent)] if __name__ == "__main__" else []

# ruff: noqa: E402, I001
from plain_programs import LOG, PROGRAMS, Derived
from plain_machine import start
from plain_scopes import CANNOT, WIDE
from minicompile.dynamo.bytecode import decode
from minicompile.dynamo.continuation import State, bind, break_at, continuation
from minicompile.dynamo.breaks import StandIn
from minicompile.dynamo.continuation import successors, units
from minicompile.errors import Unsupported

SKIP_NESTED = {"big"}


pieces = functools.cache(units)
signature_of = functools.cache(functools.partial(inspect.signature, follow_wrapped=False))


@dataclass
class Cut:
    """A frame between two units."""

    function: FunctionType
    state: State
    values: tuple[Any, ...]

    def stack(self) -> list[Any]:
        """The stack's values, with None for a NULL."""
        values = iter(self.values[len(self.state.bound) :])
        return [None if slot == "null" else next(values) for slot in self.state.stack]


def begin(function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cut:
    """A call's frame before its first unit."""
    given = signature_of(function).bind(*args, **kwargs)
    given.apply_defaults()
    state, cells = start(function.__code__), function.__code__.co_cellvars
    values = [
        given.arguments.get(name)
        if name not in cells
        else (CellType(given.arguments[name]) if name in given.arguments else CellType())
        for name in state.bound
    ]
    return Cut(function, state, tuple(values))


_steps: dict[tuple[CodeType, State], Any] = {}
_natives: dict[tuple[CodeType, State], Any] = {}


def one_unit(cut: Cut) -> Any:
    """Run one unit: another Cut, or what the frame returns, as it does where its handlers end."""
    code, state = cut.function.__code__, cut.state
    if (code, state) not in _steps:
        after = successors(code, state)

        def transfer(number: int, closure: tuple[CellType, ...]) -> Callable[..., Cut]:
            return lambda *values: Cut(None, after[number], values)  # type: ignore[arg-type]

        _steps[code, state] = break_at(code, state, transfer)
    got = bind(_steps[code, state], cut.function, cut.function.__closure__ or ())(*cut.values)
    if isinstance(got, Cut):
        got.function = cut.function
    return got


def natively(cut: Cut) -> Any:
    """Break at the unit with `break_at`, and go on in eager by `continuation`."""
    code, state = cut.function.__code__, cut.state
    if (code, state) not in _natives:
        after = successors(code, state)
        made: dict[int, CodeType] = {}
        function = cut.function

        def transfer(number: int, closure: tuple[CellType, ...]) -> FunctionType:
            if number not in made:
                made[number] = continuation(code, after[number])
            return bind(made[number], function, closure)

        _natives[code, state] = break_at(code, state, transfer)
    return bind(_natives[code, state], cut.function, cut.function.__closure__ or ())


def step_to(cut: Any, count: int) -> Any:
    for _ in range(count):
        cut = one_unit(cut)
    return cut


def visits(cut: Any) -> list[int]:
    """Steps that lead to the first and the last visit of each unit."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    count = 0
    try:
        while isinstance(cut, Cut):
            first.setdefault(cut.state.point, count)
            last[cut.state.point] = count
            cut = one_unit(cut)
            count += 1
    except Exception:  # the frame raises: that is where it ends
        pass
    return sorted({*first.values(), *last.values()})


def outcome(run: Callable[[], Any]) -> Any:
    """Value or exception with its chain, and the log."""
    LOG.clear()
    try:
        result: Any = ("value", repr(run()))
    except Exception as error:
        chain = [error, error.__cause__, error.__context__]
        result = ("raised", [(type(e).__name__, str(e)) for e in chain])
    return result, list(map(repr, LOG))


def call_of(cut: Cut) -> tuple[int, FunctionType, tuple[Any, ...], dict[str, Any]] | None:
    """If the next unit calls a Python function: which of `values` it is, and the call's arguments."""
    code = cut.function.__code__
    unit = pieces(code)[cut.state.point]
    last, stack = unit[-1], cut.stack()
    if last.opname not in ("CALL", "CALL_KW"):
        return None
    window = len(stack) - last.arg - 2
    at = window if cut.state.stack[window + 1] == "null" else window + 1
    callee, args = stack[at], stack[len(stack) - last.arg :]
    names = code.co_consts[unit[0].arg] if len(unit) > 1 and unit[0].opname != "PRECALL" else ()
    kwargs = dict(zip(names, args[len(args) - len(names) :]))
    args = args[: len(args) - len(names)]
    if isinstance(callee, MethodType):
        callee, args = callee.__func__, [callee.__self__, *args]
    if not isinstance(callee, FunctionType) or callee.__code__.co_flags & (0x20 | 0x80):
        return None
    below = sum(slot != "null" for slot in cut.state.stack[:at])
    return len(cut.state.bound) + below, callee, tuple(args), kwargs


class Fuzzer:
    def __init__(self) -> None:
        self.points = self.nested = self.steps = self.wrong = 0
        self.seen: set[tuple[str, int]] = set()
        self.places: dict[str, int] = {}

    def compare(self, what: str, want: Any, run: Callable[[], Any]) -> None:
        got = outcome(run)
        if got != want:
            self.wrong += 1
            print(f"{what}\n  want {want}\n  got  {got}")

    def program(self, function: FunctionType, case: tuple[Any, ...], every: int = 1) -> None:
        name = function.__qualname__

        def fresh() -> tuple[Any, ...]:
            return tuple(Derived() if arg == "self" else arg for arg in case)

        def at(count: int) -> Any:
            return step_to(begin(function, fresh(), {}), count)

        want = outcome(lambda: function(*fresh()))
        everywhere = visits(begin(function, fresh(), {}))
        self.places[name] = len(units(function.__code__))
        self.steps += everywhere[-1] + 1
        self.compare(f"{name}{case} step by step", want, lambda: at(everywhere[-1] + 1))
        for count in everywhere[::every]:
            cut = None

            def run(count: int = count) -> Any:
                nonlocal cut
                cut = at(count)
                return natively(cut)(*cut.values)

            self.compare(f"{name}{case} cut after {count} units", want, run)
            self.points += 1
            assert isinstance(cut, Cut)
            self.seen.add((name, cut.state.point))
            if name not in SKIP_NESTED and call_of(at(count)) is not None:
                self.callee(f"{name}{case} unit {count}", want, lambda c=count: at(c))

    def callee(self, what: str, want: Any, outer_at: Callable[[], Cut]) -> None:
        """Cut the called function everywhere; the outer frame is cut at the call."""
        found = call_of(outer_at())
        assert found is not None
        try:
            everywhere = visits(begin(found[1], *found[2:]))
        except TypeError:  # wrong arguments
            return
        for count in everywhere:

            def run(count: int = count) -> Any:
                outer = outer_at()
                position, callee, args, kwargs = call_of(outer)  # type: ignore[misc]
                inner = step_to(begin(callee, args, kwargs), count)
                values = list(outer.values)
                values[position] = StandIn(natively(inner), inner.values)
                return natively(outer)(*values)

            self.compare(f"{what}, in the callee after {count} units", want, run)
            self.nested += 1


def refusals() -> int:
    """Functions that can't be cut everywhere say so."""
    wrong = 0
    for function in CANNOT:
        try:
            state = start(function.__code__)
            for _ in range(4):
                break_at(function.__code__, state, bind)  # type: ignore[arg-type]
                state = successors(function.__code__, state)[0]
        except Unsupported:
            continue
        wrong += 1
        print(f"{function.__qualname__} does not refuse")
    return wrong


def disagreements(code: CodeType) -> int:
    """Normalised instructions that don't lead to a unit of their own, in order."""
    places = [instruction.unit for instruction in decode(code).instructions]
    return sum(before >= after for before, after in pairwise(places))


def main() -> int:
    sys.setrecursionlimit(10_000)
    fuzzer = Fuzzer()
    warnings.simplefilter("ignore")  # coroutines that are cut before they start
    gc.disable()  # frames that were cut and left must not finalise in the midst of another run
    for function, cases in PROGRAMS:
        if function in CANNOT:
            continue
        for case in cases:
            fuzzer.program(function, case)
            gc.collect()
    fuzzer.program(WIDE, (1,), every=97)
    fuzzer.wrong += refusals()
    fuzzer.wrong += sum(disagreements(function.__code__) for function, _ in PROGRAMS)
    places = sum(n for name, n in fuzzer.places.items() if name != "big")
    seen = sum(name != "big" for name, _ in fuzzer.seen)
    print(
        f"{sys.version.split()[0]}: {len(PROGRAMS)} functions, {fuzzer.points} break points "
        f"({seen} of {places} units), {fuzzer.nested} nested, {fuzzer.steps} single steps, "
        f"{fuzzer.wrong} differences"
    )
    assert "torch" not in sys.modules
    return int(fuzzer.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
