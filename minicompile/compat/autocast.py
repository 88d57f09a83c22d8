"""Autocast as operators see it: is any on, and none inside a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minicompile.compat.private import take

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla", "ipu", "maia")

any_autocast_enabled: Callable[[], bool] = take("torch._C._is_any_autocast_enabled", "capture")
without_autocast: Any = take("torch._C._DisableAutocast", "capture")
"""A context in which operators run in the dtypes they are given."""
