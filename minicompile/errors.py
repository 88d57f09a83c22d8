"""The exceptions a user can meet, each with the way out in its text."""

from __future__ import annotations

from collections.abc import Sequence

from minicompile.ops.origin import SourceLine


class MinicompileError(Exception):
    """Base of every error minicompile raises on its own account."""


class Unsupported(MinicompileError):
    """Something a room can't do yet: the caller falls back and counts it.

    `reason` is one sentence, `where` the user's line, `hint` the way out; `id` names the kind of reason
    (`dynamo/reasons.py` explains each).
    """

    places: Sequence[int] = ()
    """Where the capture could end instead, the best place first: numbers of executed instructions."""

    def __init__(
        self, reason: str, where: SourceLine | None = None, hint: str = "", id: str = ""
    ) -> None:
        super().__init__(reason, where, hint, id)
        self.reason, self.where, self.hint, self.id = reason, where, hint, id

    def __str__(self) -> str:
        return refusal_text(self.reason, self.where, self.hint, self.id)


def refusal_text(reason: str, where: SourceLine | None, hint: str, id: str) -> str:
    """What happened, the user's line and the usual fix, each on a line of its own."""
    lines = [f"{reason} [{id}]" if id else reason]
    lines += [f"  at {where}"] if where is not None else []
    lines += [f"  usual fix: {hint}"] if hint else []
    return "\n".join(lines)


class BackendError(MinicompileError):
    """A compile-time tool is missing or failed: a C++ compiler, Triton, a GPU."""


class RejectedKernel(BackendError):
    """The system's compiler doesn't take a kernel: its own trouble, or a bug in minicompile."""


class VerifyError(MinicompileError):
    """An IR broke one of its own rules: a bug in minicompile or in a plugged-in rule."""


class OptionError(MinicompileError, ValueError):
    """An option that does not exist, or a value it can't take."""


class ExportError(MinicompileError, ValueError):
    """A program that can't be exported, a call that an exported one does not allow, a damaged file."""
