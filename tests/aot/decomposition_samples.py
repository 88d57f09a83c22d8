"""Each decomposition against eager, on the samples of torch's operator database and some of our own.

A sample is traced forward and backward. Wherever the graph calls an operator that has a rule, the operator
and the rule are both run on the real arguments, and on these arguments with NaN, infinities and zeros of both
signs: values, dtypes and strides are compared. That whole graphs compute what eager does is checked by
tests/opinfo.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.autograd import ahead_of_time
from minicompile.aot.decompositions import decomposition
from minicompile.aot.layout import conform, same_strides
from minicompile.aot.levels import verify
from minicompile.errors import Unsupported, VerifyError
from minicompile.ops.nodes import is_pointwise
from minicompile.options import Options
from tests.aot.helpers import capture
from tests.opinfo.database import operators

aten = torch.ops.aten

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.uint8, torch.bool, torch.complex64),
)
SPECIAL = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 1e4)
FINITE = tuple(v for v in SPECIAL if not math.isinf(v))
RUNNING = {aten.var_mean.correction, aten.std_mean.correction, aten.native_layer_norm.default}
RUNNING |= {aten.native_group_norm.default, aten._native_batch_norm_legit_functional.default}
RUNNING |= {aten._native_batch_norm_legit.no_stats, aten.native_group_norm_backward.default}
RUNNING |= {aten._native_batch_norm_legit_no_training.default}
"""Eager's running sums are NaN or infinite by where in a row an infinity stands, and so is the product of
mean and weight that it takes first: these get FINITE values."""

UNTAGGED = {
    getattr(aten, name).default
    for name in (
        *("hardtanh_backward", "hardswish", "hardswish_backward", "hardsigmoid_backward"),
        *("elu_backward", "leaky_relu_backward", "softplus_backward"),
    )
}
"""Pointwise, though torch doesn't tag them so."""

SPECIAL_RUNS = 3
"""How often the calls of one operator are repeated with special values, for each dtype."""

EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default}
EMPTY |= {aten.empty_permuted.default, aten.new_empty.default, aten.new_empty_strided.default}
"""What these hold is nobody's business."""
ORDINARY = EMPTY | {aten.log_sigmoid_backward.default}
"""Called with the arguments at hand alone: a result of the forward among them must belong to the input."""

TOLERANCES = {torch.float64: (1e-9, 1e-9), torch.complex128: (1e-9, 1e-9)}
TOLERANCES |= dict.fromkeys((torch.float32, torch.complex64), (1e-5, 1e-5))
TOLERANCES |= {d: (2 * torch.finfo(d).eps,) * 2 for d in (torch.float16, torch.bfloat16)}


@dataclass
class Sample:
    """A function of tensors, and the tensors."""

    name: str
    fn: Callable[..., Any]
    inputs: list[torch.Tensor]


@dataclass
class Report:
    """How often each rule was checked, and what was wrong."""

    checked: Counter[OpOverload] = field(default_factory=Counter)
    special: Counter[Any] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    names: set[str] = field(default_factory=set)

    def take_wrong(self) -> list[str]:
        """What was wrong since the last time."""
        found, self.wrong = self.wrong, []
        return found


def flat_tensors(value: Any) -> tuple[torch.Tensor, ...]:
    return tuple(v for v in compat.tree_leaves(value) if isinstance(v, torch.Tensor))


def as_sample(name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Sample:
    """A call as a function of its tensors alone."""
    leaves, spec = compat.tree_flatten((args, kwargs))
    places = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]

    def fn(*tensors: torch.Tensor) -> Any:
        given = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            given[i] = tensor
        called, options = compat.tree_unflatten(given, spec)
        return flat_tensors(op(*called, **options))

    return Sample(name, fn, [leaves[i] for i in places])


