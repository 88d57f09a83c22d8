"""Checks before tracing that AOT autograd handles a graph; if not, the frame runs in eager, with the reason.

    inputs      strided tensors; on CUDA only with a torch that was built for it
    calls       what autograd can be asked about on fakes
    writes      into memory that no other input shares, that keeps its storage, and where no element is read
                for another one; an input keeps its shape
    outputs     fresh tensors, inputs, and views of one of these: of its type, with its gradient history

Nothing behind the desk emulates what it refuses. The real compiler makes inputs that share memory views of
one more input (a synthetic base): torch/_functorch/_aot_autograd/runtime_wrappers.py (merge_view_inputs).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd.function import BackwardCFunction

from minicompile import compat
from minicompile.aot.layout import collide, is_dense, overlaps
from minicompile.errors import OptionError, Unsupported
from minicompile.ops.nodes import is_inplace_view
from minicompile.ops.origin import SourceLine

STORAGE_SURGERY = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::set_data"}
HIDDEN_WRITES = ("aten::batch_norm_update_stats", "aten::batch_norm_gather_stats")
"""How names of operators begin that write to running statistics, of which their schemas say nothing."""
MOVES = {
    f"aten::{name}_" for name in ("index_put", "index_add", "index_copy", "scatter", "scatter_add")
}
"""They put what they read into other places; eager refuses to read there what they write."""


@contextlib.contextmanager
def refusing(what: str, where: SourceLine | None) -> Iterator[None]:
    """Whatever goes wrong inside is a reason not to compile, but for a user's rule that is wrong."""
    try:
        yield
    except OptionError:
        raise
    except Unsupported as error:
        raise Unsupported(error.reason, error.where or where, error.hint) from error
    except Exception as error:
        reason = f"{what} can't be traced: {type(error).__name__}: {error}"
        raise Unsupported(reason, where) from error


def admit_inputs(fakes: Collection[Any]) -> None:
    """Sparse tensors have no strides; with CUDA tensors but without CUDA, autograd ends the process."""
    for value in filter(torch.is_tensor, fakes):
        if value.layout is not torch.strided:
            raise Unsupported(f"an input has layout {value.layout}")
        if value.device.type == "cuda" and not torch.backends.cuda.is_built():
            raise Unsupported("CUDA tensors can't be traced with a build of torch without CUDA")


def admit_call(name: str, read: Collection[Any]) -> None:
    """A captured call, by its function's name and the values that it reads."""
    if ("interpolate" in name or "upsample" in name) and any(
        getattr(x, "dtype", None) is torch.uint8 for x in read
    ):
        raise Unsupported("images of bytes are resampled in eager's fixed-point arithmetic")
    if "as_strided" in name and torch.is_grad_enabled():
        # with fakes, autograd looks in the wrong place for the gradient of what is written there
        viewed = next(x for x in read if isinstance(x, torch.Tensor))
        if compat.autograd_base(viewed).storage_offset() != 0:
            raise Unsupported("a view by strides of a tensor that is a part of other memory")


def admit_operator(func: OpOverload, args: Any, inputs: Collection[int]) -> None:
    """An ATen operator before it is recorded; `inputs`: the storages of the graph's inputs."""
    if func._schema.name in STORAGE_SURGERY:
        raise Unsupported(f"{func} changes a tensor's storage")
    if func._schema.name.startswith(HIDDEN_WRITES):
        raise Unsupported(f"{func} writes to running statistics")
    if func.namespace == "_c10d_functional":  # all processes call it, or none
        raise Unsupported(f"{func} exchanges tensors with other processes")
    if func.namespace == "aten" and any(a.is_out for a in func._schema.arguments):
        raise Unsupported(f"{func} writes to an `out`, which it may resize")
    if is_inplace_view(func) and compat.storage_id(args[0]) in inputs:
        raise Unsupported(f"{func} changes the shape of an input in place")
    if func._schema.name == "aten::mkldnn_rnn_layer_backward" and not args[18]:
        raise Unsupported("an LSTM in evaluation has no backward kernel that a graph can call")


def admit_write(
    func: OpOverload, written: Collection[Any], read: Collection[Any], inputs: Collection[int]
) -> None:
    """An operator that writes to tensors, with all that it gets. `inputs`: the storages of the inputs, each
    as often as it has inputs."""
    places = [*inputs]
    if any(places.count(compat.storage_id(x)) > 1 for x in written):
        raise Unsupported("several inputs share memory that is written to")
    if any(collide(x, y, func._schema.name in MOVES) for x in written for y in read):
        raise Unsupported(f"{func} writes to elements that it reads in other places")


def is_own_leaf(value: torch.Tensor) -> bool:
    """Does it require grad, though nothing that it was made of does?"""
    base = value._base
    return value.requires_grad and value.is_leaf and (base is None or not base.requires_grad)


def admit_output(value: torch.Tensor, of_input: bool) -> None:
    """An output that is no input itself; `of_input`: it lies in an input's memory."""
    if is_own_leaf(value) or (not of_input and is_own_leaf(compat.autograd_base(value))):
        raise Unsupported("an output is a leaf that the graph makes: it would get a gradient")
    if value.is_conj() or value.is_neg():
        raise Unsupported("an output is the conjugate or the negative of what lies in memory")


def admit_view(view: torch.Tensor, base: torch.Tensor, linked: bool) -> None:
    """An output that is made again as a view of a base. `linked`: other outputs are views of what autograd
    takes this one to be a view of."""
    if view.dtype is not base.dtype or base.is_conj() or base.is_neg():
        raise Unsupported(f"an output views {base.dtype} memory as {view.dtype}")
    known = compat.autograd_base(view) is compat.autograd_base(base)
    apart = view.requires_grad and view.grad_fn is not base.grad_fn
    if not known and (apart or linked):
        raise Unsupported("outputs share memory, but autograd takes them for views of two tensors")
    if view.requires_grad and overlaps(base):  # whose gradients `as_strided` would take the mean of
        raise Unsupported("an output is a view of a tensor whose elements share memory")
    if view.grad_fn is not None:
        admit_history(view, (base, compat.autograd_base(base)))


def admit_base(base: torch.Tensor) -> None:
    """Refuse a base whose memory has gaps: the graph can't return it whole for outputs to be views of it."""
    if not is_dense(base) or base.storage_offset() != 0:
        raise Unsupported("outputs are views of a tensor whose memory has gaps")


def admit_history(view: torch.Tensor, bases: Collection[torch.Tensor]) -> None:
    """A view's gradient must go to its base, as that of the view which is made again does."""

    def there(step: Any) -> bool:
        return any(step is x.grad_fn or getattr(step, "variable", None) is x for x in bases)

    step = view.grad_fn
    while step is None or not there(step):
        if step is None or isinstance(step, BackwardCFunction):
            what = "was made without grad mode, or by a custom autograd.Function"
            raise Unsupported(f"an output is a view of what {what}")
        strided, step = step.name().startswith("AsStrided"), next(iter(step.next_functions))[0]
        if strided and not there(step):
            raise Unsupported("an output is as_strided of a view")
