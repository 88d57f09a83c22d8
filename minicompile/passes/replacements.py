"""The call that a rewrite puts into a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Replacement:
    """What a rewrite calls in a graph, until the next level traces it."""

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.__name__, self.run = name, run

    def __call__(self, *values: Any) -> Any:
        results = self.run(*values)
        return results if len(results) > 1 else results[0]

    def __str__(self) -> str:
        return f"pattern {self.__name__}"
