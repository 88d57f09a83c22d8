"""What each normalised opcode does to the frame. Meaning comes from `frame.world`; here is only stack
traffic.

Plug-in point: `@bytecode("OPNAME")` on a function `(frame, instruction)`; it may replace any of these.
The real compiler: the methods of InstructionTranslatorBase in torch/_dynamo/symbolic_convert.py.
"""

from __future__ import annotations

import builtins
import types
from typing import Any

from minicompile.dynamo.bytecode import Instruction
from minicompile.dynamo.interpreter import NULL, UNBOUND, Frame, Lazy, bytecode

# -- stack


@bytecode("POP_TOP")
def pop_top(frame: Frame, ins: Instruction) -> None:
    frame.stack.pop()


@bytecode("PUSH_NULL")
def push_null(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(NULL)


@bytecode("COPY")
def copy(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.stack[-ins.arg])


@bytecode("SWAP")
def swap(frame: Frame, ins: Instruction) -> None:
    stack = frame.stack
    stack[-1], stack[-ins.arg] = stack[-ins.arg], stack[-1]


@bytecode("LOAD_CONST")
def load_const(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(ins.value)


# -- locals, cells, globals


@bytecode("LOAD_FAST", "LOAD_CLOSURE")
def load_fast(frame: Frame, ins: Instruction) -> None:
    value = frame.fast[ins.arg]
    if value is UNBOUND:
        raise UnboundLocalError(
            f"cannot access local variable {ins.value!r} where it is not associated with a value"
        )
    if value.__class__ is Lazy:
        value = frame.fast[ins.arg] = frame.world.realize(value)
    frame.stack.append(value)


@bytecode("LOAD_FAST_AND_CLEAR")
def load_fast_and_clear(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.fast[ins.arg])
    frame.fast[ins.arg] = UNBOUND


@bytecode("STORE_FAST")
def store_fast(frame: Frame, ins: Instruction) -> None:
    frame.fast[ins.arg] = frame.stack.pop()


@bytecode("DELETE_FAST")
def delete_fast(frame: Frame, ins: Instruction) -> None:
    if frame.fast[ins.arg] is UNBOUND:
        raise UnboundLocalError(
            f"cannot access local variable {ins.value!r} where it is not associated with a value"
        )
    frame.fast[ins.arg] = UNBOUND


@bytecode("MAKE_CELL")
def make_cell(frame: Frame, ins: Instruction) -> None:
    value = frame.world.realize(frame.fast[ins.arg])
    frame.fast[ins.arg] = types.CellType() if value is UNBOUND else types.CellType(value)


@bytecode("COPY_FREE_VARS")
def copy_free_vars(frame: Frame, ins: Instruction) -> None:
    cells = frame.world.closure(frame.function)
    frame.fast[-len(cells) :] = cells


def cell_contents(frame: Frame, ins: Instruction) -> Any:
    try:
        return frame.world.load_cell(frame.fast[ins.arg])
    except ValueError:
        free = ins.value in frame.program.code.co_freevars
        error: type[NameError] = NameError if free else UnboundLocalError
        raise error(
            f"cannot access variable {ins.value!r} where it is not associated with a value"
        ) from None


@bytecode("LOAD_DEREF")
def load_deref(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(cell_contents(frame, ins))


@bytecode("STORE_DEREF")
def store_deref(frame: Frame, ins: Instruction) -> None:
    frame.world.store_cell(frame.fast[ins.arg], frame.stack.pop())


@bytecode("DELETE_DEREF")
def delete_deref(frame: Frame, ins: Instruction) -> None:
    cell_contents(frame, ins)
    frame.fast[ins.arg] = types.CellType()


@bytecode("LOAD_GLOBAL")
def load_global(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.world.load_global(frame, ins.value))


@bytecode("STORE_GLOBAL")
def store_global(frame: Frame, ins: Instruction) -> None:
    frame.world.store_global(frame, ins.value, frame.stack.pop())


@bytecode("DELETE_GLOBAL")
def delete_global(frame: Frame, ins: Instruction) -> None:
    frame.world.delete_global(frame, ins.value)


# -- class bodies


def class_namespace(frame: Frame) -> dict[str, Any]:
    assert frame.namespace is not None
    return frame.namespace


@bytecode("LOAD_LOCALS")
def load_locals(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(class_namespace(frame))


@bytecode("LOAD_NAME")
def load_name(frame: Frame, ins: Instruction) -> None:
    namespace = class_namespace(frame)
    found = (
        namespace[ins.value]
        if ins.value in namespace
        else frame.world.load_global(frame, ins.value)
    )
    frame.stack.append(found)


@bytecode("STORE_NAME")
def store_name(frame: Frame, ins: Instruction) -> None:
    class_namespace(frame)[ins.value] = frame.stack.pop()


@bytecode("DELETE_NAME")
def delete_name(frame: Frame, ins: Instruction) -> None:
    del class_namespace(frame)[ins.value]


@bytecode("LOAD_CLASSDEREF")
def load_classderef(frame: Frame, ins: Instruction) -> None:
    """3.12 pushes the namespace first (LOAD_LOCALS); in 3.11 it is the frame's."""
    namespace = class_namespace(frame)
    if frame.stack and frame.stack[-1] is namespace:
        frame.stack.pop()
    frame.stack.append(
        namespace[ins.value] if ins.value in namespace else cell_contents(frame, ins)
    )


@bytecode("LOAD_FROM_DICT_OR_GLOBALS")
def load_from_dict_or_globals(frame: Frame, ins: Instruction) -> None:
    namespace = frame.stack.pop()
    found = (
        namespace[ins.value]
        if ins.value in namespace
        else frame.world.load_global(frame, ins.value)
    )
    frame.stack.append(found)


@bytecode("SETUP_ANNOTATIONS")
def setup_annotations(frame: Frame, ins: Instruction) -> None:
    class_namespace(frame).setdefault("__annotations__", {})


@bytecode("LOAD_BUILD_CLASS")
def load_build_class(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(builtins.__build_class__)


# -- attributes and items


@bytecode("LOAD_ATTR")
def load_attr(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.world.load_attr(frame.stack.pop(), ins.value))


@bytecode("LOAD_METHOD")
def load_method(frame: Frame, ins: Instruction) -> None:
    bound = frame.world.load_attr(frame.stack.pop(), ins.value)
    frame.stack.append(NULL)
    frame.stack.append(bound)


@bytecode("LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD")
def load_super_attr(frame: Frame, ins: Instruction) -> None:
    function, cls, instance = frame.popn(3)
    parent = frame.world.call(function, (cls, instance), {})
    if ins.opname == "LOAD_SUPER_METHOD":
        frame.stack.append(NULL)
    frame.stack.append(frame.world.load_attr(parent, ins.value))


@bytecode("STORE_ATTR")
def store_attr(frame: Frame, ins: Instruction) -> None:
    value, owner = frame.popn(2)
    frame.world.store_attr(owner, ins.value, value)


@bytecode("DELETE_ATTR")
def delete_attr(frame: Frame, ins: Instruction) -> None:
    frame.world.delete_attr(frame.stack.pop(), ins.value)


@bytecode("BINARY_SUBSCR")
def binary_subscr(frame: Frame, ins: Instruction) -> None:
    container, key = frame.popn(2)
    frame.stack.append(frame.world.subscript(container, key))


@bytecode("STORE_SUBSCR")
def store_subscr(frame: Frame, ins: Instruction) -> None:
    value, container, key = frame.popn(3)
    frame.world.store_subscript(container, key, value)


@bytecode("DELETE_SUBSCR")
def delete_subscr(frame: Frame, ins: Instruction) -> None:
    container, key = frame.popn(2)
    frame.world.delete_subscript(container, key)


@bytecode("BINARY_SLICE")
def binary_slice(frame: Frame, ins: Instruction) -> None:
    container, start, stop = frame.popn(3)
    frame.stack.append(frame.world.subscript(container, slice(start, stop)))


@bytecode("STORE_SLICE")
def store_slice(frame: Frame, ins: Instruction) -> None:
    value, container, start, stop = frame.popn(4)
    frame.world.store_subscript(container, slice(start, stop), value)


# -- operators


@bytecode("BINARY_OP")
def binary_op(frame: Frame, ins: Instruction) -> None:
    left, right = frame.popn(2)
    frame.stack.append(frame.world.binary(ins.value, left, right))


@bytecode("COMPARE_OP")
def compare_op(frame: Frame, ins: Instruction) -> None:
    left, right = frame.popn(2)
    frame.stack.append(frame.world.compare(ins.value, left, right))


@bytecode("IS_OP")
def is_op(frame: Frame, ins: Instruction) -> None:
    left, right = frame.popn(2)
    frame.stack.append(frame.world.same(left, right) != bool(ins.arg))


@bytecode("CONTAINS_OP")
def contains_op(frame: Frame, ins: Instruction) -> None:
    item, container = frame.popn(2)
    frame.stack.append(frame.world.contains(container, item) != bool(ins.arg))


@bytecode("UNARY_NEGATIVE")
def unary_negative(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.world.unary("-", frame.stack.pop()))


@bytecode("UNARY_POSITIVE")
def unary_positive(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.world.unary("+", frame.stack.pop()))


@bytecode("UNARY_INVERT")
def unary_invert(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.world.unary("~", frame.stack.pop()))


@bytecode("UNARY_NOT")
def unary_not(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(not frame.world.truth(frame.stack.pop()))


@bytecode("TO_BOOL")
def to_bool(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.world.truth(frame.stack.pop()))


# -- jumps and loops


@bytecode("JUMP")
def jump(frame: Frame, ins: Instruction) -> None:
    frame.pc = ins.target


@bytecode("POP_JUMP_IF_TRUE")
def pop_jump_if_true(frame: Frame, ins: Instruction) -> None:
    if frame.world.truth(frame.stack.pop()):
        frame.pc = ins.target


@bytecode("POP_JUMP_IF_FALSE")
def pop_jump_if_false(frame: Frame, ins: Instruction) -> None:
    if not frame.world.truth(frame.stack.pop()):
        frame.pc = ins.target


@bytecode("POP_JUMP_IF_NONE")
def pop_jump_if_none(frame: Frame, ins: Instruction) -> None:
    if frame.world.same(frame.stack.pop(), None):
        frame.pc = ins.target


@bytecode("POP_JUMP_IF_NOT_NONE")
def pop_jump_if_not_none(frame: Frame, ins: Instruction) -> None:
    if not frame.world.same(frame.stack.pop(), None):
        frame.pc = ins.target


@bytecode("JUMP_IF_TRUE_OR_POP", "JUMP_IF_FALSE_OR_POP")
def jump_or_pop(frame: Frame, ins: Instruction) -> None:
    if frame.world.truth(frame.stack[-1]) == (ins.opname == "JUMP_IF_TRUE_OR_POP"):
        frame.pc = ins.target
    else:
        frame.stack.pop()


@bytecode("GET_ITER")
def get_iter(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.world.iterate(frame.stack.pop()))


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


@bytecode("BUILD_TUPLE")
def build_tuple(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(tuple(frame.popn(ins.arg)))


@bytecode("BUILD_LIST")
def build_list(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.popn(ins.arg))


@bytecode("BUILD_SET")
def build_set(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(set(frame.popn(ins.arg)))


@bytecode("BUILD_MAP")
def build_map(frame: Frame, ins: Instruction) -> None:
    flat = frame.popn(2 * ins.arg)
    frame.stack.append(dict(zip(flat[::2], flat[1::2], strict=True)))


@bytecode("BUILD_CONST_KEY_MAP")
def build_const_key_map(frame: Frame, ins: Instruction) -> None:
    keys = frame.stack.pop()
    frame.stack.append(dict(zip(keys, frame.popn(ins.arg), strict=True)))


@bytecode("BUILD_STRING")
def build_string(frame: Frame, ins: Instruction) -> None:
    frame.stack.append("".join(frame.popn(ins.arg)))


@bytecode("BUILD_SLICE")
def build_slice(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(slice(*frame.popn(ins.arg)))


@bytecode("LIST_APPEND")
def list_append(frame: Frame, ins: Instruction) -> None:
    item = frame.stack.pop()
    frame.stack[-ins.arg].append(item)


@bytecode("SET_ADD")
def set_add(frame: Frame, ins: Instruction) -> None:
    item = frame.stack.pop()
    frame.stack[-ins.arg].add(item)


@bytecode("MAP_ADD")
def map_add(frame: Frame, ins: Instruction) -> None:
    key, value = frame.popn(2)
    frame.stack[-ins.arg][key] = value


@bytecode("LIST_EXTEND")
def list_extend(frame: Frame, ins: Instruction) -> None:
    items = frame.world.items(frame.stack.pop())
    frame.stack[-ins.arg].extend(items)


@bytecode("SET_UPDATE")
def set_update(frame: Frame, ins: Instruction) -> None:
    items = frame.world.items(frame.stack.pop())
    frame.stack[-ins.arg].update(items)


@bytecode("DICT_UPDATE")
def dict_update(frame: Frame, ins: Instruction) -> None:
    other = frame.world.mapping(frame.stack.pop())
    frame.stack[-ins.arg].update(other)


@bytecode("DICT_MERGE")
def dict_merge(frame: Frame, ins: Instruction) -> None:
    other = frame.world.mapping(frame.stack.pop())
    target = frame.stack[-ins.arg]
    for key in other:
        if key in target:
            raise TypeError(f"got multiple values for keyword argument {key!r}")
    target.update(other)


@bytecode("LIST_TO_TUPLE")
def list_to_tuple(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(tuple(frame.stack.pop()))


@bytecode("UNPACK_SEQUENCE")
def unpack_sequence(frame: Frame, ins: Instruction) -> None:
    items = frame.world.items(frame.stack.pop())
    if len(items) != ins.arg:
        few = f"not enough values to unpack (expected {ins.arg}, got {len(items)})"
        raise ValueError(
            few if len(items) < ins.arg else f"too many values to unpack (expected {ins.arg})"
        )
    frame.stack.extend(reversed(items))


@bytecode("UNPACK_EX")
def unpack_ex(frame: Frame, ins: Instruction) -> None:
    before, after = ins.arg & 255, ins.arg >> 8
    items = frame.world.items(frame.stack.pop())
    if len(items) < before + after:
        raise ValueError(
            f"not enough values to unpack (expected at least {before + after}, got {len(items)})"
        )
    rest = items[before : len(items) - after]
    frame.stack.extend(reversed([*items[:before], rest, *items[len(items) - after :]]))


# -- strings


@bytecode("CONVERT_VALUE")
def convert_value(frame: Frame, ins: Instruction) -> None:
    frame.stack.append(frame.world.convert(ins.arg, frame.stack.pop()))


@bytecode("FORMAT_VALUE")
def format_value(frame: Frame, ins: Instruction) -> None:
    spec = frame.stack.pop() if ins.arg else ""
    frame.stack.append(frame.world.format(frame.stack.pop(), spec))


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
    frame.stack.append(frame.world.call(function, (*own, *given[:count]), kwargs))


@bytecode("CALL_FUNCTION_EX")
def call_function_ex(frame: Frame, ins: Instruction) -> None:
    kwargs = frame.world.mapping(frame.stack.pop()) if ins.arg & 1 else {}
    args = tuple(frame.world.items(frame.stack.pop()))
    function, own = split_callable(*frame.popn(2))
    frame.stack.append(frame.world.call(function, (*own, *args), kwargs))


@bytecode("MAKE_FUNCTION")
def make_function(frame: Frame, ins: Instruction) -> None:
    code = frame.stack.pop()
    extras = frame.popn(ins.arg.bit_count())
    parts = dict(zip([flag for flag in (1, 2, 4, 8) if ins.arg & flag], extras, strict=True))
    closure = parts.pop(8, None)
    names = code.co_freevars
    made = types.FunctionType(
        code,
        frame.function.__globals__,
        closure=closure or tuple(types.CellType() for _ in names) or None,
    )
    for flag, value in parts.items():
        set_function_part(made, flag, value)
    frame.stack.append(made)


@bytecode("SET_FUNCTION_ATTRIBUTE")
def set_function_attribute(frame: Frame, ins: Instruction) -> None:
    value, made = frame.popn(2)
    if ins.arg == 8:  # a closure can only be given to a new function
        closed = types.FunctionType(made.__code__, made.__globals__, closure=value)
        closed.__defaults__, closed.__kwdefaults__ = made.__defaults__, made.__kwdefaults__
        closed.__annotations__ = made.__annotations__
        made = closed
    else:
        set_function_part(made, ins.arg, value)
    frame.stack.append(made)


def set_function_part(function: types.FunctionType, flag: int, value: Any) -> None:
    if flag == 1:
        function.__defaults__ = value
    elif flag == 2:
        function.__kwdefaults__ = value
    else:  # annotations come as a flat tuple of names and values
        flat = list(value)
        function.__annotations__ = dict(zip(flat[::2], flat[1::2], strict=True))


@bytecode("RETURN_VALUE")
def return_value(frame: Frame, ins: Instruction) -> bool:
    frame.result = frame.stack.pop()
    frame.finished = True
    return True
