"""The handlers of bytecode instructions: one function for each normalised opname (bytecode.py), which moves
values between stack, locals and `frame.world`, which gives them meaning (world.py).

Plug-in point: `@bytecode("OPNAME")` on a function `(frame, instruction)`; it may replace any of these.
The real compiler: the methods of InstructionTranslatorBase in torch/_dynamo/symbolic_convert.py.
"""

from __future__ import annotations

import contextlib
import re
import sys
import types
from typing import Any

from minicompile.dynamo.bytecode import Instruction
from minicompile.dynamo.interpreter import (
    C_METHODS,
    DELETED,
    NULL,
    UNBOUND,
    Frame,
    Handler,
    Lazy,
    bytecode,
)

# -- opcodes that take values from the stack and give one or none

EFFECTS = """
# the stack itself
POP_TOP                    (value --)
COPY                       (-- stack[-arg])
SWAP                       (--) stack[-1], stack[-arg] = stack[-arg], stack[-1]
PUSH_NULL                  (-- NULL)
LOAD_CONST                 (-- named)
LOAD_ASSERTION_ERROR       (-- AssertionError)
LOAD_BUILD_CLASS           (-- __build_class__)

# names; what LOAD_FAST_AND_CLEAR found unbound is unbound again: after a graph break NULL stands for it
LOAD_FAST                  (-- local(frame, ins))
DELETE_FAST                (--) local(frame, ins); fast[arg] = UNBOUND
STORE_FAST                 (value --) fast[arg] = UNBOUND if value is NULL else value
LOAD_FAST_AND_CLEAR        (--) stack.append(world.realize(fast[arg])); fast[arg] = UNBOUND
LOAD_GLOBAL                (-- world.load_global(frame, named))
STORE_GLOBAL               (new --) world.store_global(frame, named, new)
COPY_FREE_VARS             (--) fast[-arg:] = world.closure(frame.function)
LOAD_DEREF                 (-- cell_contents(frame, ins))
STORE_DEREF                (new --) world.store_cell(fast[arg], new)
DELETE_DEREF               (--) delete_cell(frame, ins)
IMPORT_NAME                (level, names -- world.import_name(frame, named, names, level))
IMPORT_FROM                (-- world.import_from(stack[-1], named))

# attributes and subscripts
LOAD_ATTR                  (owner -- world.load_attr(owner, named))
LOAD_METHOD                (owner --) push_method(frame, world.load_attr(owner, named))
STORE_ATTR                 (new, owner --) world.store_attr(owner, named, new)
DELETE_ATTR                (owner --) world.store_attr(owner, named, DELETED)
LOAD_SUPER_ATTR            (make, cls, owner -- super_attr(frame, ins, make, cls, owner))
LOAD_SUPER_METHOD (make, cls, owner --) push_method(frame, super_attr(frame, ins, make, cls, owner))
BINARY_SUBSCR              (owner, key -- world.subscript(owner, key))
BINARY_SLICE               (owner, a, b -- world.subscript(owner, slice(a, b)))
STORE_SUBSCR               (new, owner, key --) world.store_subscript(owner, key, new)
STORE_SLICE                (new, owner, a, b --) world.store_subscript(owner, slice(a, b), new)
DELETE_SUBSCR              (owner, key --) world.delete_subscript(owner, key)

# operators and text
BINARY_OP                  (left, right -- world.binary(named, left, right))
COMPARE_OP                 (left, right -- world.compare(named, left, right))
IS_OP                      (left, right -- world.same(left, right) != bool(arg))
CONTAINS_OP                (item, owner -- world.contains(owner, item) != bool(arg))
UNARY_NEGATIVE             (value -- world.unary("-", value))
UNARY_POSITIVE             (value -- world.unary("+", value))
UNARY_INVERT               (value -- world.unary("~", value))
UNARY_NOT                  (value -- not world.truth(value))
TO_BOOL                    (value -- world.truth(value))
GET_LEN                    (-- world.length(stack[-1]))
CONVERT_VALUE              (value -- world.convert(arg, value))
FORMAT_VALUE (value, spec -- world.formatted(world.convert(arg, value) if arg else value, spec))

# containers; a display (`[*a, b]`) builds its own under the values
BUILD_TUPLE                (*values -- tuple(values))
BUILD_LIST                 (*values -- values)
BUILD_SET                  (*values -- set(map(world.pinned, values)))
BUILD_STRING               (*values -- "".join(values))
BUILD_SLICE                (*values -- slice(*values))
BUILD_CONST_KEY_MAP        (*values, keys -- dict(zip(keys, values, strict=True)))
LIST_TO_TUPLE              (items -- tuple(world.items(items)))
LIST_APPEND                (item --) world.extend(stack[-arg], [item])
LIST_EXTEND                (items --) world.extend(stack[-arg], world.items(items))
SET_ADD                    (item --) under(frame, ins).add(world.pinned(item))
SET_UPDATE                 (items --) world.call(set.update, (stack[-arg], items), {})
MAP_ADD                    (key, item --) world.store_subscript(stack[-arg], key, item)
DICT_UPDATE                (items --) update(world, stack[-arg], items)
DICT_MERGE                 (items --) update(world, stack[-arg], items)
SET_FUNCTION_ATTRIBUTE     (part, made -- with_part(frame, made, arg, part))

# control
JUMP                       (--) frame.pc = ins.target
POP_JUMP_IF_TRUE           (value --) if world.truth(value): frame.pc = ins.target
POP_JUMP_IF_FALSE          (value --) if not world.truth(value): frame.pc = ins.target
POP_JUMP_IF_NONE           (value --) if world.same(value, None): frame.pc = ins.target
POP_JUMP_IF_NOT_NONE       (value --) if not world.same(value, None): frame.pc = ins.target
GET_ITER                   (value -- world.iterate(value))
GET_YIELD_FROM_ITER        (value -- world.iterate(value))
RETURN_VALUE               (value --) frame.result, frame.finished = value, True; return True
YIELD_VALUE                (value --) frame.result = value; return True
RETURN_GENERATOR           (-- None)
END_SEND                   (receiver, value -- value)
MATCH_SEQUENCE             (-- bool(type(stack[-1]).__flags__ & SEQUENCE))
MATCH_MAPPING              (-- bool(type(stack[-1]).__flags__ & MAPPING))
CHECK_EXC_MATCH            (kind -- isinstance(stack[-1], kind))
PUSH_EXC_INFO              (error --) stack.extend((frame.handled, error)); frame.handled = error
POP_EXCEPT                 (before --) frame.handled = before
RERAISE                    (error --) raise error
"""
"""`OPNAME (values taken, lowest first -- value given) statement`, as in CPython's Python/bytecodes.c.

`*values` are as many as `arg` says, `named` is what the instruction's number means.
"""
PLACES = {name: f"frame.{name}" for name in ("stack", "world", "fast")}
PLACES |= {"arg": "ins.arg", "named": "ins.value"}


