"""The autograd engine: saved tensors and the hooks on them, nodes, and how a Function is applied."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from minicompile.compat.private import relies_on, take

# Hooks on saved tensors ---------------------------------------------------------------------------

AUTOGRAD = "torch._C._autograd"
top_saved_tensors_hooks = take(f"{AUTOGRAD}._top_saved_tensors_default_hooks", "capture")
"""Called with True: the user's functions that get what is saved for the backward, and give it; or None."""
push_hooks = take(f"{AUTOGRAD}._push_saved_tensors_default_hooks", "capture")
pop_hooks = take(f"{AUTOGRAD}._pop_saved_tensors_default_hooks", "capture")


StopRecomputation: Any = take(
    "torch.utils.checkpoint._StopRecomputationError", "speed", otherwise=()
)
"""The exception that ends a second run; an `except ()` catches nothing."""


class WatchedHooks:
    """The user's hooks on saved tensors while a graph runs.

    `torch.utils.checkpoint` ends a second run by an exception that its hook raises. It waits in `ended`,
    because the graph's caller still has to make the changes that eager made before.
    """

    def __init__(self) -> None:
        self.ended: Exception | None = None
        self.pack, unpack = top_saved_tensors_hooks(True)
        push_hooks(self, unpack)
        self.leave = pop_hooks

    def __call__(self, saved: torch.Tensor) -> Any:
        try:
            return saved if self.ended else self.pack(saved)
        except StopRecomputation as error:
            self.ended = error
            return saved


def of_hook(error: BaseException) -> bool:
    """Did the user's hook for what is saved raise it?"""
    code = WatchedHooks.__call__.__code__
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Hide the user's hooks on saved tensors: they are not meant for fake ones."""
    hooks = []
    while (top := top_saved_tensors_hooks(True)) is not None:
        hooks.append(top)
        pop_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_hooks(pack, unpack)


# autograd.Function ---------------------------------------------------------------------------------


UNPACKS_ONE = relies_on(
    "torch._C._FunctionBase._raw_saved_tensors", "speed", replaced=True
) & relies_on(f"{AUTOGRAD}.SavedTensor.unpack", "speed", replaced=True)
"""Can one saved tensor be had without the others?"""


def saved_tensors(ctx: Any, numbers: Collection[int]) -> dict[int, torch.Tensor]:
    """Return some of an autograd.Function's saved tensors, by number.

    The others may have been written to, if `UNPACKS_ONE`; else a write to any of them is an error as soon as
    one is wanted. RuntimeError once they are freed.
    """
    try:
        whole = ctx.saved_tensors if numbers else ()
        return {i: whole[i] for i in numbers}
    except RuntimeError:
        if not UNPACKS_ONE:
            raise
        return {i: ctx._raw_saved_tensors[i].unpack() for i in numbers}


def clear_saved_tensors(ctx: Any) -> None:
    """Let an autograd.Function's saved tensors die before its backward ends, unless the graph is retained."""
    clear = getattr(ctx, "maybe_clear_saved_tensors", None)
    if clear is not None:
        clear()


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` for where no transform of torch.func is active: 2 microseconds less."""
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


grad_impl = take("torch._functorch.eager_transforms.grad_impl", "capture")
grad_and_value_impl = take("torch._functorch.eager_transforms.grad_and_value_impl", "capture")
"""What the functions that `torch.func.grad` and `grad_and_value` return call."""

BackwardCFunction: Any = take("torch.autograd.function.BackwardCFunction", "training")


_APPLY: Any = vars(torch.autograd.Function).get("apply", torch.autograd.Function.apply)
function_apply: Callable[..., Any] = getattr(_APPLY, "__func__", _APPLY)
"""The function that `Fn.apply(...)` calls with the class `Fn` first: in Python, and in C from torch 2.14."""
