"""One program, plain and compiled: everything that a caller could notice, call by call."""

from __future__ import annotations

import ast
import re
import sys
import types
import warnings
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import minicompile as mc
from tests.dynamo.program_table import Recorder, called, reset
from tests.fuzz.rounding import hangs_on_rounding
from tests.fuzz.running import namespace_of

NAME = "fuzzed"
"""The module that a program believes to be in."""


@dataclass(frozen=True)
class Given:
    """What decides the arguments of one call."""

    seed: int = 0
    rows: int = 3
    n: int = 2
    flag: bool = True
    dtype: torch.dtype = torch.float32
    trained: bool = True
    """The first tensor is computed from a leaf that requires grad."""
    special: bool = False
    shared: bool = False
    """The second tensor is a view of the first one's memory."""
    inference: bool = False
    """The arguments are made, and the call runs, in inference mode."""
    another: bool = False
    """The call gets another network of the same class."""
    filled: bool = False
    """The list, the dict and the box hold more than else."""


CALLS = {
    "first call": Given(),
    "second call": Given(),
    "other values": Given(seed=1, filled=True),
    "other numbers": Given(seed=2, n=5, flag=False, special=True),
    "other rows": Given(rows=5, dtype=torch.float64, filled=True),
    "more rows": Given(rows=7, dtype=torch.float64),
    "without gradients": Given(rows=2, trained=False, dtype=torch.int64),
    "shared memory": Given(rows=4, shared=True),
    "another network": Given(another=True),
    "inference mode": Given(trained=False, inference=True),
    "last call": Given(),
}


class Close:
    """A tensor's values, equal to others within rounding."""

    def __init__(self, value: torch.Tensor, tolerance: float) -> None:
        self.value, self.tolerance = value.detach().clone(), tolerance

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Close) or self.value.dtype != other.value.dtype:
            return False
        flat = self.value.reshape(-1), other.value.reshape(-1)  # some have too many dimensions
        return self.value.shape == other.value.shape and torch.allclose(
            *flat, rtol=self.tolerance, atol=self.tolerance, equal_nan=True
        )

    def __repr__(self) -> str:
        return repr(self.value.tolist())


NUMBER = re.compile(r"-?\d+\.\d*(?:e[+-]\d+)?")


def printed_as(text: str, tolerance: float) -> Any:
    """What a program printed: its words, and its numbers with a point, which may differ by rounding."""
    # says who differentiates; a long name goes into a line of its own
    text = re.sub(r",\s+grad_fn=<[A-Za-z0-9]+>", ", grad_fn", text)
    if not tolerance:
        return text
    numbers = torch.tensor([float(number) for number in NUMBER.findall(text)])
    return " ".join(NUMBER.sub("#", text).split()), Close(numbers, tolerance)


def words_of(text: str) -> str:
    """An exception's words without the name of an autograd node.

    The wording of exceptions is not promised. Eager calls one view by different names: "Output 0 of
    UnbindBackward0 is a view", and of AsStridedBackward0 once its history was made anew.
    """
    return re.sub(r"Output \d+ of \w+ is a view", "an output is a view", text)


class Loose(Recorder):
    """Like Recorder; values may differ by rounding, and autograd may refuse to be asked about a tensor."""

    def __init__(self, tolerance: float) -> None:
        super().__init__()
        self.tolerance = tolerance

    def __call__(self, value: Any) -> Any:
        """Floating-point numbers may differ by rounding as well, and exceptions by their words."""
        if self.tolerance and isinstance(value, float | np.floating):
            return type(value).__qualname__, Close(torch.tensor(float(value)), self.tolerance)
        if isinstance(value, tuple) and value[:1] == ("raised",):
            kind, words, *causes = value[1]
            value = "raised", (kind, "" if self.tolerance else words_of(words), *causes)
        return super().__call__(value)

    def tensor(self, value: torch.Tensor) -> tuple[Any, ...]:
        try:
            *about, data, grad = super().tensor(value)
        except RuntimeError as error:
            return "refused", words_of(str(error))
        return *about, Close(value, self.tolerance) if self.tolerance else data, grad


