"""Images between convolutions lie channels-last: the CPU's library is faster then.

Convolutions get such images and make such, and what is computed of them elementwise or in windows follows. Any
other operator, and whoever gets the graph's results, sees a copy that lies as in eager. The partition comes
later: so what the forward saves lies as the backward wants it.

The real compiler: GraphLowering.decide_layout_opt in torch/_inductor/graph.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from minicompile import compat
from minicompile.aot.layout import hint, same_strides
from minicompile.aot.levels import family
from minicompile.aot.views import is_view
from minicompile.ops.graph import Rewrite, origins_of, statement
from minicompile.passes.manager import graph_pass

aten = torch.ops.aten

CONVOLUTIONS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""How many of the first arguments are images."""
FOLLOWING = {aten.cat.default, aten.constant_pad_nd.default, aten.clone.default}
"""Operators whose results lie as their operands do, beside pointwise ones and windows."""


@graph_pass("channels_last", stage="prims", order=80, option="layout_optimization")
def channels_last(gm: fx.GraphModule, mode: Any) -> list[Rewrite] | str:
    """Unless it doesn't pay (then the result says why)."""
    convs = gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    return why_not(gm.graph, convs) or Images(gm.graph, mode).run()


def why_not(graph: fx.Graph, convs: list[fx.Node]) -> str:
    if not convs:
        return "no convolutions"
    return ""


class Images:
    """A graph whose images are laid out anew, from the first node to the last."""

    def __init__(self, graph: fx.Graph, mode: Any) -> None:
        self.graph, self.mode = graph, mode
        self.eager: dict[fx.Node, torch.Tensor] = {}
        """The nodes that lie otherwise now, and their values before."""
        self.copies: dict[tuple[fx.Node, bool], fx.Node] = {}
        """By what is copied, and whether that is channels-last then."""

    def run(self) -> list[Rewrite]:
        done = []
        for node in list(self.graph.nodes):
            changed = [used for used in node.all_input_nodes if used in self.eager]
            if node.target in CONVOLUTIONS and node.args[0].meta["val"].dim() == 4:
                before = statement(node)
                for used in node.args[: CONVOLUTIONS[node.target]]:
                    node.replace_input_with(used, self.laid_out(used, node))
                self.lay_out(node)
                done.append(Rewrite("channels_last", before, statement(node), origins_of(node)))
            elif not changed or node.op == "call_function" and self.follows(node, changed):
                continue
            else:
                for used in changed:
                    node.replace_input_with(used, self.restored(used, node))
        return done

    def follows(self, node: fx.Node, changed: list[fx.Node]) -> bool:
        """Can a node read images as they lie now? Its results lie so too."""
        kind, target = family(node.target), node.target
        if kind in ("pointwise", "cast", "window") or target in FOLLOWING:
            if any(used.meta["val"].dim() == 4 and hint(used.meta["val"].stride(1)) == 1 for used in changed):
                self.lay_out(node)
        elif kind == "view" and target is not aten.view.default:
            self.eager[node] = node.meta["val"]
            args = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
            with self.mode:
                node.meta["val"] = node.target(*args[0], **args[1])
        else:
            return kind == "reduction"
        return True

    def lay_out(self, node: fx.Node) -> None:
        """Give a node's results new strides, where they are images in rows."""
        value = node.meta["val"]
        if isinstance(value, tuple | list):
            node.meta["val"] = tuple(map(self.relaid, value))
            for user in node.users:
                self.lay_out(user)
        elif (relaid := self.relaid(value)) is not value:
            self.eager[node], node.meta["val"] = value, relaid

    def relaid(self, value: Any) -> Any:
        """A row-major image's value channels-last."""
        if isinstance(value, torch.Tensor) and value.dim() == 4:
            n, c, h, w = value.shape
            rows = self.fake(value, (c * h * w, h * w, w, 1))
            return self.as_channels_last(value) if same_strides(value, rows) else value
        return value

    def as_channels_last(self, value: torch.Tensor) -> torch.Tensor:
        n, c, h, w = value.shape
        found = self.fake(value, (h * w * c, 1, w * c, c))
        return value if same_strides(value, found) else found

    def fake(self, value: torch.Tensor, strides: Any) -> torch.Tensor:
        return compat.new_fake(self.mode, value.shape, strides, value.dtype, value.device)

    def laid_out(self, image: fx.Node, reader: fx.Node) -> fx.Node:
        value = self.as_channels_last(image.meta["val"])
        if value is image.meta["val"]:
            return image
        return self.copy(image, reader, value, torch.channels_last)

    def restored(self, image: fx.Node, reader: fx.Node) -> fx.Node:
        """As in eager."""
        if is_view(image) and image in self.eager:
            with self.graph.inserting_before(reader):
                made = self.graph.node_copy(image, lambda used: self.restored(used, reader) if used in self.eager else used)
            made.meta["val"] = self.eager[image]
            return made
        return self.copy(image, reader, self.eager[image], torch.contiguous_format)

    def copy(self, image: fx.Node, reader: fx.Node, value: torch.Tensor, form: Any) -> fx.Node:
        key = (image, form is torch.channels_last)
        if key not in self.copies:
            with self.graph.inserting_before(reader):
                made = self.graph.call_function(aten.clone.default, (image,), {"memory_format": form})
            made.meta.update(reader.meta, val=value)
            self.copies[key] = made
        return self.copies[key]
