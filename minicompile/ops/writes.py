"""What an operator's call writes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten


def arguments(op: OpOverload, args: Any, kwargs: Any, which: Callable[[Any], bool]) -> list[Any]:
    """What is given for the parameters that are wanted; None for what was left out."""
    parameters = enumerate(op._schema.arguments)
    chosen = [(i, parameter.name) for i, parameter in parameters if which(parameter)]
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in chosen]


def written_arguments(op: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """Return what a call writes to: by its operator's schema, or statistics of batch norm in training."""
    if op in WRITES_STATISTICS:
        return (
            []
            if False in arguments(op, args, kwargs, is_training)
            else arguments(op, args, kwargs, is_statistic)
        )
    return arguments(op, args, kwargs, lambda p: p.alias_info is not None and p.alias_info.is_write)


WRITES_STATISTICS = {
    getattr(aten, name).default
    for name in (
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "batch_norm_update_stats",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
    )
}
"""Operators that write to `running_mean` and `running_var`, of which their schemas say nothing."""


def is_training(parameter: Any) -> bool:
    return parameter.name in ("training", "train")


def is_statistic(parameter: Any) -> bool:
    return parameter.name in ("running_mean", "running_var")
