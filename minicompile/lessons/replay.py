"""A compiled graph whose launches go through a function of ours: to record and replay them.

On a GPU a CUDA graph does this in the driver. Here a launch is a call of a C kernel or of a library. And what
the compiler's own CUDA graphs need of a GPU, on a CPU: `StandIn`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from minicompile.codegen.generate import generate_kernels
from minicompile.options import Options
from minicompile.pipeline_result import Trace
from minicompile.plugins.cuda_graphs.replay import CudaCapture
from minicompile.runtime.load import load_wrapper, start_modules

Do = Callable[..., Any]
"""`do(function, *arguments, **named)` must call the function, and may do more."""


class TorchThroughLaunches:
    """The module torch, its functions called through `do`."""

    def __init__(self, do: Do) -> None:
        self.do = do

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if not callable(found) or isinstance(found, type):
            return found
        return lambda *args, **named: self.do(found, *args, **named)


def launching(trace: Trace) -> Callable[[list[Any], Do], tuple[Any, ...]]:
    """`run(inputs, do)` of a trace's forward: its wrapper, with every launch handed to `do`.

    For wrappers that call C kernels and functions of torch.
    """
    stages, options = trace.graph("forward"), Options()
    kernels = start_modules(generate_kernels(dict(enumerate(stages.plans))), options)()
    constants = {c.name: c.value for c in stages.loops.constants}

    def run(inputs: list[Any], do: Do) -> tuple[Any, ...]:
        def through(kernel: Callable[..., None]) -> Callable[..., None]:
            return lambda *args: do(kernel, *args)

        names = {name: through(kernel) for name, kernel in kernels.items()}
        call = load_wrapper(stages.wrapper, {**constants, **names})
        assert isinstance(call, FunctionType)
        call.__globals__["torch"] = TorchThroughLaunches(do)
        with torch.no_grad():
            return tuple(call(list(inputs)))

    return run


class StandIn(CudaCapture):
    """Memory as a CUDA graph has it, on a CPU: capturing computes nothing; a replay runs the call again, and
    writes where the last one wrote."""

    kind = "cpu"

    def __init__(self, device: torch.device) -> None:
        pass

    def place(self) -> Any:
        return 0  # stands for device and stream

    def capture(self, call: Any, inputs: list[Any], place: Any) -> Any:
        given = list(map(by_address, inputs))
        before = [v.clone() if isinstance(v, Tensor) else v for v in given]
        results = call(list(inputs))
        for value, old in zip(given, before, strict=True):
            if isinstance(value, Tensor):
                value.copy_(old)
        memories = {storage(v) for v in inputs if isinstance(v, Tensor)}
        tensors = {i: r for i, r in enumerate(results) if isinstance(r, Tensor)}
        targets = {i: by_address(r) for i, r in tensors.items() if storage(r) not in memories}
        for target in targets.values():
            target.fill_(77)

        def replay() -> None:
            new = call(list(given))
            for i, target in targets.items():
                target.copy_(new[i])

        return replay, results


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def by_address(value: Any) -> Any:
    """A tensor's memory as a graph knows it: it lives no longer for that, and autograd sees no writes."""
    if not isinstance(value, Tensor) or not value.numel():
        return value
    span = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)) + 1
    bytes_there = (ctypes.c_char * (span * value.itemsize)).from_address(value.data_ptr())
    flat = torch.frombuffer(bytes_there, dtype=value.dtype)
    return flat.as_strided(value.shape, value.stride())
