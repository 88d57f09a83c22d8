"""From generated text to a callable graph: start the compilers, then load kernels and wrapper.

A language's loader is a rule in the registry `kernel_loader`: it starts its compiler at once and gives a
function that waits and returns the kernels by name. So two graphs compile side by side. The functions that a
wrapper's text names are here too, in plain torch; one in the namespace under the same name wins.
The real compiler: torch/_inductor/async_compile.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.autograd.graph import increment_version

from minicompile import compat
from minicompile.aot.result import BoxedCallable
from minicompile.codegen.plan import KernelModule, KernelSource, WrapperSource
from minicompile.errors import BackendError
from minicompile.lowering.ir import ConstantBuffer
from minicompile.ops import plugins
from minicompile.ops.build import start_build, start_extension
from minicompile.ops.generated import define
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.runtime import cpp, triton

Kernels = dict[str, Callable[..., None]]
KernelLoader = Callable[[KernelModule, Options], Callable[[], Kernels]]

kernel_loader: Registry[KernelLoader] = Registry(
    "kernel_loader", "language -> function that starts compiling a KernelModule"
)

Tuner = Callable[[Sequence[KernelSource], KernelModule, Options], Callable[[], Kernels] | None]

tuner: Registry[Tuner] = Registry(
    "tuner",
    "name -> function that loads a module's kernels for a GPU in its own way, or gives None for others",
)


allocator: Registry[Any] = Registry(
    "allocator", "name -> what gives large memory on the CPU, and keeps some for later calls"
)
"""It has `empty(size, stride, dtype, limit)`, which keeps so many bytes that nobody uses, and `clear()`."""


@kernel_loader("cpp")
def load_cpp(module: KernelModule, options: Options) -> Callable[[], Kernels]:
    start_extension(cpp.FAST_CALL)
    try:
        pending = start_build(module.units or module.text, options)
    except BackendError as error:  # no compiler: there is text to look at, and nothing to load
        return partial(_missing, error)
    module.cached = sum(job.process is None for job in pending.jobs)

    def finish() -> Kernels:
        library = pending.result()
        return {kernel.name: cpp.bind(library, kernel.plan) for kernel in module.kernels}

    return finish


def _missing(error: BackendError) -> Kernels:
    raise error


@kernel_loader("triton")
def load_triton(module: KernelModule, options: Options) -> Callable[[], Kernels]:
    """Kernels on CPU tensors are interpreted, also where the module has others.

    Those on a GPU are for the rules of `tuner`, of which the last is asked first.
    """
    there = torch.cuda.is_available()
    on_gpu = [k for k in module.kernels if there and k.plan.device.type == "cuda"]
    rules = plugins.rules(tuner, options.plugins).values() if on_gpu else ()
    waits = (rule(on_gpu, module, options) for rule in reversed(list(rules)))
    wait = next(filter(None, waits), None)
    rest = [kernel for kernel in module.kernels if wait is None or kernel not in on_gpu]
    return lambda: (
        (wait() if wait is not None else {}) | {k.name: triton.load_kernel(k) for k in rest}
    )


def start_modules(modules: Sequence[KernelModule], options: Options) -> Callable[[], Kernels]:
    """Start every compiler that kernels need; what comes back waits for them. Both raise BackendError."""
    started = [kernel_loader[m.language](m, options) for m in modules]
    return lambda: {name: kernel for wait in started for name, kernel in wait().items()}


def start_loading(
    modules: Sequence[KernelModule], options: Options
) -> Callable[[WrapperSource, Sequence[ConstantBuffer]], BoxedCallable]:
    """Start every compiler that the kernels need. What comes back waits for them and loads a wrapper.

    That raises BackendError where a compiler is missing or fails.
    """
    kernels = start_modules(modules, options)

    def finish(wrapper: WrapperSource, constants: Sequence[ConstantBuffer]) -> BoxedCallable:
        namespace: dict[str, Any] = {c.name: c.value for c in constants}
        allocators = plugins.rules(allocator, options.plugins).values()
        keeper = next(iter(allocators), None) if "empty_large" in wrapper.text else None
        if keeper is not None:
            namespace["empty_large"] = partial(keeper.empty, limit=options.arena_bytes)
        call = load_wrapper(wrapper, namespace | kernels())
        if keeper is not None:
            weakref.finalize(call, keeper.clear).atexit = False
        return call

    return finish


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
    """The wrapper's `call`. `namespace` holds kernels and constants by name, and may replace the helpers."""
    helpers = (empty_strided, increment_version, reinterpret, to_layout)
    scope: dict[str, Any] = {
        "aten": torch.ops.aten,
        "empty_strided_cpu": compat.empty_strided_cpu,
        "empty_large": compat.empty_strided_cpu,
        **{f.__name__: f for f in helpers},
        **namespace,
    }
    call = define("call", wrapper.text, scope, f"wrapper {wrapper.name}")
    call.owned = wrapper.owned
    return cast(BoxedCallable, call)
