"""Arguments of compiled functions: the signature they are bound by, and how large a module among them is."""

from __future__ import annotations

import inspect
import types

import torch

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
