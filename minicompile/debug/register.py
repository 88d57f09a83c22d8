"""Register the tools of this folder with the compiler: observers, a gate, a backend, methods of traces.

Tables of the compiler import this page when they are first read (`FILLED_BY` in minicompile/__init__.py). The
package itself imports nothing, so that `minicompile doctor` runs without torch.
"""

from __future__ import annotations

from typing import Any

from minicompile.codegen.plan import KernelSource
from minicompile.debug import (  # noqa: F401
    diff,
    dump,
    gpu_assembly,
    history,
    limit,
    logs,
    overview,
    provenance,
    roofline,
    verify,
    why,
)
from minicompile.ops.display import method
from minicompile.runtime.gpu_kernel import Tiles


@method(KernelSource, "interpreted")
def interpreted(source: KernelSource, tiles: Tiles | None = None) -> Any:
    """Make a Triton kernel a function of CPU tensors and sizes. Needs Triton."""
    from minicompile.debug.triton_interpreter import InterpretedKernel

    return InterpretedKernel(source, tiles)
