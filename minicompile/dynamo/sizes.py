"""Symbolic sizes: which dimensions of an input get a symbol, and what must hold for the graph to be used at
other sizes.

A dimension is symbolic if `mark_dynamic` said so, or under `dynamic=True` if it is at least 2. Dimensions
that are equal at capture share one symbol (duck shaping), and a guard keeps them equal. Strides that follow
from the sizes are written as products of symbols; others stay numbers.
The real compiler: torch/fx/experimental/symbolic_shapes.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import sympy
import torch

from minicompile.dynamo.result import Guard, Source
from minicompile.errors import OptionError, Unsupported

if TYPE_CHECKING:
    from minicompile.shapes.env import ShapeEnv

MARK = "_minicompile_dynamic"
"""Attribute of a tensor: the set of its dimensions that `mark_dynamic` named."""


def mark_dynamic(tensor: torch.Tensor, dims: int | Iterable[int]) -> None:
    """Make dimensions of an input symbolic: one graph for all their sizes from 2 on.

    Raises OptionError for a dimension that does not exist.
    """
    marked = set(getattr(tensor, MARK, ()))
    for dim in [dims] if isinstance(dims, int) else dims:
        if not -tensor.dim() <= dim < tensor.dim():
            raise OptionError(f"a tensor of {tensor.dim()} dimensions has no dimension {dim}")
        marked.add(dim % tensor.dim())
    setattr(tensor, MARK, frozenset(marked))


def marks_of(tensor: torch.Tensor) -> frozenset[int]:
    found = tensor.__dict__.get(MARK, frozenset())
    assert isinstance(found, frozenset)
    return found


def any_marked(value: Any, depth: int = 0) -> bool:
    """Whether a tensor among a call's arguments was given to `mark_dynamic`."""
    if isinstance(value, torch.Tensor):
        return bool(marks_of(value))
    if type(value) in (list, tuple) and depth < 4:
        return any(any_marked(item, depth + 1) for item in value)
    if type(value) is dict and depth < 4:
        return any(any_marked(item, depth + 1) for item in value.values())
    return False


class Sizes:
    """The symbols of one capture, and fakes of inputs that use them."""

    def __init__(self, env: ShapeEnv, mode: Any, dynamic: bool) -> None:
        self.env, self.mode, self.dynamic = env, mode, dynamic
        self.by_hint: dict[int, torch.SymInt] = {}
        self.first: dict[sympy.Symbol, Source] = {}
        """The size that each symbol is read from."""
        self.extra: list[Guard] = []

    def symbolic_dims(self, tensor: torch.Tensor, source: Source) -> list[int]:
        """The dimensions of an input that get a symbol."""
        wanted = marks_of(tensor)
        own = isinstance(tensor, torch.nn.Parameter) or source.kind in ("parameter", "buffer")
        if self.dynamic and not own:
            wanted = frozenset(range(tensor.dim()))
        return [dim for dim in sorted(wanted) if tensor.shape[dim] >= 2]

    def fake(self, tensor: torch.Tensor, source: Source) -> torch.Tensor | None:
        """A fake with symbolic sizes; None if no dimension wants one."""
        dims = self.symbolic_dims(tensor, source)
        if not dims:
            return None
        sizes: list[Any] = [
            self.symbol(tensor.shape[dim], Source("size", dim, source))
            if dim in dims
            else tensor.shape[dim]
            for dim in range(tensor.dim())
        ]
        strides = self.strides(tensor, sizes)
        if tensor.storage_offset():
            reason = f"{source} has symbolic sizes and starts inside a larger tensor"
            raise Unsupported(reason, hint="clone it")
        layout = tuple(map(expression_of, strides))
        symbols = {symbol for stride in layout for symbol in sympy.sympify(stride).free_symbols}
        sources = (source, *(self.first[symbol] for symbol in sorted(symbols, key=str)))
        self.extra.append(Guard(sources, "strides", layout, "memory layout of an input"))
        with self.mode:
            made = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_(tensor.requires_grad)

    def symbol(self, hint: int, source: Source) -> torch.SymInt:
        known = self.by_hint.get(hint)
        if known is None:
            known = self.by_hint[hint] = self.env.create_symbol(hint, source)
            symbol = expression_of(known)
            self.first[symbol] = source
            fact = sympy.Ge(symbol, 2)
            self.extra.append(Guard((source,), "shape", fact, "sizes 0 and 1 are compiled apart"))
        else:
            symbol = expression_of(known)
            pair = source, self.first[symbol]
            self.extra.append(Guard(pair, "same_size", symbol, "equal while capturing"))
        return known

    @staticmethod
    def strides(tensor: torch.Tensor, sizes: list[Any]) -> list[Any]:
        """Strides as products of sizes where the layout is dense, else as numbers."""
        order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim))
        found: list[Any] = list(tensor.stride())
        expected: Any = 1
        hint = 1
        for dim in order:
            if tensor.stride(dim) != hint:
                return list(tensor.stride())
            found[dim] = expected
            expected, hint = expected * sizes[dim], hint * tensor.shape[dim]
        return found

    def guards(self) -> list[Guard]:
        """Everything that must hold for other sizes."""
        found = list(self.extra)
        for fact, reason in self.env.guards:
            sources = tuple(self.first[symbol] for symbol in sorted(fact.free_symbols, key=str))
            found.append(Guard(sources, "shape", fact, reason))
        return found


def expression_of(size: Any) -> Any:
    """The sympy expression of a SymInt; other sizes unchanged."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


OPERATORS = {
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.Lt: "<",
    sympy.Le: "<=",
    sympy.Gt: ">",
    sympy.Ge: ">=",
}


def python_text(expr: Any, names: dict[str, str]) -> str:
    """A size expression or condition as Python, with symbols named as `names` says."""
    expr = sympy.sympify(expr)
    parts = [python_text(arg, names) for arg in expr.args]
    if isinstance(expr, sympy.Symbol):
        return names[str(expr)]
    if expr in (sympy.true, sympy.false) or expr.is_Integer:
        return str(expr)
    for kind, sign in OPERATORS.items():
        if isinstance(expr, kind):
            return f"({parts[0]} {sign} {parts[1]})"
    match type(expr).__name__:
        case "Add":
            return f"({' + '.join(parts)})"
        case "Mul":
            return f"({' * '.join(parts)})"
        case "Pow":
            return f"({parts[0]} ** {parts[1]})"
        case "And" | "Or":
            return f"({(' and ' if isinstance(expr, sympy.And) else ' or ').join(parts)})"
        case "Not":
            return f"(not {parts[0]})"
        case "FloorDiv":
            return f"({parts[0]} // {parts[1]})"
        case "ModularIndexing":
            return f"({parts[0]} // {parts[1]} % {parts[2]})"
        case "Min" | "Max" | "Abs":
            return f"{type(expr).__name__.lower()}({', '.join(parts)})"
    if expr.is_Rational:
        return f"({expr.p} / {expr.q})"
    raise Unsupported(f"a guard on the size expression {expr}")
