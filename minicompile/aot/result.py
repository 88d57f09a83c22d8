"""The result of ahead-of-time autograd: forward and backward graphs, and what the runtime must know of them.

    AotResult := forward, backward | None, joint graph | None, Partition | None, RuntimeMetadata,
                 the whole graph by operator level
    forward   : (primals...) -> (results..., sizes of views..., updated inputs..., saved tensors...,
                                 saved sizes...)
    backward  : (saved tensors..., saved sizes..., tangents...) -> one gradient (or None) per
                                 differentiable input
    Boxed calls: a compiled graph takes one list of its inputs and may empty it.

The real compiler: torch/_functorch/_aot_autograd/schemas.py (ViewAndMutationMeta), partitioners.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from minicompile.errors import unknown
from minicompile.ops.display import Shown, listed
from minicompile.ops.graph import Graph, PassRecord
from minicompile.ops.origin import Origins

if TYPE_CHECKING:
    from minicompile.aot.levels import Level, LevelGraph

BoxedCallable = Callable[[list[Any]], Sequence[Any]]
"""Takes a list of inputs, which it may empty, and gives the outputs in order. None of these is a view if its
attribute `owned` is true."""

Kind = Literal["constant", "result", "input", "output"]


@dataclass(frozen=True)
class OutputSpec:
    """How one output of the captured graph is produced at run time.

    It is "constant" (`value`, known when compiling), or number `base` of the forward's results, of the
    inputs, or of the outputs before it; or, with `size`, a view of that. `size`, `stride`, `offset` describe
    the view (ints or sympy expressions); the offset is relative to the base's.
    """

    kind: Kind
    base: int = -1
    value: Any = None
    size: tuple[Any, ...] | None = None
    stride: tuple[Any, ...] = ()
    offset: Any = 0
    requires_grad: bool = False
    detached: bool = True
    """A view that requires no grad: autograd does not know it as one."""

    def __str__(self) -> str:
        name = f"{self.kind} {self.base}" if self.base >= 0 else self.kind
        return f"view of {name}" if self.is_view else name

    @property
    def numbers(self) -> tuple[Any, ...]:
        return (*(self.size or ()), *self.stride, self.offset)

    @property
    def is_view(self) -> bool:
        return self.size is not None


class Tangent(NamedTuple):
    """A gradient of a result, as the compiled backward takes it; dimensions from the outermost in memory."""

    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]
    bytes: int


@dataclass
class RuntimeMetadata(Shown):
    """Everything the runtime wrapper must do around the two compiled graphs."""

    outputs: tuple[OutputSpec, ...]
    mutated_inputs: tuple[int, ...] = ()
    """Inputs whose new contents the forward returns, to be copied back, in order. Those of which the results
    require grad get a new gradient history by that."""
    differentiable_inputs: tuple[int, ...] = ()
    """Inputs that get a gradient from some result."""
    results: int = 0
    """How many tensors and numbers the forward returns for outputs to be, or to be views of."""
    saved: int = 0
    """Values the forward returns for the backward, after everything else."""
    saved_sizes: int = 0
    """How many of them, the last ones, are symbolic sizes."""
    trains: bool = False
    result_requires_grad: tuple[bool, ...] = ()
    """For each result that is returned: does a gradient (tangent) come back for it?"""
    reached_from: tuple[tuple[int, ...], ...] = ()
    """For each differentiable input: the tangents that lead to it. Without these it gets no gradient."""
    tangents: tuple[Tangent, ...] = ()
    sufficient: tuple[int, ...] = ()
    """Tangents beside which zeros may stand for all others (aot/missing.py)."""
    before_backward: tuple[Callable[[], None], ...] = ()
    """Checks that raise if what was captured of the backward no longer holds."""
    view_sizes: tuple[Any, ...] = ()
    """Symbolic sizes, strides and offsets of outputs that are views, returned after the results."""

    @property
    def graph_name(self) -> str:
        return "joint" if self.trains else "forward"

    @property
    def returned(self) -> int:
        """How many results of the forward serve to make outputs: the first ones."""
        return self.results + len(self.view_sizes)

    @property
    def written_back(self) -> dict[int, int]:
        """Results that are an input's new contents, and that input: where autograd doesn't know of it, it can
        be written to at once."""
        if self.trains:
            return {}
        return {self.returned + k: number for k, number in enumerate(self.mutated_inputs)}

    def __str__(self) -> str:
        counts = f"{len(self.outputs)} outputs, {self.saved} saved, trains={self.trains}"
        lines = [f"runtime metadata: {counts}"]
        lines += [f"  output {i}: {spec}" for i, spec in enumerate(self.outputs)]
        first = len(self.result_requires_grad) - len(self.mutated_inputs)
        for flag, i in zip(self.result_requires_grad[first:], self.mutated_inputs):
            seen = ", which autograd sees" if flag else ""
            lines.append(f"  new contents are copied back into input {i}{seen}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ForwardValue:
    """A value that the backward needs: the bytes it takes to keep it (None if symbolic, 0 if the backward
    only reads what is made of it), and why it is saved or recomputed."""

    name: str
    bytes: int | None
    reason: str
    is_input: bool = False
    """It exists anyway: keeping it writes nothing."""

    def __str__(self) -> str:
        return (
            f"{self.name}: {'symbolic' if self.bytes is None else self.bytes} bytes, {self.reason}"
        )


@dataclass
class Partition(Shown):
    """What the forward keeps for the backward, and what the backward computes again."""

    saved: Sequence[ForwardValue]
    recomputed: Sequence[ForwardValue]
    saved_bytes: int
    """Without inputs."""
    default_bytes: int
    """What saving everything that backward reads would have kept."""
    method: str
    origins: dict[str, Origins] = field(default_factory=dict)
    """Of what is saved or computed again, by name."""

    def __post_init__(self) -> None:
        listed(self, "saved", "recomputed")

    def __str__(self) -> str:
        inputs = [v.bytes or 0 for v in self.saved if v.is_input]
        count = len(self.saved) - len(inputs)
        lines = [
            f"{self.method} partition: saves {self.saved_bytes} bytes in {count} values "
            f"(saving all that backward reads: {self.default_bytes}), "
            f"recomputes {len(self.recomputed)} operations"
        ]
        if inputs:
            lines.append(f"  and {sum(inputs)} bytes in {len(inputs)} inputs, which exist anyway")
        for kind, values in (("saved", self.saved), ("recomputed", self.recomputed)):
            lines += [f"  {kind} {value}" for value in values]
        return "\n".join(lines)


@dataclass
class AotResult(Shown):
    """The functional graphs of one capture.

    `levels` holds the whole graph (the joint graph when training) by operator level.
    """

    forward: Graph
    backward: Graph | None
    joint: Graph | None
    partition: Partition | None
    metadata: RuntimeMetadata
    levels: dict[Level, LevelGraph] = field(default_factory=dict)
    passes: list[PassRecord] = field(default_factory=list)
    captured: Graph | None = None
    """What was differentiated: the captured graph after its own passes."""
    recorded: Graph | None = None
    """What running it recorded, still with views and writes: before functionalization."""

    def __post_init__(self) -> None:
        listed(self, "passes")

    def level(self, name: Level) -> LevelGraph:
        """The graph at operator level "full", "core" or "prims", and the rules that led there."""
        if name not in self.levels:
            raise unknown("level", name, self.levels)
        return self.levels[name]

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {graph.op_count}" for name, graph in self.levels.items())
        headline = f"ahead-of-time autograd: operations by level: {counts}"
        shown = (self.metadata, self.partition, self.forward, self.backward)
        return "\n\n".join([headline, *(str(part) for part in shown if part is not None)])
