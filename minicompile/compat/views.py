"""Views as autograd knows them: their base, how they were made, and whether they may be written to."""

from __future__ import annotations

from typing import Any

import torch

from minicompile.compat.private import relies_on, take

relies_on("torch.Tensor._base", "capture")

is_view = take("torch.Tensor._is_view", "capture")
"""Does autograd follow writes from the tensor to the one it was made of?"""
creation_meta = take("torch._C._autograd._get_creation_meta", "capture")
"""How a view was made, which decides whether autograd lets it be written to."""
set_creation_meta = take("torch._C._autograd._set_creation_meta", "capture")
CreationMeta = take("torch._C._autograd.CreationMeta", "capture")
VIEW_AS_USUAL = CreationMeta.DEFAULT
VIEW_OF_FUNCTION = CreationMeta.IN_CUSTOM_FUNCTION


def autograd_base(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which autograd takes this one to be a view; itself if it is none."""
    return tensor if tensor._base is None else tensor._base


def how_made(tensor: torch.Tensor) -> Any:
    """Return what autograd lets be done in place to a view, comparable with `==`; None if it is no view."""
    return creation_meta(tensor) if is_view(tensor) else None
