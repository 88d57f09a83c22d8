"""The exceptions a user can meet, each with the way out in its text.

`minicompile errors` lists them with cause and cure; docs/errors.md is what it prints. Exceptions that are
defined elsewhere carry something to an `except` of the package and never reach a user; `lessons.Wrong` is
the verdict on an exercise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minicompile.ops.origin import SourceLine


class MinicompileError(Exception):
    """A command or function can't do what it was asked for; the base of all errors of minicompile's own."""

    id: str = "MC-ERROR"
    """Names the kind of error, in all versions alike."""
    cure: str = "The message says what is missing or what is known in its place."


class Unsupported(MinicompileError):
    """Something a room can't do yet: the caller falls back and counts it.

    `reason` is one sentence, `where` the user's line, `hint` the way out; `id` is the class's, or names the
    reason to run in eager (`dynamo/reasons.py`).
    """

    id = "MC-UNSUPPORTED"
    cure = (
        "Without `fullgraph=True` the frame or operator runs in eager; else follow the usual fix."
    )
    places: Sequence[int] = ()
    """Where the capture could end instead, the best place first: numbers of executed instructions."""

    def __init__(
        self, reason: str, where: SourceLine | None = None, hint: str = "", id: str = ""
    ) -> None:
        super().__init__(reason, where, hint, id)
        self.reason, self.where, self.hint = reason, where, hint
        self.id = id or self.id

    def __str__(self) -> str:
        named = "" if self.id == type(self).id else self.id
        return refusal_text(self.reason, self.where, self.hint, named)


def refusal_text(reason: str, where: SourceLine | None, hint: str, id: str) -> str:
    """What happened, the user's line and the usual fix, each on a line of its own."""
    lines = [f"{reason} [{id}]" if id else reason]
    lines += [f"  at {where}"] if where is not None else []
    lines += [f"  usual fix: {hint}"] if hint else []
    return "\n".join(lines)


class BackendError(MinicompileError):
    """A compile-time tool is missing or failed: a C++ compiler, Triton, a GPU."""

    id = "MC-BACKEND"
    cure = "Install the tool that the message names, or use `backend='aot_eager'`."
    reason = "missing-tool"
    """Names the reason to run in eager (`dynamo/reasons.py`)."""


class RejectedKernel(BackendError):
    """The system's compiler doesn't take a kernel: its own trouble, or a bug in minicompile."""

    id = "MC-KERNEL"
    cure = (
        "The message has the compiler's own words; `minicompile minify` makes a small script of it."
    )


class VerifyError(MinicompileError):
    """An IR broke one of its own rules: a bug in minicompile or in a plugged-in rule."""

    id = "MC-VERIFY"
    cure = "Correct the rule that you plugged in; of minicompile's own, `minicompile bisect` finds which."


class OptionError(MinicompileError, ValueError):
    """A value that doesn't fit: of an option, or of what one asks a stage for."""

    id = "MC-OPTION"
    cure = "Take one of those that the message lists; `minicompile options` explains the options."


class UnknownName(OptionError, KeyError):
    """A registry, rule or level that does not exist."""

    id = "MC-NAME"
    cure = (
        "Take one of those that the message lists; `minicompile rules` lists registries and rules."
    )

    __str__ = Exception.__str__  # a KeyError's is quoted


def unknown(what: str, name: object, known: Iterable[object]) -> UnknownName:
    """The error for a name that is none of the known ones, which it lists."""
    return UnknownName(f"no {what} {name!r}; known: {', '.join(map(str, known))}")


class ExportError(MinicompileError, ValueError):
    """A program that can't be exported, a call that an exported one does not allow, a damaged file."""

    id = "MC-EXPORT"
    cure = (
        "Mend each listed break; call with what the conditions allow; export a damaged file again."
    )
