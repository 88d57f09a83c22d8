"""A recorded graph run on real numbers: which memory each value shows, and each memory's versions.

MemoryStory := name, steps: [MemoryStep], one an operation
MemoryStep  := the statement, what it did to memory, the memories as they are after it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from minicompile.ops.display import Shown
from minicompile.ops.graph import statement
from minicompile.ops.nodes import is_view, writes
from minicompile.pipeline_result import Trace
from minicompile.show.html import box, shows, steps, text

SEEN, CHANGED = "#bfdbfe", "#fdba74"


@dataclass(frozen=True)
class Memory:
    """One storage: the value that it began with, and its numbers in each version, as rows."""

    name: str
    width: int
    versions: tuple[tuple[float, ...], ...]
    seen: frozenset[int] = frozenset()
    """Places that the step's value shows."""
    written: bool = False
    """Did the step write to them?"""


@dataclass(frozen=True)
class MemoryStep:
    """One operation and the memories after it."""

    statement: str
    did: str
    memories: tuple[Memory, ...]


@dataclass
class MemoryStory(Shown):
    """Every step of a function, as slides."""

    name: str
    steps: list[MemoryStep] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"memory of {self.name}, step by step"]
        for step in self.steps:
            lines += [f"{step.statement}", f"    {step.did}"]
        for memory in self.steps[-1].memories if self.steps else ():
            for version, numbers in enumerate(memory.versions):
                shown = " ".join(f"{x:g}" for x in numbers)
                lines.append(f"  {memory.name}, version {version}: {shown}")
        return "\n".join(lines)


def memory_story(trace: Trace, *inputs: torch.Tensor) -> MemoryStory:
    """Run what `trace` recorded on copies of `inputs`: small tensors, without a backward pass."""
    assert trace.aot is not None and trace.aot.recorded is not None
    story, values = MemoryStory(trace.name), dict[object, torch.Tensor]()
    memories: dict[int, Memory] = {}
    given: Iterator[torch.Tensor] = iter([value.clone() for value in inputs])
    for node in trace.aot.recorded.nodes:
        if node.op == "placeholder":
            value, did = next(given), "an input: memory of the caller"
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            value = node.target(*args, **kwargs)  # type: ignore[operator]
            did = "a new value, in memory of its own"
            if writes(node.target):
                did = "a write: the memory has a new version, and all its views show it"
            elif is_view(node):
                did = "a view: nothing is computed, nothing moves"
        else:
            continue
        values[node] = value
        if str(node.target) == "aten.detach.default":
            continue
        key, numbers = value.untyped_storage().data_ptr(), contents(value)
        place = torch.arange(len(numbers)).as_strided(
            value.shape, value.stride(), value.storage_offset()
        )
        old = memories.get(key, Memory(node.name, value.shape[-1] if value.dim() else 1, ()))
        new = writes(node.target) or not old.versions
        versions = (*old.versions, numbers) if new else old.versions
        memories[key] = now = replace(old, versions=versions)
        places = frozenset(place.flatten().tolist())
        shown = {**memories, key: replace(now, seen=places, written=writes(node.target))}
        line = statement(node) if node.op == "call_function" else node.name
        story.steps.append(MemoryStep(line, did, tuple(shown.values())))
    return story


def contents(value: torch.Tensor) -> tuple[float, ...]:
    """All numbers of the storage that a tensor lies in."""
    count = value.untyped_storage().nbytes() // value.element_size()
    return tuple(value.as_strided([count], [1], 0).tolist())


def grid(numbers: Sequence[float], width: int, marks: dict[int, str]) -> str:
    """Numbers in rows, some on a coloured ground."""
    rows = []
    for start in range(0, len(numbers), max(width, 1)):
        cells = ""
        for place in range(start, min(start + width, len(numbers))):
            look = "padding:2px 7px;border:1px solid #94a3b8;text-align:right;"
            if place in marks:
                look += f"background-color:{marks[place]};color:#111827"
            cells += f'<td style="{look}">{numbers[place]:g}</td>'
        rows.append(f"<tr>{cells}</tr>")
    return (
        f'<table style="border-collapse:collapse;margin:2px 16px 2px 0px">{"".join(rows)}</table>'
    )


def memory_html(memory: Memory) -> str:
    """The versions of one memory, the present one last."""
    out, last = "", len(memory.versions) - 1
    for version, numbers in enumerate(memory.versions):
        marks = dict.fromkeys(memory.seen, CHANGED if memory.written else SEEN)
        marks = marks if version == last else {}
        faint = "" if version == last else ";opacity:0.55"
        name = f"<b>{text(memory.name)}</b> · version {version}"
        shown = f"<small>{name}</small>{grid(numbers, memory.width, marks)}"
        out += f'<td style="vertical-align:top;border:0px{faint}">{shown}</td>'
    return f'<table style="margin:6px 0px"><tr>{out}</tr></table>'


@shows(MemoryStory)
def story_html(story: MemoryStory) -> str:
    frames = []
    for number, step in enumerate(story.steps, 1):
        content = f"<pre>{text(step.statement)}</pre>" + "".join(map(memory_html, step.memories))
        frames.append((f"{number} of {len(story.steps)}", step.did, content))
    told = "move the slider · blue: what this value shows · orange: what this step writes"
    return box(f"memory of {story.name}", told, steps(frames))
