"""Running Triton kernels without a GPU, in Triton's own interpreter (NumPy blocks, one program at a time).

The interpreter is slow per program and quick per element, so tiles are as large as it allows. What it can't
do or does wrong is put right here, and only while a kernel runs (Triton 3.6.0 to 3.9.0):

- nothing runs libdevice bitcode or PTX on a CPU: those functions are torch's;
- bfloat16 lives in uint16 arrays, is converted with wrong rounding, and has no atomic addition or products;
- atomic additions read a broadcast mask as if each lane had its own;
- `range` over a runtime bound fails with NumPy 2.4 under Triton 3.6.0;
- a reduction or scan with a combine function of its own goes element by element in Python;
- `tl.sum` and our helpers are compiled functions, unless the whole process was started for interpreting;
- a scalar condition that meets a block turns into a number;
- index checks (`tl.device_assert`) are off unless asked for.
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

from minicompile.codegen.plan import (
    KernelSource,
    TemplatePlan,
    TritonPlan,
    power_of_two,
)
from minicompile.compat import triton_api
from minicompile.runtime.cpp import fail
from minicompile.runtime.gpu_kernel import (
    Tiles,
    base_name,
    blocks,
    execute,
    for_row,
    module_text,
    needs_int64,
    planned_tiles,
    programs,
)
from minicompile.shapes.expr import product, size_hint

interpreter, JITFunction = triton_api.triton_interpreter()

LANES = 2**16
"""Elements of a block under the interpreter."""

SIDE = 128
"""Of the tiles of a matrix product."""

_LOCK = threading.RLock()


def stand_ins() -> dict[str, Any]:
    """What a kernel's module finds here instead of a GPU's. Triton patches the modules among it, of which
    `tl.max` uses the last one."""

    libdevice = TorchLibdevice()
    names = {"libdevice": libdevice, "quick_tanh": libdevice.tanh}
    return {**names, "range": interpreted_range, "core": tl.core}


class InterpretedKernel:
    """A kernel on CPU tensors: call it with tensors, then sizes."""

    def __init__(self, source: KernelSource, tiles: Tiles | None = None) -> None:
        self.plan, self.tiles = source.plan, tiles
        function, namespace = execute(base_name(source), module_text(source))
        namespace |= stand_ins()
        self.kernel = interpreter.InterpretedFunction(function.fn)

    def __call__(self, *arguments: Any) -> None:
        plan, count = self.plan, len(self.plan.arguments)
        known = dict(zip(plan.sizes, arguments[count:], strict=True))
        rows = size_hint(product(plan.ranges.values()), known)
        if rows == 0:
            return
        length = size_hint(product(plan.reduction_ranges.values()), known)
        tiles = self.tiles or interpreter_tiles(plan, known, rows, length)
        if plan.varying and plan.reduction == "persistent":
            tiles = for_row(tiles, power_of_two(length))
        # bools are bytes in memory, and kernels read them as such
        tensors = [t.view(torch.uint8) if t.dtype is torch.bool else t for t in arguments[:count]]
        wide = needs_int64(plan, known)
        numbers = [scalar(n, wide) for n in known.values()]
        grid = (size_hint(programs(plan, tiles), known), 1, 1)
        try:
            with interpreting(), np.errstate(all="ignore"):
                self.kernel[grid](*tensors, *numbers, **blocks(plan, tiles))
        except interpreter.InterpreterError as error:
            if isinstance(error.__cause__, AssertionError) and plan.checked:
                fail(plan)
            raise


def scalar(number: int | float, wide: bool) -> Any:
    """A number as wide as compiled kernels get it; the interpreter itself takes no float."""
    dtype = tl.float64 if isinstance(number, float) else tl.int64 if wide else tl.int32
    held = np.array([number], dtype=dtype.name.replace("fp", "float"))
    return tl.tensor(interpreter.TensorHandle(held, dtype), dtype)


def interpreter_tiles(plan: TritonPlan, known: Any, rows: int, length: int) -> Tiles:
    """The largest tiles that make sense: whole rows where they fit."""
    if isinstance(plan, TemplatePlan):
        return planned_tiles(plan)

    def whole(axis: str, most: int) -> int:
        return min(power_of_two(size_hint(product(plan.axes[axis].values()), known)), most)

    if {*plan.axes} == {"y", "x", "r"}:
        return Tiles(whole("x", SIDE), whole("r", SIDE), y=whole("y", SIDE))
    if "y" in plan.axes:
        return Tiles(LANES // whole("y", LANES), y=whole("y", LANES))
    r = power_of_two(length)
    if plan.reduction != "persistent":
        r = min(r, LANES)
    return Tiles(max(min(power_of_two(rows), LANES // r), 1), r)


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Triton's interpreter with its gaps filled; leaves Triton as it was."""
    builder = interpreter.interpreter_builder
    changes: dict[tuple[Any, str], Any] = {
        (interpreter, "_convert_float"): convert_float(interpreter._convert_float),
        (interpreter.ReduceOps, "generic_reduce"): fold,
        (interpreter.ScanOps, "generic_scan"): run_up,
        (builder, "__class__"): Builder,
        (JITFunction, "__call__"): call_interpreted,
        (builder, "options"): interpreter.InterpreterOptions(debug=True, sanitize_overflow=False),
    }
    with _LOCK, contextlib.ExitStack() as after:
        for (owner, name), value in changes.items():
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


