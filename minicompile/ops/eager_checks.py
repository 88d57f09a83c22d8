"""What eager refuses and FakeTensor allows, where going on would read or write beyond a tensor.

Other refusals of eager's, of a dtype that a kernel doesn't take, say, are not repeated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

PUTS = {aten.index_put.default, aten.index_put_.default}


def check_arguments(op: OpOverload, args: Any) -> None:
    """Raise what eager would: for `select` outside of a dimension (torch 2.11's symbolic fakes allow it), and
    for values of another dtype or size than the places that they are put into."""
    if op is aten.select.int and args[0].dim():
        size, position = args[0].shape[args[1]], args[2]
        if not -size <= position < size:
            raise IndexError(f"select(): index {position} out of range for dimension {args[1]}")
    elif op in PUTS:
        tensor, indices, values, *accumulate = args
        # fakes of index_add put integers into bools
        if tensor.dtype is not values.dtype and not (
            tensor.dtype is torch.bool and any(accumulate)
        ):
            raise RuntimeError(f"{op} puts {values.dtype} into {tensor.dtype}")
        if not any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices
        ):
            values.expand(aten.index.Tensor(tensor, indices).shape)
