"""Autocast as operators see it: is any on, and none inside a block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minicompile.compat.private import take

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla", "ipu", "maia")


def _any_enabled() -> bool:
    return any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES))


@contextlib.contextmanager
def _all_disabled() -> Iterator[None]:
    before = {device: torch.is_autocast_enabled(device) for device in AUTOCAST_DEVICES}
    for device in before:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device, enabled in before.items():
            torch.set_autocast_enabled(device, enabled)


any_autocast_enabled: Callable[[], bool] = take(
    "torch._C._is_any_autocast_enabled", "speed", otherwise=_any_enabled
)
without_autocast: Any = take("torch._C._DisableAutocast", "speed", otherwise=_all_disabled)
"""A context in which operators run in the dtypes they are given."""
