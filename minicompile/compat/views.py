"""Views as autograd knows them."""

from __future__ import annotations

import torch

from minicompile.compat.private import relies_on, take

relies_on("torch.Tensor._base", "capture")

is_view = take("torch.Tensor._is_view", "capture")
"""Does autograd follow writes from the tensor to the one it was made of?"""


def autograd_base(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which autograd takes this one to be a view; itself if it is none."""
    return tensor if tensor._base is None else tensor._base
