"""Makes the functions of a graph break: one that leaves a frame before an instruction, one that resumes it.

    State := point, stack (a kind for each slot), bound names
    point := index into `units(code)`

A graph break at unit k needs two functions. `break_at(code, state, transfer)` restores the frame, runs unit k
as CPython does, then calls what `transfer` gives with the new state: the resume function, which is captured
in its turn. `continuation(code, state)` restores the frame and jumps into the original bytecode.

Both take their parameters by position: the bound names in slot order, then the stack from the bottom without
its NULLs. For a cell that the frame made itself the parameter is the cell, so nested functions that exist
already keep sharing it; free variables come from the closure of the frame's function. Loops, with- and
try-blocks need no special case: iterators and `__exit__` lie on the stack, the exception table still applies.

Raises Unsupported for frames that can't be cut. A trace has no effects, so such a frame can run in eager.
In CPython: Python/bytecodes.c (3.11: ceval.c). The real compiler: torch/_dynamo/resume_execution.py.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any, Literal, TypeAlias

from minicompile.dynamo import bytecode
from minicompile.dynamo.assembler import VERSION, Op, assemble
from minicompile.dynamo.bytecode import (
    LOOP_TAIL,
    SLOT_OPS,
    become,
    is_coroutine,
    is_generator,
    slot_names,
)
from minicompile.dynamo.reasons import refusal

Slot: TypeAlias = Literal["value", "null"]
"""What a stack slot holds: an object, or CPython's NULL."""

Transfer: TypeAlias = Callable[[int, tuple[CellType, ...]], Callable[..., Any]]
"""From the number of a successor and the frame's closure to the function that goes on there."""


@dataclass(frozen=True, slots=True)
class State:
    """Where a frame stands, without its values: functions made for a state serve every frame in it."""

    point: int
    stack: tuple[Slot, ...]
    bound: tuple[str, ...]
    """Names whose fast slot is filled (locals and own cells, not free variables), in slot order."""


# -- code as units: the pieces between which a frame can be cut

_CALLS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX"}
_LEAVES = {"RETURN_VALUE", "RERAISE", "RAISE_VARARGS"}
_JUMPS = {"JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT"}


def units(code: CodeType) -> list[list[Op]]:
    """The units of a code object; those that set the frame up, before any cut, do nothing."""
    out = bytecode.units(code)
    begin = next((i for i, unit in enumerate(out) if unit[0].opname == "RESUME"), -1)
    for (op,) in out[: begin + 1]:
        op.opname, op.arg = "NOP", 0
    return out


# -- running one unit


def natively(unit: list[Op]) -> list[Op]:
    """A unit's instructions, to run alone. Loading a method always gives a bound method and a NULL."""
    op = unit[0]
    if op.opname in _JUMPS or op.opname == "NOP":
        return []
    made = [Op(o.opname, o.arg, o.target, o.handler, o.line, o.offset) for o in unit]
    loads = {"LOAD_ATTR", "LOAD_SUPER_ATTR"} if VERSION >= (3, 12) else set()
    if op.opname == "LOAD_METHOD" or (op.opname in loads and op.arg & 1):
        load = ("LOAD_ATTR", op.arg) if op.opname == "LOAD_METHOD" else (op.opname, op.arg - 1)
        swapped = [("PUSH_NULL", 0), ("SWAP", 2)] if VERSION < (3, 13) else [("PUSH_NULL", 0)]
        return become(made[0], load, *swapped)
    return made


def successors(code: CodeType, state: State) -> list[State]:
    """The states after one unit: at the next unit, then at the jump's target; none after a return."""
    all_units, names = units(code), slot_names(code)
    unit = all_units[state.point]
    last = unit[-1]
    ways = [] if last.opname in _JUMPS | _LEAVES else [(state.point + 1, False)]  # point, by jump
    if last.target is not None:
        point = next(i for i, other in enumerate(all_units) if other[0] is last.target)
        ways.append((point + len(LOOP_TAIL) * (last.opname == "FOR_ITER"), True))
    out = []
    for point, jump in ways:
        stack, bound = list(state.stack), set(state.bound)
        for op in natively(unit):
            apply(op, stack, bound, names, jump)
        out.append(State(point, tuple(stack), tuple(name for name in names if name in bound)))
    return out


