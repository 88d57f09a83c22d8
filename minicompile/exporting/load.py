"""Packages in Python: checked, loaded by ctypes, called with tensors. Nothing is compiled.

The real compiler: torch/_inductor/package/package.py (load_package).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicompile.errors import ExportError
from minicompile.exporting.c_wrapper import DTYPES, MOST_DIMENSIONS
from minicompile.exporting.checks import check_package
from minicompile.exporting.conditions import Expression, classes_of, signature_from
from minicompile.exporting.exported import Constraint, bound_arguments, check_memory
from minicompile.ops.display import Shown

NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
BY_NUMBER = list(DTYPES)


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
            self.handle, self.results = library._handle, results
            self.open, self.close, self.free = library.mc_open, library.mc_close, library.mc_free
            self.call, self.error_text = library.mc_run, library.mc_error
        except (OSError, AttributeError) as error:
            raise ExportError(f"the package's library can't be loaded: {error}") from error
        self.open.restype, self.error_text.restype = ctypes.c_void_p, ctypes.c_char_p
        pointer, number, tensors = ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(CTensor)
        self.close.argtypes, self.free.argtypes = [pointer], [tensors, number]
        self.call.argtypes, self.close.restype = [pointer, tensors, number, tensors, number], None
        self.model = self.open(os.fsencode(folder))
        if not self.model:
            said = self.error()
            self.unload()
            raise ExportError(said)

    def error(self) -> str:
        return str(self.error_text().decode(errors="replace"))

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results for contiguous CPU tensors. Raises ExportError with what the library says."""
        given, made = (CTensor * (len(inputs) + 1))(), (CTensor * (self.results + 1))()
        for place, tensor in zip(given, inputs):
            if tensor.dim() > MOST_DIMENSIONS or tensor.dtype not in NUMBERS:
                raise ExportError(f"a package takes no {tensor.dtype} of {tensor.dim()} dimensions")
            if tensor.device.type != "cpu":
                raise ExportError(f"a package takes no tensor on device {tensor.device}")
            place.data, place.dtype = tensor.data_ptr(), NUMBERS[tensor.dtype]
            place.ndim, place.shape[: tensor.dim()] = tensor.dim(), tuple(tensor.shape)
        if self.call(self.model, given, len(inputs), made, self.results):
            raise ExportError(self.error())
        results = []
        for result in made[: self.results]:
            out = torch.empty(result.shape[: result.ndim], dtype=BY_NUMBER[result.dtype])
            if out.numel():
                ctypes.memmove(out.data_ptr(), result.data, out.nbytes)
            results.append(out)
        self.free(made, self.results)
        return results

    def unload(self) -> None:
        """No file that may be replaced stays mapped: Python itself never unloads a library."""
        unload = ctypes.CDLL(None).dlclose
        unload.argtypes = [ctypes.c_void_p]
        unload(self.handle)

    def __del__(self) -> None:
        if getattr(self, "model", None):
            self.close(self.model)
            self.unload()


class Package(Shown):
    """A loaded package: called as what was exported, with CPU tensors; gives what that gave, contiguous.

    Raises ExportError for arguments that do not fulfil the constraints, and where the data is unfit (an index
    out of range). Threads may call it at the same time; of calls that change its state, one after the other.
    """

    def __init__(self, folder: Path) -> None:
        facts = check_package(folder)
        self.name = facts["name"]
        self.constraints: Sequence[Constraint] = [
            Constraint(*parts) for parts in facts["constraints"]
        ]
        self.call = signature_from(facts["call"])
        self.inputs = [(Expression(path), changed) for path, changed in facts["inputs"]]
        self.structure = Expression(facts["structure"])
        self.classes = classes_of(self.structure)
        self.library = Library(folder, self.name, facts["results"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = bound_arguments(self, args, kwargs)
        given = [path(arguments) for path, _ in self.inputs]
        named = zip((path.text for path, _ in self.inputs), given)
        check_memory(self.name, named, {path.text for path, changes in self.inputs if changes})
        laid = [x.detach().resolve_conj().resolve_neg().contiguous() for x in given]
        results = self.library.run(laid)
        for old, new, (_, changes) in zip(given, laid, self.inputs):
            if changes and old.data_ptr() != new.data_ptr():
                with torch.no_grad():
                    old.copy_(new)
        return self.structure({**arguments, **self.classes, "result": results})

    def __str__(self) -> str:
        head = f"package {self.name}{self.call} returns {self.structure.text}"
        return "\n".join([head, "each call must fulfil:", *(f"  {c}" for c in self.constraints)])


def load_package(path: str | Path) -> Package:
    """A package that `mc.aot_package` made, ready to be called.

    Nothing is compiled, and nothing of it runs before all its files are found whole. Raises ExportError.
    """
    return Package(Path(path))
