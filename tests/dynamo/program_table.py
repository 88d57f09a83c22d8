"""What the tables of small programs share: how a program is listed, run from a fresh start, and recorded.

A table is a module of functions over tensors, each listed with its arguments:

    @program(x, 2, again=(x, 3), change="SCALE = 5")
    def scaled(a, n): ...

The module is executed anew for every run, so that the compiled and the plain run share no global, class,
cell or argument. `run` calls the program six times: twice as listed, with other values, after `change` (a
statement in the module's namespace), with more rows, and as listed again. It records everything that a caller
could notice. An ExitStack named `modes` holds the modes that `change` entered; they are left after one call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import random
import sys
import types
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from tests.comparing import strides_of

TABLES = (
    "table_functions",
    "table_control",
    "table_library",
    "table_classes",
    "table_records",
    "table_containers",
    "table_torch",
    "table_values",
    "table_changes",
)


@dataclasses.dataclass(frozen=True)
class Program:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    again: tuple[Any, ...] | None
    """Other arguments; None changes the values of those given."""
    change: str
    """A statement that changes globals, attributes or closures."""
    whole: bool
    """Whether every call is one graph; else it may break, or run in eager."""


class Table:
    """The decorator of one table, and what it has listed."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}

    def __call__(
        self,
        *args: Any,
        again: tuple[Any, ...] | None = None,
        change: str = "",
        whole: bool = True,
    ) -> Any:
        def listed(function: Any) -> Any:
            assert function.__name__ not in self.programs, f"{function.__name__} is listed twice"
            self.programs[function.__name__] = Program(function, args, again, change, whole)
            return function

        return listed


@functools.cache
def code_of(table: str) -> tuple[types.CodeType, str]:
    spec = importlib.util.find_spec(f"tests.dynamo.{table}")
    assert spec is not None and spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        return compile(file.read(), spec.origin, "exec"), spec.origin


def reset() -> None:
    """Torch's global state as it is at the start of a process."""
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


def fresh(table: str) -> types.ModuleType:
    """The table's module, executed anew."""
    reset()
    torch.utils.hooks.RemovableHandle.next_id = 0
    code, path = code_of(table)
    module = types.ModuleType(f"tests.dynamo.{table}")
    module.__file__ = path
    sys.modules[module.__name__] = module
    torch.manual_seed(0)
    exec(code, module.__dict__)
    return module


def names() -> list[tuple[str, str]]:
    """(table, program) of every program."""
    return [(table, name) for table in TABLES for name in fresh(table).program.programs]


def other_values(value: Any) -> Any:
    """The same structure with other values in it."""
    if isinstance(value, torch.Tensor):
        turned = value.detach().flip(tuple(range(value.dim())))
        other = ~turned if value.dtype is torch.bool else turned * 2 + 1
        return other.requires_grad_(value.requires_grad)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return mapped(other_values, value)


def more_rows(value: Any) -> Any:
    """The same structure with every tensor one row longer."""
    if isinstance(value, torch.Tensor) and value.dim():
        longer = torch.cat([value.detach(), value.detach()[:1]])
        return longer.requires_grad_(value.requires_grad)
    return mapped(more_rows, value)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    return value


