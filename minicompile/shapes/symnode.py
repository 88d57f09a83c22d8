"""`SymNode`: the number inside a `torch.SymInt`, whose arithmetic builds a sympy expression.

torch's C++ and Python code computes shapes with `torch.SymInt`; each operation is forwarded to the node by
name (`add`, `guard_bool`, `is_contiguous`, ...). A comparison gives another node; only when
somebody needs its truth (`guard_bool`) is the `ShapeEnv` asked, which may add a guard.

The real compiler: torch/fx/experimental/sym_node.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import sympy

from minicompile.shapes.expr import ONE, FloorDiv, ModularIndexing, exact_quotient

if TYPE_CHECKING:
    from minicompile.shapes.env import ShapeEnv

Number = int | float | bool
Text = str  # a node has a method called `str`


class SymNode:
    """A sympy expression of an environment, with the Python type (int, float, bool) it stands for."""

    constant = None
    """Plain numbers are never kept as nodes of their own kind."""
    fx_node = None
    """Graph tracing in torch looks here; ours maps expressions to nodes itself."""
    _hint = None

    def __init__(self, expr: sympy.Basic, shape_env: ShapeEnv, pytype: type) -> None:
        self.expr, self.shape_env, self.pytype = expr, shape_env, pytype

    @property
    def _expr(self) -> sympy.Basic:
        return self.expr

    def _new(self, expr: sympy.Basic, pytype: type) -> SymNode:
        return SymNode(expr, self.shape_env, pytype)

    # Identity and printing

    def _value_hash(self) -> int:
        return hash((self.expr, id(self.shape_env)))

    def _value_eq(self, other: SymNode) -> bool:
        return self.expr == other.expr and self.shape_env is other.shape_env

    def str(self) -> Text:
        return Text(self.expr)

    def __str__(self) -> Text:
        return Text(self.expr)

    __repr__ = __str__

    def _graph_repr(self) -> Text:
        return Text(self.expr)

    def clone(self) -> SymNode:
        return self

    # What kind of number

    @property
    def hint(self) -> Number:
        value: Number = self.pytype(self.shape_env.hint(self.expr))
        return value

    def has_hint(self) -> bool:
        return True

    def is_int(self) -> bool:
        return self.pytype is int

    def is_float(self) -> bool:
        return self.pytype is float

    def is_bool(self) -> bool:
        return self.pytype is bool

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def nested_int(self) -> None:
        return None

    def maybe_as_int(self) -> int | None:
        return int(self.expr) if self.expr.is_Integer else None

    def maybe_as_float(self) -> float | None:
        return float(self.expr) if self.expr.is_number else None

    def maybe_as_bool(self) -> bool | None:
        return {sympy.true: True, sympy.false: False}.get(self.expr)

    def wrap_int(self, value: int) -> SymNode:
        return self._new(sympy.Integer(value), int)

    def wrap_float(self, value: float) -> SymNode:
        return self._new(sympy.Float(value), float)

    def wrap_bool(self, value: bool) -> SymNode:
        return self._new(sympy.S(value), bool)

    # Asking for the value: guards are born here

    def guard_int(self, file: Text = "", line: int = 0) -> int:
        return int(self.shape_env.evaluate(self.expr))

    def guard_float(self, file: Text = "", line: int = 0) -> float:
        return float(self.shape_env.evaluate(self.expr))

    def guard_bool(self, file: Text = "", line: int = 0) -> bool:
        return bool(self.shape_env.evaluate(self.expr))

    def int_(self) -> int:
        return self.guard_int()

    def bool_(self) -> bool:
        return self.guard_bool()

    def guard_size_oblivious(self, file: Text = "", line: int = 0) -> bool:
        return self.guard_bool()

    def guard_or_false(self, file: Text = "", line: int = 0) -> bool:
        return self.guard_bool()

    def guard_or_true(self, file: Text = "", line: int = 0) -> bool:
        return self.guard_bool()

    def expect_true(self, file: Text = "", line: int = 0) -> bool:
        return self.guard_bool()

    def expect_size(self, file: Text = "", line: int = 0) -> bool:
        return self._compare(sympy.Ge, self.wrap_int(0)).guard_bool()

    def statically_known_true(self, file: Text = "", line: int = 0) -> bool:
        return bool(self.shape_env.static(self.expr) == sympy.true)

    # Arithmetic

    def _arithmetic(self, rule: Callable[..., sympy.Expr], *others: SymNode) -> SymNode:
        nodes = (self, *others)
        pytype = float if any(node.pytype is float for node in nodes) else int
        return self._new(rule(*(node.expr for node in nodes)), pytype)

    def _quotient(self, other: SymNode) -> SymNode:
        return self._new(self.expr / other.expr, float)

    truediv = int_truediv = float_truediv = _quotient

    def sym_sqrt(self) -> SymNode:
        return self._new(sympy.sqrt(self.expr), float)

    def sym_sum(self, nodes: Sequence[SymNode]) -> SymNode:
        return self._new(sympy.Add(*(node.expr for node in nodes)), int)

    def sym_float(self) -> SymNode:
        return self._new(self.expr, float)

    def pos(self) -> SymNode:
        return self

    def round(self, ndigits: int | None = None) -> SymNode:
        if self.pytype is int:
            return self
        raise NotImplementedError("round() of a symbolic float")

    def sym_not(self) -> SymNode:
        return self._new(sympy.Not(self.expr), bool)

    def sym_ite(self, then: SymNode, otherwise: SymNode) -> SymNode:
        return then if self.guard_bool() else otherwise

    def _compare(self, relation: Callable[..., sympy.Basic], other: SymNode) -> SymNode:
        return self._new(relation(self.expr, other.expr), bool)

    # Layout predicates over sizes and strides: decided at once, so that they guard on little

    def is_contiguous(self, sizes: Sequence[SymNode], strides: Sequence[SymNode]) -> SymNode:
        return self._contiguous_in_order(sizes, strides, range(len(sizes) - 1, -1, -1))

    def is_channels_last_contiguous_2d(
        self, sizes: Sequence[SymNode], strides: Sequence[SymNode]
    ) -> SymNode:
        return self._contiguous_in_order(sizes, strides, (1, 3, 2, 0), rank=4)

    def is_channels_last_contiguous_3d(
        self, sizes: Sequence[SymNode], strides: Sequence[SymNode]
    ) -> SymNode:
        return self._contiguous_in_order(sizes, strides, (1, 4, 3, 2, 0), rank=5)

    def is_channels_last_strides_2d(
        self, sizes: Sequence[SymNode], strides: Sequence[SymNode]
    ) -> SymNode:
        return self._ordered_strides(sizes, strides, (1, 3, 2, 0))

    def is_channels_last_strides_3d(
        self, sizes: Sequence[SymNode], strides: Sequence[SymNode]
    ) -> SymNode:
        return self._ordered_strides(sizes, strides, (1, 4, 3, 2, 0))

    def is_non_overlapping_and_dense(
        self, sizes: Sequence[SymNode], strides: Sequence[SymNode]
    ) -> SymNode:
        hints = [node.hint for node in strides]
        return self._contiguous_in_order(
            sizes, strides, sorted(range(len(sizes)), key=hints.__getitem__)
        )

    def is_non_overlapping_and_dense_indicator(
        self, sizes: Sequence[SymNode], strides: Sequence[SymNode]
    ) -> SymNode:
        return self.wrap_int(int(self.is_non_overlapping_and_dense(sizes, strides).guard_bool()))

    def _holds(
        self, relation: Callable[..., sympy.Basic], left: sympy.Expr, right: sympy.Expr | int
    ) -> bool:
        return bool(self.shape_env.evaluate(relation(left, right), "memory layout of a tensor"))

    def _contiguous_in_order(
        self,
        sizes: Sequence[SymNode],
        strides: Sequence[SymNode],
        order: Sequence[int],
        rank: int | None = None,
    ) -> SymNode:
        """Are elements adjacent in memory when dimensions are walked in `order`, innermost first?"""
        if rank is not None and len(sizes) != rank:
            return self.wrap_bool(False)
        if any(node.expr.is_zero for node in sizes):
            return self.wrap_bool(True)
        expected: sympy.Expr = sympy.Integer(1)
        for dim in order:
            size, stride = sizes[dim].expr, strides[dim].expr
            if self._holds(sympy.Eq, size, 1):
                continue
            if not self._holds(sympy.Eq, stride, expected):
                return self.wrap_bool(False)
            expected = expected * size
        return self.wrap_bool(True)

    def _ordered_strides(
        self, sizes: Sequence[SymNode], strides: Sequence[SymNode], order: Sequence[int]
    ) -> SymNode:
        """Do strides grow in `order`? (torch's test for channels-last.)"""
        if len(sizes) != len(order) or strides[1].expr.is_zero:
            return self.wrap_bool(False)
        smallest: sympy.Expr = sympy.Integer(0)
        for dim in order:
            size, stride = sizes[dim].expr, strides[dim].expr
            if size.is_zero or not self._holds(sympy.Ge, stride, smallest):
                return self.wrap_bool(False)
            if dim == 0 and smallest == strides[1].expr:
                return self.wrap_bool(
                    False
                )  # all inner dimensions have size 1: N111 counts as contiguous
            smallest = stride * size if self._holds(sympy.Gt, size, 1) else stride
        return self.wrap_bool(True)


def _modulo(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
    """`base % divisor`, zero where division is exact."""
    if exact_quotient(base, divisor) is not None:
        return sympy.Integer(0)
    return ModularIndexing(base, ONE, divisor)


def _raise_to(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    return base**exponent


ARITHMETIC: dict[str, Callable[..., sympy.Expr]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "abs": sympy.Abs,
    "mod": _modulo,
    "floordiv": FloorDiv,
    "int_floordiv": FloorDiv,
    "sym_min": sympy.Min,
    "sym_max": sympy.Max,
    "pow": _raise_to,
    "pow_by_natural": _raise_to,
    "float_pow": _raise_to,
}
COMPARISONS = {
    "eq": sympy.Eq,
    "ne": sympy.Ne,
    "lt": sympy.Lt,
    "le": sympy.Le,
    "gt": sympy.Gt,
    "ge": sympy.Ge,
}
CONNECTIVES = {"and_": sympy.And, "sym_and": sympy.And, "or_": sympy.Or, "sym_or": sympy.Or}


def _toward_zero(value: sympy.Expr) -> sympy.Expr:
    return sympy.sign(value) * sympy.floor(sympy.Abs(value))


ROUNDING = {
    "floor": sympy.floor,
    "sym_int": _toward_zero,
    "trunc": _toward_zero,
    "ceil": sympy.ceiling,
}


def _method(kind: Callable[..., SymNode], rule: Any) -> Callable[..., SymNode]:
    rule = functools.lru_cache(4096)(rule)  # the same few sizes are combined again and again
    return lambda self, *others: kind(self, rule, *others)


def _rounded(self: SymNode, rule: Callable[[sympy.Expr], sympy.Expr]) -> SymNode:
    return self if self.pytype is int else self._new(rule(self.expr), int)


def _connected(self: SymNode, rule: Callable[..., sympy.Basic], other: SymNode) -> SymNode:
    return self._new(rule(self.expr, other.expr), bool)


for _names, _kind in (
    (ARITHMETIC, SymNode._arithmetic),
    (COMPARISONS, SymNode._compare),
    (CONNECTIVES, _connected),
    (ROUNDING, _rounded),
):
    for _name, _rule in _names.items():
        setattr(SymNode, _name, _method(_kind, _rule))
