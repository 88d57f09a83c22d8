"""Grad mode and autocast of this thread: what a captured frame may change.

The real compiler: torch/_dynamo/variables/ctx_manager.py, torch/_dynamo/resume_execution.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from minicompile import compat

CHANGEABLE = (
    *("grad mode", "autocast cache"),
    *(f"autocast {device}" for device in compat.AUTOCAST_DEVICES),
)
"""Those of the global facts that a `Modes` holds."""


@dataclass(frozen=True)
class Modes:
    """What `torch.no_grad` and `torch.autocast` set."""

    grad: bool
    casts: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    nesting: int
    """Open autocast blocks; the cache is cleared when the last one ends."""

    @staticmethod
    def now() -> Modes:
        casts = tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in compat.AUTOCAST_DEVICES
        )
        torch.autocast_increment_nesting()
        nesting = torch.autocast_decrement_nesting()
        return Modes(torch.is_grad_enabled(), casts, torch.is_autocast_cache_enabled(), nesting)

    def set(self, nesting: int) -> None:
        """Make them this thread's, with so many open autocast blocks."""
        torch.set_grad_enabled(self.grad)
        for device, enabled, dtype in self.casts:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        while torch.autocast_increment_nesting() <= nesting:
            pass
        while torch.autocast_decrement_nesting() > nesting:
            pass


@contextlib.contextmanager
def restored_modes() -> Iterator[None]:
    """Grad mode and autocast as before, whatever happens inside."""
    before = Modes.now()
    try:
        yield
    finally:
        before.set(before.nesting)


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
    found = compat.global_facts()
    different = [name for name, fact in facts.items() if found[name] != fact]
    if fixed := [name for name in different if name not in CHANGEABLE]:
        raise ValueError(fixed[0])
    after = Modes.now()
    return Change(after, after.nesting - before.nesting) if after != before else None