def module_of(text: str) -> types.ModuleType:
    """The program's module, executed anew; its source can be looked up."""
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    torch.manual_seed(0)
    namespace_of(text, NAME, module.__dict__)
    return module


def arguments(module: types.ModuleType, given: Given, net: Any) -> tuple[Any, ...]:
    torch.manual_seed(given.seed)
    rows, width = given.rows * module.ROWS, module.WIDTH
    leaf = torch.randn(rows, width, requires_grad=given.trained)
    a = leaf * 1.0 if given.trained else leaf
    b = (torch.randn(rows, width) * 3).to(given.dtype)
    if given.shared:
        b = a.detach()[1:]
    items = [torch.randn(rows, width), b, leaf]
    table = {"x": torch.randn(width), "y": a}
    box = (module.Special if given.special else module.Box)(torch.randn(width))
    if given.filled:
        items.append(torch.randn(rows, width))
        table |= {"z": torch.randn(rows, width), "w": 0}
        box.steps, box.extra = 2, torch.randn(width)
    return a, b, given.n, given.flag, items, table, box, net


MADE = {"arange", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}


class Placed(ast.NodeTransformer):
    """Calls of torch that make a tensor make it on a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(ast.Name("torch"), name) if name in MADE:
                node.keywords.append(ast.keyword("device", ast.Constant(self.device)))
        return node


def placed(text: str, device: str) -> str:
    """The program whose tensors are on a device."""
    return text if device == "cpu" else ast.unparse(Placed(device).visit(ast.parse(text)))


def leaves_of(value: Any, found: dict[int, torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Floating-point tensors inside a result."""
    found = {} if found is None else found
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            found[id(value)] = value
    elif isinstance(value, list | tuple):
        for item in value:
            leaves_of(item, found)
    elif isinstance(value, dict):
        leaves_of(list(value.values()), found)
    elif hasattr(value, "__dict__") and not isinstance(value, type | torch.nn.Module):
        leaves_of(vars(value), found)
    return list(found.values())


GRADIENTS = ", gradients"
REFUSED = "refused"
"""Eager can't differentiate, for something it saved was written to. Compiled code may have saved something
else; then it can, and there are no gradients to compare with, nor to train with."""


def differentiate(values: list[torch.Tensor]) -> str:
    """Backward through everything; the kind of exception, if it raises one."""
    try:
        total = sum(value.double().sum() for value in values)
        if isinstance(total, torch.Tensor):
            total.backward()
    except Exception as error:
        refused = (
            "modified by an inplace",
            "modified inplace",
        )  # the second of views of several at once
        return REFUSED if any(why in str(error) for why in refused) else type(error).__name__
    return ""


def train(net: torch.nn.Module) -> None:
    """A step of gradient descent."""
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.clamp(-1, 1), alpha=0.01)
    net.zero_grad()


