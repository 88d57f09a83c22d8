"""Storages: which tensors share one, who owns one, and memory made without an operator call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from minicompile.compat.private import relies_on, take

relies_on("torch.UntypedStorage._cdata", "capture")


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that share memory, fake tensors included."""
    return int(tensor.untyped_storage()._cdata)


def storage_pointer(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage itself, not of its data."""
    return int(storage._cdata)


empty_strided_cpu: Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor] = take(
    "torch._C._dynamo.guards._empty_strided_cpu", "capture"
)
"""Allocate memory on the CPU: torch's own helper is twice as fast as the operator."""

storage_uses: Callable[[int], int] = take(
    "torch._C._storage_Use_Count", "speed", otherwise=lambda pointer: 0
)
"""Count the owners in C++ of the storage at a pointer: tensors, autograd graphs, one for all of Python.
0: unknown, so that the storage isn't used again."""


def has_storage(tensor: torch.Tensor) -> bool:
    """False for sparse tensors, and for the tensors that `vmap` and its like hand to functions."""
    try:
        tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True
