"""Programs that hang on rounding: a branch on a sum of large numbers that cancel has no one result.

A difference there says nothing of a compiler. It is told by running the plain program again, the numbers that
it sums up changed in their last bits, as another order of adding might change the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minicompile.ops.nodes import aten_ops

RUNS = 6
SUMS = aten_ops(
    "sum mean nansum var var_mean std std_mean cumsum prod logsumexp linalg_vector_norm _log_softmax"
    " _softmax mm bmm addmm baddbmm addmv mv dot convolution mse_loss native_layer_norm native_batch_norm"
)


class Nudged(TorchDispatchMode):
    """Each number in a sum is wrong by some units in its last place, up or down by chance. The same numbers
    have the same sum."""

    def __init__(self, units: int, seed: int = 0) -> None:
        super().__init__()
        self.units, self.seed = units, seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = map(self.nudged, args) if func.overloadpacket in SUMS else args
        return func(*given, **(kwargs or {}))

    def nudged(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        chance = torch.Generator().manual_seed(self.seed)
        signs = torch.randint(0, 2, value.shape, generator=chance) * 2 - 1
        return value + value * (self.units * torch.finfo(value.dtype).eps * signs).to(value.dtype)


def hangs_on_rounding(show: Callable[[], Any]) -> bool:
    """Whether what is shown of a plain program changes with how its sums round."""
    with Nudged(0):
        expected = show()
    for seed in range(RUNS):
        with Nudged(1, seed):
            if show() != expected:
                return True
    return False
