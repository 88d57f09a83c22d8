"""Windows that end at edges stay out of reductions, whose loops aren't cut."""

from __future__ import annotations

from collections import Counter

from minicompile.scheduling.fusion import Fuser, align_rule
from minicompile.scheduling.nest import LoopNest
from minicompile.scheduling.nodes import SchedulerNode
from minicompile.scheduling.reasons import Refusal, listed


@align_rule("windows")
def apart(producer: LoopNest, consumer: LoopNest, fuser: Fuser) -> Refusal | None:
    """Return why a reduction doesn't take over windows, unless somebody wishes that it does."""
    if producer.is_reduction or not consumer.is_reduction:
        return None
    names = {node.name for node in (*producer.nodes, *consumer.nodes)}
    windows = [node.name for node in producer.nodes if has_windows(node)]
    if not windows or any(names.issuperset(pair) for pair in fuser.wishes.fuse):
        return None
    told = "in windows that end at edges: loops are cut there, but not those of a reduction"
    return Refusal(f"{listed(windows)} loads {told}", "policy")


def has_windows(node: SchedulerNode) -> bool:
    """Does a node on a CPU load elements of one buffer under several conditions, each for itself?"""
    loads = Counter(v.buffer for v in node.body.values if v.op == "load" and v.mask is not None)
    alone = node.kind == "pointwise" and node.buffer.layout.device.type == "cpu"
    return alone and max(loads.values(), default=0) > 1
