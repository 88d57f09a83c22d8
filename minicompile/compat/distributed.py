"""Functions with which processes exchange tensors."""

from __future__ import annotations

import torch

NAMES = """all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single
    barrier batch_isend_irecv broadcast broadcast_object_list gather gather_object irecv isend recv reduce
    reduce_scatter reduce_scatter_tensor scatter scatter_object_list send"""
COLLECTIVES = [
    getattr(torch.distributed, n) for n in NAMES.split() if hasattr(torch.distributed, n)
]
"""Functions with which processes exchange tensors in place. None where torch was built without."""
