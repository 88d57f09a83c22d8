"""A new package is run once, on an input that is made up, and compared with the export that it was made from.

A compiler may be wrong: gcc 12 was, about constant structs passed by value (c/model.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minicompile.errors import BackendError, ExportError
from minicompile.exporting.exported import Exported, as_number
from minicompile.exporting.load import Library

RELATIVE, ABSOLUTE = 1e-2, 1e-3
"""Tolerances: of an element, and of a result's largest element. Half types round so coarsely."""
ALLOWED = 0.01
"""Share of elements that may differ: a comparison of nearly equal numbers falls out otherwise."""


def check_built(folder: Path, name: str, exported: Exported, hints: Mapping[Any, int]) -> None:
    """Raise BackendError if a package's library computes something else than the export.

    `hints`: values of the symbolic sizes. Nothing is checked where the export itself refuses the input.
    """
    specs, state = exported.signature.inputs, exported.state
    outputs = [output for output in exported.signature.outputs if output.kind == "result"]
    given = [
        made_up(x, hints).contiguous() if s.kind == "input" else state[s.target].clone()
        for s, x in zip(specs, exported.layouts)
    ]
    try:
        with torch.no_grad():
            expected = exported.run(exported.laid_out([x.clone() for x in given]))
    except Exception:  # an index out of range, a matrix that has no inverse
        return
    cure = "try another compiler (CC), or cpu='x86-64' for simpler instructions"
    try:
        inputs = [x for s, x in zip(specs, given) if s.kind == "input"]
        results = Library(folder, name, len(outputs)).run(inputs)
    except ExportError as error:
        raise BackendError(f"the package of {name} fails: {error}; {cure}") from error
    for output, result, value in zip(outputs, results, expected):
        if not alike(result, value):
            raise BackendError(f"the package of {name} computes another {output.target}: {cure}")


def made_up(like: Tensor, hints: Mapping[Any, int]) -> Tensor:
    """Some tensor on the CPU of a fake's size and dtype. Integers are 0 or 1, which most indices may be."""
    size = [int(as_number(n, hints)) for n in like.shape]
    chance = torch.Generator().manual_seed(0)
    if like.dtype.is_floating_point:
        return torch.randn(size, generator=chance).to(like.dtype)
    return torch.randint(2, size, generator=chance).to(like.dtype)


def alike(found: Tensor, expected: Tensor) -> bool:
    """Whether results differ by rounding alone. Integers aren't compared: they may count rounded numbers."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point() or expected.numel() == 0:
        return True
    found, expected = found.double(), expected.double()
    largest = float(expected.nan_to_num(0, 0, 0).abs().amax())
    close = torch.isclose(found, expected, RELATIVE, ABSOLUTE * largest, equal_nan=True)
    return int((~close).sum()) <= ALLOWED * expected.numel()
