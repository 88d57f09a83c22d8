"""One table of functions that capture never enters: a call of them is a graph break.

The real compiler: torch/_dynamo/trace_rules.py, torch/_dynamo/graph_break_registry.json.
"""

from __future__ import annotations

import builtins
import collections
import contextvars
import inspect
import logging
import sys
import warnings
from typing import Any

import torch
from torch import autograd
from torch.utils import checkpoint

COLLECTIVES = """all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single
    barrier batch_isend_irecv broadcast broadcast_object_list gather gather_object irecv isend recv reduce
    reduce_scatter reduce_scatter_tensor scatter scatter_object_list send"""
"""Functions with which processes exchange tensors. None where torch was built without."""
FUNCTIONS: tuple[tuple[str, Any, str], ...] = (
    ("print", builtins, "print"),
    ("log", warnings, "warn"),
    ("log", logging, "getLogger"),
    ("log", logging.Logger, "debug info warning error critical log exception"),
    ("file-or-terminal", builtins, "open input"),
    ("file-or-terminal", torch, "save load"),
    ("code-from-text", builtins, "exec eval compile"),
    ("memory-address", builtins, "id"),
    ("frame-inspection", builtins, "locals vars"),
    ("frame-inspection", inspect, "currentframe stack"),
    ("frame-inspection", sys, "_getframe"),
    ("autograd-state", torch, "detach_"),
    ("class-change", builtins, "__build_class__"),
    ("class-change", type, "__call__"),
    ("outside-object", collections, "deque"),
    ("outside-object", collections.defaultdict, "__init__"),
    ("tensor-memory", torch, "resize_as_ as_strided_"),
    ("checkpoint", checkpoint, "checkpoint checkpoint_sequential"),
    ("nested-compile", torch, "compile"),
    ("nested-compile", torch.compiler, "disable"),
    ("backward", autograd, "grad backward"),
    ("inference-mode", torch.inference_mode, "__enter__ __exit__"),
    ("inference-mode", torch, "is_inference"),
    ("context-variable", contextvars.ContextVar, "get set reset"),
    ("default-dtype-or-device", torch, "set_default_dtype set_default_device"),
    ("default-dtype-or-device", torch.device, "__enter__"),
    ("random-state", torch, "manual_seed seed set_rng_state"),
    (
        "function-transform",
        torch.func,
        "grad grad_and_value vjp jvp jacrev jacfwd hessian linearize functional_call functionalize",
    ),
    ("function-transform", torch, "vmap"),
    ("several-processes", torch.distributed, COLLECTIVES),
)
"""(id of the reason, where the functions are, their names)."""

LAUNCHES = (
    "triton.runtime.jit.run",
    "triton.runtime.autotuner.run",
    "triton.runtime.interpreter.run",
)
"""The methods that launch a user's Triton kernel: compiled; autotuned or with heuristics; interpreted."""

OF_TENSORS = (
    (
        "item",
        "item tolist apply_ map_ __bool__ __int__ __float__ __index__ __complex__ __contains__",
    ),
    ("numpy", "numpy __array__ __dlpack__"),
    (
        "autograd-state",
        "retain_grad detach_ grad grad_fn data _version register_hook",
    ),
    ("backward", "backward"),
    ("inference-mode", "is_inference"),
    ("tensor-memory", "set_ resize_ share_memory_ data_ptr storage untyped_storage"),
    ("tensor-memory", "storage_offset is_shared is_pinned is_set_to _is_view"),
    (
        "tensor-memory",
        "resize_as_ as_strided_ t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_",
    ),
    ("tensor-attribute", "__hash__ __repr__ __str__ __format__ __iter__ __len__"),
    ("tensor-attribute", "__reduce_ex__ __deepcopy__"),
)
"""Attributes and methods of tensors: (id of the reason, their names)."""
TENSOR_REFUSED = {
    name: (id, f"`.{name}` of a tensor is used")
    for id, names in OF_TENSORS
    for name in names.split()
}
"""By name: the id of the reason, and what happened."""
