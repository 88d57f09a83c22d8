"""Grad mode and autocast, which a captured frame may leave changed, and what a graph that raises has changed.

    Change         how a frame leaves grad mode and autocast
    raised         puts random numbers and inputs back after an exception

The real compiler: torch/_dynamo/variables/ctx_manager.py, torch/_dynamo/resume_execution.py.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from minicompile import compat
from minicompile.compat import settings
from minicompile.compat.inference import version
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
    return None if after == before else Change(after, after.nesting - before.nesting)


def random_states() -> list[tuple[torch.Generator, torch.Tensor]]:
    """Where each default generator stands."""
    return [(generator, generator.get_state()) for generator in generators()]


class Raised(NamedTuple):
    """The exception of a graph whose frame is to run in eager: its kind, and what it says."""

    kind: str
    text: str


class AtOnce:
    """A graph that is called with its inputs one by one, and writes to them as it goes."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    def __call__(self, inputs: list[Any]) -> Any:
        return self.run(*inputs)


def held_by(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of inputs, to be put back."""
    return [x.clone() for x in inputs]


def raised(
    acts: bool,
    error: Exception,
    written: Sequence[torch.Tensor] = (),
    versions: tuple[int, ...] = (),
    held: Sequence[torch.Tensor] = (),
    states: Sequence[tuple[torch.Generator, torch.Tensor]] = (),
) -> Raised:
    """What a graph raised, once random numbers that it drew and inputs that it wrote to are put back. Raised
    again where eager may not run the frame: a hook has been called, inputs have other versions than these and
    it isn't known what they held; and, unless the frame `acts`, memory ran out or code raised that is neither
    torch's nor ours, nor an operator's."""
    frames = traceback.walk_tb(error.__traceback__)  # generated code is in no module
    names = [frame.f_globals.get("__name__", "minicompile") for frame, _ in frames]
    foreign = names[-1].partition(".")[0] not in ("torch", "minicompile")
    aside = (foreign and "torch._ops" not in names) or isinstance(error, torch.OutOfMemoryError)
    late = any(x.is_inference() for x in written) or tuple(map(version, written)) != versions
    if compat.of_hook(error) or (aside and not acts) or (late and not held):
        raise error
    for x, before in zip(written, held):
        x.copy_(before)
    for generator, state in states:
        generator.set_state(state)
    return Raised(type(error).__name__, str(error))


def generators() -> list[torch.Generator]:
    """The default generators of all devices in use; a CUDA graph that is being recorded lets nobody ask."""
    found = [torch.default_generator]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        found += torch.cuda.default_generators
    return found
