"""What an operator's call writes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload


def arguments(op: OpOverload, args: Any, kwargs: Any, which: Callable[[Any], bool]) -> list[Any]:
    """What is given for the parameters that are wanted; None for what was left out."""
    parameters = enumerate(op._schema.arguments)
    chosen = [(i, parameter.name) for i, parameter in parameters if which(parameter)]
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in chosen]


def written_arguments(op: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """Return what a call writes to, by its operator's schema."""
    return arguments(op, args, kwargs, lambda p: p.alias_info is not None and p.alias_info.is_write)
