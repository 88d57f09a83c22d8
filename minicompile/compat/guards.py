"""One check for the tensors of a call: torch's own in C++, and the same facts in Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from minicompile.compat.fakes import FakeTensor
from minicompile.compat.inference import is_inference
from minicompile.compat.private import take

TensorGuards: Any = take("torch._C._dynamo.guards.TensorGuards", "capture")


def tensor_guards(
    tensors: Sequence[torch.Tensor],
    free: Mapping[int, Collection[int]] = {},
    different: bool = True,
) -> Callable[..., bool]:
    """Return a check of many tensors: each has the same `tensor_facts`, and all are different objects.

    `free` gives, by tensor number, the dimensions of any size; the strides of such a tensor are not checked.
    """
    if not different:
        checks = [
            tensor_guards([t], {0: free[i]} if i in free else {}) for i, t in enumerate(tensors)
        ]
        return lambda *given: all(check(tensor) for check, tensor in zip(checks, given))
    sizes: list[Any] = [_sizes(tensor, free.get(i, ())) for i, tensor in enumerate(tensors)]
    strides: list[Any] = [
        [None] * tensor.dim() if i in free else list(tensor.stride())
        for i, tensor in enumerate(tensors)
    ]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _sizes(tensor: torch.Tensor, free: Collection[int]) -> list[int | None]:
    return [None if dim in free else size for dim, size in enumerate(tensor.shape)]


TENSOR_FACTS = (
    *("class", "dtype", "device", "requires_grad", "layout", "conjugate", "negative", "inference"),
    *("shape", "strides"),
)


def tensor_facts(tensor: torch.Tensor, free: Collection[int] = ()) -> tuple[Any, ...]:
    """Return what a captured graph relies on in a tensor input, comparable with `==`; alike for its fake.

    In the order of TENSOR_FACTS. `free`: dimensions of any size; if there are any, strides are left out.
    """
    cls = type(tensor)
    if cls is FakeTensor:
        cls = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor
    return (
        *(cls, tensor.dtype, tensor.device, tensor.requires_grad, tensor.layout),
        *(tensor.is_conj(), tensor.is_neg(), is_inference(tensor)),
        *(tuple(_sizes(tensor, free)), None if free else tensor.stride()),
    )