def half(values: torch.Tensor) -> Any:
    """Values as bfloat16, the way that the interpreter holds them."""
    return values.to(torch.bfloat16).view(torch.uint16).numpy()


def single(block: Any) -> Any:
    """The values of a block of a half type, in float32."""
    if block.dtype.scalar == tl.bfloat16:
        return (block.data.astype(np.uint32) << 16).view(np.float32)
    return block.data.astype(np.float32)


def convert_float(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """bf16 to fp32 by shifting, fp32 to bf16 rounded to nearest even; other types as before."""

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return data.astype(np.uint32) << 16
        if (source, target) == (tl.float32, tl.bfloat16):
            return half(torch.from_numpy(np.ascontiguousarray(data)))
        return otherwise(data, source, target, rounding)

    return convert


class Builder(type(interpreter.interpreter_builder)):  # type: ignore[misc]
    """What makes the interpreter's operations, with some of them put right."""

    def create_atomic_rmw(self, kind: Any, pointer: Any, value: Any, mask: Any, *order: Any) -> Any:
        """Atomic additions of bf16, one lane after the other; others on blocks that are not broadcast."""
        if value.dtype.scalar != tl.bfloat16:
            handles = (pointer, value, mask)
            blocks = [interpreter.TensorHandle(h.data.copy(), h.dtype) for h in handles]
            return super().create_atomic_rmw(kind, *blocks, *order)
        before = np.zeros_like(value.data)
        for lane in zip(*np.nonzero(mask.data), strict=True):
            cell = ctypes.c_uint16.from_address(int(pointer.data[lane]))
            before[lane] = cell.value
            pair = np.array([cell.value, value.data[lane]], dtype=np.uint32) << 16
            cell.value = int(half(torch.from_numpy(pair.view(np.float32)).sum()))
        return interpreter.TensorHandle(before, tl.bfloat16)

    def create_dot(self, a: Any, b: Any, total: Any, *how: Any) -> Any:
        """Products of half types in fp32."""
        if a.dtype.scalar in (tl.bfloat16, tl.float16):
            a, b = (interpreter.TensorHandle(single(block), tl.float32) for block in (a, b))
        return super().create_dot(a, b, total, *how)

    def create_splat(self, shape: Any, value: Any) -> Any:
        """A scalar as a block: the result of a comparison is no number of its operands' type."""
        if value.data.dtype == np.bool_:
            value = interpreter.TensorHandle(value.data, tl.int1)
        return super().create_splat(shape, value)


def fold(self: Any, blocks: tuple[Any, ...]) -> list[Any]:
    """Reduce rows (a power of two long) by combining their halves, for any combine function."""

    def tensors(columns: slice | int) -> list[Any]:
        pairs = zip(arrays, blocks, strict=True)
        return [self.to_tensor(array[:, columns], block.dtype) for array, block in pairs]

    arrays = [block.handle.data for block in blocks]
    while arrays[0].shape[1] > 1:
        half = arrays[0].shape[1] // 2
        both = self.combine_fn.fn(*tensors(slice(half)), *tensors(slice(half, None)))
        arrays = [t.handle.data for t in (both if isinstance(both, tuple) else (both,))]
    return tensors(0)


def run_up(self: Any, blocks: tuple[Any, ...]) -> list[Any]:
    """Scan rows by combining elements 1, 2, 4, ... apart, for any combine function."""
    step, length = 1, blocks[0].handle.data.shape[1]
    while step < length:
        earlier = [self.to_tensor(np.roll(b.handle.data, step, axis=1), b.dtype) for b in blocks]
        both = self.combine_fn.fn(*earlier, *blocks)
        found = both if isinstance(both, tuple) else (both,)
        for new, old in zip(found, blocks, strict=True):
            new.handle.data[:, :step] = old.handle.data[:, :step]
        blocks, step = found, 2 * step
    return list(blocks)


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
