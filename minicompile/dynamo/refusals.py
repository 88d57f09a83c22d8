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

_LOGGING = "debug info warning error critical log exception"
_TRANSFORMS = (
    "grad grad_and_value vjp jvp jacrev jacfwd hessian linearize functional_call functionalize"
)
FUNCTIONS: tuple[tuple[str, str, Any, str], ...] = (
    ("print", "print writes to the terminal", builtins, "print"),
    ("log", "a warning is issued", warnings, "warn"),
    ("log", "a logger is looked up", logging, "getLogger"),
    ("log", "a log message is written", logging.Logger, _LOGGING),
    ("file-or-terminal", "a file is opened", builtins, "open"),
    ("file-or-terminal", "input() asks the user", builtins, "input"),
    ("file-or-terminal", "tensors are written to a file, or read", torch, "save load"),
    ("code-from-text", "code is evaluated from text", builtins, "exec eval compile"),
    ("memory-address", "id() depends on memory addresses", builtins, "id"),
    ("frame-inspection", "the frame's variables are inspected", builtins, "locals vars"),
    ("frame-inspection", "the frame's variables are inspected", inspect, "currentframe stack"),
    ("frame-inspection", "the frame's variables are inspected", sys, "_getframe"),
    ("autograd-state", "`detach_` changes how autograd treats a tensor", torch, "detach_"),
    ("class-change", "a class is defined", builtins, "__build_class__"),
    ("outside-object", "a deque is made", collections, "deque"),
    ("outside-object", "a subclass of defaultdict is made", collections.defaultdict, "__init__"),
    ("tensor-memory", "a tensor's shape changes in place", torch, "resize_as_ as_strided_"),
    ("checkpoint", "activation checkpointing", checkpoint, "checkpoint checkpoint_sequential"),
    ("nested-compile", "torch.compile is called inside the captured function", torch, "compile"),
    ("nested-compile", "torch.compiler.disable is called", torch.compiler, "disable"),
    ("backward", "gradients are computed by the captured function", autograd, "grad backward"),
    ("inference-mode", "inference mode is switched", torch.inference_mode, "__enter__ __exit__"),
    ("context-variable", "a ContextVar is set", contextvars.ContextVar, "set reset"),
    ("default-dtype-or-device", "the default dtype is set", torch, "set_default_dtype"),
    ("default-dtype-or-device", "the default device is set", torch, "set_default_device"),
    ("default-dtype-or-device", "the default device is set", torch.device, "__enter__"),
    ("random-state", "the random state is changed", torch, "manual_seed seed set_rng_state"),
    ("function-transform", "torch.func transforms", torch.func, _TRANSFORMS),
    ("function-transform", "torch.vmap", torch, "vmap"),
)
"""(id of the reason, what happened, where the functions are, their names)."""

OF_TENSORS = (
    ("item", "`.{}()` needs the tensor's data", "item tolist apply_ map_"),
    ("item", "a tensor is turned into a Python number by {}", "__bool__ __int__ __float__"),
    ("item", "a tensor is turned into a Python number by {}", "__index__ __complex__"),
    ("item", "`{}` needs the tensor's data", "__contains__"),
    ("numpy", "`.{}()` needs the tensor's data", "numpy"),
    ("numpy", "`.{}()` exports the tensor's memory", "__array__ __dlpack__"),
    ("autograd-state", "`.{}()` changes how autograd treats a tensor", "retain_grad detach_"),
    ("autograd-state", "`.{}` is read inside the captured function", "grad grad_fn data _version"),
    ("autograd-state", "`.{}()`: a hook on a tensor", "register_hook"),
    ("backward", "`.{}()` runs inside the captured function", "backward"),
    ("tensor-memory", "`.{}()` changes a tensor's storage", "set_ resize_ share_memory_"),
    ("tensor-memory", "`.{}()` changes a tensor's shape", "resize_as_ as_strided_ t_ transpose_"),
    (
        "tensor-memory",
        "`.{}()` changes a tensor's shape",
        "swapaxes_ swapdims_ squeeze_ unsqueeze_",
    ),
    ("tensor-memory", "`.{}()`: a captured tensor has no memory", "data_ptr storage"),
    ("tensor-memory", "`.{}()`: a captured tensor has no memory", "untyped_storage"),
    ("tensor-memory", "`.{}()` is no part of the guards", "storage_offset is_shared is_pinned"),
    ("tensor-memory", "`.{}()` is no part of the guards", "is_set_to _is_view"),
    ("tensor-attribute", "{} of a tensor", "__hash__ __repr__ __str__ __format__"),
    ("tensor-attribute", "{} of a tensor", "__reduce_ex__ __deepcopy__"),
)
"""Attributes and methods of tensors: (id, what happened, names)."""
TENSOR_REFUSED = {
    name: (id, what.format(name)) for id, what, names in OF_TENSORS for name in names.split()
}
"""The same by name."""
