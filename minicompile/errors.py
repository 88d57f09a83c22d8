"""The exceptions a user can meet, each with the way out in its text."""

from __future__ import annotations

from collections.abc import Sequence

from minicompile.ops.origin import SourceLine


class MinicompileError(Exception):
    """Base of every error minicompile raises on its own account."""


class Unsupported(MinicompileError):
    """Something a room can't do yet: the caller falls back and counts it.

    `reason` is one sentence, `where` the user's line, `hint` the way out.
    """

    places: Sequence[int] = ()
    """Where the capture could end instead, the best place first: numbers of executed instructions."""

    def __init__(self, reason: str, where: SourceLine | None = None, hint: str = "") -> None:
        self.reason, self.where, self.hint = reason, where, hint
        parts = [reason]
        if where is not None:
            parts.append(f"at {where}")
        if hint:
            parts.append(f"({hint})")
        super().__init__(" ".join(parts))


class BackendError(MinicompileError):
    """A compile-time tool is missing or failed: a C++ compiler, Triton, a GPU."""


class VerifyError(MinicompileError):
    """An IR broke one of its own rules: a bug in minicompile or in a plugged-in rule."""


class OptionError(MinicompileError, ValueError):
    """An option that does not exist, or a value it can't take."""
