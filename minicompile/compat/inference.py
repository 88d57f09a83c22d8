"""Inference mode: frames are captured out of it, and their graphs run in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from minicompile.compat.private import relies_on, take

# Without it, tensors made in inference mode are refused where fakes are made.
plain_fakes: Any = take(
    "torch._subclasses.meta_utils.disable_inference_mode_for_fake_prop",
    "recognition",
    otherwise=contextlib.nullcontext,
)
relies_on("torch.Tensor._version", "capture")


@contextlib.contextmanager
def without_inference_mode() -> Iterator[None]:
    """Leave inference mode, with gradients still off; fakes of inference tensors are ordinary fakes.

    Tensors of inference mode have no versions and no bases, by which writes and views are recognised.
    """
    if not torch.is_inference_mode_enabled():
        with plain_fakes():
            yield
    else:
        with plain_fakes(), torch.inference_mode(False), torch.no_grad():
            yield


def mark_inference(fake: Any) -> None:
    """Note that an ordinary fake stands for an inference tensor."""
    fake.stands_for_inference = True


def is_inference(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or the one that a fake stands for, is an inference tensor."""
    return tensor.is_inference() or getattr(tensor, "stands_for_inference", False)


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; always 0 for inference tensors, which don't count."""
    return 0 if tensor.is_inference() else tensor._version
