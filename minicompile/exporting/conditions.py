"""What must hold of arguments, and how results are put together: expressions that are read, never executed.

condition  := x is f32 | x.dim() == 2 | x.size(1) == 16 | 2 <= x.size(0) <= 64 | x.size(0) == y.size(0)
            | x.device == 'cpu' | flag == True | type(xs) is list | len(xs) == 2 | list(d) == ['a'] ...
structure  := {'logits': result[0], 'n': x.size(0) // 2, 'rest': (None, xs[1])} ...
"""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sympy
import torch

from minicompile.dynamo.result import describe
from minicompile.errors import ExportError
from minicompile.ops.dtypes import SHORT
from minicompile.shapes.env import SMALLEST_SIZE
from minicompile.shapes.expr import PYTHON_NUMBERS, loop_symbol

DTYPES = {name: dtype for dtype, name in SHORT.items()}
ARITHMETIC: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.NotIn: lambda a, b: a not in b, ast.USub: operator.neg, ast.Not: operator.not_,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": len, "list": list, "min": min, "max": max, "float": float, "torch.device": torch.device,
    "torch.Size": torch.Size, "OrderedDict": collections.OrderedDict,
}  # fmt: skip
MEMBERS = ("size", "dim", "device")


def class_name(cls: type) -> str:
    """`list`, `collections.OrderedDict`: how a class is written in a condition."""
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal in type and value. NaN is NaN, 0.0 is not -0.0."""
    if isinstance(left, torch.device):
        return str(left) == right
    if type(left) is float and type(right) is float:
        return left.hex() == right.hex()
    return type(left) is type(right) and left == right


def literal(value: Any) -> str:
    """A number, string, other constant, or container of such, as a condition has it."""
    if type(value) is dict:
        return f"{{{', '.join(f'{literal(key)}: {literal(one)}' for key, one in value.items())}}}"
    if type(value) in (tuple, list):
        parts = ", ".join(map(literal, value))
        return f"[{parts}]" if type(value) is list else f"({parts}{',' * (len(value) == 1)})"
    if isinstance(value, float) and value - value:
        return f"float({str(value)!r})"
    return repr(str(value)) if isinstance(value, torch.device) else repr(value)


class Expression:
    """One expression of the language. Raises ExportError for a text that isn't one."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self.tree = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ExportError(f"not an expression: {text[:200]!r} ({error})") from None

    def __call__(self, names: Mapping[str, Any]) -> Any:
        """Its value. `names`: arguments, `result`, classes. What it can't look at raises what Python
        raises for it."""
        return value_of(self.tree, names)

    def holds(self, names: Mapping[str, Any]) -> bool:
        """Whether it is a true condition; not, if what it is about isn't there."""
        try:
            return bool(self(names))
        except (LookupError, AttributeError, TypeError, ValueError, ArithmeticError):
            return False

    def found(self, names: Mapping[str, Any]) -> str:
        """The values of both sides of a comparison, as text: `x.size(1) is 17`."""
        sides = [self.tree]
        if isinstance(self.tree, ast.Compare):
            sides = [self.tree.left, *self.tree.comparators]
            if isinstance(self.tree.ops[0], ast.Is):
                sides.pop()
        told = []
        for side in sides:
            if isinstance(side, ast.Constant | ast.List):
                continue
            try:
                if isinstance(side, ast.Call) and dotted(side.func) == "type":
                    what = class_name(type(value_of(side.args[0], names)))
                else:
                    what = describe(value_of(side, names))
            except Exception as error:  # whatever the argument's class raises
                what = f"not there ({type(error).__name__})"
            told.append(f"{ast.unparse(side)} is {what}")
        return ", ".join(told)


def dotted(node: ast.AST) -> str:
    """`torch.float32`; "" if it is no such name."""
    if isinstance(node, ast.Name):
        return node.id
    above = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{above}.{node.attr}" if isinstance(node, ast.Attribute) and above else ""


def classes_of(structure: Expression) -> dict[str, Any]:
    """The classes of results that a structure names: torch's own, or named tuples with these fields."""
    found: dict[str, Any] = {}
    for node in ast.walk(structure.tree):
        name = dotted(node.func) if isinstance(node, ast.Call) else ""
        space, _, short = name.rpartition(".")
        if space == "torch.return_types":
            found[name] = getattr(torch.return_types, short)
        elif isinstance(node, ast.Call) and space and not node.args and short not in MEMBERS:
            found[name] = collections.namedtuple(short, [str(k.arg) for k in node.keywords])  # type: ignore[misc]
    return found


