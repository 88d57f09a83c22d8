"""Running the kernel of a loop program in either language, and comparing with what eager makes of it.

Memory behind each result is watched: a kernel that writes beyond an end is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minicompile.codegen.cpp_units import kernel_module
from minicompile.codegen.plan import KernelPlan, plan_rule
from minicompile.ops.build import start_build
from minicompile.ops.registry import scoped
from minicompile.options import Options
from minicompile.runtime.cpp import bind
from minicompile.runtime.gpu_kernel import Tiles
from tests.codegen.fusing import Program
from tests.codegen.races import shared_writes
from tests.codegen.triton_running import call, source_of

WATCHED = 64
"""Elements behind each result that no kernel may write."""

Kernel = Callable[[dict[str, Tensor]], None]
"""Fills results, by the names of buffers."""


@dataclass
class Case:
    """A program, its inputs, and its results by eager."""

    program: Program
    inputs: dict[str, Tensor]
    results: dict[str, Tensor]
    internal: Sequence[str] = ()
    """Buffers that never reach memory."""
    sizes: dict[str, int] = field(default_factory=dict)
    close: dict[str, float] = field(default_factory=lambda: {"rtol": 0.0, "atol": 0.0})
    """Tolerances; empty for those of the dtype."""
    tiles: Tiles | None = None
    """Tiles of Triton that leave lanes over, where rows aren't held at once."""
    signed: Sequence[str] = ()
    """Results whose zeros have eager's signs."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """What results hold before the kernel runs."""

    def check(self, kernel: Kernel, device: str = "cpu") -> None:
        """The results of a kernel are eager's."""
        whole, results = dict[str, Tensor](), dict[str, Tensor]()
        for name, expected in self.results.items():
            count = expected.numel()
            whole[name] = torch.full((count + WATCHED,), 77, device=device).to(expected.dtype)
            results[name] = whole[name][:count].view(expected.shape)
            if name in self.before:
                results[name].copy_(self.before[name])
        kernel({**results, **{name: x.to(device) for name, x in self.inputs.items()}})
        for name, expected in self.results.items():
            beyond = whole[name][expected.numel() :]
            assert (beyond == torch.tensor(77).to(beyond)).all(), name
            found = results[name].cpu()
            torch.testing.assert_close(found, expected, equal_nan=True, **self.close)
            if name in self.signed:
                zero = expected == 0
                assert torch.equal(found[zero].signbit(), expected[zero].signbit()), name

    def triton(self, reduction: str = "", device: str = "cpu") -> Kernel:
        """The kernel in Triton, whose rows are "persistent" or "looped"."""
        with scoped():
            force(reduction)
            source = source_of(self.program, self.internal, device)
        tiles = None if reduction == "persistent" else self.tiles
        return lambda tensors: call(source, tensors, self.sizes, tiles)


def force(reduction: str) -> None:
    """Register a plan rule that decides between rows held at once ("persistent") and swept ("looped")."""

    @plan_rule("triton:forced")
    def forced(plan: Any, options: Options) -> None:
        if plan.reduction_ranges and reduction:
            plan.reduction = reduction

    @plan_rule("triton:split")
    def whole(plan: Any, options: Options) -> None:
        """One program takes a row."""


def run_cpp(plan: KernelPlan, tensors: Mapping[str, Tensor], *sizes: int) -> None:
    """Build one kernel in C and call it."""
    [call] = cpp_calls([plan])
    call(*(tensors[a.buffer] for a in plan.arguments), *sizes)


def cpp_calls(plans: Sequence[KernelPlan], flags: tuple[str, ...] = ()) -> list[Callable[..., Any]]:
    """Build kernels in C together."""
    text = kernel_module(plans).text
    assert not shared_writes(text)
    module = start_build(text, Options(cpp_flags=flags)).result()
    return [bind(module, plan) for plan in plans]


def cpp_kernels(cases: Mapping[str, Case]) -> dict[str, Kernel]:
    """Build the kernels of all cases in C together."""
    plans = [c.program.plan(c.internal, position=i) for i, c in enumerate(cases.values())]

    def kernel(plan: KernelPlan, call: Callable[..., Any], case: Case) -> Kernel:
        return lambda of: call(*(of[a.buffer] for a in plan.arguments), *case.sizes.values())

    found = zip(plans, cpp_calls(plans), cases.values(), strict=True)
    return dict(zip(cases, (kernel(*each) for each in found), strict=True))


REFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(1, dtype=x.dtype), "prod": lambda x: x.prod(1, dtype=x.dtype),
    "max": lambda x: x.amax(1), "min": lambda x: x.amin(1), "any": lambda x: x.any(1),
    "all": lambda x: x.all(1), "argmax": lambda x: x.argmax(1), "argmin": lambda x: x.argmin(1),
}  # fmt: skip
"""Reductions of rows by eager."""


def special(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(*size, generator=generator).to(dtype)


def one_reduction(
    kind: str,
    rows: Any,
    columns: Any,
    dtype: torch.dtype,
    result: torch.dtype,
    across: bool,
    **kw: Any,
) -> Program:
    """Reduce x[rows, columns] along its columns, or (`across`) along its rows."""
    p = Program(**kw)
    size = (rows, columns)
    p.input("x", size, dtype)
    if across:
        fn = lambda ops, i, r: ops.load("x", p.at(r[0], i[0], size=size))  # noqa: E731
        p.reduce("out", (columns,), (rows,), kind, fn, result)
    else:
        fn = lambda ops, i, r: ops.load("x", p.at(i[0], r[0], size=size))  # noqa: E731
        p.reduce("out", (rows,), (columns,), kind, fn, result)
    return p
