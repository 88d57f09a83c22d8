"""What a release outside of the tested ranges means: one warning, and perhaps that all code runs in eager."""

from __future__ import annotations

import functools
import warnings

from minicompile.compat.private import require
from minicompile.errors import Unsupported
from minicompile.versions import TESTED, installed, python_is_unknown, python_version

PYTHON_UNKNOWN = "python-unknown"
"""The id of the reason (`dynamo/reasons.py`) why all code runs in eager under a Python newer than tested."""


@functools.cache
def check_capture() -> None:
    """Raise Unsupported where no frame can be captured: an unknown Python, or a torch that lacks a name."""
    if python_is_unknown():
        raise Unsupported(
            f"the bytecode of Python {python_version()} is not known: every call runs in eager",
            hint=f"take Python {TESTED['Python']}",
            id=PYTHON_UNKNOWN,
        )
    require("capture")


@functools.cache
def warn_if_untested() -> None:
    """Warn once in a process: of releases that were not tested, and where nothing can be captured."""
    lines = [
        f"minicompile was tested with {name} {tested}; {name} {version} is {place}."
        for name, tested in TESTED.items()
        if (version := installed(name)) and (place := tested.place(version)) != "known"
    ]
    try:
        check_capture()
    except Unsupported as loss:
        lines.append(str(loss))
    if lines:
        advice = "What works, works; `minicompile doctor` says what doesn't."
        warnings.warn("\n".join([*lines, advice]), stacklevel=3)
