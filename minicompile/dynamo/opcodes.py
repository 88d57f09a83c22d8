"""What each normalised opcode does to the frame. Meaning comes from `frame.world`; here is only stack
traffic.

Plug-in point: `@bytecode("OPNAME")` on a function `(frame, instruction)`; it may replace any of these.
The real compiler: the methods of InstructionTranslatorBase in torch/_dynamo/symbolic_convert.py.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
import types
from collections.abc import Callable
from typing import Any

from minicompile.dynamo.bytecode import Instruction
from minicompile.dynamo.interpreter import DELETED, NULL, UNBOUND, Frame, Lazy, bytecode

# -- opcodes that take a fixed number of values, and give one or none

Operation = Callable[..., Any]
"""`(frame, instruction, *values taken)`, lowest first. A count of None means as many as `arg` says."""

GIVES: dict[str, tuple[int | None, Operation]] = {
    "COPY": (0, lambda frame, ins: frame.stack[-ins.arg]),
    "PUSH_NULL": (0, lambda frame, ins: NULL),
    "LOAD_ASSERTION_ERROR": (0, lambda frame, ins: AssertionError),
    "LOAD_BUILD_CLASS": (0, lambda frame, ins: builtins.__build_class__),
    "LOAD_GLOBAL": (0, lambda frame, ins: frame.world.load_global(frame, ins.value)),
    "LOAD_DEREF": (0, lambda frame, ins: cell_contents(frame, ins)),
    "LOAD_LOCALS": (0, lambda frame, ins: frame.namespace),
    "LOAD_NAME": (0, lambda frame, ins: find_name(frame, ins, frame.namespace)),
    "LOAD_FROM_DICT_OR_GLOBALS": (1, lambda frame, ins, names: find_name(frame, ins, names)),
    "LOAD_ATTR": (1, lambda frame, ins, owner: frame.world.load_attr(owner, ins.value)),
    "IMPORT_NAME": (
        2,
        lambda frame, ins, level, names: frame.world.import_name(frame, ins.value, names, level),
    ),
    "IMPORT_FROM": (0, lambda frame, ins: frame.world.import_from(frame.stack[-1], ins.value)),
    "BINARY_SUBSCR": (2, lambda frame, ins, owner, key: frame.world.subscript(owner, key)),
    "BINARY_SLICE": (
        3,
        lambda frame, ins, owner, *ends: frame.world.subscript(owner, slice(*ends)),
    ),
    "BINARY_OP": (2, lambda frame, ins, a, b: frame.world.binary(ins.value, a, b)),
    "COMPARE_OP": (2, lambda frame, ins, a, b: frame.world.compare(ins.value, a, b)),
    "IS_OP": (2, lambda frame, ins, a, b: frame.world.same(a, b) != bool(ins.arg)),
    "CONTAINS_OP": (2, lambda frame, ins, a, b: frame.world.contains(b, a) != bool(ins.arg)),
    "UNARY_NEGATIVE": (1, lambda frame, ins, value: frame.world.unary("-", value)),
    "UNARY_POSITIVE": (1, lambda frame, ins, value: frame.world.unary("+", value)),
    "UNARY_INVERT": (1, lambda frame, ins, value: frame.world.unary("~", value)),
    "UNARY_NOT": (1, lambda frame, ins, value: not frame.world.truth(value)),
    "TO_BOOL": (1, lambda frame, ins, value: frame.world.truth(value)),
    "GET_ITER": (1, lambda frame, ins, value: frame.world.iterate(value)),
    "GET_YIELD_FROM_ITER": (1, lambda frame, ins, value: frame.world.iterate(value)),
    "GET_LEN": (0, lambda frame, ins: frame.world.length(frame.stack[-1])),
    "CHECK_EXC_MATCH": (
        1,
        lambda frame, ins, kind: frame.world.exception_matches(frame.stack[-1], kind),
    ),
    "BUILD_TUPLE": (None, lambda frame, ins, *values: values),
    "BUILD_LIST": (None, lambda frame, ins, *values: list(values)),
    "BUILD_SET": (None, lambda frame, ins, *values: set(map(frame.world.pinned, values))),
    "BUILD_STRING": (None, lambda frame, ins, *values: "".join(values)),
    "BUILD_SLICE": (None, lambda frame, ins, *values: slice(*values)),
    "LIST_TO_TUPLE": (1, lambda frame, ins, items: tuple(frame.world.items(items))),
    "CONVERT_VALUE": (1, lambda frame, ins, value: frame.world.convert(ins.arg, value)),
    "FORMAT_VALUE": (
        2,
        lambda frame, ins, value, spec: frame.world.format(
            frame.world.convert(ins.arg, value) if ins.arg else value, spec
        ),
    ),
    "END_SEND": (2, lambda frame, ins, receiver, value: value),
    "RETURN_GENERATOR": (0, lambda frame, ins: None),
}
GIVES_NONE: dict[str, tuple[int | None, Operation]] = {
    "POP_TOP": (1, lambda frame, ins, value: None),
    "POP_EXCEPT": (1, lambda frame, ins, before: setattr(frame, "handled", before)),
    "JUMP": (0, lambda frame, ins: setattr(frame, "pc", ins.target)),
    "STORE_GLOBAL": (1, lambda frame, ins, new: frame.world.store_global(frame, ins.value, new)),
    "DELETE_GLOBAL": (0, lambda frame, ins: frame.world.delete_global(frame, ins.value)),
    "STORE_DEREF": (1, lambda frame, ins, new: frame.world.store_cell(frame.fast[ins.arg], new)),
    "STORE_NAME": (1, lambda frame, ins, new: frame.namespace.__setitem__(ins.value, new)),
    "DELETE_NAME": (0, lambda frame, ins: frame.namespace.__delitem__(ins.value)),
    "SETUP_ANNOTATIONS": (0, lambda frame, ins: frame.namespace.setdefault("__annotations__", {})),
    "STORE_ATTR": (2, lambda frame, ins, new, owner: frame.world.store_attr(owner, ins.value, new)),
    "DELETE_ATTR": (1, lambda frame, ins, owner: frame.world.delete_attr(owner, ins.value)),
    "STORE_SUBSCR": (
        3,
        lambda frame, ins, new, owner, key: frame.world.store_subscript(owner, key, new),
    ),
    "DELETE_SUBSCR": (2, lambda frame, ins, owner, key: frame.world.delete_subscript(owner, key)),
    "STORE_SLICE": (
        4,
        lambda frame, ins, new, owner, *ends: frame.world.store_subscript(owner, slice(*ends), new),
    ),
    # A display (`[*a, b]`) builds its container under the values.
    "LIST_APPEND": (1, lambda frame, ins, item: under(frame, ins).append(item)),
    "SET_ADD": (1, lambda frame, ins, item: under(frame, ins).add(frame.world.pinned(item))),
    "MAP_ADD": (
        2,
        lambda frame, ins, key, item: frame.world.store_subscript(frame.stack[-ins.arg], key, item),
    ),
    "LIST_EXTEND": (
        1,
        lambda frame, ins, items: under(frame, ins).extend(frame.world.items(items)),
    ),
    "SET_UPDATE": (1, lambda frame, ins, items: under(frame, ins).update(frame.world.items(items))),
    "DICT_UPDATE": (1, lambda frame, ins, items: update(frame, frame.stack[-ins.arg], items)),
    "DICT_MERGE": (1, lambda frame, ins, items: merge(frame, frame.stack[-ins.arg], items)),
}


def under(frame: Frame, ins: Instruction) -> Any:
    """The list or set on the stack that is being filled; it can be from before a graph break."""
    return frame.world.mutable(frame.stack[-ins.arg])


def update(frame: Frame, target: Any, items: Any) -> None:
    for key, item in frame.world.mapping(items).items():
        frame.world.store_subscript(target, key, item)


def cell_contents(frame: Frame, ins: Instruction) -> Any:
    try:
        return frame.world.load_cell(frame.fast[ins.arg])
    except ValueError:
        if ins.value not in frame.program.code.co_freevars:
            raise unbound(ins.value) from None
        raise NameError(
            f"cannot access free variable {ins.value!r} where it is not associated with a value "
            "in enclosing scope"
        ) from None


def find_name(frame: Frame, ins: Instruction, namespace: Any) -> Any:
    """A name in a class body."""
    if ins.value in namespace:
        return namespace[ins.value]
    return frame.world.load_global(frame, ins.value)


def merge(frame: Frame, target: dict[Any, Any], items: Any) -> None:
    for key, item in frame.world.mapping(items).items():
        if frame.world.contains(target, key):
            raise TypeError(f"got multiple values for keyword argument {key!r}")
        frame.world.store_subscript(target, key, item)


def register(opname: str, count: int | None, operation: Operation, gives: bool) -> None:
    def handler(frame: Frame, ins: Instruction) -> None:
        stack = frame.stack
        if count == 0:
            found = operation(frame, ins)
        elif count == 1:
            found = operation(frame, ins, stack.pop())
        else:
            found = operation(frame, ins, *frame.popn(ins.arg if count is None else count))
        if gives:
            stack.append(found)

    bytecode(opname)(handler)


for _opname, _entry in GIVES.items():
    register(_opname, *_entry, gives=True)
for _opname, _entry in GIVES_NONE.items():
    register(_opname, *_entry, gives=False)


# -- stack and locals


@bytecode("SWAP")
def swap(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    stack[-1], stack[-ins.arg] = stack[-ins.arg], stack[-1]


@bytecode("LOAD_CONST")
def load_const(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(ins.value)


def unbound(name: str) -> UnboundLocalError:
    return UnboundLocalError(
        f"cannot access local variable {name!r} where it is not associated with a value"
    )


@bytecode("LOAD_FAST")
def load_fast(frame: Frame, ins: Instruction) -> None:
    value = frame.fast[ins.arg]
    if value is UNBOUND:
        raise unbound(ins.value)
    if value.__class__ is Lazy:
        value = frame.fast[ins.arg] = frame.world.realize(value)
    frame.stack.append(value)


@bytecode("LOAD_FAST_AND_CLEAR")
def load_fast_and_clear(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.world.realize(frame.fast[ins.arg]))
    frame.fast[ins.arg] = UNBOUND


@bytecode("STORE_FAST")
def store_fast(frame: Frame, ins: Instruction) -> None:
    """What LOAD_FAST_AND_CLEAR found unbound is unbound again: after a graph break NULL stands for it."""
    value = frame.stack.pop()
    frame.fast[ins.arg] = UNBOUND if value is NULL else value


@bytecode("DELETE_FAST")
def delete_fast(frame: Frame, ins: Instruction) -> None:
    if frame.fast[ins.arg] is UNBOUND:
        raise unbound(ins.value)
    frame.fast[ins.arg] = UNBOUND


# -- cells


@bytecode("MAKE_CELL")
def make_cell(frame: Frame, ins: Instruction) -> None:
    value = frame.world.realize(frame.fast[ins.arg])
    frame.fast[ins.arg] = types.CellType() if value is UNBOUND else types.CellType(value)


@bytecode("COPY_FREE_VARS")
def copy_free_vars(frame: Frame, ins: Instruction) -> None:
    cells = frame.world.closure(frame.function)
    frame.fast[-len(cells) :] = cells


@bytecode("DELETE_DEREF")
def delete_deref(frame: Frame, ins: Instruction) -> None:
    cell_contents(frame, ins)
    frame.world.store_cell(frame.fast[ins.arg], DELETED)


@bytecode("LOAD_CLASSDEREF")
def load_classderef(frame: Frame, ins: Instruction) -> None:
    """3.12 pushes the namespace first (LOAD_LOCALS); in 3.11 it is the frame's."""
    namespace: Any = frame.namespace
    if frame.stack and frame.stack[-1] is namespace:
        frame.stack.pop()
    in_class = ins.value in namespace
    frame.stack.append(namespace[ins.value] if in_class else cell_contents(frame, ins))


