"""Python functions made from generated text, which tracebacks show line by line."""

from __future__ import annotations

import itertools
import linecache
import weakref
from typing import Any

_numbers = itertools.count()


class GeneratedText:
    """Source of generated code; `linecache`, and so every traceback, has it while this object lives."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.show()
        weakref.finalize(self, linecache.cache.pop, file, None).atexit = False

    def show(self) -> None:
        """Put the text into `linecache`, which others may have emptied."""
        lines = self.text.splitlines(keepends=True)
        linecache.cache[self.file] = (len(self.text), None, lines, self.file)


def define(name: str, text: str, names: dict[str, Any], title: str = "") -> Any:
    """Run a text, and return the function `name` that it defines. `title`: what tracebacks call its file."""
    file = f"<minicompile {title or name} {next(_numbers)}>"
    exec(compile(text, file, "exec"), names)
    function = names.pop(name)  # else it and its globals would hold each other
    function._minicompile_text = GeneratedText(file, text)
    return function
