"""What rewrites of graphs share: the place that is rewritten, and the call that takes its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

Function = Callable[..., Any]


@dataclass(frozen=True)
class Match:
    """A place to rewrite: the nodes that give the results, the arguments they are computed from, the nodes
    replaced."""

    results: tuple[fx.Node, ...]
    arguments: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]

    @property
    def values(self) -> list[Any]:
        """The arguments when compiling: fake tensors and numbers."""
        return [value_of(argument) for argument in self.arguments]


class Replacement:
    """What a rewrite calls in a graph, until the next level traces it."""

    def __init__(self, name: str, run: Function) -> None:
        self.__name__, self.run = name, run

    def __call__(self, *values: Any) -> Any:
        results = self.run(*values)
        return results if len(results) > 1 else results[0]

    def __str__(self) -> str:
        return f"pattern {self.__name__}"


def value_of(argument: Any) -> Any:
    """What is known of a node when compiling; numbers are themselves."""
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument
