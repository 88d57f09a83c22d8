"""Sets of ATen operators, written as names."""

from __future__ import annotations

import operator
from typing import Any

import torch


def aten_ops(names: str) -> set[Any]:
    """The operators with these names: `add.Tensor` is an overload, `add` the group of them."""
    return {operator.attrgetter(name)(torch.ops.aten) for name in names.split()}
