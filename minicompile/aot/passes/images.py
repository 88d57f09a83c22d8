"""Images between convolutions lie channels-last: a CPU's library is faster then.

Convolutions get and give such images, and what is computed of them by elements or windows follows. For any
other operator, and for whoever gets the graph's results, they are copied into eager's layout. As this comes
before the partition, the forward saves images as the backward wants them.

The real compiler: GraphLowering.decide_layout_opt in torch/_inductor/graph.py.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.layout import hint, same_strides
from minicompile.aot.levels import family
from minicompile.aot.partition import bytes_of
from minicompile.ops.display import bytes_text
from minicompile.ops.graph import Rewrite, origins_of, statement
from minicompile.passes.manager import graph_pass

aten = torch.ops.aten

CONVOLUTIONS: dict[Any, int] = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""How many of the first arguments are images."""
FOLLOWING = {aten.cat.default, aten.constant_pad_nd.default, aten.clone.default}
"""Results lie as operands do, as those of pointwise operators and windows."""
VIEWS = {aten.permute, aten.expand, aten.slice, aten.select, aten.squeeze, aten.unsqueeze}
"""They view what lies in any order."""
ROWS, LAST = torch.contiguous_format, torch.channels_last


@graph_pass("channels_last", stage="prims", order=80, option="layout_optimization")
def channels_last(gm: fx.GraphModule, mode: Any) -> list[Rewrite] | str:
    """Not where more would be copied than half of what the convolutions read and write: says so then."""
    if not any(map(is_convolution, gm.graph.nodes)):
        return "no convolution of images on a CPU"
    if gm.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        return "as_strided looks at memory"
    copy, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        nodes[node] = copy.node_copy(node, nodes.__getitem__)
    images = Images(copy, mode)
    done = images.run()
    if images.copied * 2 > images.moved:
        copied, moved = map(bytes_text, (images.copied, images.moved))
        return f"{copied} would be copied, convolutions read and write {moved}"
    gm.graph = copy
    return done


def is_convolution(node: fx.Node) -> bool:
    if node.target not in CONVOLUTIONS:
        return False
    image: Any = node.args[0]
    return image.meta["val"].dim() == 4 and image.meta["val"].device.type == "cpu"


class Images:
    """A graph whose images are laid out anew, from the first node to the last."""

    def __init__(self, graph: fx.Graph, mode: Any) -> None:
        self.graph, self.mode = graph, mode
        self.eager: dict[fx.Node, torch.Tensor] = {}
        """The nodes that lie otherwise now, and their values before."""
        self.copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
        self.moved = self.copied = 0
        """Bytes that convolutions read and write, and that are copied."""

    def run(self) -> list[Rewrite]:
        done = []
        for node in list(self.graph.nodes):
            if is_convolution(node):
                before = statement(node)
                for image in self.images_read(node):
                    node.replace_input_with(image, self.laid_out(image, node))
                self.lay_out(node)
                parts = [user for user in node.users if user.target is operator.getitem]
                self.moved += sum(map(bytes_of, [*self.images_read(node), node, *parts[:1]]))
                done.append(Rewrite("channels_last", before, statement(node), origins_of(node)))
            elif not self.follows(node):
                for image in node.all_input_nodes:
                    if image in self.eager:
                        node.replace_input_with(image, self.restored(image, node))
        return done

    def images_read(self, node: fx.Node) -> Any:
        return node.args[: CONVOLUTIONS[node.target]]

    def follows(self, node: fx.Node) -> bool:
        """Can a node read images as they lie now? If its results are images, they lie so too."""
        target, read = node.target, node.all_input_nodes
        if not isinstance(target, OpOverload):
            return target is operator.getitem
        kind = family(target)
        if kind in ("pointwise", "cast", "window") or target in FOLLOWING:
            if any(map(is_last, read)):
                self.lay_out(node)
        elif target.overloadpacket in VIEWS:
            if read[0] in self.eager:
                self.eager[node] = node.meta["val"]
                args: Any = fx.map_arg(node.args, lambda used: used.meta["val"])
                with self.mode:
                    node.meta["val"] = target(*args)
        else:
            return kind == "reduction"
        return True

    def lay_out(self, node: fx.Node) -> None:
        """Give a node's results new strides, where they are images in rows."""
        value = node.meta["val"]
        if isinstance(value, tuple | list):
            node.meta["val"] = tuple(map(self.relaid, value))
            for part in node.users:
                self.lay_out(part)
        elif (relaid := self.relaid(value)) is not value:
            self.eager[node], node.meta["val"] = value, relaid

    def relaid(self, value: Any) -> Any:
        rows = isinstance(value, torch.Tensor) and value.dim() == 4
        return (
            self.as_format(value, LAST) if rows and self.as_format(value, ROWS) is value else value
        )

    def as_format(self, value: torch.Tensor, form: torch.memory_format) -> torch.Tensor:
        """An image's value in a layout; the value itself if it lies so."""
        c, h, w = value.shape[1:]
        strides = (c * h * w, h * w, w, 1) if form is ROWS else (h * w * c, 1, w * c, c)
        found = compat.new_fake(self.mode, value.shape, strides, value.dtype, value.device)
        return value if same_strides(value, found) else found

    def laid_out(self, image: fx.Node, reader: fx.Node) -> fx.Node:
        value = self.as_format(image.meta["val"], LAST)
        return image if value is image.meta["val"] else self.copy(image, reader, LAST, value)

    def restored(self, image: fx.Node, reader: fx.Node) -> fx.Node:
        """An image, or a view of one, as eager has it."""
        if image not in self.eager:
            return image
        if getattr(image.target, "overloadpacket", None) not in VIEWS:
            return self.copy(image, reader, ROWS, self.eager[image])
        with self.graph.inserting_before(reader):
            made = self.graph.node_copy(image, lambda used: self.restored(used, reader))
        made.meta["val"] = self.eager[image]
        return made

    def copy(
        self, image: fx.Node, reader: fx.Node, form: torch.memory_format, value: torch.Tensor
    ) -> fx.Node:
        if (image, form) not in self.copies:
            with self.graph.inserting_before(reader):
                made = self.graph.call_function(
                    aten.clone.default, (image,), {"memory_format": form}
                )
            made.meta.update(reader.meta, val=value)
            self.copies[image, form] = made
            self.copied += bytes_of(image)
        return self.copies[image, form]


def is_last(node: fx.Node) -> bool:
    """Does an image have its channels side by side?"""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    return hint(value.stride(1)) == 1 < hint(value.shape[1]) <= hint(value.stride(3))
