"""Warnings of torch's functions: a capture hears them, every call issues them again, as eager does.

    Recorder.hearing    adds to `recorder.warned` what a function warns of when it runs on fakes
    pipeline.issuing    puts `issue()` of each behind the compiled graph, which may raise itself

The real compiler leaves them where they come up: once while tracing.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from minicompile.ops.origin import SourceLine

PACKAGES = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent / "_")
"""Code that runs in place of eager's: warnings that seem to come from there are about the user's line."""


@dataclass(frozen=True)
class Warned:
    """One warning and the place that it is about."""

    message: Warning
    file: str
    line: int
    module: str
    """Never None, of which `warn_explicit` makes nothing."""
    registry: dict[Any, Any] = field(compare=False)
    """What the place's module has warned of already: most filters let it through once."""

    def issue(self) -> None:
        """Warn. Raises the warning if a filter says so."""
        kind = type(self.message)
        warnings.warn_explicit(self.message, kind, self.file, self.line, self.module, self.registry)

    def __str__(self) -> str:
        text = str(self.message).partition("\n")[0]
        return f"{type(self.message).__name__}: {text}"


def warned(heard: warnings.WarningMessage, line: SourceLine | None) -> Warned:
    """A warning that came up while `line` was captured."""
    file, number = heard.filename, heard.lineno
    if line is not None and file.startswith(PACKAGES):
        file, number = line.file, line.line
    modules = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == file]
    module = modules[0].__name__ if modules else file.removesuffix(".py")
    registry = vars(modules[0]).setdefault("__warningregistry__", {}) if modules else {}
    message = heard.message if isinstance(heard.message, Warning) else heard.category(heard.message)
    return Warned(message, file, number, module, registry)


class AtOnce(torch.autograd.Function):
    """A call that is a torch function to torch."""

    @staticmethod
    def forward(_: Any, call: Callable[[], Any]) -> Any:
        return call()


def at_once(call: Callable[[], Any]) -> Any:
    """What a call gives, which warns before it ends. Warnings of C++ wait for the end of the torch function
    that Python called, which filters around inner operators miss; where there is none they go to stderr."""
    return super(torch.autograd.Function, AtOnce).apply(call)  # type: ignore[misc]


def mentioned(word: str, texts: Iterable[str]) -> bool:
    """Whether a word is in any of these texts."""
    return any(word in re.findall(r"\w+", text) for text in texts)
