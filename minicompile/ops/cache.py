"""What is kept on disk between processes: a folder for each kind of thing, in it a sealed file for each key.

    kind      what a key leads to
    cpp       a C library, which the system loads from there (build.py)
    triton    a kernel's machine code (runtime/triton.py)
    tiles     the tiles that max-autotune found best (plugins/matrix_products)
    graphs    the texts of a whole capture's kernels and wrappers (plugins/graph_cache/store.py)

A key is a digest of everything that decides what it leads to, so nothing is ever out of date. What isn't
whole, or could have been written by others (files.py), is made again.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path

from minicompile.ops.files import make_private, read_sealed, write_sealed
from minicompile.options import Options


def digest(*facts: object) -> str:
    """The key of what these facts decide. Each must have a `repr` that says all about it."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def cache_folder(options: Options, kind: str) -> Path | None:
    """Where things of a kind lie, made if need be; None where that is switched off, impossible or unsafe."""
    if not options.disk_cache:
        return None
    folder = options.cache_folder / kind
    reason = make_private(folder)
    if reason:
        cure = "MINICOMPILE_CACHE_DIR may name a folder of yours"
        warnings.warn(f"compiled kernels are not kept: {reason}; {cure}", stacklevel=2)
    return None if reason else folder


@dataclass(frozen=True)
class Cache:
    """Things of one kind, each in a file behind a seal."""

    options: Options
    kind: str
    suffix: str = ".json"

    def _place(self, key: str) -> Path | None:
        folder = cache_folder(self.options, self.kind)
        return None if folder is None else folder / f"{key}{self.suffix}"

    def get(self, key: str) -> bytes | None:
        """What is kept under a key; None where nothing whole is."""
        place = self._place(key)
        return None if place is None else read_sealed(place, key)

    def file(self, key: str) -> Path | None:
        """The file that is kept under a key, whole."""
        return None if self.get(key) is None else self._place(key)

    def put(self, key: str, content: bytes) -> None:
        """Keep it, if there is room."""
        place = self._place(key)
        if place is not None:
            write_sealed(place, key, content)
