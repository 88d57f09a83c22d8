"""Results that share no gradient are differentiated apart: one compiled graph behind several autograd nodes.

    f(x, h) = sin(x), cos(h)      forward   once
                                  backward  node 1: tangent of sin -> gradient of x
                                            node 2: tangent of cos -> gradient of h

As in eager a loss of the first result doesn't lead to what `h` was made of, and the second can be
differentiated later. Each node keeps what its own gradients depend on, and runs the compiled backward with
zeros for the rest: such parts are rare. The real compiler has one node for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from minicompile.aot.layout import dense_in_order
from minicompile.aot.result import BoxedCallable, Differentiated, RuntimeMetadata, Tangent


@dataclass(frozen=True)
class Part:
    """Some of a graph's gradients, the tangents that these alone depend on, and the saved tensors."""

    gradients: list[int]
    tangents: list[int]
    saved: list[int]


def parts_of(about: Differentiated, metadata: RuntimeMetadata) -> list[Part]:
    """What can be differentiated apart; a tangent that leads nowhere, and a gradient that comes
    from nowhere, belong to a first part."""
    first, tensors = metadata.saved, metadata.saved - metadata.saved_sizes
    groups: list[tuple[list[int], set[int]]] = []
    for number, used in enumerate(about.sources):
        # zeros that no tangent is in, as of a random draw, come with the first
        tangents = {one - first for one in used if one >= first} or {0}
        same = [group for group in groups if group[1] & tangents]
        groups = [group for group in groups if group not in same]
        gradients = [number, *chain.from_iterable(found for found, _ in same)]
        groups.append((gradients, tangents.union(*(found for _, found in same))))
    alone = set(range(len(about.tangents))).difference(*(found for _, found in groups))
    groups[0][1].update(alone)
    return [
        Part(
            sorted(gradients),
            sorted(tangents),
            sorted({n for g in gradients for n in about.sources[g] if n < tensors}),
        )
        for gradients, tangents in groups
    ]


@dataclass(frozen=True)
class Elsewhere:
    """What a part doesn't keep: the sizes, and the layouts of the other parts' tensors."""

    sizes: Sequence[Any]
    saved: dict[int, tuple[torch.Tensor, torch.device]]
    """Layouts as tensors on the meta device, and where they belong."""
    shapes: dict[int, torch.Size]
    """Of tangents."""

    def arguments(self, part: Part, given: Sequence[Any], expected: Sequence[Tangent]) -> list[Any]:
        """Those of the whole backward: `given` where the part has them, zeros elsewhere."""
        kept = dict(zip(part.saved, given))
        tangents = dict(zip(part.tangents, given[len(part.saved) + 1 :]))
        for number, (like, device) in self.saved.items():
            kept[number] = torch.zeros_like(like, device=device)
        for number, shape in self.shapes.items():
            about = expected[number]
            zeros = torch.zeros(shape, dtype=about.dtype, device=about.device)
            tangents[number] = dense_in_order(zeros, about.order)
        return [
            *(kept[n] for n in sorted(kept)),
            *self.sizes,
            *(tangents[n] for n in sorted(tangents)),
        ]


def apart(
    metadata: RuntimeMetadata,
    about: Differentiated,
    parts: Sequence[Part],
    forward: BoxedCallable,
    backward: BoxedCallable,
    node: Callable[..., BoxedCallable],
) -> BoxedCallable:
    """A call of the graph, then `node(metadata, about, forward, backward)` for each part of it.

    `forward` runs without autograd, and owns what it gives.
    """
    first_saved, sizes = len(metadata.result_requires_grad), metadata.saved_sizes
    last_saved = first_saved + metadata.saved - sizes
    results_of = [i for i, flag in enumerate(metadata.result_requires_grad) if flag]
    calls = [(part, node(*piece(metadata, about, part, backward))) for part in parts]

    def run(inputs: list[Any]) -> Sequence[Any]:
        given = list(inputs)
        results = forward(inputs)
        outputs = list(results[:first_saved])
        for part, call in calls:
            own = [results[results_of[n]] for n in part.tangents]
            saved = results[first_saved:last_saved]
            elsewhere = Elsewhere(
                results[last_saved:],
                {n: layout(x) for n, x in enumerate(saved) if n not in part.saved},
                {n: results[i].shape for n, i in enumerate(results_of) if n not in part.tangents},
            )
            made = call([*given, [*own, *(saved[n] for n in part.saved), elsewhere]])
            for number, value in zip(part.tangents, made):
                outputs[results_of[number]] = value
        return outputs

    return run


def layout(value: torch.Tensor) -> tuple[torch.Tensor, torch.device]:
    return torch.empty_strided(
        value.shape, value.stride(), dtype=value.dtype, device="meta"
    ), value.device


def piece(
    metadata: RuntimeMetadata, about: Differentiated, part: Part, backward: BoxedCallable
) -> tuple[RuntimeMetadata, Differentiated, BoxedCallable, BoxedCallable]:
    """One part as if it were a graph: its forward gets the results as its last input."""
    expected, first = about.tangents, metadata.saved
    position = {n + first: i + len(part.saved) + 1 for i, n in enumerate(part.tangents)}

    def only(run: BoxedCallable) -> BoxedCallable:
        def gradients(arguments: list[Any]) -> Sequence[Any]:
            whole = arguments[len(part.saved)].arguments(part, arguments, expected)
            arguments.clear()
            found = run(whole)
            return [found[n] for n in part.gradients]

        return gradients

    def forward(inputs: list[Any]) -> Sequence[Any]:
        results: Sequence[Any] = inputs.pop()
        inputs.clear()
        return results

    own = replace(
        metadata,
        result_requires_grad=(True,) * len(part.tangents),
        saved=len(part.saved) + 1,
        saved_sizes=1,
        differentiable_inputs=tuple(metadata.differentiable_inputs[n] for n in part.gradients),
    )
    sources = [[position[n] for n in about.sources[g] if n >= first] for g in part.gradients]
    tangents = [expected[n] for n in part.tangents]
    described = Differentiated(tangents, sources, lambda: only(about.interpreted()))
    return own, described, forward, only(backward)
