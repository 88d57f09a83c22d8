"""The table of decompositions: an operator written with simpler operators.

A rule is a plain function with the operator's signature, traced on fakes. It leads to a level:

    full   ATen, as autograd and functionalization leave it
    core   the functional subset that every backend understands
    prims  pointwise arithmetic on equal shapes and dtypes, reductions, views, creation, indexing,
    extern operators

Rules "to prims" apply after rules "to core". An operator without a rule stays as it is. Results
are cast to the operator's dtype and laid out like its result, so a rule may compute half types in float32.

    @decompose(aten.silu.default, to="core")
    def silu(x): return x * torch.sigmoid(x)

The real compiler: torch/_decomp/decompositions.py, torch/_inductor/decomposition.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from minicompile.ops.registry import Registry

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Decomposition:
    """A rule, and the level whose operators it uses."""

    rule: Rule
    level: Literal["core", "prims"]


decomposition: Registry[Decomposition] = Registry(
    "decomposition", "ATen operator -> the same in simpler operators"
)


def decompose(*ops: OpOverload, to: Literal["core", "prims"]) -> Callable[[Rule], Rule]:
    """Decorator: the function computes `ops`. It may return NotImplemented to leave a call as it is."""

    def add(rule: Rule) -> Rule:
        decomposition(*ops)(Decomposition(rule, to))
        return rule

    return add


def rule_for(op: OpOverload, level: str) -> Rule | None:
    """The rule that applies to `op` on the way to `level`."""
    found = decomposition.get(op)
    if found is None or (found.level == "prims" and level != "prims"):
        return None
    return found.rule


def wide(x: torch.Tensor) -> torch.Tensor:
    """Half types as float32, in which eager's kernels compute them."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
