"""What the package needs of Triton (3.6.0 to 3.9.0) and of torch's GPU runtime that has no public name.

Triton is imported when it is asked for: nothing on a CPU needs it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

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
    from triton.compiler import ASTSource

    class Source(ASTSource):  # type: ignore[misc]
        def hash(self) -> str:
            with _PARSING:
                return str(super().hash())

        def make_ir(self, *args: Any, **kwargs: Any) -> Any:
            with _PARSING:
                return super().make_ir(*args, **kwargs)

    with _PARSING, contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()  # reads half a gigabyte: once, rather than in each thread
    place = {name: (i,) for i, name in enumerate(signature)}
    source = Source(
        fn=function,
        signature=signature,
        constexprs={place[name]: value for name, value in constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in divisible},
    )
    return triton.compile(source, target=target, options=options)


def gpu_target(backend: str, arch: int | str) -> Any:
    """`("cuda", 90)` or `("hip", "gfx942")` as Triton's own kind of target."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(backend, arch, 64 if backend == "hip" else 32)


@functools.cache
def triton_identity() -> str:
    """What a compiled kernel depends on besides its source; "missing" without Triton."""
    try:
        import triton
    except ImportError:
        return "missing"
    library = Path(triton.__file__).parent / "_C" / "libtriton.so"
    build = library.stat() if library.exists() else None
    return f"{triton.__version__} {build and (build.st_size, build.st_mtime_ns)}"


def triton_interpreter() -> tuple[Any, Any]:
    """(the interpreter's module, the type of compiled functions): runtime/interpreter.py mends both."""
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    return interpreter, JITFunction


def nvidia_tool(name: str) -> str | None:
    """Path of "cuobjdump" or "nvdisasm", which Triton's wheels bring along; None if it isn't there."""
    from triton import knobs

    try:
        return str(getattr(knobs.nvidia, name).path)
    except (AttributeError, RuntimeError):
        return None


def gpu_pause(seconds: float) -> None:
    """Keep the GPU waiting about this long, while the host goes on queueing work."""
    torch.cuda._sleep(int(seconds * 2e9))  # cycles


def cuda_launch_state() -> tuple[Callable[[], int], Callable[[int], int]]:
    """(current device index, a device's current stream), each a C function of under 0.1 microseconds."""
    return torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
