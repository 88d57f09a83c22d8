"""A capture as slides: one executed instruction each, with the stack and the graph as they are then."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from minicompile.debug.history import explain
from minicompile.dynamo.interpreter import C_METHODS, Frame
from minicompile.dynamo.result import describe
from minicompile.dynamo.world import World
from minicompile.lessons.pictures import Picture, slides
from minicompile.ops.dtypes import value_text
from minicompile.ops.graph import call_text

HEADS = ("instructions", "the stack, its top last", "the graph so far")
AROUND = 10
"""How many instructions before the current one and after it are shown."""


def bytecode_steps(function: Callable[..., Any], *args: Any) -> Picture:
    """Slides of the capture of `function(*args)`, which must be captured whole."""
    seen: list[tuple[str, str, list[str], list[str]]] = []
    step = World.step

    def stepped(world: World, frame: Frame, instruction: Any) -> None:
        def say(value: Any) -> str:
            if isinstance(value, torch.Tensor):
                return f"{world.recorder.nodes.get(id(value))}: {value_text(value)}"
            owner = getattr(value, "__self__", None)
            if isinstance(owner, torch.Tensor):
                return f"{world.recorder.nodes[id(owner)]}.{value.__name__}"
            if isinstance(value, C_METHODS):
                return value.__qualname__.replace("TensorBase", "Tensor")
            return str(value) if str(value) == "NULL" else describe(value).rpartition(".")[2]

        step(world, frame, instruction)
        graph = [f"{node} = {call_text(node)}" for node in world.recorder.calls]
        told = "  " * frame.depth + str(instruction)
        seen.append((told, frame.line.text, list(map(say, frame.stack)), graph))

    with mock.patch.object(World, "step", stepped):
        explain(function)(*args)
    frames: list[tuple[str, str, object]] = []
    for number, (told, line, stack, graph) in enumerate(seen):
        first = max(0, min(number - AROUND, len(seen) - 2 * AROUND))
        shown = [text for text, *_ in seen[first : first + 2 * AROUND]]
        marked = [
            ("\u25b6 " if i == number else "  ") + text for i, text in enumerate(shown, first)
        ]
        columns = ([head, *column] for head, column in zip(HEADS, (marked, stack, graph)))
        rows = itertools.zip_longest(*columns, fillvalue="")
        text = "\n".join(f"{left:<30}{middle:<34}{right}".rstrip() for left, middle, right in rows)
        frames.append((told.strip(), line, text))
    return slides(f"capture of {function.__name__}", *frames)