# -- methods


@bytecode("LOAD_METHOD")
def load_method(frame: Frame, ins: Instruction) -> None:
    push_method(frame, frame.world.load_attr(frame.stack.pop(), ins.value))


def push_method(frame: Frame, method: Any) -> None:
    """A bound method and the NULL in place of its instance, as this CPython orders them."""
    frame.stack.extend((NULL, method) if sys.version_info < (3, 13) else (method, NULL))


@bytecode("LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD")
def load_super_attr(frame: Frame, ins: Instruction) -> None:
    function, cls, instance = frame.popn(3)
    parent = frame.world.call(function, (cls, instance), {})
    found = frame.world.load_attr(parent, ins.value)
    if ins.opname == "LOAD_SUPER_METHOD":
        push_method(frame, found)
    else:
        frame.stack.append(found)


# -- jumps and loops


@bytecode("POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE")
def pop_jump_if(frame: Frame, ins: Instruction) -> None:
    if frame.world.truth(frame.stack.pop()) == (ins.opname == "POP_JUMP_IF_TRUE"):
        frame.pc = ins.target


@bytecode("POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE")
def pop_jump_if_none(frame: Frame, ins: Instruction) -> None:
    if frame.world.same(frame.stack.pop(), None) == (ins.opname == "POP_JUMP_IF_NONE"):
        frame.pc = ins.target


