"""Gives DistributedDataParallel gradients in groups while the backward runs: a chain of autograd nodes, one a
group.

    forward     link 3 (parameters of group 3) -> anchor
                link 2 (parameters of group 2, anchor) -> anchor
                Compiled (inputs, parameters of group 1, anchor) -> outputs
    backward    Compiled (tangents) -> gradients of group 1, baton
                link 2 (baton) -> gradients of group 2, baton
                link 3 (baton) -> gradients of group 3

The engine runs the node made last first, and accumulates gradients, with the hooks on that, as soon as it has
them: so DistributedDataParallel sends group 1 around while group 2 is computed. Anchors and batons are empty
tensors. The compiled backward, a generator (codegen/wrapper.py), travels with the baton as its attribute: so
each run of the backward has its own, and where the engine stops early it dies with the baton.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from minicompile.aot.result import BoxedCallable, OutputGroup
from minicompile.compat.inference import version

Gradients = Sequence[torch.Tensor | None]


class Link(torch.autograd.Function):
    """A node that hands on one group's gradients. Takes a device, tensors, and the anchor of the link that
    comes next in the backward (None: none does)."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, *_: Any) -> torch.Tensor:
        ctx.device = device
        return torch.empty(0, device=device)

    @staticmethod
    def backward(ctx: Any, baton: Any) -> Any:
        gradients = next(baton.rest)
        more = ctx.needs_input_grad[-1]
        return None, *gradients, baton_for(baton.rest, ctx.device) if more else None


def chained(
    apply: Callable[..., Any],
    places: Sequence[Sequence[int]],
    device: torch.device,
    link: Callable[..., torch.Tensor],
) -> BoxedCallable:
    """A call of the Function that runs both graphs, behind links for all groups but the first. `places`: the
    inputs of each group."""

    def run(inputs: list[Any]) -> Sequence[Any]:
        anchor = None
        for numbers in reversed(places[1:]):
            anchor = link(device, *[inputs[i] for i in numbers], anchor)
        *outputs, _ = apply(inputs, *[inputs[i] for i in places[0]], anchor)
        return outputs

    return run


def pass_on(parts: Iterator[Gradients], device: torch.device) -> tuple[Any, ...]:
    """The first group's gradients, and the baton for the others'."""
    return *next(parts), baton_for(parts, device)


def baton_for(rest: Iterator[Gradients], device: torch.device) -> torch.Tensor:
    baton: Any = torch.empty(0, device=device)
    baton.rest = rest
    return baton


def in_turn(
    step: Callable[[Callable[[Any], Any], Any], Any],
    run: Callable[[list[Any]], Any],
    arguments: list[Any],
    groups: Sequence[OutputGroup],
) -> Iterator[Gradients]:
    """Each group's gradients. `step(next, it)` runs the compiled backward on to the next group.

    Raises RuntimeError, as eager would, if what it still needs was changed in place meanwhile.
    """
    tensors = ((i, arguments[i]) for i in groups[0].read_later)
    versions = {i: (weakref.ref(t), version(t)) for i, t in tensors}
    handed = run(arguments)
    needed: Iterable[int] = ()
    for group in groups:
        for i in needed:
            tensor, before = versions[i][0](), versions[i][1]
            if tensor is not None and version(tensor) != before:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation while the compiled backward ran: a tensor of size {list(tensor.shape)}"
                )
        yield taken(step(next, handed))
        needed = group.read_later


def taken(results: list[Any]) -> Gradients:
    """What is in a list, which is emptied: autograd keeps a gradient's memory if nobody else refers to it."""
    found = tuple(results)
    results.clear()
    return found


def split(gradients: Iterable[Any], groups: Sequence[OutputGroup]) -> Iterator[list[Any]]:
    """Gradients in the order of groups, as lists of each group's."""
    left = iter(gradients)
    return (list(itertools.islice(left, len(group.outputs))) for group in groups)


def one_by_one(whole: BoxedCallable, groups: Sequence[OutputGroup]) -> Callable[..., Any]:
    """A graph that gives all results at once, as if it handed them out."""

    def run(arguments: list[Any]) -> Iterator[list[Any]]:
        results = whole(arguments)
        return split([results[i] for group in groups for i in group.outputs], groups)

    return run
