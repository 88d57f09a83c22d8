"""What a captured frame may change of its thread, and what a graph that raises has changed already.

    Change         grad mode and autocast
    Noted          inputs and random numbers

The real compiler: torch/_dynamo/variables/ctx_manager.py, torch/_dynamo/resume_execution.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minicompile.compat import settings
from minicompile.compat.settings import Modes

CHANGEABLE = (
    *("grad mode", "autocast cache"),
    *(f"autocast {device}" for device in settings.AUTOCAST_DEVICES),
)
"""Those of the global facts that a `Modes` holds."""


@dataclass(frozen=True)
class Change:
    """What a frame leaves changed: applied to each call's own modes."""

    after: Modes
    blocks: int
    """Autocast blocks that it opened and left open; negative: that it closed."""

    def __call__(self) -> None:
        self.after.set(Modes.now().nesting + self.blocks)


def changed(facts: dict[str, object], before: Modes) -> Change | None:
    """What differs from the facts and modes noted before; None if nothing does.

    Raises ValueError with the name of a fact that can't be set.
    """
    found = settings.global_facts()
    different = [name for name, fact in facts.items() if found[name] != fact]
    if fixed := [name for name in different if name not in CHANGEABLE]:
        raise ValueError(fixed[0])
    after = Modes.now()
    return Change(after, after.nesting - before.nesting) if after != before else None


class Noted:
    """What there was before a graph ran. `mutated`: positions of inputs that it changes.

    When a graph raises, the frame runs again in eager: that raises in the right place, under its handlers.
    Nothing of the frame has happened by then, since writes are replayed afterwards. But the graph itself may
    have drawn random numbers, which are given back, or changed its inputs: then its exception is the call's.
    """

    def __init__(self, mutated: Sequence[int], random: bool, inputs: list[Any]) -> None:
        self.tensors = [inputs[i] for i in mutated]
        self.versions = versions(self.tensors)
        self.states = [(g, g.get_state()) for g in generators()] if random else []

    def undone(self) -> bool:
        """Whether everything is as before, once the random numbers are given back."""
        for generator, state in self.states:
            generator.set_state(state)
        return versions(self.tensors) == self.versions


def versions(tensors: Sequence[torch.Tensor]) -> tuple[float, ...]:
    """How often each was changed; those of inference mode don't count it, and never compare equal."""
    return tuple(float("nan") if t.is_inference() else t._version for t in tensors)


def generators() -> list[torch.Generator]:
    """The default generators of all devices in use."""
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += torch.cuda.default_generators
    return found
