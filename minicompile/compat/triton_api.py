"""Triton's compiler, interpreter and tools, and torch's GPU runtime, where they have no public name.

Triton is imported when it is asked for: nothing on a CPU needs it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from minicompile.compat.private import Gone, later
from minicompile.errors import Unsupported

ast_source = later("triton.compiler.ASTSource", "triton")
triton_key = later("triton.runtime.cache.triton_key", "speed")
target_type = later("triton.backends.compiler.GPUTarget", "triton")
interpreter_module = later("triton.runtime.interpreter", "triton")
jit_function = later("triton.runtime.jit.JITFunction", "triton")
tools = later("triton.knobs.nvidia", "triton")
sleep = later("torch.cuda._sleep", "gpu")
current_device = later("torch._C._cuda_getDevice", "gpu")
current_stream = later("torch._C._cuda_getCurrentRawStream", "gpu")

_PARSING = threading.Lock()


def triton_compile(
    function: Any,
    signature: dict[str, str],
    constants: dict[str, int],
    divisible: Collection[str],
    target: Any,
    options: dict[str, Any],
) -> Any:
    """Compile a JITFunction for a GPUTarget: no driver is needed. `divisible`: arguments that 16 divides.

    Threads run Triton's passes and `ptxas` side by side, but Python's part, which they can't share anyway,
    one after the other: before 3.13, `ast.parse` may fail in a thread while another parses (cpython#106905).
    """
    import triton

    class KernelAst(ast_source()):  # type: ignore[misc]
        def hash(self) -> str:
            with _PARSING:
                return str(super().hash())

        def make_ir(self, *args: Any, **kwargs: Any) -> Any:
            with _PARSING:
                return super().make_ir(*args, **kwargs)

    with _PARSING, contextlib.suppress(Unsupported):
        triton_key()()  # reads half a gigabyte: once, rather than in each thread
    place = {name: (i,) for i, name in enumerate(signature)}
    source = KernelAst(
        fn=function,
        signature=signature,
        constexprs={place[name]: value for name, value in constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in divisible},
    )
    return triton.compile(source, target=target, options=options)


def gpu_target(backend: str, arch: int | str) -> Any:
    """Return `("cuda", 90)` or `("hip", "gfx942")` as Triton's own kind of target."""
    return target_type()(backend, arch, 64 if backend == "hip" else 32)


@functools.cache
def triton_identity() -> str:
    """Return what a compiled kernel depends on besides its source; "missing" without Triton."""
    try:
        import triton
    except ImportError:
        return "missing"
    library = Path(triton.__file__).parent / "_C" / "libtriton.so"
    build = library.stat() if library.exists() else None
    return f"{triton.__version__} {build and (build.st_size, build.st_mtime_ns)}"


def triton_interpreter() -> tuple[Any, Any]:
    """Return the interpreter's module and the type of compiled functions."""
    return interpreter_module(), jit_function()


def nvidia_tool(name: str) -> str | None:
    """Return the path of one of Triton's "ptxas", "ptxas_blackwell", "cuobjdump", "nvdisasm", or None."""
    try:
        knobs = tools()
        return None if isinstance(knobs, Gone) else str(getattr(knobs, name).path)
    except (AttributeError, RuntimeError):
        return None


def gpu_pause(seconds: float) -> None:
    """Keep the GPU waiting about this long, while the host goes on queueing work."""
    sleep()(int(seconds * 2e9))  # cycles


def cuda_launch_state() -> tuple[Callable[[], int], Callable[[int], int]]:
    """Return what gives the current device's index, and what gives the current stream of a device.

    Each is a C function of under 0.1 microseconds.
    """
    return current_device(), current_stream()
