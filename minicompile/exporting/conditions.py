"""What must hold of arguments, and how results are put together: expressions of a small language.

condition  := x is f32 | x.dim() == 2 | x.size(1) == 16 | 2 <= x.size(0) <= 64 | x.size(0) == y.size(0)
            | x.device == 'cpu' | flag == True | type(xs) is list | len(xs) == 2 | list(d) == ['a'] ...
structure  := {'logits': result[0], 'n': x.size(0) // 2, 'rest': (None, xs[1])} ...
"""

from __future__ import annotations

import ast
import collections
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


def differ(left: Any, right: Any) -> bool:
    """Whether two values are not the same."""
    return not same(left, right)


def has_dtype(value: Any, name: str) -> bool:
    """Whether a value is a dense tensor of this dtype: `f32`, `torch.float32`."""
    dtype = DTYPES.get(name) or getattr(torch, name.removeprefix("torch."), None)
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return dense and value.dtype is dtype


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
    """One expression of the language. Raises ExportError for a text that isn't Python."""

    def __init__(self, text: str) -> None:
        self.text, reader = text, Reader()
        try:
            self.tree = ast.parse(text, mode="eval").body
            meaning = ast.Expression(reader.visit(ast.parse(text, mode="eval").body))
            self.code = compile(ast.fix_missing_locations(meaning), "<condition>", "eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ExportError(f"not an expression: {text[:200]!r} ({error})") from None
        self.constants = {"__builtins__": {}, **reader.constants}

    def __call__(self, names: Mapping[str, Any]) -> Any:
        """Its value. `names`: arguments, `result`, classes. Raises what Python raises."""
        return eval(self.code, self.constants, names)

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
        texts = []
        for side in map(ast.unparse, sides):
            try:
                value = describe(Expression(side)(names))
            except Exception as error:  # whatever the argument's class raises
                value = f"not there ({type(error).__name__})"
            texts.append(f"{side} is {value}" * (value != side))
        return ", ".join(filter(None, texts))


class Reader(ast.NodeTransformer):
    """Makes Python of an expression. `constants`: its functions and dtypes, by names that no argument has."""

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}

    def constant(self, name: str, value: Any) -> ast.Name:
        self.constants[f"{name} "] = value
        return ast.Name(f"{name} ", ast.Load())

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = dotted(node.func)
        self.generic_visit(node)
        if name in FUNCTIONS:
            node.func = self.constant(name, FUNCTIONS[name])
        elif getattr(node.func, "attr", "") not in MEMBERS:
            node.func = ast.Name(name, ast.Load())  # a class of the results
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        name, dtype = dotted(node), getattr(torch, node.attr, None)
        if name.startswith("torch.") and isinstance(dtype, torch.dtype):
            return self.constant(name, dtype)
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """`is` asks for a class, a dtype, or the same object; `==` for the type, too."""
        right, op = node.comparators[0], node.ops[0]
        name, of_type = dotted(right), dotted(getattr(node.left, "func", node)) == "type"
        self.generic_visit(node)
        values: list[ast.expr] = [node.left, node.comparators[0]]
        if isinstance(op, ast.Is) and (of_type or name in DTYPES or name.startswith("torch.")):
            test = same if of_type else has_dtype
            return ast.Call(self.constant("is", test), [node.left, ast.Constant(name)], [])
        if isinstance(op, ast.Eq | ast.NotEq):
            test = same if isinstance(op, ast.Eq) else differ
            return ast.Call(self.constant(test.__name__, test), values, [])
        return node


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


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "len": len, "list": list, "min": min, "max": max, "float": float, "torch.device": torch.device,
    "torch.Size": torch.Size, "OrderedDict": collections.OrderedDict,
    "type": lambda value: class_name(type(value)),
}  # fmt: skip
MANY = 2000
"""From so many combinations of sizes on they are not tried one by one."""
EXACT = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv}
