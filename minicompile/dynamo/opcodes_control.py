"""Opcodes of generators, exceptions, `with`, imports and pattern matching; the others are in opcodes.py."""

from __future__ import annotations

import contextlib
from typing import Any

from minicompile.dynamo.bytecode import Instruction
from minicompile.dynamo.interpreter import NULL, UNBOUND, Frame, bytecode

# -- generators


@bytecode("YIELD_VALUE")
def yield_value(frame: Frame, ins: Instruction) -> bool:
    frame.result = frame.stack.pop()
    return True


@bytecode("SEND")
def send(frame: Frame, ins: Instruction) -> None:
    value = frame.stack.pop()
    receiver = frame.stack[-1]
    try:
        got = frame.world.advance(receiver) if value is None else receiver.send(value)
    except StopIteration as stop:
        if ins.arg:
            frame.stack.pop()
        frame.stack.append(stop.value)
        frame.pc = ins.target
    else:
        frame.stack.append(got)


@bytecode("CLEANUP_THROW")
def cleanup_throw(frame: Frame, ins: Instruction) -> None:
    _, _, error = frame.popn(3)
    if not isinstance(error, StopIteration):
        raise error
    frame.stack.extend((None, error.value))


@bytecode("STOPITERATION_ERROR")
def stopiteration_error(frame: Frame, ins: Instruction) -> None:
    error = frame.stack.pop()
    if isinstance(error, StopIteration):
        replacement = RuntimeError("generator raised StopIteration")
        replacement.__cause__ = error
        error = replacement
    frame.stack.append(error)


# -- exceptions and with


@bytecode("RAISE_VARARGS")
def raise_varargs(frame: Frame, ins: Instruction) -> None:
    if ins.arg == 0:
        handled = frame.handling()
        if handled is None:
            raise RuntimeError("No active exception to reraise")
        raise handled
    cause: Any = frame.stack.pop() if ins.arg == 2 else NULL
    error = frame.stack.pop()
    if isinstance(error, type):
        error = frame.world.call(error, (), {})
    if not isinstance(error, BaseException):
        raise TypeError("exceptions must derive from BaseException")
    if frame.handling() is not None and error is not frame.handling():
        error.__context__ = None  # the exception being handled takes its place
    if cause is not NULL:
        error.__cause__ = frame.world.call(cause, (), {}) if isinstance(cause, type) else cause
    raise error


@bytecode("RERAISE")
def reraise(frame: Frame, ins: Instruction) -> None:
    raise frame.stack.pop()


@bytecode("PUSH_EXC_INFO")
def push_exc_info(frame: Frame, ins: Instruction) -> None:
    error = frame.stack.pop()
    frame.stack.extend((frame.handled, error))
    frame.handled = error


@bytecode("BEFORE_WITH")
def before_with(frame: Frame, ins: Instruction) -> None:
    world, manager = frame.world, frame.stack.pop()
    enter, leave = world.special(manager, "__enter__"), world.special(manager, "__exit__")
    if enter is UNBOUND or leave is UNBOUND:
        kind = type(manager).__name__
        raise TypeError(f"{kind!r} object does not support the context manager protocol")
    frame.stack.extend((leave, world.call(enter, (), {})))


@bytecode("WITH_EXCEPT_START")
def with_except_start(frame: Frame, ins: Instruction) -> None:
    error, leave = frame.stack[-1], frame.stack[-4]
    frame.stack.append(frame.world.call(leave, (type(error), error, error.__traceback__), {}))


# -- imports and pattern matching


PATTERN_FLAGS = {"MATCH_SEQUENCE": 1 << 5, "MATCH_MAPPING": 1 << 6, "MATCH_SELF": 1 << 22}
"""Py_TPFLAGS_SEQUENCE, Py_TPFLAGS_MAPPING, and the flag of classes like int that match the subject itself."""


@bytecode("MATCH_SEQUENCE", "MATCH_MAPPING")
def match_kind(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(bool(type(frame.stack[-1]).__flags__ & PATTERN_FLAGS[ins.opname]))


@bytecode("MATCH_KEYS")
def match_keys(frame: Frame, ins: Instruction) -> None:
    subject, keys = frame.stack[-2:]
    found = all(frame.world.contains(subject, key) for key in keys)
    values = tuple(frame.world.subscript(subject, key) for key in keys) if found else None
    frame.stack.append(values)


@bytecode("MATCH_CLASS")
def match_class(frame: Frame, ins: Instruction) -> None:
    """Gives the attributes to match on, None if the subject is no instance of the class."""
    subject, cls, names = frame.popn(3)
    world, count = frame.world, ins.arg
    frame.stack.append(None)
    if not world.call(isinstance, (subject, cls), {}):
        return
    own: Any = getattr(cls, "__match_args__", ())
    itself: tuple[Any, ...] = ()
    if not own and count == 1 and cls.__flags__ & PATTERN_FLAGS["MATCH_SELF"]:
        itself, count = (subject,), 0
    if count > len(own):
        allowed = f"accepts {len(own)} positional sub-patterns ({count} given)"
        raise TypeError(f"{cls.__name__}() {allowed}")
    with contextlib.suppress(AttributeError):
        values = [world.load_attr(subject, name) for name in (*own[:count], *names)]
        frame.stack[-1] = (*itself, *values)
