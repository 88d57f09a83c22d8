"""`associative_scan(f, xs, dim)`: a few ordinary operations for each doubling of the distance, no loop.

    x0 x1 x2 x3 x4        pairs:  f(x0, x1)  f(x2, x3), which are scanned in the same way:  y1  y3
    y0 = x0, y2 = f(y1, x2), y4 = f(y3, x4)    what lies between needs one more step

Blelloch, "Prefix Sums and Their Applications" (1990). The real compiler:
torch/_higher_order_ops/associative_scan.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minicompile import compat
from minicompile.dynamo.builtins import means
from minicompile.dynamo.world import World
from minicompile.plugins.control_flow.calls import flat

*_, ASSOCIATIVE, _ = compat.CONTROL_FLOW


@means(ASSOCIATIVE)
def associative_scan(
    world: World,
    combine_fn: Any,
    xs: Any,
    dim: int,
    reverse: bool = False,
    combine_mode: str = "pointwise",
) -> Any:
    leaves, structure = flat(world, "associative_scan", xs)
    dim = world.pinned(dim) % leaves[0].dim()
    lengths = {int(x.shape[dim]) for x in leaves}
    if lengths == {0} or len(lengths) > 1 or combine_mode != "generic":
        what = "associative_scan of a pointwise function, or over no elements"
        world.unsupported("control-flow", what, 'pass combine_mode="generic"')

    def call(function: Any, *args: Any) -> Any:
        return world.torch_call(function, args, {})

    def combine(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
        pair = (compat.tree_unflatten(x, structure) for x in (left, right))
        mapped = world.call(torch.vmap, (combine_fn,), {})
        return flat(world, "associative_scan", world.call(mapped, tuple(pair), {}))[0]

    def rows(values: list[Tensor], start: int, stop: int | None = None, step: int = 1) -> Any:
        return [call(Tensor.__getitem__, x, slice(start, stop, step)) for x in values]

    def scanned(values: list[Tensor], count: int) -> list[Tensor]:
        if count < 2:
            return values
        half = count // 2
        pairs = combine(rows(values, 0, 2 * half, 2), rows(values, 1, None, 2))
        odd = scanned(pairs, half)
        between = (count - 1) // 2
        even = rows(values, 0, 1)
        if between:
            later = combine(rows(odd, 0, between), rows(values, 2, None, 2))
            even = [call(torch.cat, [a, b]) for a, b in zip(even, later)]
        return [interleaved(a, b, half) for a, b in zip(even, odd)]

    def interleaved(even: Tensor, odd: Tensor, half: int) -> Tensor:
        both = call(torch.stack, [call(Tensor.__getitem__, even, slice(0, half)), odd], 1)
        joined = call(torch.flatten, both, 0, 1)
        return call(torch.cat, [joined, call(Tensor.__getitem__, even, slice(half, None))])

    values = [call(torch.movedim, x, dim, 0) for x in leaves]
    if flipped := world.truth(reverse):
        values = [call(torch.flip, x, [0]) for x in values]
    values = scanned(values, lengths.pop())
    if flipped:
        values = [call(torch.flip, x, [0]) for x in values]
    return compat.tree_unflatten([call(torch.movedim, x, 0, dim) for x in values], structure)