def effect(opname: str, taken: str, given: str, statement: str) -> Handler:
    """The handler that a row of the table describes."""
    words = re.findall(r"\w+", f"stack {given} {statement}")
    lines = [f"{name} = {place}" for name, place in PLACES.items() if name in words]
    for name in filter(None, reversed(taken.split(", "))):
        many = name.startswith("*")
        lines.append(f"{name[1:]} = frame.popn(ins.arg)" if many else f"{name} = stack.pop()")
    lines.append(f"stack.append({given})" if given else statement or "pass")
    text = f"def {opname.lower()}(frame, ins):\n" + "".join(f"    {line}\n" for line in lines)
    found: dict[str, Handler] = {}
    exec(compile(text, f"<minicompile {opname}>", "exec"), globals(), found)
    return found[opname.lower()]


for _row in re.findall(r"^(\w+) +\(([^-]*?) ?--(?: (.*)\)|\) ?(.*))$", EFFECTS, re.MULTILINE):
    bytecode(_row[0])(effect(*_row))


def under(frame: Frame, ins: Instruction) -> Any:
    """The set on the stack that is being filled; it can be from before a graph break."""
    return frame.world.mutable(frame.stack[-ins.arg])


def update(world: Any, target: dict[Any, Any], items: Any) -> None:
    for key, item in world.mapping(items).items():
        world.store_subscript(target, key, item)


