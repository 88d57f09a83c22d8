"""What is looked at before a package's library is loaded: sizes and checksums of its files.

The checksums (zip's CRC-32) find damage, not malice: a package is as trustworthy as where it came from. The C
side is minicompile_load.h.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minicompile.errors import ExportError

VERSION = 3
"""Of the package's format and C interface: MC_VERSION in minicompile_package.h."""
LAST = '"crc32_above": '
PIECE = 1 << 24


def checksum(path: Path, start: int = 0, end: int | None = None) -> int:
    """CRC-32 of a file's bytes from `start` to `end`."""
    found, left = 0, (path.stat().st_size if end is None else end) - start
    with path.open("rb") as file:
        file.seek(start)
        while piece := file.read(min(PIECE, left)):
            found, left = zlib.crc32(piece, found), left - len(piece)
    return found


def write_metadata(folder: Path, facts: Mapping[str, Any]) -> None:
    """metadata.json: facts, a line for each file, and the checksum of all above it."""
    head = json.dumps({"format": "minicompile package", "version": VERSION, **facts}, indent=2)
    files = ",\n".join(
        "    " + json.dumps({"file": f.name, "bytes": f.stat().st_size, "crc32": checksum(f)})
        for f in sorted(folder.iterdir())
    )
    text = head.removesuffix("\n}") + f',\n  "files": [\n{files}\n  ],\n  '
    text += f"{LAST}{zlib.crc32(text.encode())}\n}}\n"
    (folder / "metadata.json").write_text(text, encoding="utf-8")


def check_package(folder: Path) -> dict[str, Any]:
    """The metadata of a package whose files are whole. Raises ExportError that says what isn't."""
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
        whole = file.is_file() and file.stat().st_size == entry["bytes"]
        if not whole or checksum(file) != entry["crc32"]:
            raise ExportError(f"{file} is missing, truncated or damaged")
    return facts
