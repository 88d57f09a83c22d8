"""How an exported program's results are put together from the graph's outputs, as a Python expression.

The code that capture generated to rebuild the frame's result is run on stand-ins for tensors; what it
returns is written down: `{'logits': result[0], 'n': x.size(0), 'same': x}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from minicompile import compat
from minicompile.dynamo.capture import CapturedFrame
from minicompile.dynamo.guards import generate
from minicompile.dynamo.result import describe
from minicompile.errors import ExportError
from minicompile.exporting.call import CONSTANTS, Call
from minicompile.exporting.conditions import CONTAINERS, walk
from minicompile.ops.graph import output_node
from minicompile.shapes.symnode import SYMBOLIC


@dataclass(frozen=True)
class Stand:
    """Stands for a tensor of the captured graph: an output, or an input."""

    of: str
    number: int


class Structure:
    """The results: `text` is the expression, in terms of `result[i]`; `results` has what each of these is."""

    def __init__(self, call: Call, captured: CapturedFrame) -> None:
        self.call, self.capture = call, captured.capture
        self.results: dict[Stand, int] = {}
        fakes = {
            id(tensor): given.fake
            for path, tensor in walk(call.arguments)
            for given in self.capture.inputs
            if given.source.name == path
        }
        arguments = compat.tree_map(lambda leaf: fakes.get(id(leaf), leaf), call.arguments)
        self.paths = {id(x): p for p, x in walk(arguments) if isinstance(x, torch.Tensor)}
        self.text = self.written(self.replay(captured, arguments))

    def replay(self, captured: CapturedFrame, arguments: dict[str, Any]) -> Any:
        """What the frame returns, tensors as stand-ins. Raises ExportError for changes of other things."""
        capture, names, call = captured.capture, dict(captured.code.names), self.call
        if "change_modes" in names:
            raise ExportError(f"{call.name} leaves grad mode or autocast changed")
        if capture.side_effects:
            cure = "give it back as a result, or write to a buffer in place (`copy_`)"
            what = f"changes what is not exported: {capture.side_effects[0]}"
            raise ExportError(f"{call.name} {what}: {cure}")
        outputs = cast(Any, output_node(capture.graph.gm.graph).args[0])
        names["graph"] = lambda inputs: [Stand("output", n) for n in range(len(outputs))]
        names |= {"version": lambda stand: 0}
        run = generate(
            f"replay({', '.join(['inputs', *map('L_{}'.format, arguments)])})",
            captured.lines,
            names,
        )
        stands = [Stand("input", n) for n in range(len(capture.inputs))]
        return run(stands, *arguments.values())

    def written(self, value: Any, depth: int = 0) -> str:
        """A part of the results as an expression. Raises ExportError for what none can name."""
        if isinstance(value, Stand):
            source = self.capture.inputs[value.number].source if value.of == "input" else None
            if source is not None and self.call.is_argument(source):
                return source.name  # the argument itself, as in eager
            return f"result[{self.results.setdefault(value, len(self.results))}]"
        if id(value) in self.paths:
            return self.paths[id(value)]
        if isinstance(value, SYMBOLIC):
            return str(self.capture.shape_env.text(value.node.expr))
        if type(value) in CONSTANTS:
            return "torch." * isinstance(value, torch.device) + repr(value)
        cls = type(value)
        if cls not in (*CONTAINERS, torch.Size) or depth > 50:
            cure = "return tensors and numbers in tuples, lists and dicts"
            raise ExportError(f"{self.call.name} returns {describe(value)}: {cure}")
        items = [self.written(item, depth + 1) for item in value]
        if cls is dict:
            values = [self.written(item, depth + 1) for item in value.values()]
            return f"{{{', '.join(map('{}: {}'.format, items, values))}}}"
        if cls is list:
            return f"[{', '.join(items)}]"
        text = f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        return text if cls is tuple else f"torch.Size({text})"
