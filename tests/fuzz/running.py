"""The text of a random program as a module of its own."""

from __future__ import annotations

import linecache
from typing import Any


def namespace_of(text: str, name: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a text; gives the names that it defines. Its source can be looked up."""
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names = {"__name__": name} if names is None else names
    exec(compile(text, file, "exec"), names)
    return names
