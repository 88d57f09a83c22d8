"""The plain machine: Python's own meaning of every operation of the interpreter. Needs no torch."""

from __future__ import annotations

import operator
import types

from minicompile.dynamo.bytecode import decode, parameters, slot_names
from minicompile.dynamo.continuation import State
from minicompile.dynamo.interpreter import (
    BINARY,
    COMPARE,
    DELETED,
    UNARY,
    UNBOUND,
    Interpreter,
    Lazy,
    set_cell,
)
from minicompile.dynamo.reasons import refusal


def start(code: types.CodeType) -> State:
    """A frame before its first unit, its cells made."""
    own = {*code.co_varnames[: parameters(code)[-1]], *code.co_cellvars}
    return State(0, (), tuple(name for name in slot_names(code) if name in own))


CONVERSIONS = {1: str, 2: repr, 3: ascii}


class PlainMachine(Interpreter):
    """A Python interpreter that runs Python functions instruction by instruction, and calls others."""

    program = staticmethod(decode)
    load_attr = staticmethod(getattr)
    subscript = staticmethod(operator.getitem)
    store_subscript = staticmethod(operator.setitem)
    delete_subscript = staticmethod(operator.delitem)
    truth = staticmethod(bool)
    contains = staticmethod(operator.contains)
    same = staticmethod(operator.is_)
    iterate = staticmethod(iter)
    advance = staticmethod(next)
    length = staticmethod(len)
    formatted = staticmethod(format)
    store_cell = staticmethod(set_cell)

    def store_attr(self, value, name, new):
        delattr(value, name) if new is DELETED else setattr(value, name, new)

    def unsupported(self, id, what, hint=""):
        raise refusal(id, what, self.user_line(), hint)

    def user_line(self):
        return self.frame.line if self.frame is not None else None

    def pinned(self, value):
        return value

    def call(self, function, args, kwargs):
        if isinstance(function, types.MethodType):
            return self.call(function.__func__, (function.__self__, *args), kwargs)
        if isinstance(function, types.FunctionType):
            return self.run_function(function, args, kwargs)
        if function is super and not args:
            return self.zero_argument_super()
        return function(*args, **kwargs)

    def default(self, function, index):
        return function.__defaults__[index]

    def keyword_default(self, function, name):
        return (function.__kwdefaults__ or {}).get(name, UNBOUND)

    def realize(self, value):
        return value.value if isinstance(value, Lazy) else value

    def load_global(self, frame, name):
        for namespace in (frame.function.__globals__, frame.builtins):
            if name in namespace:
                return namespace[name]
        raise NameError(f"name {name!r} is not defined")

    def store_global(self, frame, name, value):
        frame.function.__globals__[name] = value

    def delete_global(self, frame, name):
        del frame.function.__globals__[name]

    def load_cell(self, cell):
        return cell.cell_contents

    def closure(self, function):
        return function.__closure__ or ()

    def import_name(self, frame, name, fromlist, level):
        return __import__(name, frame.function.__globals__, None, fromlist, level)

    def special(self, value, name):
        return getattr(value, name) if hasattr(type(value), name) else UNBOUND

    def binary(self, symbol, left, right):
        return BINARY[symbol](left, right)

    def unary(self, symbol, value):
        return UNARY[symbol](value)

    def compare(self, symbol, left, right):
        return COMPARE[symbol](left, right)

    def convert(self, kind, value):
        return CONVERSIONS[kind](value)

    def extend(self, target, items):
        target.extend(items)

    def mutable(self, value):
        return value

    def items(self, value):
        return list(self.iterate(value))

    def mapping(self, value):
        return {key: self.subscript(value, key) for key in value.keys()}  # noqa: SIM118
