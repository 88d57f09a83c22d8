"""Random programs of views and writes, compiled and plain.

A program is made statement by statement while it runs in eager, so that each statement is one that eager
takes. Compared are all outputs and all inputs afterwards: values, strides, who is the same object, who shares
memory and where, requires_grad, is_leaf, the gradients of the leaves, and what writes to the outputs then
change.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import minicompile as mc
from minicompile.aot.layout import overlaps
from tests.comparing import alias_pattern, strides_of
from tests.dynamo.helpers import explained
from tests.fuzz.running import namespace_of

SHAPES = [(4, 6), (6,), (3, 4), (2, 3, 4), (1, 4), (4, 4), (2, 2), (5, 1, 3)]
DTYPES = {
    "torch.float32": 12,
    "torch.float64": 3,
    "torch.int64": 2,
    "torch.bool": 1,
    "torch.complex64": 1,
}
REFUSED = 0.03
"""The share of programs that may run in eager."""
TOLERANCES = {"aot_eager": 1e-5, "inductor": 1e-4}


@dataclass
class Program:
    """Text that makes the inputs (from `seed`) and the program's own statements."""

    inputs: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    leaves: list[str] = field(default_factory=list)
    returned: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        given = ", ".join(self.arguments)
        return (
            "import torch\n\n\ndef make(seed):\n    torch.manual_seed(seed)\n"
            + textwrap.indent("\n".join(self.inputs), "    ")
            + f"\n    return [{given}], [{', '.join(self.leaves)}]\n\n"
            + f"def program({given}):\n"
            + textwrap.indent("\n".join([*self.body, "pass"]), "    ")
            + f"\n    return ({''.join(f'{name}, ' for name in self.returned)})\n"
        )