def cell_contents(frame: Frame, ins: Instruction) -> Any:
    try:
        return frame.world.load_cell(frame.fast[ins.arg])
    except ValueError:
        raise unbound(frame, ins.value) from None


def delete_cell(frame: Frame, ins: Instruction) -> None:
    cell_contents(frame, ins)  # may raise NameError
    frame.world.store_cell(frame.fast[ins.arg], DELETED)


# -- stack and locals


def unbound(frame: Frame, name: str) -> NameError:
    where = f"{name!r} where it is not associated with a value"
    if name in frame.program.code.co_freevars:
        return NameError(f"cannot access free variable {where} in enclosing scope")
    return UnboundLocalError(f"cannot access local variable {where}")


def local(frame: Frame, ins: Instruction) -> Any:
    value = frame.fast[ins.arg]
    if value is UNBOUND:
        raise unbound(frame, ins.value)
    if value.__class__ is Lazy:
        value = frame.fast[ins.arg] = frame.world.realize(value)
    return value


# -- cells


@bytecode("MAKE_CELL")
def make_cell(frame: Frame, ins: Instruction) -> None:
    value = frame.world.realize(frame.fast[ins.arg])
    frame.fast[ins.arg] = types.CellType() if value is UNBOUND else types.CellType(value)


# -- methods


def push_method(frame: Frame, method: Any) -> None:
    """A method of C code below its instance; another, bound, and a NULL, as this CPython orders them.

    A frame cut above `rows.append` goes on with `list.append`, not with a method that is new each time.
    """
    in_c = type(method) is types.MethodType and isinstance(method.__func__, C_METHODS)
    if in_c and frame.world.tracker(method) is None:  # not made by the user
        frame.stack.extend((method.__func__, method.__self__))
        return
    frame.stack.extend((NULL, method) if sys.version_info < (3, 13) else (method, NULL))


def super_attr(frame: Frame, ins: Instruction, function: Any, *given: Any) -> Any:
    return frame.world.load_attr(frame.world.call(function, given, {}), ins.value)


# -- jumps and loops


@bytecode("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")
def jump_or_pop(frame: Frame, ins: Instruction) -> None:
    if frame.world.truth(frame.stack[-1]) == (ins.opname == "JUMP_IF_TRUE_OR_POP"):
        frame.pc = ins.target
    else:
        frame.stack.pop()


@bytecode("FOR_ITER")
def for_iter(frame: Frame, ins: Instruction) -> None:
    try:
        frame.stack.append(frame.world.advance(frame.stack[-1]))
    except StopIteration:
        frame.stack.pop()
        frame.pc = ins.target


# -- building and unpacking


@bytecode("BUILD_MAP")
def build_map(frame: Frame, ins: Instruction) -> None:
    flat = frame.popn(2 * ins.arg)
    keys = map(frame.world.pinned, flat[::2])
    frame.stack.append(dict(zip(keys, flat[1::2], strict=True)))


@bytecode("UNPACK_SEQUENCE", "UNPACK_EX")
def unpack_sequence(frame: Frame, ins: Instruction) -> None:
    starred = ins.opname == "UNPACK_EX"
    before, after = (ins.arg & 255, ins.arg >> 8) if starred else (ins.arg, 0)
    items = frame.world.items(frame.stack.pop())
    end = len(items) - after
    if end < before or (end > before and not starred):
        raise ValueError(f"{len(items)} values to unpack into {before + after} names")
    rest = [items[before:end]] if starred else []
    frame.stack.extend(reversed([*items[:before], *rest, *items[end:]]))


