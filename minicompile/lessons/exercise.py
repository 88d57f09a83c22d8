"""Check cells: a verdict on what the reader answered, always the same words for the same answer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def verdict(exercise: str, given: Any, expected: Any, hint: str = "") -> None:
    """Print whether an answer is right. `None` is no answer yet; `hint` helps after a wrong one."""
    if given is None:
        print(f"{exercise}: no answer yet")
    elif given == expected and type(given) is type(expected):
        print(f"{exercise} pass")
    else:
        print(f"{exercise}: {given!r} is not it." + (f" {hint}" if hint else ""))


def verdict_any(exercise: str, given: Any, accepted: Collection[Any], hint: str = "") -> None:
    """Like `verdict`, where several answers are right."""
    verdict(exercise, given, given if given in accepted else object(), hint)
