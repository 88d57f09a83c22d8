"""Grad mode, autocast and the like that a frame changes; and undoing what a graph that raised had changed.

    Change         grad mode and autocast
    raised         random numbers

The real compiler: torch/_dynamo/variables/ctx_manager.py, torch/_dynamo/resume_execution.py.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minicompile import compat
from minicompile.compat.inference import version
from minicompile.compat.settings import Modes


@dataclass(frozen=True)
class Change:
    """What a frame leaves changed: applied to each call's own modes."""

    after: Modes
    blocks: int
    """Autocast blocks that it opened and left open; negative: that it closed."""

    def __call__(self) -> None:
        self.after.set(Modes.now().nesting + self.blocks)


def changed(before: Modes) -> Change | None:
    """What differs from the modes noted before; None if nothing does."""
    after = Modes.now()
    return None if after == before else Change(after, after.nesting - before.nesting)


def random_states() -> list[tuple[torch.Generator, torch.Tensor]]:
    """Where each default generator stands; a CUDA graph that is being recorded lets nobody ask."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators += torch.cuda.default_generators
    return [(generator, generator.get_state()) for generator in generators]


class GraphRaised(NamedTuple):
    """The exception of a graph whose frame is to run in eager: its kind, and what it says."""

    kind: str
    text: str


def raised(
    acts: bool,
    error: Exception,
    written: Sequence[torch.Tensor] = (),
    versions: tuple[int, ...] = (),
    states: Sequence[tuple[torch.Generator, torch.Tensor]] = (),
) -> GraphRaised:
    """What a graph raised, once random numbers that it drew are put back. Raised again where eager may not
    run the frame: a hook has been called, inputs have other versions than these; and, unless the frame
    `acts`, code raised that is neither torch's nor ours, nor an operator's."""
    frames = traceback.walk_tb(error.__traceback__)  # generated code is in no module
    names = [frame.f_globals.get("__name__", "minicompile") for frame, _ in frames]
    foreign = names[-1].partition(".")[0] not in ("torch", "minicompile")
    aside = foreign and "torch._ops" not in names
    late = any(x.is_inference() for x in written) or tuple(map(version, written)) != versions
    if compat.of_hook(error) or (aside and not acts) or late:
        raise error
    for generator, state in states:
        generator.set_state(state)
    return GraphRaised(type(error).__name__, str(error))
