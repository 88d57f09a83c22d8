"""Packages in Python: checked, loaded by ctypes, called with tensors. Nothing is compiled.

The real compiler: torch/_inductor/package/package.py (load_package).
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicompile.errors import ExportError
from minicompile.exporting.c_wrapper import DTYPES, MOST_DIMENSIONS
from minicompile.exporting.conditions import Constraint, evaluate, plain
from minicompile.exporting.exported import bound_arguments, check_memory
from minicompile.ops.display import Shown

VERSION = 4
"""Of the package's format and C interface: MC_VERSION in minicompile_package.h."""
LAST = '"crc32_above": '
BY_NUMBER = list(DTYPES)


class CTensor(ctypes.Structure):
    """`mc_tensor` of minicompile_package.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MOST_DIMENSIONS),
    )


class PackageLibrary:
    """The C interface of a loaded package, with its one model."""

    def __init__(self, folder: Path, name: str, results: int) -> None:
        self.results = results
        pointer, number, tensors = ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(CTensor)
        try:
            self.c = ctypes.CDLL(str((folder / f"lib{name}.so").resolve()))
            self.c.mc_run.argtypes = [pointer, tensors, number, tensors, number]
            self.c.mc_free.argtypes, self.c.mc_close.argtypes = [tensors, number], [pointer]
            self.c.mc_open.restype, self.c.mc_error.restype = pointer, ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise ExportError(f"the package's library can't be loaded: {error}") from error
        self.model = self.c.mc_open(os.fsencode(folder))
        if not self.model:
            raise ExportError(self.error())
        weakref.finalize(self, self.c.mc_close, self.model)

    def error(self) -> str:
        return str(self.c.mc_error().decode(errors="replace"))

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results for contiguous CPU tensors. Raises ExportError with what the library says."""
        given, made = (CTensor * (len(inputs) + 1))(), (CTensor * (self.results + 1))()
        for place, tensor in zip(given, inputs):
            place.data, place.dtype = tensor.data_ptr(), BY_NUMBER.index(tensor.dtype)
            place.ndim, place.shape[: tensor.dim()] = tensor.dim(), tuple(tensor.shape)
        if self.c.mc_run(self.model, given, len(inputs), made, self.results):
            raise ExportError(self.error())
        results = []
        for result in made[: self.results]:
            out = torch.empty(result.shape[: result.ndim], dtype=BY_NUMBER[result.dtype])
            ctypes.memmove(out.data_ptr(), result.data, out.nbytes)
            results.append(out)
        self.c.mc_free(made, self.results)
        return results


class Package(Shown):
    """A loaded package: called as what was exported, with CPU tensors; gives what that gave, contiguous.

    Raises ExportError for arguments that do not fulfil the constraints, and where the data is unfit (an index
    out of range). Threads may call it at the same time; of calls that change its state, one after the other.
    """

    def __init__(self, folder: Path) -> None:
        facts = check_package(folder)
        self.name, self.structure = facts["name"], facts["structure"]
        self.constraints = [Constraint(*parts) for parts in facts["constraints"]]
        self.call = inspect.signature(evaluate(f"lambda {facts['call'][1:-1]}: None", {}))
        self.inputs = facts["inputs"]
        self.library = PackageLibrary(folder, self.name, facts["results"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = bound_arguments(self, args, kwargs)
        inputs = {path: evaluate(path, arguments) for path, _ in self.inputs}
        changed = [path for path, changes in self.inputs if changes]
        check_memory(self.name, inputs, changed)
        laid = {path: plain(value) for path, value in inputs.items()}
        results = self.library.run([*laid.values()])
        for path in changed:
            if inputs[path].data_ptr() != laid[path].data_ptr():
                with torch.no_grad():
                    inputs[path].copy_(laid[path])
        return evaluate(self.structure, {**arguments, "result": results})

    def __str__(self) -> str:
        head = f"package {self.name}{self.call} returns {self.structure}"
        return "\n".join([head, "each call must fulfil:", *(f"  {c}" for c in self.constraints)])


def check_package(folder: Path) -> dict[str, Any]:
    """The metadata of a package whose files are whole. Raises ExportError that says what isn't.

    The checksums (zip's CRC-32) find damage, not malice. The C side is minicompile_load.h.
    """
    try:
        content = (folder / "metadata.json").read_bytes()
    except OSError as error:
        raise ExportError(f"{folder} is no package: {error}") from error
    above, last, _ = content.rpartition(LAST.encode())
    if not last or content[len(above) :] != f"{LAST}{zlib.crc32(above)}\n}}\n".encode():
        raise ExportError(f"{folder}/metadata.json is damaged")
    facts: dict[str, Any] = json.loads(content)
    if facts["version"] != VERSION:
        known = f"this minicompile loads version {VERSION}: export the model again"
        raise ExportError(f"the package has version {facts['version']}, {known}")
    for entry in facts["files"]:
        file = folder / entry["file"]
        if not file.is_file() or zlib.crc32(file.read_bytes()) != entry["crc32"]:
            raise ExportError(f"{file} is missing, truncated or damaged")
    return facts


def load_package(path: str | Path) -> Package:
    """A package that `mc.aot_package` made, ready to be called.

    Nothing is compiled, and nothing of it runs before all its files are found whole. Raises ExportError.
    """
    return Package(Path(path))
