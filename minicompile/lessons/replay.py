"""A compiled graph whose launches go through a function of ours: to record and replay them.

On a GPU a CUDA graph does this in the driver. Here a launch is a call of a C kernel or of a library.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from minicompile.codegen.generate import generate_kernels
from minicompile.options import Options
from minicompile.pipeline_result import Trace
from minicompile.runtime.load import load_wrapper, start_modules

Do = Callable[..., Any]
"""`do(function, *arguments, **named)` must call the function, and may do more."""


class Library:
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
        call.__globals__["torch"] = Library(do)
        with torch.no_grad():
            return tuple(call(list(inputs)))

    return run
