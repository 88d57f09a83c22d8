"""Which function is which: torch's bindings, wrappers around functions, how modules are called."""

from __future__ import annotations

from typing import Any

import torch

from minicompile.compat.private import relies_on, take

TensorBase = take("torch._C.TensorBase", "speed", otherwise=torch.Tensor.__base__)
"""The C class below torch.Tensor, which defines its methods."""

BUILTINS: dict[str, Any] = {"nn": take("torch._C._nn", "capture"), "C": take("torch._C", "capture")}
"""Where functions live that torch writes in C++, among others."""

VariableFunctions = take("torch._C._VariableFunctions", "capture")
BINDINGS = [
    take(f"torch._C.{name}", "recognition", otherwise=None)
    for name in ("_nn", "_fft", "_linalg", "_special", "_sparse", "_nested")
]

GLOBAL_HOOK_TABLES: list[dict[Any, Any]] = [
    take(f"torch.nn.modules.module._global_{kind}_hooks", "capture")
    for kind in ("backward_pre", "backward", "forward_pre", "forward")
]
"""The hooks that apply to every nn.Module."""

relies_on(
    "torch.nn.Module._call_impl torch.nn.Module.__call__ torch.nn.Module.__getattr__", "capture"
)
module_call, module_getattr = torch.nn.Module.__call__, torch.nn.Module.__getattr__
module_call_impl = take("torch.nn.Module._call_impl", "capture")
"""The function that `nn.Module.__call__` ends in: hooks around `forward`."""

CONTROL_FLOW = [
    take(f"torch._higher_order_ops.{name}", "recognition", otherwise=None)
    for name in ("cond", "while_loop", "scan", "map")
]
"""Functions that call other functions once, often, or not at all, as tensors say."""

DISABLING_FILE = take("torch._compile.__file__", "recognition", otherwise=None)
"""Where torch wraps its own functions to keep its compiler out of them."""


def is_operator_binding(function: Any) -> bool:
    """Does a C function call one of torch's operators (`torch.relu`, `torch._C._nn.gelu`)?"""
    owner = function.__self__
    if owner is None or type(owner) is type(VariableFunctions):
        return bool(getattr(VariableFunctions, function.__name__, None) == function)
    return any(owner is binding for binding in BINDINGS)


def wrapped_original(function: Any) -> Any:
    """Return the function that `torch.compiler.disable` or torch itself wrapped; None if none was.

    torch wraps some functions of its own (`torch.manual_seed`) when torch._dynamo is imported, and
    `nn.Module.__init__` at the first use of torch.compile.
    """
    if function.__qualname__ == "install_generation_tagging_init.<locals>.patched_init":
        return function.__closure__[0].cell_contents
    if getattr(function, "_torchdynamo_disable", False):
        return getattr(function, "_torchdynamo_orig_callable", None)
    if function.__code__.co_filename == DISABLING_FILE:
        return getattr(function, "__wrapped__", None)
    return None
