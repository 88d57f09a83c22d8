"""Chooses which sizes, ints and floats of a call get a symbol, and which of them share one (duck shaping).

    Dynamic         what was asked for: `dynamic=`, and what varied between calls so far
    SymbolicSizes   the symbols of one capture, and the fakes of inputs that use them

A dimension is symbolic if `mark_dynamic` said so, if it had another size in an earlier call, or under
`dynamic=True`; sizes 0 and 1 never are. Dimensions that are equal at capture share one symbol (duck shaping),
and a guard keeps them equal. Strides that follow from the sizes are written as products of symbols; others
stay numbers. Ints and floats that the frame reads follow the same rules. What Python makes of them, other
than sums and products of sizes, is a symbol of its own, which is computed before the graph runs.
The real compiler: torch/fx/experimental/symbolic_shapes.py, torch/_dynamo/variables/builder.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import sympy
import torch

from minicompile import compat
from minicompile.dynamo.result import Guard, Source, computed
from minicompile.errors import OptionError
from minicompile.ops.strides import dense_strides
from minicompile.shapes.env import SMALLEST_SIZE, ShapeEnv
from minicompile.shapes.expr import ordered, python_number, to_size
from minicompile.shapes.symnode import operation_of, size_expr

MARK = "_minicompile_dynamic"
"""Attribute of a tensor: the dimensions that `mark_dynamic` named, with their ranges; and the names under
which `mc.export` knows them, if it does."""


def mark_dynamic(
    tensor: torch.Tensor, dims: int | Iterable[int], min: int = 0, max: int | None = None
) -> None:
    """Make dimensions of an input symbolic: one graph for all their sizes from `min` (at least 2) to `max`.

    Raises OptionError for a dimension that does not exist, and for a size outside of the range.
    """
    marked = dict(getattr(tensor, MARK, {}))
    for dim in [dims] if isinstance(dims, int) else dims:
        if not -tensor.dim() <= dim < tensor.dim():
            raise OptionError(f"a tensor of {tensor.dim()} dimensions has no dimension {dim}")
        size = tensor.shape[dim]
        if not min <= size <= (size if max is None else max):
            raise OptionError(f"dimension {dim} is {size}, which is not from {min} to {max}")
        marked[dim % tensor.dim()] = min, max
    setattr(tensor, MARK, marked)


def any_marked(value: Any, depth: int = 0) -> bool:
    """Whether a tensor among a call's arguments was given to `mark_dynamic`."""
    if isinstance(value, torch.Tensor):
        return hasattr(value, MARK)
    items = value.values() if type(value) is dict else value
    known = type(value) in (list, tuple, dict) and depth < 4
    return known and any(any_marked(item, depth + 1) for item in items)


