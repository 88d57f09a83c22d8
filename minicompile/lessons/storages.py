"""A recorded graph run on real numbers: the memory that each value shows and its versions, as slides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from minicompile.lessons.pictures import Picture, slides
from minicompile.ops.graph import statement
from minicompile.ops.nodes import is_view, writes
from minicompile.pipeline_result import Trace
from minicompile.show.html import columns, table, text

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

    def __str__(self) -> str:
        return "\n".join(
            f"  {self.name}, version {version}: {' '.join(f'{x:g}' for x in numbers)}"
            for version, numbers in enumerate(self.versions)
        )


def memory_story(trace: Trace, *inputs: torch.Tensor) -> Picture:
    """Run what `trace` recorded on copies of `inputs`: small tensors, without a backward pass."""
    assert trace.aot is not None and trace.aot.recorded is not None
    frames, values = list[tuple[str, str, Picture]](), dict[object, torch.Tensor]()
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
        legend = "<small>blue: what the value shows; orange: what the step writes</small>"
        pictures = f"<pre>{text(line)}</pre>{legend}" + "".join(map(memory_html, shown.values()))
        said = "\n".join([line, *map(str, shown.values())])
        frames.append((f"step {len(frames)}", f"{node.name}: {did}", Picture(said, pictures)))
    return slides(f"memory of {trace.name}", *frames)


def contents(value: torch.Tensor) -> tuple[float, ...]:
    """All numbers of the storage that a tensor lies in."""
    count = value.untyped_storage().nbytes() // value.element_size()
    return tuple(value.as_strided([count], [1], 0).tolist())


def memory_html(memory: Memory) -> str:
    """The versions of one memory, the present one last."""
    parts, last = [], len(memory.versions) - 1
    look = f"background-color:{CHANGED if memory.written else SEEN};color:#111827;padding:2px 7px"
    for version, numbers in enumerate(memory.versions):
        seen = memory.seen if version == last else ()
        cells = [
            f'<span style="{look}">{x:g}</span>' if place in seen else f"{x:g}"
            for place, x in enumerate(numbers)
        ]
        width = max(memory.width, 1)
        rows = [cells[start : start + width] for start in range(0, len(cells), width)]
        name = f"<small><b>{text(memory.name)}</b> · version {version}</small>"
        parts.append(name + table((), rows, range(width)))
    return columns(*parts)