def apply(op: Op, stack: list[Slot], bound: set[str], names: tuple[str, ...], jump: bool) -> None:
    """What an instruction does to the kinds of the stack's slots and to the bound names."""
    opname, arg, number = op.opname, op.arg, dis.opmap[op.opname]
    name = names[arg] if opname in SLOT_OPS else ""
    if opname == "SWAP":
        stack[-1], stack[-arg] = stack[-arg], stack[-1]
    elif opname == "COPY":
        stack.append(stack[-arg])
    elif opname == "PUSH_NULL":
        stack.append("null")
    elif opname == "LOAD_FAST_AND_CLEAR":
        stack.append("value" if name in bound else "null")
    elif opname == "FOR_ITER":
        stack[-1:] = [] if jump else ["value", "value"]
    elif opname == "STORE_FAST":  # of a NULL: unbinds
        (bound.add if stack.pop() == "value" else bound.discard)(name)
    else:
        change = dis.stack_effect(number, arg if number >= dis.HAVE_ARGUMENT else None, jump=jump)
        stack[len(stack) + min(change, 0) :] = ["value"] * change
        if opname in _CALLS:  # the result took the place of the callable or its NULL
            stack[-1] = "value"
    if opname == "MAKE_CELL":
        bound.add(name)
    elif opname in ("DELETE_FAST", "LOAD_FAST_AND_CLEAR"):
        bound.discard(name)


# -- making the functions


def continuation(code: CodeType, state: State) -> CodeType:
    """Code that restores `state` from its parameters and goes on in the original instructions."""
    writer = _FrameWriter(code, state, len(state.stack))
    enter = Op("JUMP_FORWARD", 0, writer.units[state.point][0])
    return writer.finish([*writer.restore(), enter], with_body=True)


def break_at(code: CodeType, state: State, transfer: Transfer) -> CodeType:
    """Code that restores `state`, runs one unit and hands over to `transfer(number, closure)(*values)`.

    `number` counts the successors, whose parameters the values are. When the unit raises, the frame's own
    handlers run; the transfer lies outside them, so an `__exit__` never runs twice. The code holds
    `transfer`, and code objects are not garbage-collected in cycles: let it refer weakly to its owner.
    """
    after = successors(code, state)
    writer = _FrameWriter(code, state, max(len(s.stack) for s in (state, *after)))
    step = natively(writer.units[state.point])
    ops = writer.restore()
    if step:  # 3.13 looks for the handler of a call one unit ahead of it
        ops.append(Op("NOP", handler=step[0].handler, line=writer.line))
    ops += step
    for number, reached in enumerate(after):
        leave = writer.leave(reached, number, transfer)
        if number == 1:  # by the jump
            if step[-1].opname == "FOR_ITER":
                leave[:0] = map(writer.op, LOOP_TAIL)
            step[-1].opname = step[-1].opname.replace("BACKWARD", "FORWARD")
            step[-1].target = leave[0]
        ops += leave
    return writer.finish(ops, with_body=any(op.handler for op in step))