def run(
    text: str,
    wrap: Callable[[Any], Any],
    tolerance: float = 0.0,
    refused: Collection[str] = (),
    trained: dict[str, list[torch.Tensor]] | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """What each call shows. `refused`: the calls that eager can't differentiate. `trained`: the parameters
    after each call of the first run; where rounding is no difference, later runs go on with these. (Else it
    would add up: from weights that differ in the last bit a saturated tanh trains to gradients that differ in
    the third digit, in eager as well.)"""
    trained = {} if trained is None else trained
    reset()
    module = module_of(placed(text, device))
    torch.manual_seed(3)
    net = module.Net().to(device)
    function = wrap(module.program)
    record = Loose(tolerance)
    gradients = Loose(max(tolerance, 1e-5))
    kept: list[Any] = []
    shown: dict[str, Any] = {}
    other = module.Net().to(device)
    for step, given in CALLS.items():
        with torch.device(device), torch.inference_mode(given.inference):
            args = arguments(module, given, other if given.another else net)
        kept.append(args)  # identities must not be used again
        results: list[Any] = []

        def keeping(*args: Any, results: list[Any] = results) -> Any:
            results.append(function(*args))
            return results[0]

        with torch.inference_mode(given.inference):
            result, printed, _warnings, *after = called(keeping, args, record, ExitStack())
        shown[step] = result, printed_as(printed, tolerance), *after
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            raised = differentiate(leaves_of([results, args]))
        if raised == REFUSED or (raised == "" and step in refused):
            shown[step + GRADIENTS] = (REFUSED,)
            net.zero_grad()
        else:
            shown[step + GRADIENTS] = raised, gradients([args, list(net.parameters())])
            train(net)
        kept.append(results)
        here = list(net.parameters())
        after = trained.setdefault(step, [p.detach().clone() for p in here])
        with torch.no_grad():
            for parameter, value in zip(here if tolerance else (), after):
                if parameter.shape == value.shape:
                    parameter.copy_(value)
        reset()
    shown["globals"] = record.module(module)
    return shown


@dataclass(frozen=True)
class Backend:
    name: str
    tolerance: float = 1e-3
    half: float = 4e-2
    """The tolerance of programs that choose a dtype of 16 bits: a few of its last digits."""
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"


BACKENDS = {
    "eager": Backend("eager", 0.0, 0.0),
    "aot_eager": Backend("aot_eager", 1e-5),
    "inductor": Backend("inductor"),
    "triton": Backend("inductor", options={"device_codegen": "triton"}),
    "cuda": Backend("inductor", device="cuda"),
}
"""How programs are compiled: "inductor" is C++, "triton" kernels run in Triton's interpreter, "cuda"'s on a
GPU, where all tensors are then."""


def difference(text: str, backend: str = "eager") -> str:
    """Where the compiled program shows something else than the plain one; "" if nowhere."""
    chosen = BACKENDS[backend]
    compiled = lambda f: mc.compile(f, backend=chosen.name, options=chosen.options)  # noqa: E731
    return compare(text, compiled, tolerance_of(text, chosen), chosen.device)


def tolerance_of(text: str, backend: Backend) -> float:
    return backend.half if re.search(r"torch\.b?float16", text) else backend.tolerance


def undecided(text: str, backend: str, why: str) -> bool:
    """Does the plain program's result, of which a compiled one's differs, hang on rounding?"""
    tolerance, step = tolerance_of(text, BACKENDS[backend]), why.partition(":")[0]
    device = BACKENDS[backend].device
    plain = lambda: run(text, lambda f: f, tolerance, device=device).get(step)  # noqa: E731
    return tolerance > 0 and hangs_on_rounding(plain)


def compare(
    text: str, wrap: Callable[[Any], Any], tolerance: float = 0.0, device: str = "cpu"
) -> str:
    """Where the wrapped program shows something else than the plain one."""
    trained: dict[str, list[torch.Tensor]] = {}

    def plain(text: str, refused: Collection[str] = ()) -> dict[str, Any]:
        return run(text, lambda function: function, tolerance, refused, trained, device)

    theirs = plain(text)
    refused = refused_steps(theirs)
    if (
        ".data." in text
    ):  # eager doesn't see that it differentiates with other numbers than it computed with
        trained.clear()
        refused |= refused_steps(plain(text.replace(".data.", ".detach().")))
        trained.clear()
        theirs = plain(text, refused)
    try:
        ours = run(text, wrap, tolerance, refused, trained, device)
    except Exception as error:  # outside of the program's own calls
        return f"{type(error).__name__}: {error}"
    for step, expected in theirs.items():
        if ours[step] != expected:
            return f"{step}: {first_difference(expected, ours[step])}"
    return ""


def refused_steps(shown: dict[str, Any]) -> set[str]:
    """The calls that could not be differentiated, for what was saved had been written to."""
    return {step for step in CALLS if shown[step + GRADIENTS] == (REFUSED,)}


def first_difference(expected: Any, found: Any) -> str:
    """The innermost parts of two records that differ first."""
    if isinstance(expected, tuple) and isinstance(found, tuple) and len(expected) == len(found):
        for one, other in zip(expected, found):
            if one != other:
                return first_difference(one, other)
    return f"expected {str(expected)[:300]}, found {str(found)[:300]}"
