"""Chooses saved values within a memory budget: those that spare the most work per byte come first.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016). The real compiler:
torch/_functorch/_activation_checkpointing/knapsack.py.
"""

from __future__ import annotations

from torch import fx

from minicompile.aot.maxflow import UNLIMITED
from minicompile.aot.partition import (
    ONE_BYTE,
    Cut,
    JointParts,
    Saved,
    ancestors,
    flops,
    partitioner,
    why_never_recomputed,
)
from minicompile.ops.nodes import bytes_of
from minicompile.options import Options


@partitioner("memory_budget")
def chosen_by_budget(parts: JointParts, naive: Saved, options: Options) -> Saved | None:
    """What `options.memory_budget` says, if it says anything."""
    budget = options.memory_budget
    if budget is None:
        return None
    return naive if budget == 1 else within_budget(parts, naive, budget)


def within_budget(parts: JointParts, naive: Saved, budget: float) -> Saved:
    """Between the fewest bytes (budget 0) and those of `naive` (budget 1), not counting inputs.

    A knapsack: the values of `naive` with the most work per byte are kept first, each one that fits. More
    budget never keeps fewer bytes: where two budgets first differ, the smaller found the value too large.
    """

    def work_per_byte(node: fx.Node) -> float:
        between = ancestors([node], stop=lambda used: used in naive and used is not node)
        work = sum(flops(used) for used in between if used is node or used not in naive)
        return work / max(bytes_of(node), 1)

    bans = {node: why_never_recomputed(node, parts) for node in parts.candidates}
    cut = Cut(parts, bans, parts.primals, {})
    least, most = cut.width // ONE_BYTE, sum(map(bytes_of, naive.keys() - set(parts.primals)))
    limit = least + budget * (most - least)
    for node in sorted(naive, key=work_per_byte, reverse=True):
        if not bans[node]:
            reason = f"fits into the memory budget: {work_per_byte(node):.1f} FLOPs per byte"
            ban(cut, node, reason, limit)
    return cut.saved()


def ban(cut: Cut, node: fx.Node, reason: str, limit: float) -> None:
    """Keep `node` from being recomputed too, unless the cut would become wider than `limit` bytes."""
    capacity = [*cut.network.capacity, 0, 0]
    cut.network.add_edge("source", (node, "in"), UNLIMITED)
    more, side = cut.network.minimum_cut("source", "sink")
    if (cut.width + more) // ONE_BYTE <= limit:
        cut.width, cut.side, cut.bans[node] = cut.width + more, side, reason
    else:
        cut.network.capacity = capacity
