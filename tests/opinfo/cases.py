"""Calls of torch's own operator database (OpInfo): `cases(op, ...)` yields `Case`s."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.comparing import fresh
from tests.opinfo.database import operators

KINDS: dict[str, tuple[torch.dtype, ...]] = {
    "float": (torch.float32, torch.float64),
    "int": (torch.int64, torch.int32, torch.uint8),
    "bool": (torch.bool,),
    "half": (torch.bfloat16, torch.float16),
    "float16": (torch.float16,),
    "complex": (torch.complex64, torch.complex128),
}
"""Of each kind the first dtype that an operator takes."""

VARIANTS = ("function", "method", "inplace", "inplace_grad", "out", "out_strided", "out_resized")
"""in place on an input, and on a value that requires grad; `out=` of the right size, in another
memory order, and empty, to be resized."""

UNINITIALIZED = "uninitialized memory: sizes, strides and dtype are compared, values are not"
METADATA_ONLY = {
    **dict.fromkeys(
        ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"), UNINITIALIZED
    ),
    "empty_permuted": UNINITIALIZED,
    "resize_": "what a larger tensor holds is uninitialized memory",
    "resize_as_": "what a larger tensor holds is uninitialized memory",
}
"""Operators whose values are not compared, and why."""


CORRUPTS = "eager writes outside of an `out` that is not contiguous, and the process dies"
LEFT_OUT = {(name, "out_strided"): CORRUPTS for name in ("tril", "triu", "lu_unpack", "linalg.lu")}
"""Variants of operators that eager can't run, and why."""


@functools.cache
def database() -> dict[str, Any]:
    """The OpInfos of the installed torch by full name."""
    found = operators()
    # `check` seeds before each call; seeding inside the call would cut its graph
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal") and hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = plainly  # type: ignore[attr-defined]
    return {op.full_name: op for op in found}


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# Cases -------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One call: `call(*args, **kwargs)` on copies of the sample's arguments."""

    op: str
    variant: str
    dtype: torch.dtype
    number: int
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any] = lambda result: result
    """Which part of the result is differentiable whatever the eigenvectors' signs are."""

    @property
    def name(self) -> str:
        return f"{self.op} {self.variant} {str(self.dtype)[6:]} #{self.number}"


def dtypes_of(op: Any, kinds: tuple[str, ...]) -> list[torch.dtype]:
    found = []
    for kind in kinds:
        taken = [dtype for dtype in KINDS[kind] if op.supports_dtype(dtype, "cpu")]
        found += taken[:1]
    return found


def variants_of(op: Any, wanted: tuple[str, ...]) -> list[str]:
    has = {
        "function": True,
        "method": op.method_variant is not None,
        "inplace": op.inplace_variant is not None,
        "inplace_grad": op.inplace_variant is not None and op.supports_autograd,
        **dict.fromkeys(("out", "out_strided", "out_resized"), op.supports_out),
    }
    return [v for v in wanted if has[v] and (op.full_name, v) not in LEFT_OUT]


def spread(items: list[Any], count: int) -> list[tuple[int, Any]]:
    """`count` items with their positions, from the whole list."""
    if count >= len(items):
        return list(enumerate(items))
    places = [round(i * (len(items) - 1) / max(count - 1, 1)) for i in range(count)]
    return [(place, items[place]) for place in places]


def cases(
    op: Any, variants: tuple[str, ...], kinds: tuple[str, ...], samples: int
) -> Iterator[Case]:
    """`samples` calls of each variant in each kind of dtype."""
    for dtype, variant in itertools.product(dtypes_of(op, kinds), variants_of(op, variants)):
        grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        if variant == "inplace_grad" and not grad:
            continue
        torch.manual_seed(0)
        wanted = grad and variant in ("function", "method", "inplace_grad")
        drawn = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=wanted), 64))
        for number, sample in spread(drawn, samples):
            args, process = (sample.input, *sample.args), sample.output_process_fn_grad
            called = (op.op, args, dict(sample.kwargs), process)
            with contextlib.suppress(CantMake):
                yield varied(Case(op.full_name, variant, dtype, number, *called), op)


class CantMake(Exception):
    """The variant makes no sense for this sample."""


def varied(case: Case, op: Any) -> Case:
    """The case's variant of a call of the function."""
    calls = {
        "method": op.method_variant,
        "inplace": op.inplace_variant,
        "inplace_grad": on_a_clone(op.inplace_variant),
    }
    case.call = calls.get(case.variant, case.call)
    if case.variant.startswith("out"):
        torch.manual_seed(0)
        try:
            args, kwargs = fresh((case.args, case.kwargs))
            result = case.call(*args, **kwargs)
        except Exception as error:
            raise CantMake from error
        case.kwargs["out"] = pytree.tree_map(functools.partial(out_like, case.variant), result)
    return case


def on_a_clone(inplace: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        return inplace(first.clone(), *args, **kwargs)

    return call


def out_like(variant: str, result: Any) -> Any:
    """A tensor to write a result to."""
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        raise CantMake
    plain = torch.empty_like(result, memory_format=torch.contiguous_format, requires_grad=False)
    if variant == "out_resized":
        return plain.new_empty(0)
    if variant == "out_strided":
        if result.dim() == 0:
            raise CantMake
        turned = [*reversed(range(result.dim()))]
        plain = torch.stack([plain.permute(turned)] * 2, -1)[..., 0].permute(turned)
    return plain.fill_(1)