def database_samples(name: str, dtype: torch.dtype, most: int) -> Iterator[Sample]:
    """The first samples of an operator in torch's database, of a dtype that it takes."""
    for op in operators():
        if name != op.name or dtype not in op.supported_dtypes("cpu"):
            continue
        grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        torch.manual_seed(0)
        for number, s in enumerate(op.sample_inputs("cpu", dtype, requires_grad=grad)):
            if number == most:
                break
            label = f"{op.formatted_name}[{number}] {str(dtype).removeprefix('torch.')}"
            yield as_sample(label, op.op, s.input, *s.args, **s.kwargs)


def difference(got: Any, expected: Any, zeros: bool = False, strides: bool = True) -> str:
    """What is unlike: the kind of value, dtype, shape, strides, elements; "" if nothing is."""
    if not isinstance(expected, torch.Tensor):
        return "" if got is None and expected is None else f"{got} for {expected}"
    if not isinstance(got, torch.Tensor):
        return f"{got} for a tensor"
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return f"{got.dtype} {list(got.shape)} for {expected.dtype} {list(expected.shape)}"
    if strides and not same_strides(got, expected):
        return f"strides {got.stride()} for {expected.stride()}"
    rtol, atol = TOLERANCES.get(expected.dtype, (0.0, 0.0))
    try:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return str(error).replace("\n", " ")
    if zeros and expected.is_floating_point():
        both = (got == 0) & (expected == 0)
        if not torch.equal(got.signbit() & both, expected.signbit() & both):
            return "zeros of another sign"
    return ""


def special(x: Any, start: list[int], values: tuple[float, ...], gaps: bool) -> Any:
    """A floating tensor's elements as special values, each tensor beginning with another one.

    `gaps` in memory: eager's vector instructions disagree with its plain loops about NaN (in
    `hardtanh_backward`, say), and it is the plain loops that the other devices agree with.
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.numel() == 0:
        return x
    start[0] = start[0] * 3 + 1
    kinds = len(values)
    found = [values[(start[0] * (i // kinds + 1) + i) % kinds] for i in range(x.numel())]
    new = torch.tensor(found, dtype=x.dtype).view(x.shape)
    return torch.stack([new, new], -1)[..., 0] if gaps else torch.empty_like(x).copy_(new)


class Checked(fx.Interpreter):
    """Runs a graph; each call of an operator that has a rule is compared with the rule."""

    def __init__(self, gm: fx.GraphModule, report: Report, sample: Sample) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.report, self.sample = report, sample

    def call_function(self, op: Any, args: Any, kwargs: Any) -> Any:
        if op not in decomposition or not isinstance(op, OpOverload):
            return super().call_function(op, args, kwargs)
        before = torch.get_rng_state()
        expected = op(*args, **kwargs)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        self.compare(op, args, kwargs, expected)
        self.compare_special(op, args, kwargs)
        torch.set_rng_state(after)
        return expected

    def compare_special(self, op: Any, args: Any, kwargs: Any) -> None:
        dtypes = tuple(x.dtype for x in flat_tensors((args, kwargs)))
        runs = self.report.special[op, dtypes]
        many = max((x.numel() for x in flat_tensors((args, kwargs))), default=0) >= len(SPECIAL)
        if not many or op in ORDINARY or runs == SPECIAL_RUNS:
            return
        start, values = [runs], FINITE if op in RUNNING else SPECIAL
        gaps = is_pointwise(op) or op in UNTAGGED
        odd_args, odd_kwargs = compat.map_aggregate(
            (args, dict(kwargs)), lambda x: special(x, start, values, gaps)
        )
        if start == [runs]:
            return
        self.report.special[op, dtypes] += 1
        state = torch.get_rng_state()
        try:
            wanted = op(*odd_args, **odd_kwargs)
        except (RuntimeError, IndexError, ValueError):
            return  # arguments that eager refuses
        torch.set_rng_state(state)
        self.compare(op, odd_args, odd_kwargs, wanted, " (special values)")

    def compare(self, op: Any, args: Any, kwargs: Any, expected: Any, about: str = "") -> None:
        rule = decomposition[op].rule
        try:
            result = rule(*args, **kwargs)
            if result is NotImplemented:
                return
            result = conform(op, result, expected)
        except Exception as error:
            self.wrong(op, f"{type(error).__name__}: {error}{about}")
            return
        self.report.checked[op] += 1
        if op in EMPTY:
            return
        pairs = zip(compat.tree_leaves(result), compat.tree_leaves(expected), strict=True)
        for got, wanted in pairs:
            if (
                found := wanted is not None
                and got is not None
                and difference(got, wanted, bool(about) and is_pointwise(op), not about)
            ):
                self.wrong(op, f"{found}{about}")

    def wrong(self, op: Any, what: str) -> None:
        self.report.wrong.append(f"{self.sample.name}: the rule of {op}: {what[:300]}")


def check(sample: Sample, report: Report) -> None:
    """Compare the rules of the operators that a sample's graphs call with the operators."""
    try:
        with compat.quiet_fakes():
            graph, fakes, _ = capture(sample.fn, sample.inputs)
    except Exception as error:  # fakes can't, or the tests' way to capture can't
        report.refused[f"{type(error).__name__}: {str(error)[:70]}"] += 1
        return
    try:
        with compat.quiet_fakes():
            training = any(x.requires_grad for x in sample.inputs)
            result = ahead_of_time(graph, fakes, Options(), training=training)
    except (Unsupported, *compat.FAKE_LIMITS) as error:
        report.refused[f"{type(error).__name__}: {str(error)[:70]}"] += 1
        return
    except Exception as error:
        report.wrong.append(f"{sample.name}: {type(error).__name__}: {error}")
        return
    inputs = [x.detach() for x in sample.inputs]
    torch.manual_seed(1)
    nodes = [n for n in result.level("full").nodes if n.op == "placeholder"]
    tangents = [draw(node.meta["val"]) for node in nodes[len(inputs) :]]
    for level, graph in result.levels.items():
        try:
            verify(graph)
            if level != "prims":
                given = [x.clone() for x in (*inputs, *tangents)]
                with torch.no_grad():
                    Checked(graph.gm, report, sample).run(*given)
        except (VerifyError, RuntimeError) as error:
            report.wrong.append(f"{sample.name}: level {level}: {error}")


