"""A GPU for packages where there is none: fake_cuda.c as the driver, kernels in Triton's interpreter."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minicompile.exporting import cuda
from minicompile.exporting.cuda import Cubin
from minicompile.exporting.load import Package, load_package
from minicompile.runtime.gpu_kernel import POINTER_TYPES, execute

DTYPES = {kind: dtype for dtype, kind in POINTER_TYPES.items() if dtype is not torch.bool}
LAUNCHER = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)
)


def build(folder: Path) -> Path:
    """The fake driver's library."""
    made = folder / "libfake_cuda.so"
    source = Path(__file__).with_name("fake_cuda.c")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    subprocess.run(["cc", *flags, "-o", made, source], check=True)
    return made


class FakeGpu:
    """Runs what packages launch that were made since; its log is what the driver was called for."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        library, self.log, self.patch = build(folder), folder / "calls.log", patch
        self.driver = ctypes.CDLL(str(library))
        self.driver.fake_bytes_from.argtypes = [ctypes.c_uint64]
        self.driver.fake_bytes_from.restype = ctypes.c_int64
        self.failed: list[BaseException] = []
        self.known: dict[bytes, Callable[..., None]] = {}
        patch.setenv("MINICOMPILE_CUDA_DRIVER", str(library))
        patch.setenv("FAKE_CUDA_LOG", str(self.log))
        compile_kernels = cuda.machine_code

        def machine_code(*given: Any) -> dict[str, Cubin]:
            found = compile_kernels(*given)
            self.known |= {cubin.binary.code: self._run(cubin) for cubin in found.values()}
            return found

        patch.setattr(cuda, "machine_code", machine_code)
        self.callback = LAUNCHER(self._launch)

    def load(self, folder: Path, **variables: str) -> Package:
        """A package, on a machine that some variables describe."""
        self.expect(folder, **variables)
        return load_package(folder)

    def expect(self, folder: Path, **variables: str) -> None:
        """The next package to be loaded. The log, and counts of calls that are to fail, begin anew."""
        for name in ("FAIL", "CAPABILITY", "DEVICES", "ORDINAL"):
            self.patch.delenv(f"FAKE_CUDA_{name}", raising=False)
        for name, value in variables.items():
            self.patch.setenv(f"FAKE_CUDA_{name.upper()}", value)
        self.runs = [self.known.get(file.read_bytes()) for file in sorted(folder.glob("*.cubin"))]
        self.first = self.driver.fake_functions()
        self.driver.fake_set_launcher(self.callback)
        self.log.write_text("")

    def calls(self) -> list[str]:
        """The driver's calls since then: "cuMemAlloc_v2 100"."""
        return self.log.read_text().splitlines()

    def check(self) -> None:
        """Raises what a kernel raised."""
        if self.failed:
            raise self.failed.pop()

    def _launch(self, number: int, programs: int, threads: int, shared: int, given: Any) -> None:
        try:
            run = self.runs[number - self.first]
            assert run is not None
            run(programs, threads, shared, given)
        except BaseException as error:
            self.failed.append(error)

    def _run(self, cubin: Cubin) -> Callable[..., None]:
        from minicompile.debug import triton_interpreter as interpreter

        kernel = cubin.kernel
        function, namespace = execute(kernel.name, kernel.module)
        namespace |= interpreter.stand_ins()
        interpreted = interpreter.interpreter.InterpretedFunction(function.fn)

        def run(programs: int, threads: int, shared: int, given: Any) -> None:
            assert (threads, shared) == (32 * cubin.binary.warps, cubin.binary.shared)
            values = list(self._values(kernel.types.values(), given))
            assert not any(given[len(values) + i] is None for i in range(2))
            with interpreter.interpreting(), np.errstate(all="ignore"):
                interpreted[(programs, 1, 1)](*values, **kernel.constants)

        return run

    def _values(self, types: Iterable[str], given: Any) -> Iterable[Any]:
        from minicompile.debug.triton_interpreter import scalar

        for kind, place in zip(types, given):
            if kind.startswith("*"):
                address = ctypes.c_uint64.from_address(place).value
                assert address % 16 == 0, "pointers are aligned"
                yield self.memory(address, DTYPES[kind])
            else:
                width = ctypes.c_int64 if kind == "i64" else ctypes.c_int32
                yield scalar(width.from_address(place).value, kind == "i64")

    def memory(self, address: int, dtype: torch.dtype) -> Tensor:
        """What lies there, up to its allocation's end."""
        count = self.driver.fake_bytes_from(address)
        assert count >= 0, "memory of the GPU"
        count -= count % dtype.itemsize
        return torch.frombuffer((ctypes.c_char * count).from_address(address), dtype=dtype)
