"""Which ATen operators become kernels: `python -m tests.lowering.coverage`.

The samples of torch's operator database run in eager, forward and backward, and every ATen overload that
they reach is noted: what graphs hold when they come to the AOT room, before any decomposition. Each call is
then a graph of its own, which is decomposed, lowered and scheduled. An overload counts as compiled if a call
of it, in float32 or another supported dtype, leaves no extern operator; the reference interpreter runs
the loops, and what it computes must be eager's. No compiler runs.

    --ops NAME ...   these operators of the database only (`fnmatch` patterns)
    --samples N      samples of an operator, for each dtype
    --write          write the list of extern operators, minicompile/lowering/EXTERN.md
    --registry       write only that part of it which stands in the registry

For torch.compile an overload counts if it has a lowering that is no fallback, or a decomposition.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fnmatch
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from minicompile import compat
from minicompile.aot.functionalize import functional_variant
from minicompile.errors import MinicompileError, Unsupported
from minicompile.lowering import rules as _rules  # noqa: F401  registers the reasons
from minicompile.lowering.context import extern_reasons
from minicompile.lowering.lower import lower
from minicompile.ops.registry import key_name
from minicompile.options import Options
from minicompile.scheduling.schedule import schedule
from tests.comparing import fresh, tensors
from tests.lowering.conftest import flat, run, traced
from tests.opinfo.cases import spread
from tests.opinfo.compare import near
from tests.opinfo.database import operators

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
GOAL = 300
FILE = Path(__file__).parents[2] / "minicompile" / "lowering" / "EXTERN.md"
UNKNOWN = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
)
"""Operators whose results are nobody's business."""


@dataclass
class Overload:
    """What became of an overload's calls."""

    compiled: list[str] = field(default_factory=list)
    """Calls that are kernels alone: their dtypes."""
    refused: dict[str, str] = field(default_factory=dict)
    """Dtypes -> why a library ran the call."""
    wrong: list[str] = field(default_factory=list)


Call = tuple[OpOverload, Any, Any]


class Seen(compat.TorchDispatchMode):
    """Notes the ATen calls that run inside, in functional form, with copies of their arguments."""

    def __init__(self, wanted: Callable[[Call], bool]) -> None:
        super().__init__()
        self.wanted, self.calls = wanted, list[Call]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if compat.is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with contextlib.suppress(Unsupported):
            self.note(func, args, kwargs)
        return func(*args, **kwargs)

    def note(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        plain = all(map(is_plain, tensors((args, kwargs))))
        if func.namespace != "aten" or not plain or not makes_tensors(func):
            return
        if func._schema.is_mutable:
            func = functional_variant(func)
            kwargs = {k: v for k, v in kwargs.items() if k not in ("out", "out0", "out1", "out2")}
        call = func, args, kwargs
        if not compat.is_composite(func) and self.wanted(call):
            self.calls.append((func, *fresh((args, kwargs))))


def makes_tensors(op: OpOverload) -> bool:
    return any("Tensor" in str(result.type) for result in op._schema.returns)


def is_plain(tensor: torch.Tensor) -> bool:
    kept = tensor.layout is torch.strided and not tensor.is_quantized
    return type(tensor) is torch.Tensor and kept and not tensor.is_nested


def dtypes_of(call: Call) -> str:
    """The kinds of a call's tensors, or of what it makes."""
    found = dict.fromkeys(t.dtype for t in tensors(call[1:]))
    made = {leaf: None for leaf in pytree.tree_leaves(call[2]) if isinstance(leaf, torch.dtype)}
    return " ".join(str(dtype)[6:] for dtype in found or made)


def attempt(call: Call) -> tuple[str, str]:
    """(why a library runs the call, what is wrong with the numbers): empty if neither."""
    op, args, kwargs = call
    leaves, shape = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    given = [leaves[i].detach() for i in places]

    def fn(*values: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        again_args, again_kwargs = pytree.tree_unflatten(filled, shape)
        return op(*again_args, **again_kwargs)

    if not given:  # a graph needs fakes
        inner, given = fn, [torch.zeros(1)]
        fn = lambda _: inner()  # noqa: E731
    try:
        traced_graph = traced(fn, given)
    except Exception as error:  # data in sizes, most often
        known = extern_reasons.get(op.overloadpacket)
        return known or f"not traced: {type(error).__name__}", ""
    try:
        graph = lower(traced_graph, Options(verify=True))
        schedule(graph, Options(verify=True))
    except MinicompileError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0], ""
    except Exception as error:
        return f"crash of {type(error).__name__}: {error}".splitlines()[0], f"crash: {error!r}"
    if graph.externs:
        return graph.externs[0].reason, ""
    if op.overloadpacket.__name__ in UNKNOWN:
        return "", ""
    try:
        found = run(graph, *given)
    except (MinicompileError, IndexError) as error:
        return "", repr(error)
    expected = flat(fn(*given))
    try:
        integers = not any(t.is_floating_point() for t in given)
        widened = (t.double() if integers or t.is_floating_point() else t for t in given)
        exact = flat(fn(*widened))
    except (RuntimeError, IndexError):  # arguments of one dtype, most often
        exact = expected
    rows = zip(found, expected, exact, strict=True)
    return "", next((f"{a} is not {b}" for a, b, c in rows if not alike(a, b, c)), "")


def alike(found: Any, expected: Any, exact: Any) -> bool:
    """Equal, or as near to the result in double precision as eager's roundings."""
    if not isinstance(expected, torch.Tensor):
        return bool(found == expected)
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    if not expected.dtype.is_floating_point:
        return torch.equal(found, expected)
    return near(expected, found, exact)


def samples(op: Any, dtype: torch.dtype, count: int) -> Iterator[Any]:
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    made = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 64)
    yield from (sample for _, sample in spread(list(made), count))