def draw(fake: torch.Tensor) -> torch.Tensor:
    real = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    return real.copy_(torch.rand(fake.shape, dtype=torch.float64)) if fake.numel() else real


def run_database(
    name: str, most: int, report: Report, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> None:
    """An operator's first samples: `most` of float32, a third of it of each other dtype."""
    for dtype in dtypes:
        few = most if dtype is torch.float32 else (most + 2) // 3
        for sample in database_samples(name, dtype, few):
            check(sample, report)


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*size, requires_grad=True)


def own(name: str, op: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, Sample]:
    return name, as_sample(name, op, *args, **kwargs)


def copies(x: torch.Tensor) -> list[Any]:
    """Copying variants of views that the database lacks."""
    found = [aten.select_copy.int(x, 0, 1), aten.slice_copy.Tensor(x, 2, 1, 3)]
    found += [
        aten.squeeze_copy.default(x),
        aten.squeeze_copy.dim(x, 1),
        aten.detach_copy.default(x),
    ]
    found += [aten.squeeze_copy.dims(x, [1]), aten.view_copy.dtype(x, torch.int32)]
    return [*found, *aten.split_copy.Tensor(x, 2), aten.narrow_copy.default(x, 0, 1, 2)]


def counts(x: torch.Tensor) -> list[torch.Tensor]:
    return [aten.count_nonzero.default(x), aten.count_nonzero.dim_IntList(x, [0])]


