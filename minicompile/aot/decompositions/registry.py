"""The table of decompositions: an operator written with simpler operators.

A rule is a plain function with the operator's signature, traced on fakes. It leads to a level
(aot/levels.py): rules "to prims" apply after rules "to core". An operator without a rule stays as it is. A
result is cast to the operator's dtype and laid out like its result, so a rule may compute in a wider type.

    @decompose(aten.silu.default, to="core", wide=True)
    def silu(x): return x * torch.sigmoid(x)

The real compiler: torch/_decomp/decompositions.py, torch/_inductor/decomposition.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from minicompile.ops.dtypes import HALF_TYPES
from minicompile.ops.registry import Registry

Rule = Callable[..., Any]
"""Computes an operator's result with other operators; may return NotImplemented."""
Target = Literal["core", "prims"]
"""The level whose operators a rule uses."""
Dtype = torch.dtype | None
Maybe = torch.Tensor | None


@dataclass(frozen=True)
class Decomposition:
    """A rule, and the level whose operators it uses."""

    rule: Rule
    level: Target


decomposition: Registry[Decomposition] = Registry(
    "decomposition", "ATen operator -> the same in simpler operators"
)


def decompose(*ops: OpOverload, to: Target, wide: bool = False) -> Callable[[Rule], Rule]:
    """Decorator: the function computes `ops`. It may return NotImplemented to leave a call as it is.

    `wide` is for formulas over real numbers: tensors of half types reach the rule as float32, in
    which eager's kernels compute them, and calls on complex tensors and on integers stay.
    """

    def add(rule: Rule) -> Rule:
        decomposition(*ops)(Decomposition(widened(rule) if wide else rule, to))
        return rule

    return add


def formulas(rules: Mapping[OpOverload, Rule], to: Target = "core", wide: bool = True) -> None:
    """Register a table of rules."""
    for op, rule in rules.items():
        decompose(op, to=to, wide=wide)(rule)


def rule_for(
    op: OpOverload, level: str, rules: Mapping[Any, Decomposition] = decomposition
) -> Rule | None:
    """The rule that applies to `op` on the way to `level`."""
    found = rules.get(op)
    reached = {"full": (), "core": ("core",), "prims": ("core", "prims")}[level]
    return found.rule if found is not None and found.level in reached else None


def wide(x: Any) -> Any:
    """Tensors of half types as float32; anything else unchanged."""
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF_TYPES else x


def widened(rule: Rule) -> Rule:
    @functools.wraps(rule)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if any(x.is_complex() for x in tensors) or not tensors[0].is_floating_point():
            return NotImplemented
        return rule(*map(wide, args), **kwargs)

    return run
