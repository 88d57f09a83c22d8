"""Running Triton kernels without a GPU, in Triton's own interpreter (NumPy blocks, one program at a time).

The interpreter is slow per program and quick per element, so tiles are as large as it allows. What it can't
do or does wrong is put right here, and only while a kernel runs (Triton 3.6.0 to 3.9.0):

- libdevice functions are torch's; nothing else runs libdevice bitcode on a CPU.
- bfloat16 lives in uint16 arrays: conversion from and to fp32 rounds as torch does.
- `range` over a runtime bound fails with NumPy 2.4 under Triton 3.6.0.
- A reduction with a combine function of its own goes element by element in Python: here it folds halves.
- `tl.sum` and our helpers are compiled functions, unless the whole process was started for interpreting:
  calling one inside a kernel interprets it too, so interpreting and compiling mix in one process.
- bfloat16 has no atomic addition.
- A scalar condition that meets a block must stay a truth value.
- Index checks (`tl.device_assert`) are off unless asked for.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl

from minicompile import compat
from minicompile.codegen.plan import KernelPlan, KernelSource, power_of_two
from minicompile.ops.origin import source_lines, union
from minicompile.runtime.triton import Tiles, blocks, execute
from minicompile.shapes.expr import product, size_hint

interpreter, JITFunction = compat.triton_interpreter()

LANES = 2**16
"""Elements of a block under the interpreter."""

_LOCK = threading.RLock()


class InterpretedKernel:
    """A kernel on CPU tensors: call it with tensors, then sizes."""

    def __init__(self, source: KernelSource, tiles: Tiles | None = None) -> None:
        self.source, self.tiles = source, tiles
        function, namespace = execute(source)
        namespace["libdevice"] = TorchLibdevice()
        namespace["range"] = interpreted_range
        # Triton patches the modules it finds here; tl.max uses this one
        namespace["core"] = tl.core
        self.kernel = interpreter.InterpretedFunction(function.fn)

    def __call__(self, *arguments: Any) -> None:
        plan = self.source.plan
        sizes = arguments[len(plan.arguments) :]
        known = dict(zip(plan.sizes, sizes, strict=True))
        rows = size_hint(product(plan.ranges.values()), known)
        if rows == 0:
            return
        length = size_hint(product(plan.reduction_ranges.values()), known)
        tiles = self.tiles or interpreter_tiles(plan, rows, length)
        tensors = [bytes_of(t) for t in arguments[: len(plan.arguments)]]
        grid = (-(-rows // tiles.x), 1, 1)
        try:
            with interpreting(), np.errstate(all="ignore"):
                self.kernel[grid](*tensors, *sizes, **blocks(plan, tiles))
        except interpreter.InterpreterError as error:
            failed = error.__cause__
            if isinstance(failed, AssertionError):  # an index check, where eager raises IndexError
                raise IndexError(f"{failed}{where(plan)}") from None
            raise


def where(plan: KernelPlan) -> str:
    """The user's lines that index."""
    checked = [v.origins for v in plan.body.values if v.op == "indirect" and v.check]
    return "".join(f"; {line}" for line in source_lines(union(checked)))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Bools as the bytes they are stored in: kernels know no other bools in memory."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def interpreter_tiles(plan: KernelPlan, rows: int, length: int) -> Tiles:
    """The largest tiles that make sense: whole rows where they fit."""
    r = power_of_two(length)
    if plan.reduction == "looped":
        r = min(r, LANES)
    return Tiles(max(min(power_of_two(rows), LANES // r), 1), r)


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Triton's interpreter with its gaps filled; leaves Triton as it was."""
    builder = interpreter.interpreter_builder
    builder_type = interpreter.InterpreterBuilder
    checked = interpreter.InterpreterOptions(debug=True, sanitize_overflow=False)
    changes: list[tuple[Any, str, Any]] = [
        (interpreter, "_convert_float", convert_float(interpreter._convert_float)),
        (interpreter.ReduceOps, "generic_reduce", fold),
        (builder_type, "create_atomic_rmw", atomic_rmw(builder_type.create_atomic_rmw)),
        (builder_type, "create_splat", splat(builder_type.create_splat)),
        (JITFunction, "__call__", call_interpreted),
        (builder, "options", checked),
    ]
    with _LOCK, contextlib.ExitStack() as after:
        for owner, name, value in changes:
            after.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def call_interpreted(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calling a JITFunction inside an interpreted kernel."""
    return interpreter.InterpretedFunction(function.fn).rewrite()(*args, **kwargs)


def interpreted_range(*bounds: Any) -> range:
    """`range` over bounds that the interpreter holds as one-element blocks."""
    known = [b.handle.data.item() if isinstance(b, tl.tensor) else b for b in bounds]
    return builtins.range(*map(int, known))


def convert_float(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """bf16 to fp32 by shifting, fp32 to bf16 rounded to nearest even; other types as before."""

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return data.astype(np.uint32) << 16
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
            return rounded.view(torch.uint16).numpy()
        return otherwise(data, source, target, rounding)

    return convert


def atomic_rmw(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Atomic additions of bf16, one lane after the other; other types as before."""

    def add(self: Any, kind: Any, pointer: Any, value: Any, mask: Any, *order: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return otherwise(self, kind, pointer, value, mask, *order)
        before = np.zeros_like(value.data)
        for lane in zip(*np.nonzero(mask.data), strict=True):
            cell = ctypes.c_uint16.from_address(int(pointer.data[lane]))
            before[lane] = cell.value
            pair = np.array([cell.value, value.data[lane]], dtype=np.uint16)
            total = torch.from_numpy(pair).view(torch.bfloat16).float().sum().to(torch.bfloat16)
            cell.value = int(total.view(torch.uint16).item())
        return interpreter.TensorHandle(before, tl.bfloat16)

    return add


def splat(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A scalar as a block. The interpreter takes a comparison's result for a number of its operands' type."""

    def create(self: Any, shape: Any, value: Any) -> Any:
        if value.data.dtype == np.bool_:
            value = interpreter.TensorHandle(value.data, tl.int1)
        return otherwise(self, shape, value)

    return create


def fold(self: Any, blocks: tuple[Any, ...]) -> list[Any]:
    """Reduce an axis (a power of two long) by combining its halves, for any combine function."""
    axis = self.axis
    arrays = [np.moveaxis(b.handle.data, axis, 0) for b in blocks]
    while len(arrays[0]) > 1:
        half = len(arrays[0]) // 2
        left = [self.to_tensor(a[:half], b.dtype) for a, b in zip(arrays, blocks, strict=True)]
        right = [self.to_tensor(a[half:], b.dtype) for a, b in zip(arrays, blocks, strict=True)]
        both = self.combine_fn.fn(*left, *right)
        arrays = [t.handle.data for t in (both if isinstance(both, tuple) else (both,))]
    found = [a if self.keep_dims else a[0] for a in arrays]
    if self.keep_dims:
        found = [np.moveaxis(a, 0, axis) for a in found]
    return [self.to_tensor(a, b.dtype) for a, b in zip(found, blocks, strict=True)]


class TorchLibdevice:
    """`libdevice.f(x, ...)` by `torch.f`."""

    NAMES = {"nearbyint": "round"}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(torch, self.NAMES.get(name, name))

        def call(*operands: Any) -> Any:
            arrays = [torch.from_numpy(np.ascontiguousarray(x.handle.data)) for x in operands]
            result = function(*arrays).numpy()
            dtype = operands[0].dtype.scalar
            block = any(x.type.is_block() for x in operands)
            kind = tl.block_type(dtype, list(result.shape)) if block else dtype
            return tl.tensor(interpreter.TensorHandle(result, dtype), kind)

        return call
