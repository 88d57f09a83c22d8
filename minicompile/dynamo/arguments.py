"""Arguments of compiled functions: the signature that they are bound by, which calls are alike, and how large
a module among them is."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch

from minicompile.dynamo.variables import is_constant

LARGE_MODULE = 24
"""Modules in a module from which on its identity is guarded first: looking at each takes too long."""


def is_large(module: torch.nn.Module) -> bool:
    """Whether a module has many modules below it. Runs no code of theirs."""
    waiting, count = [module], 0
    while waiting and count < LARGE_MODULE:
        below = vars(waiting.pop()).get("_modules") or {}
        waiting += [inner for inner in dict.values(below) if isinstance(inner, torch.nn.Module)]
        count += 1
    return count >= LARGE_MODULE


def signature_of(function: types.FunctionType) -> inspect.Signature:
    """A function's own signature, whatever it wraps or pretends to be."""
    code, defaults, cells = function.__code__, function.__defaults__, function.__closure__
    bare = types.FunctionType(code, {}, "bare", defaults, cells)
    bare.__kwdefaults__ = function.__kwdefaults__
    return inspect.signature(bare)


def fingerprint(value: Any, depth: int = 0) -> Any:
    """What two calls must share for a refusal of one to stand for the other; hashable."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):  # reads of others would run user code
        about = value.dtype, tuple(value.shape), value.device, value.requires_grad
        return type(value), value.is_inference(), *about
    if is_constant(value):
        return type(value), repr(value)
    if type(value) in (list, tuple, dict) and depth < 4:
        items = value.items() if type(value) is dict else value
        return type(value), tuple(fingerprint(item, depth + 1) for item in items)
    if isinstance(value, torch.nn.Module):
        return type(value), id(value), vars(value).get("training"), torch.is_grad_enabled()
    return type(value)
