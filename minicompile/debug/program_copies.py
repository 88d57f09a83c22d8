"""Copies of a program and of all that it reads: a tool runs it without changing anything of the user's."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def same_random_state() -> Iterator[Callable[[], bool]]:
    """Restore the state of random numbers after the block; the function says whether any were drawn."""
    numpy = sys.modules.get("numpy")
    kept = random.getstate(), numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        begun = torch.get_rng_state()

        def drew() -> bool:
            return random.getstate() != kept[0] or not torch.equal(torch.get_rng_state(), begun)

        try:
            yield drew
        finally:
            random.setstate(kept[0])
            if numpy is not None:
                numpy.random.set_state(kept[1])


class Copier:
    """Deep copies that share what the originals share; also of what functions close over."""

    def __init__(self) -> None:
        self.memo: dict[int, Any] = {}
        self.kept: list[Any] = []

    def tensors(self) -> list[torch.Tensor]:
        """The copied tensors that are leaves, in the order of copying."""
        tensors = (v for v in self.memo.values() if isinstance(v, torch.Tensor))
        return list({id(tensor): tensor for tensor in tensors if tensor.is_leaf}.values())

    def __call__(self, value: Any, depth: int = 0) -> Any:
        self.prepare(value, depth)
        return copy.deepcopy(value, self.memo)

    def prepare(self, value: Any, depth: int = 0) -> None:
        """Copy beforehand what deepcopy would not: results of autograd, and functions."""
        if id(value) in self.memo or depth > MAX_DEPTH:
            return
        if isinstance(value, torch.Tensor):
            if not value.is_leaf:
                self.remember(value, value.detach().clone().requires_grad_())
        elif isinstance(value, types.FunctionType):
            self.remember(value, self.function(value, depth))
        elif isinstance(value, types.MethodType):
            copies = (self(part, depth + 1) for part in (value.__func__, value.__self__))
            self.remember(value, types.MethodType(*copies))
        elif isinstance(value, list | tuple | set | frozenset | dict):
            for item in value.values() if isinstance(value, dict) else value:
                self.prepare(item, depth + 1)

    def remember(self, value: Any, copied: Any) -> None:
        self.memo[id(value)] = copied
        self.kept.append(value)

    def function(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        """Copy a function with the tensors, modules and functions that it reads. Its code is copied too,
        since torch.compile keeps compiled versions with the code."""
        if str(function.__module__).partition(".")[0] in ("torch", "minicompile"):
            return function
        names = {**function.__globals__}
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        twin = types.FunctionType(
            *(function.__code__.replace(), names, function.__name__, function.__defaults__, cells)
        )
        twin.__kwdefaults__ = function.__kwdefaults__
        twin.__dict__.update(function.__dict__)
        twin.__qualname__, twin.__module__ = function.__qualname__, function.__module__
        self.remember(function, twin)
        for name in names_used(function.__code__):
            if isinstance(names.get(name), COPIED):
                names[name] = self(names[name], depth + 1)
        for old, new in zip(function.__closure__ or (), cells):
            with contextlib.suppress(ValueError):  # an empty cell
                inside = old.cell_contents
                copied = isinstance(inside, COPIED)
                new.cell_contents = self(inside, depth + 1) if copied else inside
        return twin


MAX_DEPTH = 50
COPIED = (torch.Tensor, torch.nn.Module, types.FunctionType, list, dict, set)
"""Types of values that a function may write to or differentiate."""


def names_used(code: types.CodeType) -> set[str]:
    """Global names in a function and in those that it defines."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*map(names_used, inner))
