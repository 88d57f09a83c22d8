"""Graph breaks: chooses where to cut a frame, and runs what remains (continuation.py makes the functions).

    places(frame, log) -> [steps]           where the running frames could be cut, the best place first
    resume_after(frame, resume) -> GoOn     what remains to be done where they are cut
    run([GoOn])                             does it, and what that leaves to be done, until there is a result

An entry that was captured up to a cut ends with a GoOn: `function(*values)` runs one instruction natively
and gives the next GoOn, to a resume function: the original bytecode from the next instruction on, behind a
dispatcher of its own (`continuation.py` makes both). `run` calls one after the other, so that a break in a
loop nests nothing.

A break inside an inlined call cuts every frame from there up: in the caller's stack a `StandIn` takes the
callable's place, and when the call runs, natively, it runs the rest of the callee.
The real compiler: torch/_dynamo/symbolic_convert.py (break_graph_if_unsupported), resume_execution.py.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from minicompile.dynamo.assembler import VERSION
from minicompile.dynamo.bytecode import is_generator, slot_names
from minicompile.dynamo.continuation import (
    State,
    bind,
    break_at,
    continuation,
    successors,
    units,
)
from minicompile.dynamo.interpreter import NULL, UNBOUND, Frame
from minicompile.dynamo.reasons import refusal

if TYPE_CHECKING:
    from minicompile.dynamo.dispatch import Dispatcher

READS_ALL_LOCALS = {"locals", "vars", "eval", "exec", "dir"}
CALLS = ("CALL", "CALL_FUNCTION_EX")


class FrameCut(BaseException):
    """Leaves the interpreter where the capture shall end."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """What remains to be done: `function(*values)`."""

    function: Callable[..., Any]
    values: tuple[Any, ...]


def run(left: list[Any]) -> Any:
    """The result of a cut frame. Takes what `left` holds: nothing here keeps alive what the frame dropped."""
    result = left.pop()
    while type(result) is GoOn:
        function, values = result.function, result.values
        del result
        result = function(*values)
    return result


class StandIn(GoOn):
    """In the stack of a cut frame, in place of a callable whose frame is cut too."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        """The arguments are among the values already."""
        return run([GoOn(self.function, self.values)])


# -- where to cut


def places(
    frame: Frame,
    comes_and_goes: Callable[[types.FunctionType], bool],
    is_users: Callable[[Frame], bool],
) -> list[int]:
    """Numbers of executed instructions after which to cut, given the innermost frame that runs.

    Before the instruction that each frame is at, the innermost frame first; in an except block, before the
    instruction that raised. `comes_and_goes`: whether each call may bring a function
    with cells of its own; what goes on in a frame holds the cells. `is_users`: a library's function is cut
    only while it waits for code of the user's; else its call is undone, and runs in eager as a whole.
    """
    here: list[int] = []
    users = False
    while True:
        users |= is_users(frame)
        if frame.handled is not None:
            here = [frame.before_raise]
        else:
            here.append(frame.steps)
        caller = frame.parent
        if caller is None:
            break
        bound_to_call = frame.function.__closure__ and comes_and_goes(frame.function)
        if not users or not waits_for(caller, frame) or bound_to_call:
            here = []
        frame = caller
    return [steps for steps in dict.fromkeys(here) if steps]


def waits_for(caller: Frame, frame: Frame) -> bool:
    """Whether what `frame` returns is the result of the call that its caller is at."""
    called = caller.called
    if isinstance(called, types.MethodType):
        called = called.__func__
    elif not isinstance(called, types.FunctionType):
        called = inspect.getattr_static(type(called), "__call__", None)
    plain = called is frame.function and not is_generator(frame.function.__code__)
    return plain and caller.current.opname in CALLS


# -- cutting


def resume_after(
    frame: Frame, resume: Resume, fix_cells: Callable[[types.FunctionType], None]
) -> GoOn:
    """How to go on from the instruction before which `frame` stands; its callers stand at their calls.

    `fix_cells`: relies on the cells of a function whose frame is cut.

    Raises Unsupported where a frame can't be cut.
    """
    go_on = cut(frame, frame.pc, frame.stack, resume)
    while (caller := frame.parent) is not None:
        fix_cells(frame.function)
        frame = caller
        pair: list[Any] = [NULL, StandIn(go_on.function, go_on.values)]
        ins = frame.current
        spread: list[Any] = [(), {}]
        given = [None] * ins.arg if ins.opname == "CALL" else spread[: 1 + (ins.arg & 1)]
        stack = [*frame.stack, *(pair if VERSION < (3, 13) else pair[::-1]), *given]
        go_on = cut(frame, frame.pc - 1, stack, resume)
    return go_on


def cut(frame: Frame, index: int, stack: list[Any], resume: Resume) -> GoOn:
    """Go on from instruction `index` of one frame, its stack as given."""
    # a resume function's bytecode is another's behind a prologue, which shifts its units
    function, shift = frame.function.__dict__.get("_minicompile_uncut", (frame.function, 0))
    code, point = function.__code__, frame.program.instructions[index].unit - shift
    fast = dict(zip(frame.program.slots, frame.fast, strict=True))
    cells = (*code.co_cellvars, *code.co_freevars)
    cells_made = all(isinstance(fast[name], types.CellType) for name in cells)
    if point < 0 or not (shift or cells_made):
        raise refusal("place-of-cut", "a break before the frame is set up")
    kept = live_names(code, point)
    values = {
        name: value
        for name, value in fast.items()
        if value is not UNBOUND and name in kept and name not in code.co_freevars
    }
    bound = tuple(name for name in slot_names(code) if name in values)
    if not all(map(str.isidentifier, bound)):  # they become parameters
        raise refusal("place-of-cut", "a break while a local without a proper name is alive")
    empty = [value is NULL or value is UNBOUND for value in stack]
    state = State(point, tuple("null" if none else "value" for none in empty), bound)
    above = (value for value, none in zip(stack, empty, strict=True) if not none)
    given = (*(values[name] for name in bound), *above)  # arguments that nobody read are passed on
    closure = frame.function.__closure__ or ()
    return GoOn(native_step(function, closure, resume, state), given)


Cells: TypeAlias = tuple[types.CellType, ...]


def native_step(
    function: types.FunctionType, closure: Cells, resume: Resume, state: State
) -> Callable[..., Any]:
    """What runs one instruction of a frame natively, and gives what goes on there."""
    after = successors(function.__code__, state)

    def transfer(number: int, closure: Cells) -> Callable[..., Any]:
        going_on = resume(function, after[number], closure)
        return lambda *values: GoOn(going_on, values)

    code = break_at(function.__code__, state, transfer)
    return resume.watched(bind(code, function, closure))


@dataclass(frozen=True)
class Resume:
    """Finds or makes what goes on after graph breaks of a dispatcher. Code refers to it, so it holds none."""

    owner: weakref.ref[Dispatcher]

    def watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A function that runs one instruction, while what that calls may be captured."""
        before = self.owner()
        return step if before is None else before.watched(step)

    def __call__(
        self, function: types.FunctionType, state: State, closure: tuple[types.CellType, ...]
    ) -> Callable[..., Any]:
        before = self.owner()
        key = id(function.__code__), state, tuple(map(id, closure))
        if before is not None and key in before.resumed:
            return before.resumed[key]
        rest = resume_function(function, state, closure)
        if before is None or len(before.resumed) >= MAX_RESUMED:
            return rest
        resumed = before.another(rest, f"{before.name}, resumed", before)
        return before.resumed.setdefault(key, resumed.entrance)