@dataclass(frozen=True)
class Dynamic:
    """What may be symbolic in a capture: everything (True), nothing (False), or what is marked and varied."""

    wanted: bool | None = None
    varied: Mapping[Source, str] = field(default_factory=dict)
    """Sizes and numbers that differed between calls, and how."""
    general: bool = False
    """Whether what operators ask of sizes for speed alone is no guard (`ShapeEnv.general`)."""

    def wish(self, source: Source) -> str:
        """Why a size or a number shall be symbolic; "" if it shall not."""
        if self.wanted is True and from_arguments(source):
            return "dynamic=True"
        return self.varied.get(source, "") if self.wanted is not False else ""

    def anything(self, values: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments may need symbols."""
        marked = self.wanted is None and any_marked(dict(values))
        return marked or bool(self.wanted) or (self.wanted is None and bool(self.varied))


def from_arguments(source: Source) -> bool:
    """Whether a value lies in the call's arguments, in containers at most."""
    while source.kind in ("item", "size") and source.base is not None:
        source = source.base
    return source.kind == "local"


class SymbolicSizes:
    """The symbols of one capture, and fakes of inputs that use them."""

    def __init__(self, mode: Any, dynamic: Dynamic) -> None:
        self.env, self.mode, self.dynamic = ShapeEnv(), mode, dynamic
        mode.env, self.env.general = self.env, dynamic.general
        self.shared: dict[int | str, tuple[torch.SymInt, Source]] = {}
        """Symbols that stand for more than one size, by value or by name."""
        self.numbers: dict[Source, Any] = {}
        """Symbolic ints and floats, by where they are read."""
        self.guard: Callable[..., None] = lambda kind, sources, expected, reason: None
        """Keeps what a capture relies on: `Outside.guard` of the one that it belongs to."""

    def fake(self, tensor: torch.Tensor, source: Source) -> torch.Tensor | None:
        """A fake with symbolic sizes; None if no dimension wants one."""
        marked = {} if self.dynamic.wanted is False else getattr(tensor, MARK, {})
        own = isinstance(tensor, torch.nn.Parameter) or source.kind in ("parameter", "buffer")
        sizes: list[Any] = list(tensor.shape)
        for dim, size in enumerate(tensor.shape):
            place = Source("size", dim, source)
            wish = "mark_dynamic" if dim in marked else "" if own else self.dynamic.wish(place)
            if wish and size >= SMALLEST_SIZE:
                sizes[dim] = self.size(size, place, wish, *marked.get(dim, ()))
        if not any(isinstance(size, torch.SymInt) for size in sizes):
            return None
        strides = self.strides(tensor, sizes)
        layout = sympy.Tuple(*map(to_size, strides))
        sources = (source, *sources_of(self.env, layout))
        self.guard("strides", sources, layout, "memory layout of an input")
        return self.like(tensor, sizes, strides)

    def like(self, tensor: torch.Tensor, sizes: Any, strides: Any) -> torch.Tensor:
        """A fake that stands for the tensor: computed from others if it is, and refusing the same writes."""
        leaf = tensor.is_leaf
        with self.mode, torch.inference_mode(False):  # whatever mode the frame is in
            made = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
            if tensor.requires_grad and not leaf:
                made = made.copy_(torch.empty((), dtype=made.dtype, requires_grad=True))
            if compat.is_view(tensor):
                made = torch.ops.aten.alias(made)  # view_as may choose strides of size 1
            return made.requires_grad_() if tensor.requires_grad and leaf else made

    def size(
        self,
        hint: int,
        source: Source,
        wish: str,
        low: int = 0,
        high: int | None = None,
        name: str = "",
    ) -> torch.SymInt:
        """The symbol of all sizes that are `hint` while capturing; one of its own if it has limits, that of
        its name if it has one."""
        wish = f"dimension {name!r}" if name else wish
        shared, key = bool(name) or (low <= SMALLEST_SIZE and high is None), name or hint
        if shared and key in self.shared:
            size, first = self.shared[key]
            sources, why = (source, first), wish if name else "equal while capturing"
            self.guard("same_size", sources, size.node.given, why)
            return size
        size = self.env.create_symbol(hint, source, wish, low, high)
        if shared:
            self.shared[key] = size, source
        low, high = self.env.ranges[size.node.given]
        bounds = f"{{0}} >= {low}" if high is None else f"{low} <= {{0}} <= {high}"
        why = f"{wish}; sizes 0 and 1 are compiled apart" if low == SMALLEST_SIZE else wish
        self.guard("number", (source,), bounds, why)
        return size

    @staticmethod
    def strides(tensor: torch.Tensor, sizes: list[Any]) -> list[Any]:
        """Strides as products of sizes where the layout is dense, else as numbers."""
        order = sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim))
        given = list(tensor.stride())
        return dense_strides(sizes, order) if given == dense_strides(tensor.shape, order) else given

    # -- numbers

    def wish(self, value: Any, source: Source) -> str:
        """Why a value, if it is a number, shall be symbolic; "" if it shall not."""
        return self.dynamic.wish(source) if type(value) in (int, float) else ""

    def number(self, value: Any, source: Source) -> Any:
        """The symbolic number for an int or float that is read; None if it stays what it is."""
        if source in self.numbers:
            return self.numbers[source]
        wish = self.wish(value, source)
        return self.symbol(value, source, wish) if wish else None

    def symbol(self, value: float, source: Source, wish: str) -> Any:
        """A symbol for a number. None for those whose sign or size kernels would treat in their own way."""
        if type(value) is float and 0 < abs(value) <= LARGEST_FLOAT:
            made: Any = self.env.create_float(value, source, wish)
            low: float = -LARGEST_FLOAT
        elif type(value) is int and SMALLEST_SIZE <= value <= LARGEST_INT:
            made = self.env.create_symbol(value, source, wish, SMALLEST_SIZE, LARGEST_INT)
            low = SMALLEST_SIZE
        else:
            return None
        self.numbers[source] = made
        high = LARGEST_FLOAT if low < 0 else LARGEST_INT
        bounds = f"type({{0}}) is {type(value).__name__} and {low} <= {{0}} <= {high}"
        self.guard("number", (source,), bounds, wish)
        return made

    def source_of(self, value: Any) -> Source:
        """How Python computes a number, or an expression, from what the frame was given."""
        found = size_expr(value)
        if isinstance(found, sympy.Basic) and not found.is_number:
            expr = self.env.rooted(found)
            if expr.is_Symbol:
                return cast(Source, self.env.symbols[expr])
            form, _, parts = operation_of(expr)
            return computed(form, map(self.source_of, parts))
        number = python_number(found) if isinstance(found, sympy.Basic) else found
        finite = not isinstance(number, float) or math.isfinite(number)
        return Source("literal", repr(number) if finite else f"float('{number}')")


LARGEST_INT = 2**31 - 1
"""Larger ints are compiled apart: sums and products of two that are smaller fit into 64 bits."""
LARGEST_FLOAT = 65504.0
"""Beyond the largest float16 torch may raise, depending on what a number is for."""


def sources_of(env: ShapeEnv, expr: sympy.Basic) -> tuple[Source, ...]:
    """Where the symbols of an expression are read, these ordered by name."""
    return tuple(env.symbols[symbol] for symbol in ordered(expr))


def shape_guards(env: ShapeEnv | None) -> list[Guard]:
    """What has been assumed of the sizes so far."""
    guards: list[Guard] = []
    if env is None:
        return guards
    for fact in env.guards:
        sources = sources_of(env, fact.condition)
        [symbol, *_] = ordered(fact.condition)
        if symbol in env.ranges or not isinstance(fact.condition, sympy.Eq):
            guards.append(Guard(sources, "shape", fact.condition, fact.reason, fact.line))
        else:  # a float
            guards.append(Guard(sources, "equals", env.hints[symbol], fact.reason, fact.line))
    return guards


def free_dims(fake: torch.Tensor) -> list[int]:
    """The dimensions of a fake whose size is symbolic."""
    return [dim for dim, size in enumerate(fake.shape) if isinstance(size, torch.SymInt)]
