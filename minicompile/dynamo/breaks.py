"""Graph breaks: capture a frame up to an instruction, run that one as Python does, capture what follows.

    resume_after(frame, resume) -> GoOn     where the cut frame stands, and the function that goes on there

The entry that was captured up to the cut ends with `return go_on(*values)`. `go_on` runs the instruction
natively and calls a resume function: the original bytecode from the next instruction on, behind a
dispatcher of its own (`continuation.py` makes both). The real compiler: torch/_dynamo/symbolic_convert.py
(break_graph_if_unsupported), resume_execution.py.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minicompile.dynamo.assembler import Op
from minicompile.dynamo.continuation import (
    State,
    bind,
    break_at,
    continuation,
    find,
    slot_names,
    successors,
    units,
)
from minicompile.dynamo.interpreter import NULL, UNBOUND, Frame
from minicompile.errors import Unsupported

Resume = Callable[[State, types.FunctionType], Callable[..., Any]]
"""From a resume function (and the state that it starts in) to what is called in its place."""

READS_ALL_LOCALS = {"locals", "vars", "eval", "exec", "dir"}


class Cut(BaseException):
    """Leaves the interpreter where the capture shall end."""


@dataclass(frozen=True)
class GoOn:
    """What a cut frame needs: `function(*values)` runs the rest of it."""

    function: Callable[..., Any]
    values: tuple[Any, ...]


def resume_after(frame: Frame, resume: Resume) -> GoOn:
    """How to go on from the instruction before which `frame` stands.

    Raises Unsupported where the frame can't be cut.
    """
    function, code = frame.function, frame.function.__code__
    if frame.handled is not None:
        raise Unsupported("a break inside an except block")
    if frame.program.instructions[frame.pc].opname == "BEFORE_WITH":
        raise Unsupported("a break at entering a with block")
    point = point_of(frame)
    kept = live_names(code, point)
    values = {
        name: value
        for name, value in zip(frame.program.slots, frame.fast, strict=True)
        if value is not UNBOUND and name in kept and name not in code.co_freevars
    }
    bound = tuple(name for name in slot_names(code) if name in values)
    if not all(map(str.isidentifier, bound)):  # they become parameters
        raise Unsupported("a break while a local without a proper name is alive")
    state = State(point, tuple("null" if v is NULL else "value" for v in frame.stack), bound)
    after = successors(code, state)
    made: dict[int, Callable[..., Any]] = {}

    def transfer(number: int, closure: tuple[types.CellType, ...]) -> Callable[..., Any]:
        if number not in made:
            rest = bind(continuation(code, after[number]), function, closure)
            made[number] = resume(after[number], rest)
        return made[number]

    run = bind(break_at(code, state, transfer), function, function.__closure__ or ())
    stack = [value for value in frame.stack if value is not NULL]
    realize = frame.world.realize
    return GoOn(run, tuple(map(realize, (*(values[name] for name in bound), *stack))))


def point_of(frame: Frame) -> int:
    """The unit that comes next.

    Raises Unsupported inside a loop: the resume functions of its iterations would nest without end.
    """
    instructions = frame.program.instructions
    ahead = instructions[frame.pc]
    before = instructions[: frame.pc]
    code = frame.function.__code__
    point = find(code, ahead.offset, sum(other.offset == ahead.offset for other in before))
    every = units(code)
    first = {id(unit[0]): number for number, unit in enumerate(every)}
    for number, unit in enumerate(every):
        for op in unit:
            if op.target is not None and first[id(op.target)] <= point <= number:
                raise Unsupported(
                    "a break inside a loop", frame.line, "take the call out of the loop"
                )
    return point


def live_names(code: types.CodeType, point: int) -> set[str]:
    """Names of slots that instructions read that can run from `point` on."""
    names = slot_names(code)
    if READS_ALL_LOCALS.intersection(code.co_names):
        return set(names)
    every = units(code)
    first = {id(unit[0]): number for number, unit in enumerate(every)}
    found = {names[0]} if "__class__" in code.co_freevars and names else set()  # super() reads it
    seen: set[int] = set()
    waiting = [point]
    while waiting:
        number = waiting.pop()
        if number in seen or number >= len(every):
            continue
        seen.add(number)
        for op in every[number]:
            if op.opname.endswith(("_FAST", "_DEREF", "_CLOSURE", "_CLEAR", "_CHECK", "_CELL")):
                found |= set() if op.opname == "STORE_FAST" else {names[op.arg]}
            waiting += [first[id(target)] for target in targets(op)]
        waiting.append(number + 1)
    return found


def targets(op: Op) -> list[Op]:
    """Where an instruction can go besides the next one: a jump's target, its exception handler."""
    handler = op.handler.target if op.handler is not None else None
    return [target for target in (op.target, handler) if target is not None]
