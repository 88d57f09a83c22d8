"""From generated text to a callable graph: start the compilers, then load kernels and wrapper.

A language's loader is a rule in the registry `kernel_loader`: it starts its compiler at once and gives a
function that waits and returns the kernels by name. So two graphs compile side by side.
The real compiler: torch/_inductor/async_compile.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minicompile.aot.result import BoxedCallable
from minicompile.codegen.plan import KernelModule, WrapperSource
from minicompile.lowering.ir import ConstantBuffer
from minicompile.ops.build import start_build
from minicompile.ops.registry import Registry
from minicompile.options import Options
from minicompile.runtime import cpp, triton
from minicompile.runtime.wrapper import load_wrapper

Kernels = dict[str, Callable[..., None]]
KernelLoader = Callable[[KernelModule, Options], Callable[[], Kernels]]

kernel_loader: Registry[KernelLoader] = Registry(
    "kernel_loader", "language -> function that starts compiling a KernelModule"
)


@kernel_loader("cpp")
def load_cpp(module: KernelModule, options: Options) -> Callable[[], Kernels]:
    pending = start_build(module.units or module.text, options)

    def finish() -> Kernels:
        library = pending.result()
        return {kernel.name: cpp.bind(library, kernel.plan) for kernel in module.kernels}

    return finish


@kernel_loader("triton")
def load_triton(module: KernelModule, options: Options) -> Callable[[], Kernels]:
    return lambda: {kernel.name: triton.load_kernel(kernel) for kernel in module.kernels}


@dataclass(eq=False)
class Loading:
    """A graph whose kernels are being compiled."""

    wrapper: WrapperSource
    constants: Sequence[ConstantBuffer]
    kernels: list[Callable[[], Kernels]]

    def finish(self) -> BoxedCallable:
        """Wait and load. Raises BackendError where a compiler is missing or fails."""
        namespace: dict[str, Any] = {c.name: c.value for c in self.constants}
        for wait in self.kernels:
            namespace.update(wait())
        return load_wrapper(self.wrapper, namespace)


def start_loading(
    modules: Sequence[KernelModule],
    wrapper: WrapperSource,
    constants: Sequence[ConstantBuffer],
    options: Options,
) -> Loading:
    """Start every compiler that the kernels need."""
    return Loading(wrapper, constants, [kernel_loader[m.language](m, options) for m in modules])
