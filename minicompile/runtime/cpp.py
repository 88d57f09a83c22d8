"""C kernels as Python callables that take tensors and sizes."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from minicompile.codegen.plan import INDEX_ERROR, KernelPlan
from minicompile.ops.build import Module, load_extension
from minicompile.ops.origin import source_lines, union

Kernel = Callable[..., None]

FAST_CALL = Path(__file__).with_name("fast_call.c")
MOST_ARGUMENTS = 48
"""What the extension can pass."""


def bind(module: Module, plan: KernelPlan) -> Kernel:
    """`kernel(*tensors, *sizes)` in the order of the plan's arguments and symbols, floats among them.

    Raises IndexError or RuntimeError as eager does, when a loaded index is out of range.
    """
    counts = len(plan.arguments), len(plan.integers), len(plan.sizes) - len(plan.integers)
    extension = load_extension(FAST_CALL)
    if extension is None or sum(counts) > MOST_ARGUMENTS:
        return bind_ctypes(module, plan)
    call_back = partial(fail, plan)
    kernel: Kernel = extension.bind(module.address(plan.name), *counts, call_back, module)
    return kernel


def bind_ctypes(module: Module, plan: KernelPlan) -> Kernel:
    """The same without an extension module: slower to call."""
    function, tensors = getattr(module, plan.name), len(plan.arguments)
    first_float = tensors + len(plan.integers)
    types = [ctypes.c_void_p] * tensors + [ctypes.c_int64] * len(plan.sizes)
    function.argtypes = types

    def kernel(*given: Any) -> None:
        if len(given) != len(types):
            raise TypeError(f"{plan.name} takes {len(types)} arguments, not {len(given)}")
        bits = (struct.unpack("=q", struct.pack("=d", number))[0] for number in given[first_float:])
        integers = given[tensors:first_float]
        code = function(*(t.data_ptr() for t in given[:tensors]), *integers, *bits)
        if code:
            fail(plan)

    return kernel


def fail(plan: KernelPlan, code: int = INDEX_ERROR) -> NoReturn:
    """Raise what eager would, with the user's lines."""
    called = {o.target.rpartition(".")[2].rstrip("_") for v in plan.checked for o in v.origins}
    raise (RuntimeError if called & NO_INDEX_ERROR else IndexError)(complaint(plan))


NO_INDEX_ERROR = {
    "gather",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "index_add",
    "masked_scatter",
}
"""Eager's CPU kernels raise RuntimeError for an index of theirs that is out of range."""


def complaint(plan: KernelPlan) -> str:
    """What a kernel says of an index, with the user's lines."""
    sizes = ", ".join(sorted({str(v.size) for v in plan.checked}))
    lines = source_lines(union(v.origins for v in plan.checked))
    where = "".join(f"; {line}" for line in lines)
    return f"index out of range in a dimension of size {sizes} (kernel {plan.name}{where})"
