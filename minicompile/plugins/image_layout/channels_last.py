"""Images between convolutions lie channels-last: a CPU's library is faster then, and so is a GPU's.

Convolutions get and give such images, and what is computed of them by elements or windows follows. For any
other operator, and for whoever gets the graph's results, they are copied into eager's layout. As this comes
before the partition, the forward saves images as the backward wants them.

The real compiler: GraphLowering.decide_layout_opt in torch/_inductor/graph.py.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from minicompile import compat
from minicompile.aot.layout import same_strides
from minicompile.aot.partition import REDUCTIONS
from minicompile.ops.display import bytes_text
from minicompile.ops.graph import Rewrite, copies, origins_of, statement
from minicompile.ops.nodes import bytes_of, is_pointwise
from minicompile.ops.strides import dense_strides
from minicompile.passes.manager import graph_pass
from minicompile.shapes.symnode import hint

aten = torch.ops.aten

CONVOLUTIONS: dict[Any, int] = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""How many of the first arguments are images."""
FOLLOWING = re.compile(
    "cat|constant_pad_nd|clone|convert_element_type|_to_copy|.*(pool|pad.d|upsample).*"
)
"""Names of operators whose results lie as operands do, as those of pointwise operators."""
VIEWS = {aten.permute, aten.expand, aten.slice, aten.select, aten.squeeze, aten.unsqueeze}
"""They view what lies in any order."""
ROWS, LAST = torch.contiguous_format, torch.channels_last
VECTOR = 16
"""Floats in the longest vector of a CPU."""


@graph_pass("channels_last", stage="prims", order=80)
def channels_last(gm: fx.GraphModule, mode: Any) -> list[Rewrite] | str:
    """Not where more would be copied than half of what the convolutions read and write, nor where a weight's
    gradient is larger than all images (the library takes scratch memory for it): says so then. Convolutions
    that the library gets wrong so stay as they are."""
    if not any(map(is_convolution, gm.graph.nodes)):
        return "no convolution of images"
    if gm.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        return "as_strided looks at memory"
    copy, _ = copies(gm.graph)
    images = Images(copy, mode)
    done = images.run()
    copied, moved = map(bytes_text, (images.copied, sum(images.moved)))
    if images.copied * 2 > sum(images.moved):
        return f"{copied} would be copied, convolutions read and write {moved}"
    if max(images.weights, default=0) > max(images.moved):
        return f"scratch for a weight's gradient of {bytes_text(max(images.weights))}"
    gm.graph = copy
    return done


def is_convolution(node: fx.Node) -> bool:
    image: Any = node.args[0].meta["val"] if node.target in CONVOLUTIONS else None  # type: ignore[union-attr]
    return image is not None and image.dim() == 4


def is_misread(node: fx.Node) -> bool:
    """Does oneDNN compute this weight's gradient of memory that isn't the image's? Channels-last it does so
    for kernels of one place that skip some, where fewer channels lie side by side than fill a vector."""
    if node.target is not aten.convolution_backward.default:
        return False
    args: Any = node.args
    image, weight = args[1].meta["val"], args[2].meta["val"]
    skips = any(step != 1 for step in args[4]) and all(size == 1 for size in weight.shape[2:])
    return skips and args[10][1] and image.device.type == "cpu" and hint(image.shape[1]) < VECTOR


def is_last(node: fx.Node) -> bool:
    """Does an image have its channels side by side?"""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    return hint(value.stride(1)) == 1 < hint(value.shape[1]) <= hint(value.stride(3))


class Images:
    """A graph whose images are laid out anew, from the first node to the last."""

    def __init__(self, graph: fx.Graph, mode: Any) -> None:
        self.graph, self.mode = graph, mode
        self.eager: dict[fx.Node, torch.Tensor] = {}
        """The nodes that lie otherwise now, and their values before."""
        self.copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}
        self.copied, self.moved, self.weights = 0, list[int](), list[int]()
        """Bytes that are copied, of each image that convolutions read or write, of each weight's gradient."""

    def run(self) -> list[Rewrite]:
        done = []
        for node in list(self.graph.nodes):
            if is_convolution(node) and not is_misread(node):
                before, count = statement(node), CONVOLUTIONS[node.target]
                for image in node.args[:count]:
                    node.replace_input_with(image, self.copy(image, node, LAST))  # type: ignore[arg-type]
                self.lay_out(node)
                parts = [u for u in node.users if u.target is operator.getitem and u.args[1] == 0]
                images: Any = [*node.args[:count], node, *parts]
                self.moved += map(bytes_of, images)
                self.weights += map(bytes_of, node.args[2 : count + 1])
                done.append(Rewrite("channels_last", before, statement(node), origins_of(node)))
            elif not self.follows(node):
                for image in node.all_input_nodes:
                    node.replace_input_with(image, self.copy(image, node, ROWS))
        return done

    def follows(self, node: fx.Node) -> bool:
        """Can a node read images as they lie now? If its results are images, they lie so too."""
        target: Any = node.target
        if not isinstance(target, OpOverload):
            return target is operator.getitem
        if is_pointwise(target) or FOLLOWING.fullmatch(target.overloadpacket.__name__):
            if any(map(is_last, node.all_input_nodes)):
                self.lay_out(node)
        elif target.overloadpacket in VIEWS:
            if node.args[0] in self.eager:
                self.eager[node] = node.meta["val"]
                args: Any = fx.map_arg(node.args, lambda used: used.meta["val"])
                with self.mode:
                    node.meta["val"] = target(*args)
        else:
            return target.overloadpacket in REDUCTIONS
        return True

    def lay_out(self, node: fx.Node) -> None:
        """Give a node's results new strides, where they are images in rows."""
        value = node.meta["val"]
        if isinstance(value, tuple | list):
            for part in node.users:
                self.lay_out(part)
            parts = {part.args[1]: part.meta["val"] for part in node.users}
            node.meta["val"] = tuple(parts.get(i, value[i]) for i in range(len(value)))
        elif value.dim() == 4 and self.placed(value, ROWS) is value:
            new = self.placed(value, LAST)
            if new is not value:
                self.eager[node], node.meta["val"] = value, new

    def placed(self, value: torch.Tensor, form: torch.memory_format) -> torch.Tensor:
        """An image's value in a layout; the value itself if it lies so."""
        strides = dense_strides(value.shape, None if form is ROWS else (0, 2, 3, 1))
        found = compat.new_fake(self.mode, value.shape, strides, value.dtype, value.device)
        return value if same_strides(value, found) else found

    def copy(self, image: fx.Node, reader: fx.Node, form: torch.memory_format) -> fx.Node:
        """An image, or a view of one, for a reader: channels-last, or (`ROWS`) as eager has it."""
        value = image.meta["val"]
        new = self.placed(value, LAST) if form is LAST else self.eager.get(image, value)
        if new is value:
            return image
        if (image, form) not in self.copies:
            with self.graph.inserting_before(reader):
                if form is ROWS and getattr(image.target, "overloadpacket", None) in VIEWS:
                    made = self.graph.node_copy(image, lambda used: self.copy(used, reader, ROWS))
                else:
                    how: dict[str, Any] = {"memory_format": form}
                    made = self.graph.call_function(aten.clone.default, (image,), how)
                    self.copied += bytes_of(image)
            made.meta.update(reader.meta, val=new)
            self.copies[image, form] = made
        return self.copies[image, form]
