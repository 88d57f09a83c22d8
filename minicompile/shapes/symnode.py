"""`SymNode`: the number inside a `torch.SymInt`, whose arithmetic builds a sympy expression.

torch's C++ and Python code computes shapes with `torch.SymInt`; each operation is forwarded to the node by
name (`add`, `guard_bool`, `sym_max`, ...). A comparison gives another node; only when
somebody needs its truth (`guard_bool`) is the `ShapeEnv` asked, which may add a guard. `SizeNodes` gives such
numbers nodes in a graph.

The real compiler: torch/fx/experimental/sym_node.py, torch/fx/experimental/proxy_tensor.py.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import sympy
import torch
from torch import fx

from minicompile.errors import Unsupported
from minicompile.shapes.expr import (
    ONE,
    PYTHON_NUMBERS,
    FloorDiv,
    ModularIndexing,
    PythonNumber,
    exact_quotient,
    is_float,
    python_number,
)

if TYPE_CHECKING:
    from minicompile.shapes.env import ShapeEnv

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Numbers that stand for any number: what torch's functions take and give."""
Number = int | float | bool
Nodes: TypeAlias = "Sequence[SymNode]"
Text = str  # a node has a method called `str`


class SymNode:
    """A sympy expression of an environment, with the Python type (int, float, bool) it stands for."""

    constant = None
    """Plain numbers are never kept as nodes of their own kind."""
    fx_node = None
    """Graph tracing in torch looks here; ours maps expressions to nodes itself."""
    _hint = None

    def __init__(self, expr: sympy.Basic, shape_env: ShapeEnv, pytype: type) -> None:
        self.given = self._expr = expr  # torch reads the second name
        self.shape_env, self.pytype = shape_env, pytype

    @property
    def expr(self) -> sympy.Basic:
        """The expression, with what guards have said of its symbols since."""
        return self.shape_env.simplified(self.given)

    def _new(self, expr: sympy.Basic, pytype: type) -> SymNode:
        return SymNode(expr, self.shape_env, pytype)

    # Printing

    def str(self) -> Text:
        return Text(self.expr)

    __str__ = __repr__ = _graph_repr = str

    def clone(self) -> SymNode:
        return self

    # What kind of number

    @property
    def hint(self) -> Number:
        value: Number = self.pytype(self.shape_env.hint(self.expr))
        return value

    def maybe_as_int(self) -> int | None:
        return int(self.expr) if self.expr.is_Integer else None

    def _wrapped(self, pytype: type, value: Number) -> SymNode:
        return self._new(sympy.sympify(value), pytype)

    wrap_int = functools.partialmethod(_wrapped, int)
    wrap_float = functools.partialmethod(_wrapped, float)
    wrap_bool = functools.partialmethod(_wrapped, bool)

    # Asking for the value: guards are born here

    def _decided(self, pytype: type, file: Text = "", line: int = 0) -> Any:
        if file.endswith("native/Convolution.cpp"):  # which of its backends is the fastest
            return pytype(self.shape_env.settle(self.expr))
        return pytype(self.shape_env.evaluate(self.expr))

    def _settled(self, answer: bool, file: Text = "", line: int = 0) -> bool:
        return bool(self.shape_env.settle(self.expr, answer))

    guard_int = int_ = functools.partialmethod(_decided, int)
    guard_float = functools.partialmethod(_decided, float)
    guard_bool = bool_ = functools.partialmethod(_decided, bool)
    guard_size_oblivious = expect_true = guard_bool
    guard_or_false = functools.partialmethod(_settled, False)
    guard_or_true = functools.partialmethod(_settled, True)

    def statically_known_true(self, file: Text = "", line: int = 0) -> bool:
        return bool(self.shape_env.static(self.expr) == sympy.true)

    # Arithmetic

    def _apply(self, rule: Callable[..., sympy.Basic], pytype: type, *others: SymNode) -> SymNode:
        if rule in DIVISIONS and self.shape_env.evaluate(sympy.Eq(others[0].expr, 0)):
            raise ZeroDivisionError("division by zero")
        return self._new(_computed(rule, self.expr, *(node.expr for node in others)), pytype)

    def _arithmetic(self, name: Text, *others: SymNode) -> SymNode:
        """As Python has it: floats if one of them is a float."""
        pytype = float if float in (self.pytype, *(node.pytype for node in others)) else int
        rules = ARITHMETIC if pytype is int else ARITHMETIC | PYTHON_NUMBERS
        return self._apply(rules[name], pytype, *others)

    def sym_sum(self, nodes: Nodes) -> SymNode:
        return self._new(sympy.Add(*(node.expr for node in nodes)), int)

    def pos(self) -> SymNode:
        return self

    def sym_max(self, other: SymNode) -> SymNode:
        """The larger one. Compared with 1, as in row-major strides, which one that is becomes a guard."""
        if ONE in (self.expr, other.expr):
            return self if self.shape_env.evaluate(sympy.Ge(self.expr, other.expr)) else other
        return self._new(sympy.Max(self.expr, other.expr), int)