def calls_of(op: Any, sample: Any, wanted: Callable[[Call], bool]) -> list[Call]:
    """The ATen calls of a sample's forward and backward pass."""
    seen = Seen(wanted)
    # as the AOT room traces: torch's Python kernels take some operators apart
    with compat.python_dispatcher(), seen, contextlib.suppress(Exception):
        result = op.op(sample.input, *sample.args, **sample.kwargs)
        outputs = [t for t in tensors(sample.output_process_fn_grad(result)) if t.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    return seen.calls


def cover(names: list[str], count: int) -> dict[OpOverload, Overload]:
    """All overloads that the operators reach, and what became of them."""
    found: dict[OpOverload, Overload] = collections.defaultdict(Overload)
    tried: collections.Counter[tuple[OpOverload, str]] = collections.Counter()

    def wanted(call: Call) -> bool:
        key = call[0], dtypes_of(call)
        tried[key] += 1
        return not found[call[0]].compiled and tried[key] <= count

    for op in operators():
        if names and not any(fnmatch.fnmatch(op.full_name, name) for name in names):
            continue
        for dtype in DTYPES:
            if not op.supports_dtype(dtype, "cpu"):
                continue
            torch.manual_seed(0)
            for sample in samples(op, dtype, count):
                for call in calls_of(op, sample, wanted):
                    judge(call, found[call[0]])
    return dict(found)


def judge(call: Call, overload: Overload) -> None:
    dtypes = dtypes_of(call)
    if overload.compiled:
        return
    reason, wrong = attempt(call)
    overload.wrong += [wrong] if wrong else []
    if reason:
        overload.refused[dtypes] = reason
    else:
        overload.compiled.append(dtypes)


def torch_compiles(op: OpOverload) -> bool:
    """Whether torch.compile has a lowering that isn't a fallback, or a decomposition, for an overload."""
    from torch._inductor import lowering
    from torch._inductor.decomposition import select_decomp_table

    if op in select_decomp_table():
        return True
    return op in lowering.lowerings and op not in lowering.fallbacks


# The list ----------------------------------------------------------------------------------------

HEAD = f"""# Operators that a library runs

Everything else becomes loops. `python -m {__spec__.name if __spec__ else __name__} --write` wrote this file.
"""


def registry_part() -> str:
    """The reasons that stand in the registry, with their operators."""
    by_reason: dict[str, set[str]] = collections.defaultdict(set)
    for key, reason in extern_reasons.items():
        by_reason[reason].add(key_name(key).removeprefix("aten."))
    lines = [
        "## On purpose",
        "",
        "What no rule takes is called for the reason that is registered for it.",
        "",
    ]
    lines += [f"- **{reason}**: {' '.join(sorted(ops))}" for reason, ops in by_reason.items()]
    return "\n".join(lines) + "\n"


def database_part(found: dict[OpOverload, Overload]) -> str:
    """The overloads that torch's operator database reaches."""
    done = {op for op, overload in found.items() if overload.compiled}
    never: dict[str, list[str]] = collections.defaultdict(list)
    for op, overload in sorted(found.items(), key=lambda item: str(item[0])):
        for reason in dict.fromkeys(overload.refused.values() if op not in done else ()):
            never[general(reason, op)].append(name_of(op))
    lines = ["## In torch's operator database", ""]
    lines += [f"torch {torch.__version__.partition('+')[0]} reaches {len(found)} ATen overloads, "]
    lines[-1] += f"of which {len(done)} become kernels without an extern operator. The others:"
    lines += ["", *(f"- **{reason}**: {', '.join(never[reason])}" for reason in sorted(never))]
    return "\n".join(lines) + "\n"


def name_of(op: OpOverload) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


def general(reason: str, op: OpOverload) -> str:
    return reason.replace(f" for {op}", "").replace(str(op), "the operator")


def written(found: dict[OpOverload, Overload] | None) -> str:
    """The file; without new results the part that stems from the database stays."""
    if found is None:
        old = FILE.read_text(encoding="utf-8") if FILE.exists() else ""
        database = "## In torch's" + old.partition("## In torch's")[2]
    else:
        database = database_part(found)
    return "\n".join((HEAD, registry_part(), database))


def report(found: dict[OpOverload, Overload]) -> bool:
    """Print the counts; whether the goal is reached and nothing is wrong."""
    done = {op for op, overload in found.items() if overload.compiled}
    theirs = {op for op in found if torch_compiles(op)}
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    for op in sorted(found.keys() - done, key=str):
        for reason in dict.fromkeys(found[op].refused.values()):
            reasons[general(reason, op)].append(name_of(op) + ("*" if op in theirs else ""))
    for reason, ops in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"{len(ops):4} {reason}: {', '.join(ops)}")
    wrong = {op: overload.wrong for op, overload in found.items() if overload.wrong}
    for op, texts in wrong.items():
        print(f"wrong: {op}: {texts[0][:300]}")
    print(
        f"{len(found)} ATen overloads; {len(done)} are kernels without an extern operator; torch.compile "
        f"has rules for {len(theirs)}; {len(theirs - done)} of these are not among ours (*)"
    )
    return not wrong and len(done) >= GOAL


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--registry", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.registry:
        FILE.write_text(written(None), encoding="utf-8")
        return 0
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = cover(chosen.ops, chosen.samples)
    if chosen.write:
        FILE.write_text(written(found), encoding="utf-8")
    return 0 if report(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