class Maker:
    """Makes one program. `live` holds the tensors by name, as they are after the statements so far."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.program = Program()
        self.live: dict[str, Any] = {"torch": torch}
        self.pool: list[str] = []
        self.count = 0

    def make(self) -> Program:
        torch.manual_seed(0)
        for _ in range(self.rng.randint(1, 3)):
            self.input()
        while self.rng.random() < 0.35 and len(self.program.arguments) < 5:
            self.alias()
        self.rng.shuffle(self.program.arguments)
        wanted = self.rng.randint(2, 8)
        for _ in range(40):
            if len(self.program.body) < wanted:
                self.statement()
        count = self.rng.randint(1, 4)
        usable = [name for name in self.pool if facts(self.live[name])[-1] != "refused"]
        self.program.returned = [self.rng.choice(usable) for _ in range(count)] if usable else []
        return self.program

    def do(self, text: str) -> bool:
        """Run a statement; whether eager takes it, and doesn't resize what it writes to."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "An output with one or more elements was resized")
                exec(text, self.live)
        except (RuntimeError, IndexError, ValueError, TypeError, Warning):
            return False
        return True

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def input(self) -> None:
        rng, name = self.rng, f"x{len(self.program.arguments)}"
        shape = list(rng.choice(SHAPES))
        dtype = rng.choices(list(DTYPES), list(DTYPES.values()))[0]
        size = ", ".join(map(str, shape))
        source = f"(torch.randn({size}) * 3).to({dtype})"
        if rng.random() < 0.3 and len(shape) > 1:
            turned = ", ".join(map(str, [*shape[:-2], shape[-1], shape[-2]]))
            source = f"(torch.randn({turned}) * 3).to({dtype}).transpose(-1, -2)"
            if rng.random() < 0.5:
                source += ".detach()"
        elif rng.random() < 0.2:
            wide = ", ".join(map(str, [*shape[:-1], 2 * shape[-1] + 1]))
            source = f"(torch.randn({wide}) * 3).to({dtype})[..., 1::2]"
        floating = "int" not in dtype and "bool" not in dtype
        kind = rng.choice(["plain", "leaf", "computed", "view"]) if floating else "plain"
        lines = [f"{name} = {source}"]
        if kind != "plain":
            leaf = f"{name}_leaf"
            lines = [f"{leaf} = ({source}).detach().requires_grad_()"]
            lines.append(f"{name} = {leaf}" + {"computed": " * 1", "view": " * 1"}.get(kind, ""))
            if kind == "view":
                lines.append(f"{name} = {name}[...]")
            self.program.leaves.append(leaf)
        for line in lines:
            assert self.do(line), line
        self.program.inputs += lines
        self.program.arguments.append(name)
        self.pool.append(name)

    def alias(self) -> None:
        """One more input in the memory of an earlier one."""
        rng, name = self.rng, f"x{len(self.program.arguments)}"
        of = rng.choice(self.pool)
        made = self.view(of) if rng.random() < 0.8 else f"{of}.detach()"
        if self.do(f"{name} = {made}") and self.live[name].layout is torch.strided:
            if self.live[name].is_conj() or self.live[name].is_neg():
                return
            self.program.inputs.append(f"{name} = {made}")
            self.program.arguments.append(name)
            self.pool.append(name)

    def statement(self) -> None:
        rng, pool = self.rng, self.pool
        of = rng.choice(pool)
        kind = rng.choices(["view", "write", "compute", "relay"], [8, 8, 3, 1])[0]
        name = self.new() if kind in ("view", "compute") else ""
        if kind == "view":
            text = f"{name} = {self.view(of)}"
        elif kind == "compute":
            text = f"{name} = {self.compute(of)}"
        elif kind == "write":
            text = self.write(of)
        else:
            text = f"{of}.{self.relay(of)}"
        if rng.random() < (0.05 if kind == "relay" else 0.2):
            text = f"with torch.no_grad():\n    {text}"
        if self.do(text):
            self.program.body.append(text)
            if name:
                pool.append(name)

    def value(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.live[name]
        return found

    def dim(self, x: torch.Tensor) -> int:
        return self.rng.randrange(-x.dim(), x.dim()) if x.dim() else 0

    def view(self, of: str) -> str:
        rng, x = self.rng, self.value(of)
        dim, other = self.dim(x), self.dim(x)
        size = x.shape[dim] if x.dim() else 1
        start = rng.randrange(size) if size else 0
        order = list(range(x.dim()))
        rng.shuffle(order)
        near = rng.randint(1, max(size, 1))
        room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        first = rng.randint(0, 1) if room > 3 else 0
        forms = [
            f"{of}.select({dim}, {start})",
            f"{of}.narrow({dim}, {start}, {rng.randint(0, size - start)})",
            f"{of}[..., {rng.randint(0, 1)}::{rng.randint(1, 2)}]",
            f"{of}[{start}:]",
            f"{of}[{start}]",
            f"{of}.transpose({dim}, {other})",
            f"{of}.permute({order})",
            f"{of}.view(-1)",
            f"{of}.view({self.refold(x)})",
            f"{of}.reshape({self.refold(x)})",
            f"{of}.flatten()",
            f"{of}.unsqueeze({dim})",
            f"{of}.squeeze()",
            f"{of}.expand(2, {', '.join(['-1'] * x.dim())})",
            f"{of}.diagonal()",
            f"{of}.unfold({dim}, {near}, {rng.randint(1, 2)})",
            f"{of}.split({near}, {dim})[{rng.choice([0, -1])}]",
            f"{of}.chunk(2, {dim})[{rng.choice([0, -1])}]",
            f"{of}.unbind({dim})[{rng.choice([0, -1])}]",
            f"{of}.movedim({dim}, {other})",
            f"{of}.mT",
            f"{of}.detach()",
            f"{of}.as_strided((2, 2), (1, 2), {x.storage_offset() + first})"
            if room >= 4 + first
            else f"{of}[...]",
            f"{of}.view_as({of})",
        ]
        if x.is_complex():
            forms += [f"torch.view_as_real({of})", f"{of}.real", f"{of}.imag", f"{of}.conj()"]
        if x.dtype is torch.float32 and not x.requires_grad and rng.random() < 0.3:
            forms += [f"{of}.view(torch.int32)"]
        return rng.choice(forms)

    def refold(self, x: torch.Tensor) -> str:
        count = x.numel()
        rows = self.rng.choice([n for n in range(1, count + 1) if count % n == 0] or [1])
        return f"{rows}, {count // rows if count else 0}"

    def compute(self, of: str) -> str:
        other = self.rng.choice(self.pool)
        forms = ["{0} + 1", "{0} * 0.5", "{0}.sin()", "{0}.clone()", "{0} * {1}", "{0} - {1}.sum()"]
        forms += ["torch.cat([{0}, {0}])", "{0}.contiguous()", "{0}.sum()", "torch.zeros_like({0})"]
        return self.rng.choice(forms).format(of, other)

    def write(self, of: str) -> str:
        rng, x = self.rng, self.value(of)
        other, dim = rng.choice(self.pool), self.dim(x)
        if overlaps(x):  # eager's result depends on the order of writes
            return "raise RuntimeError"
        if self.overlap(x, self.value(other)):  # what is read then depends on the order of writes
            other = f"{other}.clone()"
        forms = [
            "{0}.add_(1)",
            "{0}.mul_(0.5)",
            "{0}.mul_({1}.sum().to({0}.dtype) * 0.1)",
            "{0}.copy_({1})",
            "{0}.copy_({0}.clone() + 2)",
            "{0}.zero_()",
            "{0}.fill_(2)",
            "{0}.masked_fill_({0} == 0, 3)",
            "{0}.masked_fill_({1} != 0, 3)",
            "{0}.clamp_(max=2)",
            "{0}.sin_()",
            "{0}.relu_()",
            "{0} += {1}",
            "{0}[0] = 5",
            "{0}[..., ::2] = {1}.sum().to({0}.dtype)",
            "{0}[torch.tensor([0])] = 1.5",
            "{0}[{0} == 2] = 0",
            "{0}.index_put_((torch.tensor([0, 0]),), torch.ones((), dtype={0}.dtype), accumulate=True)",
            "{0}.index_fill_({2}, torch.tensor([0]), 4)",
            "{0}.index_add_({2}, torch.tensor([0]), {0}.narrow({2}, 0, 1).clone())",
            "{0}.scatter_({2}, torch.zeros_like({0}, dtype=torch.int64), 3)",
            "{0}.unbind({2})[0].add_(1)",
            "{0}.split(1, {2})[-1].mul_(2)",
            "{0}.swapaxes(0, -1).add_({1}.sum().to({0}.dtype))",
            "torch._foreach_add_([{0}, {1}.clone()], 1)",
        ]
        return rng.choice(forms).format(of, other, dim)

    @staticmethod
    def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
        """Do two tensors share memory, but not in the same elements?"""
        shared = one.untyped_storage()._cdata == other.untyped_storage()._cdata
        places = [(x.storage_offset(), x.shape, x.stride(), x.dtype) for x in (one, other)]
        return shared and places[0] != places[1]

    def relay(self, of: str) -> str:
        dim, other = self.dim(self.value(of)), self.dim(self.value(of))
        forms = ["t_()", f"unsqueeze_({dim})", "squeeze_()", f"transpose_({dim}, {other})"]
        return self.rng.choice([*forms, f"swapaxes_({dim}, {other})"])


def program_for(seed: int) -> Program:
    """The first program of a seed that eager runs as a whole."""
    for attempt in itertools.count():
        program = Maker(f"{seed}.{attempt}").make()
        names = namespace_of(str(program), f"views {seed}")
        with (
            contextlib.suppress(RuntimeError, IndexError, ValueError, TypeError, Warning),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("error", "An output with one or more elements was resized")
            for call in range(2):
                names["program"](*names["make"](call)[0])
            return program
    raise AssertionError


# Running and comparing ---------------------------------------------------------------------------


def contents(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [x.resolve_conj().resolve_neg().clone() for x in tensors]


def facts(x: torch.Tensor) -> tuple[Any, ...]:
    try:
        history: Any = (x.requires_grad, x.is_leaf)
    except RuntimeError:  # a view that autograd refuses to use, since its base was changed
        history = "refused"
    return (x.dtype, tuple(x.shape), strides_of(x), history)


def differentiable(x: torch.Tensor) -> bool:
    try:
        return x.requires_grad and x.grad_fn is not None
    except RuntimeError:
        return False


def observe(program: Callable[..., Any], make: Callable[[int], Any], seed: int) -> dict[str, Any]:
    """Everything that a caller can notice of one call."""
    inputs, leaves = make(seed)
    seen: dict[str, Any] = {}
    outputs = list(program(*inputs))
    every = [*outputs, *inputs]
    seen["facts"] = [facts(x) for x in every]
    seen["aliases"] = alias_pattern(every)
    seen["values"] = contents(every)
    distinct = {id(x): x for x in every if differentiable(x)}
    try:
        total: Any = sum(
            ((x * (k + 1)).abs() if x.is_complex() else x * (k + 1)).double().sum()
            for k, x in enumerate(distinct.values())
        )
        if distinct:
            total.backward()
        seen["gradients"] = [None if x.grad is None else x.grad for x in leaves]
    except RuntimeError as error:
        seen["backward"] = str(error)
    after = []
    with torch.no_grad():
        for k, x in enumerate(outputs):
            try:
                x.fill_(k % 2 if x.dtype is torch.bool else 10 + k)
            except RuntimeError:  # its elements share memory
                after.append([torch.tensor(k)])
                continue
            after.append(contents(every))
    seen["after writes"] = [x for each in after for x in each]
    return seen


def same(one: Any, other: Any, tolerance: float) -> bool:
    """Equal within rounding. A compiled backward is one step: an input that eager's did not come to may get
    zeros from it.
    """
    if one is None and isinstance(other, torch.Tensor):
        return not other.any()
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other) if one is None or other is None else False
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def first_difference(theirs: dict[str, Any], ours: dict[str, Any], tolerance: float) -> str:
    if "backward" in theirs:  # ours need not raise
        theirs.pop("gradients", None)
    for key in theirs:
        if key == "backward":
            continue
        if key not in ours:
            return f"{key}: {ours.get('backward')}"
        for i, (one, other) in enumerate(zip(theirs[key], ours[key], strict=True)):
            if key in ("facts", "aliases"):
                if one != other:
                    return f"{key} of {i}: expected {one}, found {other}"
            elif not same(one, other, tolerance):
                return f"{key} of {i}: expected {one}, found {other}"
    return ""


@dataclass
class Outcome:
    seed: int
    difference: str = ""
    reasons: tuple[str, ...] = ()
    """Why the program was not one graph; empty if it was."""
    excused: bool = False
    """Eager's own backward raises."""
    text: str = ""


def run(seed: int, backend: str = "aot_eager", dynamic: bool | None = None) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = str(program_for(seed))
        names = namespace_of(text, f"views {seed}")
        mc.reset()
        compiled = mc.compile(names["program"], backend=backend, dynamic=dynamic)
        difference, excused = "", False
        for call in range(2):
            theirs = observe(names["program"], names["make"], call)
            excused = excused or "backward" in theirs
            try:
                ours = observe(compiled, names["make"], call)
            except Exception as error:
                difference = f"{type(error).__name__}: {error}"
            else:
                difference = first_difference(theirs, ours, TOLERANCES[backend])
            if difference:
                difference = f"call {call}: {difference}"
                break
        found = explained(compiled)
        reasons = tuple(str(b.reason) for b in found.breaks)
        if not reasons and found.graph_count == 0 and "=" in text.partition("def program")[2]:
            reasons = ("no graph",)
    return Outcome(seed, difference, reasons, excused, text)
