"""Sealed files that are damaged, or lie under another's key, are not read."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from minicompile.ops import files


def flip(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit": flip,
    "cut": lambda content, draw: content[: draw.randrange(len(content))],
    "longer": lambda content, draw: content + draw.randbytes(draw.randint(1, 99)),
    "noise": lambda content, draw: draw.randbytes(len(content)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_nothing_damaged_or_swapped_is_read(tmp_path: Path, name: str) -> None:
    path, draw = tmp_path / "kept", random.Random(0)
    assert files.write_sealed(path, "key", b"content")
    whole = path.read_bytes()
    assert files.read_sealed(path, "key") == b"content"
    assert files.read_sealed(path, "another key") is None
    for _ in range(200):
        path.write_bytes(DAMAGES[name](whole, draw))
        assert files.read_sealed(path, "key") is None


def test_nothing_unpickles() -> None:
    """The formats that run code when they are read."""
    forbidden = r"^\s*(import|from) (pickle|marshal|shelve|dill|joblib)\b|\b(torch|np)\.load\("
    for file in Path(files.__file__).parents[1].rglob("*.py"):
        assert not re.search(forbidden, file.read_text(encoding="utf-8"), re.MULTILINE), file


def test_a_pipe_in_the_cache_is_no_file(tmp_path: Path) -> None:
    files.os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PermissionError):
        files.read_private(tmp_path / "pipe")
