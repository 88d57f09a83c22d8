"""Packages in Python: checked, loaded by ctypes, called with tensors. Nothing is compiled.

The real compiler: torch/_inductor/package/package.py (load_package).
"""

from __future__ import annotations

import ctypes
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicompile.exporting.c_wrapper import DTYPES
from minicompile.exporting.checks import PackageError, check_package
from minicompile.exporting.safetensors import bytes_of

NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
BY_NUMBER = list(DTYPES)
MOST_DIMENSIONS = 16


class CTensor(ctypes.Structure):
    """`mc_tensor` of minicompile_package.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MOST_DIMENSIONS),
    )


class Library:
    """The C interface of a loaded package, with its one model."""

    def __init__(self, folder: Path, name: str, results: int) -> None:
        try:
            library = ctypes.CDLL(str((folder / f"lib{name}.so").resolve()))
            self.open, self.close, self.free = library.mc_open, library.mc_close, library.mc_free
            self.call, self.error_text = library.mc_run, library.mc_error
        except (OSError, AttributeError) as error:
            raise PackageError(f"the package's library can't be loaded: {error}") from error
        self.open.restype, self.error_text.restype = ctypes.c_void_p, ctypes.c_char_p
        pointer, number, tensors = ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(CTensor)
        self.close.argtypes, self.free.argtypes = [pointer], [tensors, number]
        self.call.argtypes, self.close.restype = [pointer, tensors, number, tensors, number], None
        self.results = results
        self.model = self.open(str(folder).encode())
        if not self.model:
            raise PackageError(self.error())

    def error(self) -> str:
        return str(self.error_text().decode(errors="replace"))

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results for contiguous CPU tensors. Raises PackageError with what the library says."""
        given, made = (CTensor * (len(inputs) + 1))(), (CTensor * (self.results + 1))()
        for place, tensor in zip(given, inputs):
            if tensor.dim() > MOST_DIMENSIONS or tensor.dtype not in NUMBERS:
                raise PackageError(f"a package takes no {tensor.dtype} of {tensor.dim()} dimensions")
            place.data, place.dtype = tensor.data_ptr(), NUMBERS[tensor.dtype]
            place.ndim, place.shape[: tensor.dim()] = tensor.dim(), tuple(tensor.shape)
        if self.call(self.model, given, len(inputs), made, self.results):
            raise PackageError(self.error())
        found = []
        for result in made[: self.results]:
            out = torch.empty(result.shape[: result.ndim], dtype=BY_NUMBER[result.dtype])
            if out.numel():
                ctypes.memmove(out.data_ptr(), result.data, out.nbytes)
            found.append(out)
        self.free(made, self.results)
        return found

    def __del__(self) -> None:
        if getattr(self, "model", None):
            self.close(self.model)


def unpack(path: Path, folder: Path) -> None:
    """The files of a zip that `aot_package` wrote. Raises PackageError."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if Path(name).name != name or name in ("", ".", ".."):
                    raise PackageError(f"{path} has a file {name!r}, which is no part of a package")
                (folder / name).write_bytes(archive.read(name))
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError,
            zlib.error, OverflowError, MemoryError) as error:  # fmt: skip
        raise PackageError(f"{path} is damaged: {error}") from error