class Recorder:
    """Turns values into plain tuples that are equal if no caller could tell the values apart.

    Identity counts: an object met again is its number; tensors also number their memory.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []

    def number(self, key: int, value: Any) -> tuple[int, bool]:
        """A number for an identity, and whether it is new."""
        new = key not in self.numbers
        if new:
            self.numbers[key] = len(self.numbers)
            self.kept.append(value)
        return self.numbers[key], new

    def __call__(self, value: Any) -> Any:
        kind = type(value).__qualname__
        if value is None or isinstance(value, bool | int | str | bytes | type(...) | torch.Size):
            return kind, str(value)
        if isinstance(
            value, float | complex | torch.dtype | torch.device | slice | range | np.generic
        ):
            return kind, repr(value)
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return kind, value.__qualname__
        if isinstance(value, types.ModuleType):
            return kind, value.__name__
        if type(value) in (tuple, frozenset):
            return kind, *map(self, sorted(value, key=repr) if kind == "frozenset" else value)
        number, new = self.number(id(value), value)
        if not new:
            return "again", number
        if isinstance(value, torch.Tensor):
            return kind, number, *self.tensor(value)
        return kind, number, *self.contents(value)

    def tensor(self, value: torch.Tensor) -> tuple[Any, ...]:
        plain = value.detach()
        layout = (
            str(value.dtype),
            str(value.device),
            tuple(value.shape),
            strides_of(value),
            value.storage_offset(),
        )
        memory, _ = self.number(value.untyped_storage()._cdata, value.untyped_storage())
        flags = (value.requires_grad, value.is_leaf, value.is_inference())
        grad = self(value.grad) if value.is_leaf else None
        flat = plain.reshape(-1).contiguous()
        data = b"" if value.is_meta else bytes(flat.view(torch.uint8).tolist())
        return layout, memory, flags, data, grad

    def contents(self, value: Any) -> tuple[Any, ...]:
        found: list[Any] = []
        if isinstance(value, dict):
            found += [(self(key), self(item)) for key, item in value.items()]
        elif isinstance(value, set):
            found += [self(item) for item in sorted(value, key=repr)]
        elif isinstance(value, list | tuple) or type(value).__name__ == "deque":
            found += map(self, value)
        elif isinstance(value, BaseException):
            found += map(self, value.args)
        elif isinstance(value, types.MethodType):
            found += [value.__func__.__qualname__, self(value.__self__)]
        elif type(value).__module__ == "numpy":
            found += [str(value.dtype), repr(value.tolist())]
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if not name.startswith("__") and hasattr(value, name):
                    found.append((name, self(getattr(value, name))))
        for name, item in getattr(value, "__dict__", {}).items():
            if not name.startswith("__"):
                found.append((name, self(item)))
        return tuple(found)

    def module(self, module: types.ModuleType) -> tuple[Any, ...]:
        """Globals, and what classes and functions of the module hold."""
        found: list[Any] = []
        for name, value in list(vars(module).items()):
            if name.startswith("__") or isinstance(value, types.ModuleType | Table):
                continue
            if getattr(value, "__module__", None) == module.__name__:
                found.append((name, self.holder(value)))
            elif not callable(value):
                found.append((name, self(value)))
        return tuple(found)

    def holder(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return self([value.__defaults__, value.__kwdefaults__, cells, plain_items(value)])
        if isinstance(value, type):
            return self(plain_items(value))
        return self(value)


def plain_items(value: Any) -> dict[str, Any]:
    """Attributes that are data: those of a function, or of a class."""
    return {
        name: item
        for name, item in vars(value).items()
        if not name.startswith(("__", "_abc", "_minicompile"))
        and isinstance(item, int | float | str | list | dict | set | tuple | torch.Tensor)
    }


def surroundings() -> tuple[Any, ...]:
    """State that belongs to no object: modes, defaults, random numbers."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        str(torch.get_default_dtype()),
        torch.get_rng_state().sum().item(),
        hash(random.getstate()),
    )


def called(
    function: Callable[..., Any], args: tuple[Any, ...], record: Recorder, modes: ExitStack
) -> Any:
    """One call: value or exception, what was printed and warned, the arguments afterwards.

    `modes` are left when the call has ended.
    """
    torch.manual_seed(1)
    random.seed(1)
    printed = io.StringIO()
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            result = ("value", function(*args))
        except Exception as error:
            cause, context = type(error.__cause__).__name__, type(error.__context__).__name__
            result = ("raised", (type(error).__name__, str(error), cause, context))
        finally:
            modes.close()
    messages = [str(w.message) for w in warned if not str(w.message).startswith("minicompile")]
    return record(result), printed.getvalue(), messages, record(args), surroundings()


STEPS = ("first call", "second call", "other values", "after the change", "more rows", "last call")


def run(
    table: str, name: str, wrap: Callable[[Any], Any], steps: tuple[str, ...] = STEPS
) -> tuple[dict[str, Any], Any]:
    """What each step of a program's run shows, and the function that `wrap` made of it."""
    module = fresh(table)
    program: Program = module.program.programs[name]
    function = wrap(program.function)
    record = Recorder()
    modes = getattr(module, "modes", ExitStack())
    again = program.again if program.again is not None else other_values(program.args)
    shown: dict[str, Any] = {}
    given = {"other values": again, "more rows": more_rows(program.args)}
    for step in steps:
        if step == "after the change":
            exec(program.change, module.__dict__)
        shown[step] = called(function, given.get(step, program.args), record, modes)
    reset()
    shown["globals"] = record.module(module)
    return shown, function
