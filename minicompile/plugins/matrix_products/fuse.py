"""Which loops a product's kernel takes over.

It computes what follows of each element that it has made, and cheap loops that make its factors.
"""

from __future__ import annotations

import itertools

from minicompile.lowering.ir import Template
from minicompile.scheduling.align import Matching, align, flows, joined
from minicompile.scheduling.fusion import Fuser, align_rule, template_of
from minicompile.scheduling.nest import LoopNest
from minicompile.scheduling.nodes import SchedulerNode
from minicompile.scheduling.reasons import Verdict, index_mismatch, loop_mismatch, refused

CHEAP = 8
"""Most operations on an element of a product's factor, which the kernel repeats for each tile."""


@align_rule("template")
def template_loops(
    producer: LoopNest, consumer: LoopNest, fuser: Fuser
) -> LoopNest | Verdict | None:
    """Return the common loops of a product and of what its kernel takes over; None where neither is one."""
    if template_of(producer) is None and template_of(consumer) is None:
        return None
    if (refusal := _refusal(producer, consumer, fuser)) is not None:
        return refusal
    if template_of(consumer) is not None:
        return _prologue(producer, consumer)
    nest = align(producer, consumer)
    if isinstance(nest, LoopNest):
        levels = {m.level for m in nest.members if m.node in consumer.nodes}
        if levels != {"row"}:
            return refused(f"not one element for each of {producer.name}", "template")
    return nest


def _refusal(producer: LoopNest, consumer: LoopNest, fuser: Fuser) -> Verdict | None:
    """Return why a product's kernel doesn't take over the other loops."""
    context, one, other = fuser.context, template_of(producer), template_of(consumer)
    loops, product = (producer, consumer) if one is None else (consumer, producer)
    if one is not None and other is not None:
        told = f"{one} and {other} are products, each with a kernel of its own"
    elif not context.flows(producer, consumer):
        told = f"{one or other} is a template: it takes over what is computed of its product alone"
        return refused(told, "template")
    elif any(a.footprint is None for a in (*loops.reads, *loops.writes)):
        told = f"{loops.name} reads or writes where only the data tells"
    elif loops.is_reduction and one is not None:
        told = f"{one} is made in tiles: none has a whole row or column to reduce"
    elif any(node.kind != "pointwise" for node in loops.nodes):
        told = f"{loops.name} is not pointwise"
    elif one is not None and (reader := _reduced_by(loops, fuser)) is not None:
        told = f"{reader} reduces what {loops.name} gives: a kernel of both reads {one} once"
    elif one is None and loops.written - context.never_written(loops, product):
        told = f"others read {loops.name} too, or it is a result"
        return refused(told, "template")
    elif one is None and (count := context.size(loops)) > CHEAP:
        told = f"{other} loads its factors several times: {count} operations each are too many"
    else:
        return None
    return refused(told, "template")


def _reduced_by(nest: LoopNest, fuser: Fuser) -> str | None:
    """Return a reduction, which is no product, of what a nest writes."""
    readers = itertools.chain(*(fuser.context.readers[name] for name in nest.written))
    return next(
        (
            name
            for name in sorted(readers, key=fuser.place.__getitem__)
            if isinstance(node := fuser.nodes[fuser.place[name]], SchedulerNode)
            and node.is_reduction
            and not isinstance(node.buffer.loops, Template)
        ),
        None,
    )


def _prologue(producer: LoopNest, product: LoopNest) -> LoopNest | Verdict:
    """Compute a factor at every point at which the product's loops read it."""
    matching = Matching(producer, product, {})
    for write, read, _ in flows(producer, product):
        if write.key is None or read.key is None or not matching.match(write, read):
            return index_mismatch(write, read, product.hints)
    if matching.free(matching.a.loops):
        return loop_mismatch(matching.a, matching.b)
    return joined(matching, "elem")