class _FrameWriter:
    """New slots for a code object: parameters first, then the other locals, then free variables."""

    def __init__(self, code: CodeType, state: State, depth: int) -> None:
        check(code, state)
        self.code, self.state = code, state
        self.units = units(code)
        self.old_names = slot_names(code)
        self.stack_names = [f"__stack{i}" for i in range(depth)]
        given = [n for n, slot in zip(self.stack_names, state.stack) if slot != "null"]
        own = (n for n in self.old_names if n not in code.co_freevars)
        self.varnames = list(dict.fromkeys((*state.bound, *given, *own, *self.stack_names)))
        self.slots = {n: i for i, n in enumerate((*self.varnames, *code.co_freevars))}
        self.parameters = len(state.bound) + len(given)
        self.consts = [*code.co_consts, ""]
        self.line = self.units[state.point][0].line

    def op(self, opname: str, arg: int | str = 0) -> Op:
        number = self.slots[arg] if isinstance(arg, str) else arg
        return Op(opname, number, line=self.line)

    def const(self, value: Any) -> Op:
        self.consts.append(value)
        return self.op("LOAD_CONST", len(self.consts) - 1)

    def move(self, name: str) -> list[Op]:
        """Load a local and unbind it: no second reference stays behind."""
        old = VERSION < (3, 12)
        opnames = ("LOAD_FAST", "DELETE_FAST") if old else ("LOAD_FAST_AND_CLEAR",)
        return [self.op(opname, name) for opname in opnames]

    def call(self, function: list[Op], arguments: list[Op], count: int) -> list[Op]:
        null = [self.op("PUSH_NULL")]
        before, after = (null, []) if VERSION < (3, 13) else ([], null)
        precall = [self.op("PRECALL", count)] if VERSION < (3, 12) else []
        return [*before, *function, *after, *arguments, *precall, self.op("CALL", count)]

    def restore(self) -> list[Op]:
        """The prologue: free variables, own cells, and the stack."""
        out, free = [], len(self.code.co_freevars)
        if free:
            out.append(self.op("COPY_FREE_VARS", free))
        for name in self.code.co_cellvars:
            if name in self.state.bound:  # MAKE_CELL tells `locals()` that the slot holds a cell
                out += [self.op(n, name) for n in ("LOAD_FAST", "MAKE_CELL", "STORE_FAST")]
        out.append(self.op("RESUME"))
        for name, slot in zip(self.stack_names, self.state.stack):
            out += [self.op("PUSH_NULL")] if slot == "null" else self.move(name)
        return out

    def leave(self, state: State, number: int, transfer: Transfer) -> list[Op]:
        """The epilogue: take the stack apart, from the top, and return what the resume function gives."""
        names = self.stack_names[: len(state.stack)]
        out = [self.op("STORE_FAST", name) for name in reversed(names)]
        load = "LOAD_CLOSURE" if VERSION < (3, 13) else "LOAD_FAST"
        closure = [self.op(load, name) for name in self.code.co_freevars]
        closure.append(self.op("BUILD_TUPLE", len(closure)))
        resume = self.call([self.const(transfer)], [self.const(number), *closure], 2)
        stack = [name for name, slot in zip(names, state.stack) if slot != "null"]
        loads = [op for name in (*state.bound, *stack) for op in self.move(name)]
        count = len(state.bound) + len(stack)
        return [*out, *self.call(resume, loads, count), self.op("RETURN_VALUE")]

    def finish(self, ops: list[Op], with_body: bool) -> CodeType:
        own = [op for unit in self.units for op in unit] if with_body else []
        for op in (*ops, *own):
            if op.opname in SLOT_OPS and op.offset >= 0:  # not one of ours
                op.arg = self.slots[self.old_names[op.arg]]
        code = self.code
        return assemble(
            code,
            [*ops, *own],
            co_consts=tuple(self.consts),
            co_stacksize=code.co_stacksize + len(self.slots) + len(self.stack_names) + 8,
            co_argcount=self.parameters,
            co_posonlyargcount=0,
            co_kwonlyargcount=0,
            co_nlocals=len(self.varnames),
            co_varnames=tuple(self.varnames),
            co_flags=code.co_flags & ~(inspect.CO_VARARGS | inspect.CO_VARKEYWORDS),
        )


def check(code: CodeType, state: State) -> None:
    """Raises Unsupported for frames that can't be cut."""
    if is_generator(code) or is_coroutine(code):
        what = f"{code.co_qualname} is a generator or coroutine and can't be cut"
        raise refusal("generator-or-coroutine", what)
    first = code.co_varnames[:1] if code.co_argcount else ()
    if "__class__" in code.co_freevars and (not first or first != state.bound[:1]):
        # super() reads the first parameter from the first slot
        what = f"{code.co_qualname} may call super() and has no first argument"
        raise refusal("place-of-cut", what)


def bind(code: CodeType, like: FunctionType, closure: tuple[CellType, ...]) -> FunctionType:
    """A function over `code` with the globals and names of `like`."""
    made = FunctionType(code, like.__globals__, like.__name__, None, closure)
    made.__qualname__, made.__module__ = like.__qualname__, like.__module__
    return made