def value_of(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """An expression's value. Raises ExportError for what the language hasn't got."""
    inner = functools.partial(value_of, names=names)
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() if node.id in names:
            return names[node.id]
        case ast.Tuple():
            return tuple(map(inner, node.elts))
        case ast.List():
            return list(map(inner, node.elts))
        case ast.Dict() if None not in node.keys:
            return {inner(k): inner(v) for k, v in zip(node.keys, node.values, strict=True) if k}
        case ast.Subscript():
            return inner(node.value)[inner(node.slice)]
        case ast.UnaryOp() if type(node.op) in ARITHMETIC:
            return ARITHMETIC[type(node.op)](inner(node.operand))
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            return ARITHMETIC[type(node.op)](inner(node.left), inner(node.right))
        case ast.BoolOp():
            test = all if isinstance(node.op, ast.And) else any
            return test(map(inner, node.values))
        case ast.Compare():
            left = node.left
            for op, right in zip(node.ops, node.comparators):
                if not compared(op, left, right, names):
                    return False
                left = right
            return True
        case ast.Attribute(attr="device"):
            return inner(node.value).device
        case ast.Attribute(value=ast.Name(id="torch")):
            found = getattr(torch, node.attr, None)
            if isinstance(found, torch.dtype):
                return found
        case ast.Call(func=ast.Attribute(attr="size", value=of), args=[axis], keywords=[]):
            return inner(of).shape[inner(axis)]
        case ast.Call(func=ast.Attribute(attr="dim", value=of), args=[], keywords=[]):
            return inner(of).dim()
        case ast.Call(func=function) if name := dotted(function):
            call = FUNCTIONS.get(name) or (names.get(name) if "." in name else None)
            if callable(call):
                given = {str(k.arg): inner(k.value) for k in node.keywords}
                return call(*map(inner, node.args), **given)
    raise ExportError(f"not part of the language of conditions: {ast.unparse(node)[:200]!r}")


def compared(op: ast.cmpop, left: ast.expr, right: ast.expr, names: Mapping[str, Any]) -> Any:
    """One comparison. `is` asks for a class, for a type of tensor elements, or for the same object."""
    if isinstance(op, ast.Is):
        if isinstance(left, ast.Call) and dotted(left.func) == "type":
            return class_name(type(value_of(left.args[0], names))) == dotted(right)
        value, name = value_of(left, names), dotted(right)
        if name in DTYPES or name.startswith("torch."):
            dtype = DTYPES.get(name) or getattr(torch, name.removeprefix("torch."), None)
            dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
            return dense and value.dtype is dtype
        return value is value_of(right, names)
    values = value_of(left, names), value_of(right, names)
    if isinstance(op, ast.Eq | ast.NotEq):
        equal = same(*values)
        return equal if isinstance(op, ast.Eq) else not equal
    if type(op) not in ARITHMETIC:
        raise ExportError(f"not part of the language of conditions: {type(op).__name__}")
    return ARITHMETIC[type(op)](*values)


def signature_rows(call: inspect.Signature) -> list[tuple[str, ...]]:
    """How a program is called, as data: name, kind and, as text, the default of each parameter."""
    return [
        (p.name, p.kind.name, *(() if p.default is p.empty else (literal(p.default),)))
        for p in call.parameters.values()
    ]


def signature_from(rows: Iterable[Sequence[str]]) -> inspect.Signature:
    """The signature that `signature_rows` wrote down."""

    def parameter(name: str, kind: str, *default: str) -> inspect.Parameter:
        value = Expression(default[0])({}) if default else inspect.Parameter.empty
        return inspect.Parameter(name, getattr(inspect.Parameter, kind), default=value)

    return inspect.Signature([parameter(*row) for row in rows])


def always_holds(condition: sympy.Basic, ranges: Mapping[sympy.Symbol, Any]) -> bool:
    """Whether a condition is true of all sizes in their ranges: few are tried one by one; else floats are
    taken as exact, `4 * s0 / 4 - 1.0 != 0`."""
    symbols = sorted(condition.free_symbols, key=str)
    limits = [ranges.get(symbol, (SMALLEST_SIZE, None)) for symbol in symbols]
    if math.prod(MANY if high is None else high - low + 1 for low, high in limits) < MANY:
        every = itertools.product(*(range(low, high + 1) for low, high in limits))
        values = (dict(zip(symbols, map(sympy.Integer, sizes))) for sizes in every)
        return all(condition.xreplace(sizes) == sympy.true for sizes in values)
    for name, exact in EXACT.items():
        condition = condition.replace(PYTHON_NUMBERS[name], exact)
    if not condition.is_Relational:
        return bool(condition == sympy.true)
    above = {s: loop_symbol(f"{s} - {low}") + low for s, (low, _) in zip(symbols, limits)}
    sides = [sympy.expand(sympy.nsimplify(side.xreplace(above))) for side in condition.args]
    return bool(condition.func(sides[0] - sides[1], 0) == sympy.true)


MANY = 2000
"""From so many combinations of sizes on they are not tried one by one."""
EXACT = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv}
