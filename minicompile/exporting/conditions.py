"""What must hold of a call's arguments, as Python expressions over the parameters' names.

type(batch) is dict and list(batch) == ['ids']      a container, and what it holds
repr(flag) == 'True'                                a number, string, None, dtype or device
x.dtype == torch.float32 and x.layout == torch.strided, x.size(1) == 16, 2 <= x.size(0) <= 64
"""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from minicompile.dynamo.result import describe
from minicompile.dynamo.sizes import MARK
from minicompile.errors import ExportError

NAMES = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
"""What expressions may name beside arguments, builtins and `result`: so that `repr` of a constant is one."""
CONTAINERS = (dict, list, tuple)


@functools.cache
def compiled(expression: str) -> types.CodeType:
    return compile(expression, "<export>", "eval")


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression. Raises what Python raises."""
    return eval(compiled(expression), dict(NAMES), names)


@dataclass(frozen=True)
class Constraint:
    """What must hold of the arguments of each call: the condition, why, and the user's line that needs it."""

    condition: str
    reason: str
    line: str = ""

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises ExportError if it doesn't hold."""
        try:
            holds = evaluate(self.condition, arguments)
        except Exception:  # whatever the argument's class raises
            holds = False
        if not holds:
            names = compiled(self.condition).co_names
            actual = ", ".join(f"{n} is {describe(x)}" for n, x in arguments.items() if n in names)
            raise ExportError(f"needs {self}, but {actual}")

    def __str__(self) -> str:
        return f"{self.condition}  # {self.reason}" + (f" ({self.line})" if self.line else "")


def walk(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The containers, tensors and constants of a call's arguments, each with its path: `batch['ids'][0]`."""
    for path, value in arguments.items():
        yield path, value
        if type(value) in CONTAINERS:
            items = value.items() if type(value) is dict else enumerate(value)
            yield from walk({f"{path}[{key!r}]": item for key, item in items})


def fixed(path: str, value: Any) -> Iterator[str]:
    """The conditions that a part of the arguments is as in the example, but for its dynamic sizes."""
    if isinstance(value, torch.Tensor):
        yield f"{path}.dtype == {value.dtype} and {path}.layout == {value.layout}"
        yield f"str({path}.device) == {str(value.device)!r} and {path}.dim() == {value.dim()}"
        for axis, size in enumerate(value.shape):
            if axis not in getattr(value, MARK, {}):
                yield f"{path}.size({axis}) == {size}"
    elif type(value) is dict:
        yield f"type({path}) is dict and list({path}) == {list(value)!r}"
    elif type(value) in (list, tuple):
        yield f"type({path}) is {type(value).__name__} and len({path}) == {len(value)}"
    else:
        yield f"repr({path}) == {repr(value)!r}"


MANY = 2000
"""So many combinations of sizes are not tried one by one."""


def always_holds(condition: sympy.Basic, limits: Mapping[sympy.Symbol, Any]) -> bool:
    """Whether a condition is true of all sizes within limits, inclusive, if these are few."""
    symbols = sorted(condition.free_symbols, key=str)
    within = [limits.get(symbol, (0, None)) for symbol in symbols]
    ranges = [range(low, high + 1) for low, high in within if high is not None]
    if len(ranges) < len(symbols) or math.prod(map(len, ranges)) > MANY:
        return False
    return all(
        condition.xreplace(dict(zip(symbols, map(sympy.Integer, sizes)))) == sympy.true
        for sizes in itertools.product(*ranges)
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gradient, row-major without gaps."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