def _modulo(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    """`base % divisor`, zero where division is exact."""
    if exact_quotient(base, divisor) is not None:
        return sympy.Integer(0)
    if divisor.is_positive:
        return ModularIndexing(base, ONE, divisor)
    return base - divisor * FloorDiv(base, divisor)


@functools.lru_cache(1 << 16)  # the same few sizes come again and again
def _computed(rule: Callable[..., sympy.Basic], *operands: sympy.Basic) -> sympy.Basic:
    return rule(*operands)


def _rounded(name: str) -> Callable[[sympy.Expr], sympy.Expr]:
    return lambda value: value if value.is_integer else PYTHON_NUMBERS[name](value)


ARITHMETIC: dict[str, Callable[..., sympy.Expr]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg", "abs", "pow")},
    "mod": _modulo,
    "floordiv": FloorDiv,
    "int_floordiv": FloorDiv,
    "sym_min": sympy.Min,
    "pow_by_natural": operator.pow,
}
TRUTHS = {
    **{name: getattr(sympy, name.capitalize()) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **dict.fromkeys(("and_", "sym_and"), sympy.And),
    **dict.fromkeys(("or_", "sym_or"), sympy.Or),
    "sym_not": sympy.Not,
}
CONVERSIONS = {
    **dict.fromkeys(("truediv", "int_truediv", "float_truediv"), PYTHON_NUMBERS["truediv"]),
    "float_pow": PYTHON_NUMBERS["pow"],
    "sym_sqrt": PYTHON_NUMBERS["sqrt"],
    "sym_float": PYTHON_NUMBERS["float"],
}
ROUNDING = {
    "floor": _rounded("floor"),
    "sym_int": _rounded("int"),
    "trunc": _rounded("int"),
    "ceil": _rounded("ceil"),
}
ANSWERS = {
    "has_hint": True,
    "is_symbolic": True,
    "is_constant": False,
    "is_nested_int": False,
    "nested_int": None,
}
"""What torch asks of nodes and all of ours answer alike. How tensors lie in memory it doesn't ask: where all
sizes have hints it works that out by their arithmetic (c10/core/SymbolicShapeMeta.cpp)."""


DIVISIONS = {FloorDiv, _modulo, *(PYTHON_NUMBERS[name] for name in ("truediv", "floordiv", "mod"))}
"""That their second operand isn't 0 becomes a guard."""

for _name in ARITHMETIC:
    setattr(SymNode, _name, functools.partialmethod(SymNode._arithmetic, _name))
for _rules, _pytype in ((TRUTHS, bool), (CONVERSIONS, float), (ROUNDING, int)):
    for _name, _rule in _rules.items():
        setattr(SymNode, _name, functools.partialmethod(SymNode._apply, _rule, _pytype))
for _type in (int, float, bool):
    setattr(SymNode, f"is_{_type.__name__}", lambda self, _type=_type: self.pytype is _type)
for _name, _answer in ANSWERS.items():
    setattr(SymNode, _name, lambda self, _answer=_answer: _answer)


OPERATORS: dict[Any, tuple[Text, Any]] = {
    sympy.Add: ("({0} + {1})", operator.add),
    sympy.Mul: ("({0} * {1})", operator.mul),
    sympy.Pow: ("({0} ** {1})", operator.pow),
    FloorDiv: ("({0} // {1})", operator.floordiv),
    sympy.Min: ("min({0}, {1})", torch.sym_min),
    sympy.Max: ("max({0}, {1})", torch.sym_max),
}


def operation_of(expr: sympy.Basic) -> tuple[Text, Any, tuple[sympy.Basic, ...]]:
    """An expression as one operation on two smaller ones: how it reads, the function, the parts.

    Raises Unsupported for one that no size is computed with.
    """
    if isinstance(expr, ModularIndexing):
        base, divisor, modulus = expr.args
        return "({0} % {1})", operator.mod, (FloorDiv(base, divisor), modulus)
    if expr.func not in OPERATORS or (expr.is_Pow and not expr.exp.is_Integer):
        raise Unsupported(f"the size expression {expr} can't be computed in a graph")
    form, function = OPERATORS[expr.func]
    first, *rest = expr.args
    return form, function, (first, expr.func(*rest) if len(rest) > 1 else rest[0])


def evaluate(expr: sympy.Expr | int, values: Mapping[sympy.Symbol, Any]) -> Any:
    """Compute an index for the numbers or int64 tensors that its symbols stand for."""
    if isinstance(expr, int | sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Symbol):
        return values[expr]
    _, function, parts = operation_of(expr)
    return function(*(evaluate(part, values) for part in parts))


def size_expr(value: Any) -> Any:
    """A number that may be symbolic as a Python number or a sympy expression; anything else as it is."""
    return value.node.expr if isinstance(value, SYMBOLIC) else value


def hint(value: Any) -> Any:
    """A number that may be symbolic by its value while compiling; adds no guard."""
    return value.node.hint if isinstance(value, SYMBOLIC) else value


class SizeNodes:
    """Symbolic sizes as graph nodes, made on demand from the inputs whose shapes contain the symbols."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.nodes: dict[sympy.Expr, fx.Node] = {}
        self.sources: dict[sympy.Symbol, tuple[fx.Node, int | None, int, int]] = {}
        """Input (of a tensor, the dimension), rest and step: the size is `step * symbol + rest`."""
        self.env: Any = None
        """The `ShapeEnv` of the symbols."""

    def add_input(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.SymInt):
            self.nodes[value.node.expr] = node
        tensor = isinstance(value, torch.Tensor)
        for dim, size in enumerate(value.shape) if tensor else [(None, value)]:
            if isinstance(size, torch.SymInt):
                self.env = size.node.shape_env
                rest, term = size.node.expr.as_coeff_Add()
                step, symbol = term.as_coeff_Mul()
                if symbol.is_Symbol:
                    self.sources.setdefault(symbol, (node, dim, int(rest), int(step)))

    def argument(self, expr: sympy.Expr, env: Any, meta: Mapping[str, Any]) -> Any:
        """The node that computes an expression, or the number it is."""
        if expr.is_number:
            return python_number(expr)
        if expr in self.nodes:
            return self.nodes[expr]
        if expr.has(PythonNumber) or (is_float(expr) and not (-expr).is_Symbol):
            return self.argument(env.evaluate(expr, "computed with"), env, meta)
        if expr.is_Symbol:
            if expr not in self.sources:
                raise Unsupported(f"{expr} is neither a graph input nor the size of one")
            node, dim, rest, step = self.sources[expr]
            steps = (
                (torch.ops.aten.sym_size.int, dim, None, step * expr + rest),
                (operator.sub, rest, 0, step * expr),
                (operator.floordiv, step, 1, expr),
            )
            for target, number, neutral, value in steps:
                if number != neutral:
                    node = self.graph.call_function(target, (node, number))
                    node.meta.update(meta, val=env.number(value))
        else:
            _, target, parts = operation_of(expr)
            arguments = tuple(self.argument(part, env, meta) for part in parts)
            node = self.graph.call_function(target, arguments)
        node.meta.update(meta, val=env.number(expr))
        self.nodes[expr] = node
        return node
