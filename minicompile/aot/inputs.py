"""What a captured graph is traced on: stand-ins for its inputs, which it may write to, and for memory that
several of them share.

The real compiler: torch/_functorch/_aot_autograd/runtime_wrappers.py (merge_view_inputs).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch

from minicompile import compat
from minicompile.aot.layout import empty_like_layout, extent, is_dense
from minicompile.aot.result import SharedMemory
from minicompile.errors import Unsupported


def refuse_layouts(fakes: list[Any]) -> None:
    """Sparse tensors have no strides; with CUDA tensors but without CUDA, autograd ends the process."""
    for value in fakes:
        if not isinstance(value, torch.Tensor):
            continue
        if value.layout is not torch.strided:
            raise Unsupported(f"an input has layout {value.layout}")
        if value.device.type == "cuda" and not torch.backends.cuda.is_built():
            raise Unsupported("CUDA tensors can't be traced with a build of torch without CUDA")


def autograd_base(value: torch.Tensor) -> torch.Tensor:
    """The tensor of which autograd takes this one to be a view; itself if it is none."""
    return value if value._base is None else value._base


def shared_memories(fakes: list[Any], written: Collection[int]) -> tuple[SharedMemory, ...]:
    """The inputs' tensors of autograd, where several inputs share memory and one is written to. If they are
    several too, or there are gaps between their elements, the storage as a whole comes first.
    """
    storages: dict[int, dict[int, list[int]]] = {}
    for i, value in enumerate(fakes):
        if isinstance(value, torch.Tensor):
            groups = storages.setdefault(compat.storage_id(value), {})
            groups.setdefault(id(autograd_base(value)), []).append(i)
    found: list[SharedMemory] = []
    for groups in storages.values():
        members = [i for group in groups.values() for i in group]
        if len(members) == 1 or not set(members) & set(written):
            continue
        bases = [autograd_base(fakes[i]) for i in members]
        if len(groups) > 1 or not is_dense(bases[0]):
            found.append(SharedMemory(members[0], (), max(map(extent, bases))))
        found += [SharedMemory(group[0], tuple(group)) for group in groups.values()]
    return tuple(found)


def stand_ins(
    fakes: list[Any], memories: tuple[SharedMemory, ...], mode: Any, training: bool
) -> list[Any]:
    """Fakes to trace with: of the captured ones, then of the memories. Inputs that share memory still do;
    what is computed from something that requires grad still is.
    """
    sharers = Counter(compat.storage_id(x) for x in fakes if isinstance(x, torch.Tensor))
    roots: dict[int, torch.Tensor] = {}
    inputs: list[Any] = []
    for value in [*fakes, *memories]:
        if isinstance(value, SharedMemory):
            member = fakes[value.of]
            root, like = roots.get(compat.storage_id(member)), autograd_base(member)
            if value.size is not None:
                like = compat.new_fake(mode, (value.size,), (1,), like.dtype, like.device)
            made = empty_like_layout(mode, like) if root is None else view_like(root, like).detach()
            roots.setdefault(compat.storage_id(member), made)
        elif isinstance(value, torch.Tensor):
            alone, like = sharers[compat.storage_id(value)] == 1, value
            made = empty_like_layout(mode, value) if alone else value.data  # own version
        else:
            inputs.append(value)
            continue
        if training and like.requires_grad and not like.is_leaf:
            # it may be written to, which gives it another history
            source = compat.new_fake(mode, (), (), like.dtype, like.device)
            made.copy_(source.requires_grad_())
        inputs.append(made.requires_grad_(training and like.requires_grad))
    return inputs


def view_like(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The part of a base's memory that another tensor is."""
    if like.element_size() != base.element_size():
        raise Unsupported("inputs share memory as types of several sizes, and one is written to")
    base = base if like.dtype is base.dtype else base.view(like.dtype)
    return base.as_strided(like.shape, like.stride(), like.storage_offset())


def views_of_memories(
    inputs: list[Any], fakes: list[Any], memories: tuple[SharedMemory, ...], training: bool
) -> list[Any]:
    """The stand-ins of inputs, those in shared memories as views of these."""
    live = inputs[: len(fakes)]
    with compat.no_dispatch_modes():  # autograd may replay a view to answer
        tracked = [getattr(value, "grad_fn", None) is not None for value in fakes]
    for memory, base in zip(memories, inputs[len(fakes) :]):
        for i in memory.members:
            live[i] = base
            if (like := fakes[i])._base is not None:
                with torch.set_grad_enabled(training and tracked[i]):
                    live[i] = view_like(base, like)
                if training:
                    compat.set_creation_meta(live[i], compat.creation_meta(like))
    return live
