"""Calls of torch's own operator database (OpInfo), each run by eager and by a compiler, and compared.

`cases(op, ...)` yields `Case`s; `check(case)` gives a `Verdict`: what differed, and whether the
operator was in a graph that ran compiled.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from minicompile import pipeline
from minicompile.dynamo.dispatch import Dispatcher
from minicompile.dynamo.result import Capture
from minicompile.options import Options
from tests.aot.database import operators

KINDS: dict[str, tuple[torch.dtype, ...]] = {
    "float": (torch.float32, torch.float64),
    "int": (torch.int64, torch.int32, torch.uint8),
    "bool": (torch.bool,),
    "half": (torch.bfloat16, torch.float16),
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
    for dtype, variant in itertools.product(dtypes_of(op, kinds), variants_of(op, variants)):
        grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        if variant == "inplace_grad" and not grad:
            continue
        torch.manual_seed(0)
        wanted = grad and variant in ("function", "method", "inplace_grad")
        made = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=wanted), 64))
        for number, sample in spread(made, samples):
            case = Case(
                op.full_name,
                variant,
                dtype,
                number,
                op.op,
                (sample.input, *sample.args),
                dict(sample.kwargs),
                sample.output_process_fn_grad,
            )
            with contextlib.suppress(CantMake):
                yield varied(case, op)


class CantMake(Exception):
    """The variant makes no sense for this sample."""


def varied(case: Case, op: Any) -> Case:
    """The case's variant of a call of the function."""
    if case.variant == "method":
        case.call = op.method_variant
    elif case.variant == "inplace":
        case.call = op.inplace_variant
    elif case.variant == "inplace_grad":
        case.call = on_a_clone(op.inplace_variant)
    elif case.variant.startswith("out"):
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


# Running -----------------------------------------------------------------------------------------


def fresh(tree: Any) -> Any:
    """A copy of all tensors: what shares memory still does, strides and bits are kept."""
    storages: dict[int, Any] = {}
    known: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in known:
            known[id(value)] = copy_of(value, storages).requires_grad_(value.requires_grad)
        return known[id(value)]

    return pytree.tree_map(copy, tree)


def copy_of(value: torch.Tensor, storages: dict[int, Any]) -> torch.Tensor:
    value = value.detach()
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return value.clone()
    memory = value.untyped_storage()
    if memory._cdata not in storages:
        storages[memory._cdata] = memory.clone()
    place = value.storage_offset(), value.size(), value.stride()
    new = torch.empty(0, dtype=value.dtype).set_(storages[memory._cdata], *place)
    new = torch._conj(new) if value.is_conj() else new
    return torch._neg_view(new) if value.is_neg() else new


@dataclass
class Outcome:
    """What a call did: result, arguments afterwards, gradients; or what it raised."""

    raised: str = ""
    message: str = ""
    result: Any = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    backward_raised: str = ""


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def run(case: Case, function: Callable[..., Any]) -> Outcome:
    """Forward, and backward with fixed cotangents where something requires grad."""
    args, kwargs = fresh((case.args, case.kwargs))
    out = Outcome(inputs=tensors((args, kwargs)))
    torch.manual_seed(0)
    try:
        out.result = function(args, kwargs)
    except Exception as error:
        out.raised, out.message = type(error).__name__, str(error)
        return out
    wanted = [value for value in out.inputs if value.requires_grad and value.is_leaf]
    outputs = [value for value in tensors(case.process(out.result)) if value.requires_grad]
    if not wanted or not outputs:
        return out
    torch.manual_seed(1)
    cotangents = [cotangent(value, case.dtype) for value in outputs]
    try:
        out.gradients = list(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))
    except Exception as error:
        out.backward_raised, out.message = type(error).__name__, str(error)
    return out