# -- calls and functions


def call(frame: Frame, given: list[Any], kwargs: dict[str, Any]) -> None:
    """Below a call's arguments lie (NULL, f), (f, NULL) or (f, first argument), on any version."""
    pair = frame.popn(2)
    own = [] if pair[0] is NULL or pair[1] is NULL else pair[1:]
    frame.called = function = pair[1] if pair[0] is NULL else pair[0]
    frame.stack.append(frame.world.call(function, (*own, *given), kwargs))


@bytecode("CALL")
def call_by_names(frame: Frame, ins: Instruction) -> None:
    given, names = frame.popn(ins.arg), ins.value or ()
    count = len(given) - len(names)
    call(frame, given[:count], dict(zip(names, given[count:], strict=True)))


@bytecode("CALL_FUNCTION_EX")
def call_function_ex(frame: Frame, ins: Instruction) -> None:
    kwargs = frame.world.mapping(frame.stack.pop()) if ins.arg & 1 else {}
    call(frame, frame.world.items(frame.stack.pop()), kwargs)


@bytecode("MAKE_FUNCTION")
def make_function(frame: Frame, ins: Instruction) -> None:
    code = frame.stack.pop()
    extras = frame.popn(ins.arg.bit_count())
    flags = [flag for flag in (1, 2, 4, 8) if ins.arg & flag]
    empty = tuple(types.CellType() for _ in code.co_freevars)  # until SET_FUNCTION_ATTRIBUTE
    made = types.FunctionType(code, frame.function.__globals__, closure=empty or None)
    for flag, value in reversed(list(zip(flags, extras, strict=True))):
        made = with_part(frame, made, flag, value)
    frame.stack.append(made)


PARTS = {1: "__defaults__", 2: "__kwdefaults__", 4: "__annotations__"}


def with_part(
    frame: Frame, function: types.FunctionType, flag: int, given: Any
) -> types.FunctionType:
    """The function with one more part; its closure, which only a new function can get, comes first."""
    world = frame.world
    value: Any = world.mapping(given) if flag == 2 else tuple(world.items(given))
    if flag == 8:
        return types.FunctionType(function.__code__, function.__globals__, closure=value)
    if flag == 4:  # a flat tuple of names and values
        value = dict(zip(value[::2], value[1::2], strict=True))
    setattr(function, PARTS[flag], value)
    return function


# -- generators


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


@bytecode("BEFORE_WITH")
def before_with(frame: Frame, ins: Instruction) -> None:
    world, manager = frame.world, frame.stack.pop()
    enter, leave = world.special(manager, "__enter__"), world.special(manager, "__exit__")
    if enter is UNBOUND or leave is UNBOUND:
        raise TypeError(f"a {type(manager).__name__} is no context manager")
    frame.stack.extend((leave, world.call(enter, (), {})))


@bytecode("WITH_EXCEPT_START")
def with_except_start(frame: Frame, ins: Instruction) -> None:
    error, leave = frame.stack[-1], frame.stack[-4]
    frame.stack.append(frame.world.call(leave, (type(error), error, error.__traceback__), {}))


# -- imports and pattern matching


SEQUENCE, MAPPING, MATCH_SELF = 1 << 5, 1 << 6, 1 << 22
"""Flags of classes for patterns; the last one of those like int, which match the subject itself."""


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
    if not own and count == 1 and cls.__flags__ & MATCH_SELF:
        itself, count = (subject,), 0
    if count > len(own):
        raise TypeError(f"{cls.__name__}() accepts {len(own)} positional sub-patterns")
    with contextlib.suppress(AttributeError):
        values = [world.load_attr(subject, name) for name in (*own[:count], *names)]
        frame.stack[-1] = (*itself, *values)
