"""What processes do together: collectives and process groups."""

from __future__ import annotations

from typing import Any

import torch

from minicompile.compat.private import later

NAMES = """all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single
    barrier batch_isend_irecv broadcast broadcast_object_list gather gather_object irecv isend recv reduce
    reduce_scatter reduce_scatter_tensor scatter scatter_object_list send"""
FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"
"""A module that takes two seconds to import: known by name."""
COLLECTIVES = [
    getattr(torch.distributed, n) for n in NAMES.split() if hasattr(torch.distributed, n)
]
"""Functions with which processes exchange tensors in place. None where torch was built without."""


def is_collective(op: Any) -> bool:
    """Does an operator exchange tensors with other processes, or wait for that: in one order for all?"""
    return getattr(op, "namespace", "").startswith("_c10d_functional")


def wait_tensor() -> torch._ops.OpOverload:
    """Return the operator that waits for a collective's result; of another tensor it does nothing."""
    op: torch._ops.OpOverload = torch.ops._c10d_functional.wait_tensor.default
    return op


def group_name(group: Any) -> str | None:
    """Return the name by which operators know a ProcessGroup; None for anything else."""
    process_group = getattr(torch.distributed, "ProcessGroup", ())
    return str(group.group_name) if isinstance(group, process_group) else None


resolve_group = later("torch.distributed.distributed_c10d._resolve_process_group", "processes")


def group_size(name: str) -> int:
    """Return how many processes a group has."""
    return int(resolve_group()(name).size())
