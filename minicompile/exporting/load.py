"""Packages in Python: checked, loaded by ctypes, called with tensors. Nothing is compiled.

The real compiler: torch/_inductor/package/package.py (load_package).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import zipfile
import zlib
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
from minicompile.ops.dtypes import value_text

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


class GpuBytes:
    """Memory of a GPU, for `torch.as_tensor` (Numba's CUDA array interface)."""

    def __init__(self, address: int, count: int) -> None:
        facts = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = facts


class Library:
    """The C interface of a loaded package, with its one model. `cuda`: the GPU's capability, if any."""

    def __init__(self, folder: Path, name: str, results: int, cuda: str | None = None) -> None:
        try:
            library = ctypes.CDLL(str((folder / f"lib{name}.so").resolve()))
            self.handle = library._handle
            self.open, self.close, self.free = library.mc_open, library.mc_close, library.mc_free
            self.call, self.error_text = library.mc_run, library.mc_error
            if cuda is not None:
                self.call_on_gpu, self.free_on_gpu = library.mc_run_on_gpu, library.mc_free_on_gpu
        except (OSError, AttributeError) as error:
            raise ExportError(f"the package's library can't be loaded: {error}") from error
        self.open.restype, self.error_text.restype = ctypes.c_void_p, ctypes.c_char_p
        pointer, number, tensors = ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(CTensor)
        self.close.argtypes, self.free.argtypes = [pointer], [tensors, number]
        self.call.argtypes, self.close.restype = [pointer, tensors, number, tensors, number], None
        if cuda is not None:
            self.call_on_gpu.argtypes = [*self.call.argtypes, pointer]
            self.free_on_gpu.argtypes, self.free_on_gpu.restype = [pointer, tensors, number], None
        self.results, self.cuda = results, cuda
        self.model = self.open(os.fsencode(folder))
        if not self.model:
            said = self.error()
            self.unload()
            raise ExportError(said)

    def error(self) -> str:
        return str(self.error_text().decode(errors="replace"))

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results for contiguous tensors: on the GPU if one of these is, else on the CPU. Raises
        ExportError with what the library says."""
        given, made = (CTensor * (len(inputs) + 1))(), (CTensor * (self.results + 1))()
        known = ("cpu", "cuda") if self.cuda else ("cpu",)
        for place, tensor in zip(given, inputs):
            if tensor.dim() > MOST_DIMENSIONS or tensor.dtype not in NUMBERS:
                raise ExportError(f"a package takes no {tensor.dtype} of {tensor.dim()} dimensions")
            if tensor.device.type not in known:
                where = "a GPU" if self.cuda else "the CPU"
                raise ExportError(
                    f"a package for {where} takes no tensor on device {tensor.device}"
                )
            place.data, place.dtype = tensor.data_ptr(), NUMBERS[tensor.dtype]
            place.ndim, place.shape[: tensor.dim()] = tensor.dim(), tuple(tensor.shape)
        arguments = (self.model, given, len(inputs), made, self.results)
        if device := next((x.device for x in inputs if x.device.type == "cuda"), None):
            return self._on_gpu(arguments, made, device)
        if self.call(*arguments):
            raise ExportError(self.error())
        found = []
        for result in made[: self.results]:
            out = torch.empty(result.shape[: result.ndim], dtype=BY_NUMBER[result.dtype])
            if out.numel():
                ctypes.memmove(out.data_ptr(), result.data, out.nbytes)
            found.append(out)
        self.free(made, self.results)
        return found

    def _on_gpu(self, arguments: Any, made: Any, device: torch.device) -> list[Tensor]:
        """On torch's current stream. Results are copied into torch's memory: theirs goes back at once."""
        stream = torch.cuda.current_stream(device)
        if self.call_on_gpu(*arguments, stream.cuda_stream):
            raise ExportError(self.error())
        found = []
        for result in made[: self.results]:
            shape, dtype = result.shape[: result.ndim], BY_NUMBER[result.dtype]
            out = torch.empty(shape, dtype=dtype, device=device)
            if out.numel():
                held = torch.as_tensor(GpuBytes(result.data, out.nbytes), device=device)
                out.view(-1).view(torch.uint8).copy_(held)
            found.append(out)
        stream.synchronize()
        self.free_on_gpu(self.model, made, self.results)
        return found

    def unload(self) -> None:
        """No file that may be replaced stays mapped: Python itself never unloads a library."""
        unload = ctypes.CDLL(None).dlclose
        unload.argtypes = [ctypes.c_void_p]
        unload(self.handle)

    def __del__(self) -> None:
        if getattr(self, "model", None):
            self.close(self.model)
            self.unload()


def unpack(path: Path, folder: Path) -> None:
    """The files of a zip that `aot_package` wrote. Raises ExportError."""
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if Path(name).name != name or name in ("", ".", ".."):
                    raise ExportError(f"{path} has a file {name!r}, which is no part of a package")
                (folder / name).write_bytes(archive.read(name))
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError,
            zlib.error, OverflowError, MemoryError) as error:  # fmt: skip
        what = "is no package" if isinstance(error, FileNotFoundError) else "is damaged"
        raise ExportError(f"{path} {what}: {error}") from error


class Package(Shown):
    """A loaded package: called as what was exported, with CPU tensors; gives what that gave, contiguous.

    One for a GPU takes tensors there, too; of any such, it gives all results there. It is loaded for the
    current device. What is wrong with data that a kernel finds on a GPU ends the CUDA context, as in torch.
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
        self.library = Library(folder, self.name, facts["results"], facts.get("cuda"))

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
    """A package that `mc.aot_package` made, folder or zip, ready to be called.

    Nothing is compiled, and nothing of it runs before all its files are found whole. Raises ExportError.
    """
    path = Path(path)
    if path.is_dir():
        return Package(path)
    with tempfile.TemporaryDirectory(prefix="minicompile_package_") as work:  # mapped files stay
        unpack(path, Path(work))
        return Package(Path(work))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("package", type=Path, help="a folder or zip file that mc.aot_package made")
    parser.add_argument("input", type=Path, help="a safetensors file with the inputs by name")
    parser.add_argument("--output", type=Path, help="write the results to this safetensors file")


def run(chosen: argparse.Namespace) -> int:
    """Run a package on the tensors of a file. Raises ExportError."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save_file
    except ImportError:
        raise ExportError("`minicompile run` needs safetensors: pip install safetensors") from None
    package = load_package(chosen.package)
    names = [path.text for path, _ in package.inputs]
    try:
        given = load_file(chosen.input)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{chosen.input} can't be read: {error}") from error
    if given.keys() != set(names):
        raise ExportError(f"{package.name} takes {', '.join(names)}, not {', '.join(given)}")
    found = package.library.run([given[name] for name in names])
    results = {f"result[{i}]": value for i, value in enumerate(found)}
    for name, value in results.items():
        print(f"{name}: {value_text(value)}")
    if chosen.output is not None:
        save_file(results, chosen.output)
    return 0