MAX_RESUMED = 256
"""How many places of one function go on in a compiled resume function; others in plain bytecode."""


def resume_function(
    function: types.FunctionType, state: State, closure: tuple[types.CellType, ...]
) -> types.FunctionType:
    """The original bytecode from a state on."""
    code = continuation(function.__code__, state)
    made = bind(code, function, closure)
    shift = len(units(code)) - len(units(function.__code__))
    made.__dict__["_minicompile_uncut"] = function, shift
    return made


@functools.lru_cache(maxsize=1024)
def live_names(code: types.CodeType, point: int) -> set[str]:
    """Names of slots that instructions read from `point` on, or from the start of the loops around it."""
    names = slot_names(code)
    if READS_ALL_LOCALS.intersection(code.co_names):
        return set(names)
    every = units(code)
    number_of = {id(unit[0]): number for number, unit in enumerate(every)}
    found = {names[0]} if "__class__" in code.co_freevars and names else set()  # super() reads it
    first, begin = len(every), point
    while begin < first:  # jumps back make loops that begin earlier
        rest, first = every[begin:first], begin
        for op in (op for unit in rest for op in unit):
            if op.opname.endswith(("_FAST", "_DEREF", "_CLOSURE", "_CLEAR", "_CHECK", "_CELL")):
                found |= set() if op.opname == "STORE_FAST" else {names[op.arg]}
            targets = op.target, op.handler and op.handler.target
            begin = min([begin, *(number_of[id(t)] for t in targets if t is not None)])
    return found
