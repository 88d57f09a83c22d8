"""How an exported program's results are put together from the graph's outputs, as an expression.

The code that capture generated to rebuild the frame's result is run on stand-ins for tensors; what it gives
is written down.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from minicompile.dynamo.capture import CapturedFrame
from minicompile.dynamo.guards import generate
from minicompile.dynamo.result import GraphInput
from minicompile.errors import ExportError
from minicompile.exporting.call import PLAIN, Call, leaves, mapped
from minicompile.exporting.conditions import Expression, class_name, literal
from minicompile.ops.graph import output_node
from minicompile.shapes.symnode import SYMBOLIC


@dataclass(frozen=True)
class Stand:
    """Stands for a tensor of the captured graph: an output, or an input."""

    of: str
    number: int


class Structure:
    """How the results are put together: `text` says it in terms of `result[i]`, whose order is `results`;
    `assigned` are the buffers that the program replaces by another tensor."""

    def __init__(self, call: Call, captured: CapturedFrame) -> None:
        self.call, self.capture = call, captured.capture
        self.results: dict[Stand, int] = {}
        self.classes: dict[str, Any] = {}
        self.assigned: dict[str, Stand] = {}
        self.within: set[int] = set()
        self.paths: dict[int, str] = {}
        """The arguments themselves, where results may hold them: by id."""
        returned = self.replay(captured)
        self.text = self.written(returned)
        Expression(self.text)

    def replay(self, captured: CapturedFrame) -> Any:
        """What the frame returns, tensors as stand-ins. What it does to buffers is undone."""
        capture, names, call = captured.capture, dict(captured.code.names), self.call
        if "change_modes" in names:
            raise ExportError(f"{call.name} leaves grad mode or autocast changed")
        owner = call.target if isinstance(call.target, torch.nn.Module) else None
        buffers = {} if owner is None else dict(owner.named_buffers(remove_duplicate=False))
        places = {re.sub(r"\.(\d+)(?=\.)", r"[\1]", f"{call.owner}.{n}"): n for n in buffers}
        for effect in capture.side_effects:
            place, _, _ = effect.partition(" = ")
            if place not in places:
                cure = "give it back as a result; register tensors that change as buffers"
                raise ExportError(f"{call.name} changes what is not exported: {effect}: {cure}")
        stands = [Stand("input", n) for n in range(len(capture.inputs))]
        outputs = cast(Any, output_node(capture.graph.gm.graph).args[0])
        outs = [Stand("output", n) for n in range(len(outputs))]
        arguments = with_fakes(call, capture.inputs)
        self.paths = {id(value): path for path, value in leaves(arguments, containers=True)}
        self.paths |= {id(v): p for p, v in leaves(arguments) if isinstance(v, torch.Tensor)}
        names |= {"graph": lambda inputs: outs, "version": lambda stand: 0}
        given = ", ".join(["inputs", *(f"L_{name}" for name in arguments)])
        run = generate(f"replay({given})", captured.lines, names)
        modules = [] if owner is None else list(owner.modules())
        before = [dict(module._buffers) for module in modules]
        try:
            returned = run(stands, *arguments.values())
            if owner is not None and capture.side_effects:
                self.find_assigned(owner, places)
        finally:
            for module, kept in zip(modules, before):
                module._buffers.clear()
                module._buffers.update(kept)
        return returned

    def find_assigned(self, owner: torch.nn.Module, places: Mapping[str, str]) -> None:
        for name in places.values():
            path, _, key = name.rpartition(".")
            found: Any = owner.get_submodule(path)._buffers[key]
            if isinstance(found, Stand):
                self.assigned[name] = found
            elif not isinstance(found, torch.Tensor):
                raise ExportError(
                    f"{self.call.name} puts a {type(found).__name__} in buffer {name}"
                )

    def written(self, value: Any) -> str:
        """A part of the result as an expression."""
        if isinstance(value, Stand):
            place = self.capture.inputs[value.number].source if value.of == "input" else None
            if place is not None and self.call.is_argument(place):
                return place.name  # the argument itself, as in eager
            return f"result[{self.results.setdefault(value, len(self.results))}]"
        if id(value) in self.paths:
            return self.paths[id(value)]
        if isinstance(value, SYMBOLIC):
            return str(self.capture.shape_env.text(value.node.expr))
        if type(value) is torch.device:
            return f"torch.device({str(value)!r})"
        if type(value) in PLAIN:
            return literal(value)
        if id(value) in self.within:
            raise ExportError(f"{self.call.name} returns a container that holds itself")
        self.within.add(id(value))
        text = self.container(value)
        self.within.remove(id(value))
        return text

    def container(self, value: Any) -> str:
        cls = type(value)
        if cls is dict:
            items = [f"{self.written(k)}: {self.written(v)}" for k, v in value.items()]
            return f"{{{', '.join(items)}}}"
        if cls is collections.OrderedDict:
            return f"OrderedDict({self.written(list(value.items()))})"
        if not isinstance(value, list | tuple):
            cure = "return tensors and numbers in tuples, lists, dicts or named tuples"
            raise ExportError(f"{self.call.name} returns a {class_name(cls)}: {cure}")
        items = [self.written(item) for item in value]
        if cls is list:
            return f"[{', '.join(items)}]"
        plain = f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if cls is tuple:
            return plain
        if cls is torch.Size:
            return f"torch.Size({plain})"
        name = class_name(cls).replace("<locals>.", "")
        self.classes[name] = cls
        if hasattr(cls, "_fields"):
            items = [f"{key}={item}" for key, item in zip(cls._fields, items, strict=True)]
            return f"{name}({', '.join(items)})"
        if cls.__module__ == "torch.return_types":
            return f"{name}({plain})"
        raise ExportError(f"{self.call.name} returns a {class_name(cls)}, a tuple of its own kind")


def with_fakes(call: Call, inputs: Sequence[GraphInput]) -> dict[str, Any]:
    """The arguments with the inputs' fakes in place of tensors."""
    by_path = {given.source.name: given.fake for given in inputs if call.is_argument(given.source)}
    same = {id(value): by_path[p] for p, value in leaves(call.arguments) if p in by_path}
    made: dict[str, Any] = mapped(call.arguments, lambda leaf: same.get(id(leaf), leaf))
    return made