def scatters(x: torch.Tensor, at: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
    """Combining variants that the database has with other names."""
    combined = aten.scatter.reduce(x, 0, at, source, reduce="add")
    return [aten.scatter.value_reduce(x, 0, at, 2.0, reduce="add"), combined]


def indexed(x: torch.Tensor, at: torch.Tensor) -> list[torch.Tensor]:
    """Variants that torch's own decompositions call."""
    found = [aten._unsafe_index.Tensor(x, [at])]
    found += [aten._unsafe_index_put.default(x, [at], x[:2], True)]
    found += [aten.index_fill.int_Tensor(x, 0, at, torch.tensor(2.0))]
    return [*found, aten.index_add.default(x, 0, at, x[:2])]


def own_samples() -> dict[str, Sample]:
    """For operators, and for their branches, that the chosen samples of the database don't reach."""
    torch.manual_seed(0)
    images, classes = leaf(2, 4, 6, 6), torch.randint(4, (2, 6, 6))
    safe = torch.tensor(
        [[0.0, 0.0, 0.0], [1.0, 0.0, 3.0]]
    )  # a row without a finite score, and one with
    return dict(
        [
            own("copy", aten.copy.default, torch.randn(3, 4), torch.arange(4)),
            own("fill", aten.fill.Tensor, leaf(3, 4), torch.tensor(2.5)),
            own("clamp_max", aten.clamp_max.default, leaf(3, 4), 0.5),
            own("floor_divide", aten.floor_divide.Scalar, torch.arange(-4, 4), 3),
            own("lift_fresh_copy", aten.lift_fresh_copy.default, leaf(3)),
            own("logsigmoid", F.logsigmoid, torch.tensor(SPECIAL, requires_grad=True)),
            own("arange", lambda x: x + torch.arange(1, 5), torch.arange(4)),
            own("full", lambda x: x + aten.full.default([4], 2.5), leaf(4)),
            own("ones", lambda x: x * torch.ones(4), leaf(4)),
            own("safe_softmax", lambda x: aten._safe_softmax.default(x.log(), -1), safe),
            own("triangles", lambda x: x.tril(1) + 2 * x.triu(-1), leaf(3, 4)),
            own("lerp", torch.lerp, leaf(3, 4), leaf(3, 4), leaf(3, 4)),
            own("dot", torch.dot, leaf(4), leaf(4)),
            own("count_nonzero", lambda x: x.count_nonzero() + x.count_nonzero([1]), torch.eye(3)),
            own("smooth_l1", F.smooth_l1_loss, leaf(3, 5), leaf(3, 5)),
            own("cross_entropy", F.cross_entropy, images, classes, ignore_index=2),
            own("instance_norm", F.instance_norm, images),
            own("adaptive_avg_pool", F.adaptive_avg_pool2d, images, (3, 2)),
            own("adaptive_avg_pool_uneven", F.adaptive_avg_pool2d, images, (4, 5)),
            own("zero", lambda x: aten.zero.default(x) + x, leaf(3)),
            own("number_minus", lambda x: torch.rsub(x, 2.0, alpha=3) + torch.arange(3), leaf(3)),
            own("unsafe_split", lambda x: torch.unsafe_split(x, 2)[1] * 2, leaf(4)),
            own("squeeze_copy", lambda x: x + aten.squeeze_copy.dim(x, 1), leaf(3, 1)),
            own("squeeze_copies", lambda x: x + aten.squeeze_copy.dims(x, [1]), leaf(3, 1)),
            own("xlogy_number", lambda x: torch.xlogy(x, 2.0) + torch.xlogy(0.0, x), leaf(9)),
            own(
                "xlog1py_number",
                lambda x: torch.special.xlog1py(x, 2.0) + torch.special.xlog1py(0.5, x),
                leaf(9),
            ),
            own("copies", copies, torch.randn(3, 1, 4)),
            own("scatters", scatters, torch.randn(3), torch.tensor([1, 2]), torch.rand(2)),
            own("indexed", indexed, torch.randn(3, 4), torch.tensor([2, 0])),
            own("empty", lambda x: x + torch.empty(4).zero_(), leaf(4)),
            own("counts", counts, torch.arange(4).view(2, 2)),
            own("select", lambda x: x[1] * x[:, 0].sum(), leaf(3, 4)),
            own(
                "empty_rows",
                lambda x: (x.softmax(1), *torch.var_mean(x, 1), x.logsumexp(1)),
                leaf(0, 3),
            ),
        ]
    )
