"""The releases of torch, Triton and Python that this package was tested with, and one warning beyond them.

A release outside a range isn't refused: what can work works, and `minicompile doctor` says what doesn't.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata

from minicompile.compat.private import require
from minicompile.errors import Unsupported


@dataclass(frozen=True)
class Tested:
    """A range of releases, both ends included. A release is compared by its first two numbers."""

    first: tuple[int, int]
    last: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.first[0]}.{self.first[1]} to {self.last[0]}.{self.last[1]}"

    def place(self, release: tuple[int, int]) -> str:
        """Return "known", "older" or "newer"."""
        if release < self.first:
            return "older"
        return "newer" if release > self.last else "known"


PYTHON_UNKNOWN = "python-unknown"
"""The id of the reason (`dynamo/reasons.py`) why all code runs in eager under a Python newer than tested."""
TESTED = {
    "Python": Tested((3, 11), (3, 13)),
    "torch": Tested((2, 11), (2, 15)),
    "triton": Tested((3, 6), (3, 9)),
}


def installed(name: str) -> str | None:
    """Return the version text of Python or of a package, without importing it; None if it is missing."""
    if name == "Python":
        return ".".join(map(str, sys.version_info[:3]))
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version text; (0, 0) if it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


@functools.cache
def check_capture() -> None:
    """Raise Unsupported where no frame can be captured: an unknown Python, or a torch that lacks a name."""
    tested = TESTED["Python"]
    if tested.place(sys.version_info[:2]) == "newer":
        what = (
            f"the bytecode of Python {installed('Python')} is not known: every call runs in eager"
        )
        raise Unsupported(what, hint=f"take Python {tested}", id=PYTHON_UNKNOWN)
    require("capture")


@functools.cache
def warn_if_untested() -> None:
    """Warn once in a process of each installed release that is outside its tested range."""
    for name, tested in TESTED.items():
        version = installed(name)
        if version is None or (where := tested.place(release(version))) == "known":
            continue
        warnings.warn(
            f"minicompile was tested with {name} {tested}; {name} {version} is {where}. What works, works: "
            "`minicompile doctor` says what doesn't.",
            stacklevel=3,
        )
