"""Loading a wrapper: from its text to a boxed callable.

The functions that the text names are here, in plain torch; a faster one (an allocator, say) is passed in
the namespace under the same name and wins.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from minicompile.aot.result import BoxedCallable
from minicompile.codegen.plan import WrapperSource


def empty_strided_cpu(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """New memory on the CPU."""
    return torch.empty_strided(size, stride, dtype=dtype)


def empty_strided(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """New memory on a device."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def reinterpret(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor's memory with another layout; `offset` counts from the tensor's first element."""
    if offset:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
    return torch.as_strided(tensor, size, stride)


def to_layout(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A copy that lies as the kernels expect."""
    out = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    return out.copy_(tensor)


def load_wrapper(wrapper: WrapperSource, namespace: Mapping[str, Any]) -> BoxedCallable:
    """The wrapper's `call`. `namespace` holds kernels and constants by name, and may replace the helpers.

    Tracebacks show the generated lines: the text is registered with `linecache`.
    """
    text = wrapper.text
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    filename = f"<minicompile wrapper {wrapper.name} {digest}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {
        "aten": torch.ops.aten,
        "empty_strided_cpu": empty_strided_cpu,
        "empty_strided": empty_strided,
        "reinterpret": reinterpret,
        "to_layout": to_layout,
        **namespace,
    }
    exec(compile(text, filename, "exec"), scope)
    call: BoxedCallable = scope["call"]
    return call
