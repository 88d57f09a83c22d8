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
    return (creation_meta(tensor), has_forgotten_history(tensor)) if is_view(tensor) else None


def has_forgotten_history(view: torch.Tensor) -> bool:
    """Has a view's base come to require grad since the view was made?

    Autograd then takes the view for a leaf, and refuses writes, until somebody asks for its history. So this
    function asks by a write that can't be carried out: of a tensor whose shape doesn't fit.
    """
    if not is_view(view) or creation_meta(view) != VIEW_AS_USUAL:
        return False
    base = autograd_base(view)
    if base.is_leaf or not base.requires_grad:
        return base.requires_grad and view.is_leaf  # a view of a leaf may never be written to
    try:
        with torch.enable_grad():
            view.add_(torch.empty(()).expand(2, *[1] * view.dim()))
    except RuntimeError as error:
        return str(error).startswith("a leaf Variable")
    return False
