"""When a graph raises, the frame runs again in eager: that raises in the right place, under its handlers.

Nothing of the frame has happened before its graph has ended: writes are replayed afterwards. But the graph
itself may have drawn random numbers by then, which are given back, or changed its inputs: then its exception
is the call's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Noted:
    """What there was before a graph ran."""

    tensors: tuple[torch.Tensor, ...]
    """Inputs that it changes."""
    versions: tuple[float, ...]
    states: tuple[tuple[torch.Generator, torch.Tensor], ...]

    def undone(self) -> bool:
        """Whether everything is as before, once the random numbers are given back."""
        for generator, state in self.states:
            generator.set_state(state)
        return versions(self.tensors) == self.versions


def versions(tensors: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """How often each was changed; those of inference mode don't count it, and never compare equal."""
    return tuple(float("nan") if t.is_inference() else t._version for t in tensors)


def noting(mutated: Sequence[int], random: bool) -> Callable[[list[Any]], Noted]:
    """A function that notes what there is before a graph runs; `mutated`: positions of inputs."""

    def note(inputs: list[Any]) -> Noted:
        tensors = tuple(inputs[i] for i in mutated)
        states = tuple((g, g.get_state()) for g in generators()) if random else ()
        return Noted(tensors, versions(tensors), states)

    return note


def generators() -> list[torch.Generator]:
    """The default generators of all devices in use."""
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += torch.cuda.default_generators
    return found
