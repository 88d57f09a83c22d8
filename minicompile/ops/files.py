"""Files that only this user can have written: a cache of code is as safe as its folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
SEAL_BYTES = hashlib.sha256().digest_size


def make_private(folder: Path) -> str:
    """Make a folder for this user alone if there is none. Gives the reason why it can't be used, or ""."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        return why_unsafe(folder)
    except OSError as error:
        return f"{folder} can't be made ({error.strerror})"


def why_unsafe(folder: Path) -> str:
    """Who else could put files into a folder; "" for nobody but root."""
    for place in (folder, folder.parent):
        info = place.stat()
        if not ours(info):
            return f"{place} belongs to another user"
        # in a folder like /tmp, others can't replace what is ours
        if info.st_mode & OTHERS_WRITE and (place == folder or not info.st_mode & stat.S_ISVTX):
            return f"others can write to {place} (chmod go-w {place})"
    return ""


def ours(info: os.stat_result) -> bool:
    """This user's, or root's."""
    return info.st_uid in (os.geteuid(), 0)


def read_private(path: Path) -> bytes:
    """A file's bytes. Raises OSError if anyone else could have written them."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        info = os.fstat(file.fileno())
        if not (ours(info) and stat.S_ISREG(info.st_mode)) or info.st_mode & OTHERS_WRITE:
            raise PermissionError(f"{path} isn't a file of this user alone")
        return file.read()


def write_private(path: Path, content: bytes) -> bool:
    """Let a file appear, whole and for this user alone. False if it can't be written."""
    part = None
    try:
        handle, part = tempfile.mkstemp(suffix=".part", dir=path.parent)  # mode 0600
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except OSError:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)
        return False
    return True


def read_sealed(path: Path, key: str) -> bytes | None:
    """What `write_sealed` wrote under this key; None where there is nothing, or it isn't whole."""
    try:
        kept = read_private(path)
    except OSError:
        return None
    content, seal = kept[:-SEAL_BYTES], kept[-SEAL_BYTES:]
    return content if seal == _seal(key, content) else None


def write_sealed(path: Path, key: str, content: bytes) -> bool:
    """Let a file appear that says that it is whole and what it is for. False if it can't be written.

    The seal is the file's end, which a library's loader doesn't read.
    """
    return write_private(path, content + _seal(key, content))


def _seal(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()