@bytecode("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")
def jump_or_pop(frame: Frame, ins: Instruction) -> None:
    if frame.world.truth(frame.stack[-1]) == (ins.opname == "JUMP_IF_TRUE_OR_POP"):
        frame.pc = ins.target
    else:
        frame.stack.pop()


@bytecode("FOR_ITER")
def for_iter(frame: Frame, ins: Instruction) -> None:
    try:
        item = frame.world.advance(frame.stack[-1])
    except StopIteration:
        frame.stack.pop()
        frame.pc = ins.target
    else:
        frame.stack.append(item)


# -- building and unpacking


@bytecode("BUILD_MAP")
def build_map(frame: Frame, ins: Instruction) -> None:
    flat = frame.popn(2 * ins.arg)
    keys = map(frame.world.pinned, flat[::2])
    frame.stack.append(dict(zip(keys, flat[1::2], strict=True)))


@bytecode("BUILD_CONST_KEY_MAP")
def build_const_key_map(frame: Frame, ins: Instruction) -> None:
    keys = frame.stack.pop()
    frame.stack.append(dict(zip(keys, frame.popn(ins.arg), strict=True)))


@bytecode("UNPACK_SEQUENCE")
def unpack_sequence(frame: Frame, ins: Instruction) -> None:
    items, wanted = frame.world.items(frame.stack.pop()), ins.arg
    if len(items) < wanted:
        raise ValueError(f"not enough values to unpack (expected {wanted}, got {len(items)})")
    if len(items) > wanted:
        raise ValueError(f"too many values to unpack (expected {wanted})")
    frame.stack.extend(reversed(items))


