"""Symbolic sizes: which dimensions of an input get a symbol, and what must hold for the graph to be used at
other sizes.

A dimension is symbolic if `mark_dynamic` said so, or under `dynamic=True` if it is at least 2. Dimensions
that are equal at capture share one symbol (duck shaping), and a guard keeps them equal. Strides that follow
from the sizes are written as products of symbols; others stay numbers.
The real compiler: torch/fx/experimental/symbolic_shapes.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from sympy.printing.pycode import PythonCodePrinter

from minicompile.dynamo.reasons import refusal
from minicompile.dynamo.result import Guard, Source
from minicompile.errors import OptionError
from minicompile.shapes.env import SMALLEST_SIZE, ShapeEnv
from minicompile.shapes.expr import size_symbol

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


def any_marked(value: Any, depth: int = 0) -> bool:
    """Whether a tensor among a call's arguments was given to `mark_dynamic`."""
    if isinstance(value, torch.Tensor):
        return hasattr(value, MARK)
    items = value.values() if type(value) is dict else value
    known = type(value) in (list, tuple, dict) and depth < 4
    return known and any(any_marked(item, depth + 1) for item in items)


class Sizes:
    """The symbols of one capture, and fakes of inputs that use them."""

    def __init__(self, mode: Any, dynamic: bool) -> None:
        self.env, self.mode, self.dynamic = ShapeEnv(), mode, dynamic
        self.by_hint: dict[int, tuple[torch.SymInt, Source]] = {}
        self.extra: list[Guard] = []

    def fake(self, tensor: torch.Tensor, source: Source) -> torch.Tensor | None:
        """A fake with symbolic sizes; None if no dimension wants one."""
        wanted: Iterable[int] = getattr(tensor, MARK, ())
        own = isinstance(tensor, torch.nn.Parameter) or source.kind in ("parameter", "buffer")
        if self.dynamic and not own:
            wanted = range(tensor.dim())
        sizes: list[Any] = list(tensor.shape)
        for dim in sorted(wanted):
            if sizes[dim] >= SMALLEST_SIZE:
                sizes[dim] = self.symbol(sizes[dim], Source("size", dim, source))
        if not any(isinstance(size, torch.SymInt) for size in sizes):
            return None
        if tensor.storage_offset():
            reason = f"{source} has symbolic sizes and starts inside a larger tensor"
            raise refusal("tensor-memory", reason, hint="clone it")
        strides = self.strides(tensor, sizes)
        layout = sympy.Tuple(*map(expression_of, strides))
        sources = (source, *sources_of(self.env, layout))
        self.extra.append(Guard(sources, "strides", layout, "memory layout of an input"))
        with self.mode:
            made = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_(tensor.requires_grad)

    def symbol(self, hint: int, source: Source) -> torch.SymInt:
        """The symbol of all sizes that are `hint` while capturing."""
        if hint in self.by_hint:
            size, first = self.by_hint[hint]
            guard = Guard(
                (source, first), "same_size", expression_of(size), "equal while capturing"
            )
        else:
            size = self.env.create_symbol(hint, source)
            self.by_hint[hint] = size, source
            fact = sympy.Ge(expression_of(size), SMALLEST_SIZE)
            guard = Guard((source,), "shape", fact, "sizes 0 and 1 are compiled apart")
        self.extra.append(guard)
        return size

    @staticmethod
    def strides(tensor: torch.Tensor, sizes: list[Any]) -> list[Any]:
        """Strides as products of sizes where the layout is dense, else as numbers."""
        order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim))
        found: list[Any] = list(tensor.stride())
        expected, hint = 1, 1
        for dim in order:
            if tensor.stride(dim) != hint:
                return list(tensor.stride())
            found[dim] = expected
            expected, hint = expected * sizes[dim], hint * tensor.shape[dim]
        return found


def sources_of(env: ShapeEnv, expr: sympy.Basic) -> tuple[Source, ...]:
    """Where the symbols of an expression are read, these ordered by name."""
    return tuple(env.symbols[symbol] for symbol in sorted(expr.free_symbols, key=str))


def shape_guards(env: ShapeEnv | None) -> list[Guard]:
    """What has been assumed of the sizes so far."""
    if env is None:
        return []
    return [Guard(sources_of(env, fact), "shape", fact, why) for fact, why in env.guards]


def expression_of(size: Any) -> Any:
    """The sympy expression of a SymInt; other sizes unchanged."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def free_dims(fake: torch.Tensor) -> list[int]:
    """The dimensions of a fake whose size is symbolic."""
    return [dim for dim, size in enumerate(fake.shape) if isinstance(size, torch.SymInt)]


PRINTER = PythonCodePrinter()


def python_text(expr: sympy.Basic, values: Sequence[str]) -> str:
    """A size expression or condition as Python; `values`: names of its symbols, these ordered by name."""
    symbols = sorted(expr.free_symbols, key=str)
    names = {symbol: size_symbol(value) for symbol, value in zip(symbols, values, strict=True)}
    text: str = PRINTER.doprint(expr.xreplace(names))
    return text
