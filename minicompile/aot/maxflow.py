"""Maximum flow and minimum cut by Dinic's algorithm, on integer capacities.

Paths of a joint graph are short and its edges few per node, which suits Dinic: twice as fast as
networkx here. Dinic, "Algorithm for solution of a problem of maximum flow in networks" (1970).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

UNLIMITED = 1 << 100
"""Capacity of an edge that no cut may take."""


class FlowNetwork:
    """Directed edges with capacities. Edge `e` and its reverse `e ^ 1` are stored side by side."""

    def __init__(self) -> None:
        self.edges: dict[Hashable, list[int]] = defaultdict(list)
        self.head: list[Hashable] = []
        self.capacity: list[int] = []

    def add_edge(self, tail: Hashable, head: Hashable, capacity: int) -> None:
        for start, end, room in ((tail, head, capacity), (head, tail, 0)):
            self.edges[start].append(len(self.head))
            self.head.append(end)
            self.capacity.append(room)

    def minimum_cut(self, source: Hashable, sink: Hashable) -> tuple[int, set[Hashable]]:
        """(flow, nodes on the source's side)."""
        flow = 0
        while sink in (level := self._levels(source)):
            flow += self._blocking_flow(source, sink, level)
        return flow, set(level)

    def _levels(self, source: Hashable) -> dict[Hashable, int]:
        """Distance from the source over edges with room."""
        level = {source: 0}
        queue = [source]
        for node in queue:
            for edge in self.edges[node]:
                head = self.head[edge]
                if self.capacity[edge] > 0 and head not in level:
                    level[head] = level[node] + 1
                    queue.append(head)
        return level

    def _blocking_flow(self, source: Hashable, sink: Hashable, level: dict[Hashable, int]) -> int:
        """Push flow along shortest paths until each is full; a node's dead edges are dropped for good."""
        untried = {node: list(self.edges[node]) for node in level}
        total = 0
        path: list[int] = []
        while True:
            node = self.head[path[-1]] if path else source
            if node == sink:
                pushed = min(self.capacity[edge] for edge in path)
                for edge in path:
                    self.capacity[edge] -= pushed
                    self.capacity[edge ^ 1] += pushed
                total += pushed
                path = []
            elif untried[node]:
                edge = untried[node][-1]
                if self.capacity[edge] > 0 and level.get(self.head[edge]) == level[node] + 1:
                    path.append(edge)
                else:
                    untried[node].pop()
            elif path:
                dead = path.pop()
                untried[self.head[dead ^ 1]].pop()
            else:
                return total
