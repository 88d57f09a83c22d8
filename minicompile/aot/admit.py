"""The front desk: what the rooms behind it handle. All else is `Unsupported`, and the frame runs in eager.

    inputs      dense or strided tensors; on CUDA only with a torch that was built for it
    writes      into memory that no other input shares, that keeps its shape and its storage, and where no
                element is read for another one
    calls       what autograd can be asked about on fakes
    outputs     fresh tensors, inputs, views of either: of the same type, and views to autograd as in eager
    results     that are differentiated together, or reach the same inputs

Nothing behind the desk emulates what it refuses.
The real compiler: torch/_functorch/_aot_autograd/collect_metadata_analysis.py, input_output_analysis.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction

from minicompile import compat
from minicompile.aot.layout import collide, is_dense, overlaps
from minicompile.errors import Unsupported
from minicompile.ops.nodes import is_inplace_view
from minicompile.ops.origin import SourceLine

STORAGE_SURGERY = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::set_data"}
MOVES = {
    f"aten::{name}_" for name in ("index_put", "index_add", "index_copy", "scatter", "scatter_add")
}
"""They put what they read into other places; eager refuses to read there what they write."""

INPUT_MEMORY, OUTPUT_MEMORY = "input-memory", "output-memory"
"""Ids of reasons to run in eager (`dynamo/reasons.py`)."""


# Inputs and calls


def admit_inputs(fakes: Collection[Any]) -> None:
    """Sparse tensors have no strides; with CUDA tensors but without CUDA, autograd ends the process."""
    for value in filter(torch.is_tensor, fakes):
        if value.layout is not torch.strided:
            raise Unsupported(f"an input has layout {value.layout}")
        if value.device.type == "cuda" and not torch.backends.cuda.is_built():
            raise Unsupported("CUDA tensors can't be traced with a build of torch without CUDA")


def admit_call(name: str, read: Collection[Any]) -> None:
    """A captured call, by its function's name and the values that it reads."""
    bytes_given = any(getattr(x, "dtype", None) is torch.uint8 for x in read)
    if bytes_given and ("interpolate" in name or "upsample" in name):
        raise Unsupported("images of bytes are resampled in eager's fixed-point arithmetic")
    if "as_strided" in name and torch.is_grad_enabled():
        # autograd, with fakes, would look for the gradient of what is written in the wrong place
        viewed = next(x for x in read if isinstance(x, torch.Tensor))
        if compat.autograd_base(viewed).storage_offset() != 0:
            raise Unsupported("a view by strides of a tensor that is a part of other memory")


def admit_operator(func: OpOverload, args: Any, inputs: Collection[int]) -> None:
    """An ATen operator before it is recorded; `inputs`: the storages of the graph's inputs."""
    if func._schema.name in STORAGE_SURGERY:
        raise Unsupported(f"{func} changes a tensor's storage", id=INPUT_MEMORY)
    if is_inplace_view(func) and compat.storage_id(args[0]) in inputs:
        raise Unsupported(f"{func} changes the shape of an input in place", id=INPUT_MEMORY)
    if func._schema.name == "aten::mkldnn_rnn_layer_backward" and not args[18]:
        raise Unsupported("an LSTM in evaluation has no backward kernel that a graph can call")


# Writes


def admit_write(func: OpOverload, written: Collection[torch.Tensor], read: Collection[Any]) -> None:
    """An operator that writes, with the tensors that it writes to and all that it gets."""
    moves = func._schema.name in MOVES
    if any(collide(x, y, moves) for x in written for y in read):
        raise Unsupported(f"{func} writes to elements that it reads in other places")


def admit_written_inputs(inputs: Collection[Any], written: Mapping[int, SourceLine | None]) -> None:
    """The graph's inputs; `written`: the storages that it wrote to, each with the user's line."""
    shared = Counter(compat.storage_id(x) for x in inputs if isinstance(x, torch.Tensor))
    for storage, where in written.items():
        if shared[storage] > 1:
            what = "several inputs share memory that is written to"
            raise Unsupported(what, where, id=INPUT_MEMORY)


# Outputs


def is_own_leaf(value: torch.Tensor) -> bool:
    """Does it require grad, though nothing that it was made of does?"""
    base = value._base
    return value.requires_grad and value.is_leaf and (base is None or not base.requires_grad)


def admit_output(value: torch.Tensor, of_input: bool) -> None:
    """An output that is no input itself; `of_input`: it lies in an input's memory."""
    if is_own_leaf(value) or (not of_input and is_own_leaf(compat.autograd_base(value))):
        raise Unsupported(
            "an output is a leaf that the graph makes: it would get a gradient", id=OUTPUT_MEMORY
        )
    if value.is_conj() or value.is_neg():
        raise Unsupported(
            "an output is the conjugate or the negative of what is in memory", id=OUTPUT_MEMORY
        )


def admit_view(view: torch.Tensor, base: torch.Tensor, made_here: bool) -> None:
    """An output that is a view of a base: an input, or memory that the graph makes."""
    if view.dtype is not base.dtype or base.is_conj() or base.is_neg():
        raise Unsupported(f"an output views {base.dtype} memory as {view.dtype}", id=OUTPUT_MEMORY)
    if made_here and not (is_dense(base) and base.storage_offset() == 0):
        raise Unsupported("outputs are views of a tensor whose memory has gaps", id=OUTPUT_MEMORY)
    known = compat.autograd_base(view) is compat.autograd_base(base)
    if not known and (view._base is not None or view.requires_grad):
        raise Unsupported(
            "outputs share memory, but autograd takes them for views of two tensors",
            id=OUTPUT_MEMORY,
        )
    if view.requires_grad and overlaps(base):  # whose gradients `as_strided` would take the mean of
        raise Unsupported(
            "an output is a view of a tensor whose elements share memory", id=OUTPUT_MEMORY
        )
    if view.grad_fn is not None:
        admit_history(view, (base, compat.autograd_base(base)))


def admit_history(view: torch.Tensor, bases: Collection[torch.Tensor]) -> None:
    """A view's gradient must go to its base, as that of the view which is rebuilt does."""

    def there(step: Any) -> bool:
        return any(step is x.grad_fn or getattr(step, "variable", None) is x for x in bases)

    step = view.grad_fn
    while step is None or not there(step):
        if step is None or isinstance(step, BackwardCFunction):
            what = "was made without grad mode, or by a custom autograd.Function"
            raise Unsupported(f"an output is a view of what {what}", id=OUTPUT_MEMORY)
        strided, step = step.name().startswith("AsStrided"), next(iter(step.next_functions))[0]
        if strided and not there(step):
            raise Unsupported("an output is as_strided of a view", id=OUTPUT_MEMORY)


def viewed_input(node: fx.Node, of_input: Mapping[fx.Node, int]) -> int:
    """The input that a view was made of: others may share its memory, but gradients go to this one."""
    while node not in of_input:
        if not node.args or not isinstance(node.args[0], fx.Node):
            raise Unsupported(
                "an output shares memory with an input that it was not made of", id=OUTPUT_MEMORY
            )
        node = node.args[0]
    return of_input[node]
