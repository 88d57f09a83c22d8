"""Random operators as functions of a seed, which loops compute.

One call per phase draws a seed for each of them from eager's generator, so that `torch.manual_seed` makes a
run repeatable; the numbers are others than eager's. Only this call is random: what the backward pass needs of
the forward's numbers it may compute again, from the seeds, which are saved.

The real compiler: torch/_inductor/fx_passes/replace_random.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import sympy
import torch
from torch import Tensor, fx

from minicompile.lowering.context import LoweringContext, lowering
from minicompile.lowering.value import TensorValue
from minicompile.ops.dtypes import HALF_TYPES
from minicompile.ops.graph import Rewrite, origins_of, statement
from minicompile.ops.handler import Index, Ops, V
from minicompile.ops.nodes import is_size
from minicompile.ops.origin import union
from minicompile.ops.philox import PHILOX
from minicompile.passes.manager import graph_pass
from minicompile.passes.replacements import Replacement
from minicompile.shapes.expr import Size, contiguous_strides, linear_index

aten = torch.ops.aten


@lowering(PHILOX)
def random_numbers(
    ctx: LoweringContext, seeds: TensorValue, number: int, size: Sequence[Size], kind: str
) -> TensorValue:
    """Random numbers, each by its position in a contiguous tensor, however this one lies."""
    strides = contiguous_strides(size)

    def body(ops: Ops, index: Sequence[Index]) -> V:
        place = ops.index_expr(linear_index(index, strides), torch.int64)
        return ops.pointwise(kind, seeds.load(ops, [sympy.Integer(number)]), place)

    return ctx.pointwise(size, seeds.device, body)


Draw = Callable[[str], Tensor]
"""Numbers of the operator's shape from its own seed: "rand" or "randn"."""


def uniform(draw: Draw, like: Tensor, _: Any, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Half types take numbers of their own grid; what rounding makes `high` becomes `low`."""
    found = draw("rand")
    if like.dtype in HALF_TYPES:
        step = torch.finfo(like.dtype).eps / 2
        found = torch.floor(found / step) * step
    if (low, high) == (0, 1):
        return found
    found = (found * (high - low) + low).to(like.dtype)
    return torch.where(found == high, low, found)


def normal(draw: Draw, like: Tensor, _: Any, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return draw("randn") if (mean, std) == (0, 1) else draw("randn") * std + mean


def bernoulli(draw: Draw, like: Tensor, _: Any, p: float) -> Tensor:
    return draw("rand") < p


def dropout(draw: Draw, like: Any, x: Tensor, p: float, train: bool | None) -> Any:
    mask = draw("rand") < 1 - p
    return x * mask * (1 / (1 - p)), mask


RULES: dict[Any, Callable[..., Any]] = {
    aten.rand.default: uniform,
    aten.rand_like.default: uniform,
    aten.uniform.default: uniform,
    aten.randn.default: normal,
    aten.randn_like.default: normal,
    aten.normal_functional.default: normal,
    aten.bernoulli.p: bernoulli,
    aten.native_dropout.default: dropout,
}
"""`rule(draw, like, *arguments)`; `like` is the operator's result. It is converted to that one's dtype."""


def can_be_drawn(node: fx.Node) -> bool:
    """Not from a generator of the user's, in float64 (a number has 31 random bits), or for an argument that
    is known at run time or refused; and dropout that drops all or nothing draws none."""
    if node.target not in RULES or node.kwargs.get("generator") is not None:
        return False
    if any(isinstance(argument, fx.Node) and is_size(argument) for argument in node.args):
        return False
    if node.target is aten.native_dropout.default:
        return node.args[2] is not False and 0 < float(node.args[1]) < 1  # type: ignore[arg-type]
    rule, numbers = RULES[node.target], cast(list[float], node.args[1:])
    if rule is bernoulli:
        return 0 <= numbers[0] <= 1
    first, second = (*numbers, *(0.0, 1.0)[len(numbers) :])
    allowed = second >= 0 if rule is normal else first <= second
    return allowed and node.meta["val"].dtype in (torch.float32, *HALF_TYPES)


def drawn(rule: Any, number: int, like: Any, seeds: Tensor, *arguments: Any) -> list[Any]:
    """A random operator's results from the `number`-th seed."""
    shape = (like[0] if isinstance(like, tuple) else like).shape
    result = rule(partial(PHILOX, seeds, number, shape), like, *arguments)
    return list(result) if isinstance(result, tuple) else [result]


@graph_pass("random_in_kernels", stage="joint", order=80, option="not fallback_random")
def random_in_kernels(gm: fx.GraphModule, mode: Any) -> list[Rewrite]:
    """Give each random operator a seed of its own, all of a device's and phase's drawn at once."""
    found: dict[tuple[torch.device, Any], list[fx.Node]] = defaultdict(list)
    for node in filter(can_be_drawn, gm.graph.nodes):
        value = node.meta["val"]
        device = (value[0] if isinstance(value, tuple) else value).device
        found[device, node.meta.get("phase")].append(node)
    done = []
    for (device, phase), nodes in found.items():
        limits = torch.iinfo(torch.int64)
        arguments: Any = (limits.min, limits.max, [len(nodes)])
        with gm.graph.inserting_before(nodes[0]), mode:
            seeds = gm.graph.call_function(aten.randint.low, arguments, {"device": device})
            seeds.meta.update(val=torch.randint(*arguments, device=device), phase=phase)
        seeds.meta["origins"] = union(map(origins_of, nodes))
        for number, node in enumerate(nodes):
            before, run = (
                statement(node),
                partial(drawn, RULES[node.target], number, node.meta["val"]),
            )
            name = f"random.{node.target.overloadpacket.__name__}"  # type: ignore[union-attr]
            node.target, node.args, node.kwargs = Replacement(name, run), (seeds, *node.args), {}
            done.append(Rewrite(name, before, statement(node), origins_of(node)))
    return done
