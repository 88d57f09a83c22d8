"""The releases of Python, torch and Triton that this package was tested with. Needs none of them but Python.

A release outside a range isn't refused: what can work works, and `minicompile doctor` says what doesn't.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Releases:
    """A range of releases, both ends included. A release is compared by its first two numbers."""

    first: tuple[int, int]
    last: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.first[0]}.{self.first[1]} to {self.last[0]}.{self.last[1]}"

    def place(self, version: str) -> str:
        """Return "known", "older" or "newer" for a version text."""
        if release(version) < self.first:
            return "older"
        return "newer" if release(version) > self.last else "known"


TESTED = {
    "Python": Releases((3, 11), (3, 13)),
    "torch": Releases((2, 11), (2, 15)),
    "triton": Releases((3, 6), (3, 9)),
}


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version text; (0, 0) if it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def python_version() -> str:
    """Return the running Python's version text."""
    return ".".join(map(str, sys.version_info[:3]))


def python_is_unknown() -> bool:
    """Is this Python newer than tested? Then nobody here knows its bytecode and its frames."""
    return TESTED["Python"].place(python_version()) == "newer"


def installed(name: str) -> str | None:
    """Return the version text of Python or of a package, without importing it; None if it is missing."""
    if name == "Python":
        return python_version()
    try:
        return metadata.version(name) if importlib.util.find_spec(name) is not None else None
    except (metadata.PackageNotFoundError, ValueError):  # ValueError: a module without a spec
        return None