@bytecode("UNPACK_EX")
def unpack_ex(frame: Frame, ins: Instruction) -> None:
    before, after = ins.arg & 255, ins.arg >> 8
    items = frame.world.items(frame.stack.pop())
    if len(items) < before + after:
        raise ValueError(
            f"not enough values to unpack (expected at least {before + after}, got {len(items)})"
        )
    end = len(items) - after
    frame.stack.extend(reversed([*items[:before], items[before:end], *items[end:]]))


# -- calls and functions


def split_callable(first: Any, second: Any) -> tuple[Any, tuple[Any, ...]]:
    """The two slots below a call's arguments: (NULL, f), (f, NULL) or (f, first argument), on any version."""
    if first is NULL:
        return second, ()
    return (first, ()) if second is NULL else (first, (second,))


@bytecode("CALL")
def call(frame: Frame, ins: Instruction) -> None:
    given = frame.popn(ins.arg)
    function, own = split_callable(*frame.popn(2))
    names = ins.value or ()
    count = len(given) - len(names)
    kwargs = dict(zip(names, given[count:], strict=True))
    frame.called = function
    frame.stack.append(frame.world.call(function, (*own, *given[:count]), kwargs))


@bytecode("CALL_FUNCTION_EX")
def call_function_ex(frame: Frame, ins: Instruction) -> None:
    kwargs = frame.world.mapping(frame.stack.pop()) if ins.arg & 1 else {}
    args = tuple(frame.world.items(frame.stack.pop()))
    function, own = split_callable(*frame.popn(2))
    frame.called = function
    frame.stack.append(frame.world.call(function, (*own, *args), kwargs))


@bytecode("MAKE_FUNCTION")
def make_function(frame: Frame, ins: Instruction) -> None:
    code = frame.stack.pop()
    extras = frame.popn(ins.arg.bit_count())
    flags = [flag for flag in (1, 2, 4, 8) if ins.arg & flag]
    empty = tuple(types.CellType() for _ in code.co_freevars)  # until SET_FUNCTION_ATTRIBUTE
    made = types.FunctionType(code, frame.function.__globals__, closure=empty or None)
    for flag, value in zip(flags, extras, strict=True):
        made = with_part(frame, made, flag, value)
    frame.stack.append(made)


@bytecode("SET_FUNCTION_ATTRIBUTE")
def set_function_attribute(frame: Frame, ins: Instruction) -> None:
    value, made = frame.popn(2)
    frame.stack.append(with_part(frame, made, ins.arg, value))


def with_part(
    frame: Frame, function: types.FunctionType, flag: int, given: Any
) -> types.FunctionType:
    world = frame.world
    value: Any = world.mapping(given) if flag == 2 else tuple(world.items(given))
    if flag == 1:
        function.__defaults__ = value
    elif flag == 2:
        function.__kwdefaults__ = value
    elif flag == 4:  # annotations come as a flat tuple of names and values
        function.__annotations__ = dict(zip(value[::2], value[1::2], strict=True))
    else:  # a closure can only be given to a new function
        closed = types.FunctionType(function.__code__, function.__globals__, closure=value)
        closed.__defaults__, closed.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        closed.__annotations__ = function.__annotations__
        return closed
    return function


@bytecode("RETURN_VALUE")
def return_value(frame: Frame, ins: Instruction) -> bool:
    frame.result = frame.stack.pop()
    frame.finished = True
    return True


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