def cotangent(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers of the case's dtype, also where the case runs in double precision."""
    made = torch.randn(value.shape, dtype=torch.complex64 if value.is_complex() else torch.float32)
    return (made.to(dtype) if dtype in KINDS["half"] and not made.is_complex() else made).to(
        value.dtype
    )


@dataclass
class Graphs:
    """What ran compiled, and why not more did."""

    operators: set[str] = field(default_factory=set)
    breaks: list[str] = field(default_factory=list)


def operators_in(graph: torch.fx.Graph) -> set[str]:
    """Names of the torch functions, methods and operators that a captured graph calls."""
    found = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        name = node.target if isinstance(node.target, str) else node.target.__name__
        part = name == "getitem" and not isinstance(value_of(node.args[0]), torch.Tensor)
        writes = value_of(node) is None and bool(node.all_input_nodes)
        if not part and (writes or tensors(value_of(node))):
            found.add(str(node.args[1]) if name == "getattr" else str(name))
    return found


def value_of(node: Any) -> Any:
    """A node's value at compile time, here or in torch.compile's graphs."""
    return node.meta.get("val", node.meta.get("example_value"))


def entry(case: Case) -> types.FunctionType:
    """A new function that makes the call, with code of its own: nothing is remembered of other samples."""
    call = case.call

    def fn(args: Any, kwargs: Any) -> Any:
        return call(*args, **kwargs)

    fn.__code__ = fn.__code__.replace(co_name=f"fn_{next(_numbers)}")
    return fn  # type: ignore[return-value]


_numbers = itertools.count()


def compile_ours(case: Case, graphs: Graphs) -> tuple[Callable[..., Any], Callable[[], None]]:
    """The call under mc.compile(backend="aot_eager"), and what reads the breaks afterwards."""
    options = Options()

    def backend(capture: Capture) -> Callable[[list[Any]], Any]:
        compiled = pipeline.aot_eager(capture, options)
        found = operators_in(capture.graph.gm.graph)

        def call(inputs: list[Any]) -> Any:
            results = compiled(inputs)
            graphs.operators |= found
            return results

        return call

    make = functools.partial(Dispatcher, backend=backend, options=options)
    dispatcher = make(entry(case))

    def finish() -> None:
        told = dispatcher.explanation()
        graphs.breaks = [f"{b.id}: {b.reason}" for b in told.breaks]

    return dispatcher.entrance, finish


def compile_theirs(case: Case, graphs: Graphs) -> tuple[Callable[..., Any], Callable[[], None]]:
    """The same under torch.compile(backend="aot_eager")."""
    import torch._dynamo
    from torch._dynamo.backends.debugging import aot_eager

    if case.number == 0:
        torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10**6

    def backend(gm: Any, inputs: Any) -> Callable[..., Any]:
        compiled = aot_eager(gm, inputs)
        found = operators_in(gm.graph)

        def call(*args: Any) -> Any:
            results = compiled(*args)
            graphs.operators |= found
            return results

        return call

    def finish() -> None:
        graphs.breaks = list(torch._dynamo.utils.counters["graph_break"])

    return torch.compile(entry(case), backend=backend), finish


# Comparing ---------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What a compiler made of a case."""

    case: str
    variant: str
    dtype: str
    wrong: str = ""
    """What differs from eager; empty if nothing."""
    in_graph: bool | None = None
    """Whether the operator was in a graph that ran compiled; None: not asked."""
    breaks: list[str] = field(default_factory=list)
    theirs: bool | None = None
    """The same of torch.compile."""
    eager_raises: bool = False
    gradients: int = 0
    exact: bool = True

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(case: Case, sides: str = "both") -> Verdict:
    """Compare `case` with eager, and say whether the operator was in a graph."""
    verdict = Verdict(case.name, case.variant, str(case.dtype)[6:])
    eager = run(case, entry(case))
    verdict.eager_raises = bool(eager.raised)
    wrapped = {"clone"} if case.variant == "inplace_grad" else set()
    if sides in ("minicompile", "both"):
        graphs = Graphs()
        function, finish = compile_ours(case, graphs)
        ours = run(case, function)
        finish()
        verdict.in_graph, verdict.breaks = bool(graphs.operators - wrapped), graphs.breaks
        verdict.gradients = sum(g is not None for g in ours.gradients)
        verdict.wrong = difference(case, eager, ours, verdict)
    if sides in ("torch", "both"):
        graphs = Graphs()
        function, finish = compile_theirs(case, graphs)
        run(case, function)
        finish()
        verdict.theirs = bool(graphs.operators - wrapped)
    return verdict


def difference(case: Case, eager: Outcome, ours: Outcome, verdict: Verdict) -> str:
    """The first difference in words; "" if there is none."""
    if eager.raised != ours.raised:
        return f"raises {ours.raised or 'nothing'} ({ours.message}), eager {eager.raised}"
    if eager.raised:
        return ""
    reference = functools.cache(functools.partial(in_double, case))
    values = case.op.partition(".")[0] not in METADATA_ONLY
    found = compare_trees(eager.result, ours.result, "result", values)
    found = found or compare_all(eager.inputs, ours.inputs, "input", values)
    if found.startswith("close?"):
        found = nearer(found, eager, ours, reference())
        verdict.exact = False
    if found:
        return found
    one, other = aliases(eager), aliases(ours)
    if one != other:
        return f"memory is shared as {other}, eager {one}"
    if eager.backward_raised != ours.backward_raised:
        return (
            f"backward raises {ours.backward_raised or 'nothing'} ({ours.message}), "
            f"eager {eager.backward_raised or 'nothing'}"
        )
    found = compare_all(eager.gradients, ours.gradients, "gradient", True, strides=False)
    if found.startswith("close?"):
        found = nearer(found, eager, ours, reference())
        verdict.exact = False
    return found


def compare_trees(one: Any, other: Any, what: str, values: bool) -> str:
    """Results: containers, tensors and numbers."""
    ones, shape = pytree.tree_flatten(one)
    others, other_shape = pytree.tree_flatten(other)
    if shape != other_shape:
        return f"{what}: a {other_shape}, eager a {shape}"
    return compare_all(ones, others, what, values)


def compare_all(
    ones: list[Any], others: list[Any], what: str, values: bool, strides: bool = True
) -> str:
    if len(ones) != len(others):
        return f"{len(others)} {what}s, eager {len(ones)}"
    found = [
        compare(a, b, f"{what} {i}", values, strides) for i, (a, b) in enumerate(zip(ones, others))
    ]
    return min(filter(None, found), key=lambda text: text.startswith("close?"), default="")


def aliases(outcome: Outcome) -> list[int]:
    """For each tensor of arguments and result the first in the same memory; negative: the same object."""
    found, memory, objects = [], {}, {}
    for index, value in enumerate((*outcome.inputs, *tensors(outcome.result))):
        same = objects.setdefault(id(value), index)
        if same != index:
            found.append(-1 - same)
        elif value.layout is not torch.strided or value.numel() == 0:
            found.append(index)
        else:
            found.append(memory.setdefault(value.untyped_storage()._cdata, index))
    return found


def facts(value: torch.Tensor, strides: bool) -> dict[str, Any]:
    """What must agree besides the values. The stride of a dimension of size 1 says nothing."""
    known = {"class": type(value), "dtype": value.dtype, "shape": tuple(value.shape)}
    known |= {"layout": value.layout, "requires grad": value.requires_grad}
    if strides and value.layout is torch.strided:
        known["strides"] = tuple(
            0 if size == 1 or value.numel() == 0 else step
            for size, step in zip(value.shape, value.stride())
        )
        known["offset"] = value.storage_offset()
        known["conjugate, negative"] = value.is_conj(), value.is_neg()
    return known


def compare(one: Any, other: Any, what: str, values: bool, strides: bool) -> str:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        same = type(one) is type(other) and (one == other or (one != one and other != other))
        return "" if same else f"{what}: {other!r}, eager {one!r}"
    ours, eagers = facts(other, strides), facts(one, strides)
    for key, expected in eagers.items():
        if ours[key] != expected:
            return f"{what}: {key} {ours[key]}, eager {expected}"
    if not values or equal(one, other):
        return ""
    if not (one.is_floating_point() or one.is_complex()) or one.layout is not torch.strided:
        return f"{what}: values {shown(other)}, eager {shown(one)}"
    return f"close? {what}: values {shown(other)}, eager {shown(one)}"


def shown(value: torch.Tensor) -> str:
    text = " ".join(str(value.detach()).split())
    return text if len(text) < 160 else text[:160] + "..."


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit; NaN equals NaN."""
    one, other = one.detach(), other.detach()
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_complex():
        one, other = (
            torch.view_as_real(one.resolve_conj()),
            torch.view_as_real(other.resolve_conj()),
        )
    return bool(((one == other) | ((one != one) & (other != other))).all())


def in_double(case: Case) -> Outcome:
    """Eager's outcome with all numbers in double precision."""
    wide = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
    halves = (torch.float32, torch.float16, torch.bfloat16)
    wide |= dict.fromkeys(halves, torch.float64)

    def widened(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return wide.get(value, value)
        if isinstance(value, torch.Tensor) and value.dtype in wide:
            found = value.detach().to(wide[value.dtype])
            return found.requires_grad_(value.requires_grad)
        return value

    args, kwargs = pytree.tree_map(widened, (case.args, case.kwargs))
    double = Case(
        case.op, case.variant, case.dtype, case.number, case.call, args, kwargs, case.process
    )
    return run(double, entry(double))


def nearer(found: str, eager: Outcome, ours: Outcome, reference: Outcome) -> str:
    """Roundings: no farther from the result in double precision than twice eager's own error, or within
    the rounding of a few operations of the dtype."""
    groups = [("result", tensors(eager.result), tensors(ours.result), tensors(reference.result))]
    groups += [("input", eager.inputs, ours.inputs, reference.inputs)]
    groups += [("gradient", eager.gradients, ours.gradients, reference.gradients)]
    for what, eagers, mine, doubles in groups:
        for index, (one, other) in enumerate(zip(eagers, mine)):
            if one is None or equal(one, other):
                continue
            double = doubles[index] if index < len(doubles) else one
            if not near(one, other, one if double is None else double):
                return f"{what} {index}: values {shown(other)}, eager {shown(one)}"
    return ""


def near(eager: torch.Tensor, ours: torch.Tensor, double: torch.Tensor) -> bool:
    if double.shape != eager.shape:
        double = eager
    wide = torch.complex128 if eager.is_complex() else torch.float64
    one, other, exact = (x.detach().resolve_conj().to(wide) for x in (eager, ours, double))
    finite = torch.isfinite(one) & torch.isfinite(other)
    if not torch.equal(torch.isnan(one), torch.isnan(other)):
        return False
    if not equal(one.masked_fill(finite, 0), other.masked_fill(finite, 0)):  # infinities
        return False
    step = torch.finfo(eager.dtype).eps
    scale = exact.abs().masked_fill(~torch.isfinite(exact), 0)
    largest = scale.max() if scale.numel() else 0
    error = (one - exact).abs().masked_fill(~finite, 0)
    # errors of sums are as large as their summands: the largest element, or an argument near 1
    rest = max(float(step * largest), torch.finfo(torch.float32).eps)
    allowed = 2 * (error.max() if error.numel() else 0) + 4 * step * scale + rest
    return bool((((other - exact).abs() <= allowed) | ~finite).all())
