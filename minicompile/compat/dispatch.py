"""torch's dispatcher: Python kernels of operators, dispatch modes, and blocks in which they are off."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from minicompile.compat.private import relies_on, take

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
else:
    _TorchDispatchMode = take("torch.utils._python_dispatch.TorchDispatchMode", "differentiation")


class Unwrapped:
    """A dispatch mode that torch doesn't wrap in code which switches off torch.compile at each call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class TorchDispatchMode(Unwrapped, _TorchDispatchMode):
    """torch's class of modes that see each operator call, below autograd."""


python_dispatcher = take("torch._dispatch.python.enable_python_dispatcher", "differentiation")
"""A context in which operators' Python kernels are used, as torch's own compiler does."""
no_dispatch_modes = take("torch.utils._python_dispatch._disable_current_modes", "differentiation")
"""A context in which no dispatch mode sees what is called."""
no_function_modes = take("torch._C.DisableTorchFunction", "capture")
"""A context in which `__torch_function__` modes are off."""
below_autograd = take("torch._C._AutoDispatchBelowAutograd", "differentiation")
"""A context in which operators leave no history for a backward pass."""

torch_decompositions = take("torch._decomp.decomposition_table", "speed", otherwise={})
"""ATen operator -> a function that computes it with simpler operators."""

DispatchKey = take("torch._C.DispatchKey", "differentiation")
without_python_dispatcher = take("torch._C._DisablePythonDispatcher", "differentiation")
has_kernel = take("torch._C._dispatch_has_kernel_for_dispatch_key", "differentiation")
relies_on(
    """torch.ops.aten.relu.default.py_kernels torch.ops.aten.relu.default._dispatch_cache
    torch.ops.aten.relu.default._overloadname torch.ops.aten.relu.default._op_dk
    torch.ops.aten.relu.default._schema""",
    "differentiation",
)


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Does the operator only call other operators (in every mode, autograd included)?"""
    return bool(has_kernel(op.name(), "CompositeImplicitAutograd"))


@contextlib.contextmanager
def python_kernels(tables: Mapping[Any, Mapping[Any, Any]]) -> Iterator[None]:
    """Inside, each operator has a table of Python kernels, by dispatch key, in place of its own."""
    before = {op: op.py_kernels for op in tables}
    try:
        for op, table in tables.items():
            op.py_kernels = dict(table)
            op._dispatch_cache.clear()
        yield
    finally:
        for op, table in before.items():
            op.py_kernels = table
            op._dispatch_cache.clear()


def torch_kernels_as_in_eager() -> contextlib.AbstractContextManager[None]:
    """Inside, operators are traced as eager runs them where torch's Python kernels do something else.

    Those of upsampling compute in other steps; that of a loss counts labels behind the -1 that ends the list;
    those of recurrent networks have no dropout between layers."""
    tables: dict[Any, dict[Any, Any]] = {}
    for name in (n for n in dir(torch.ops.aten) if "upsample_" in n or "multilabel_margin" in n):
        packet = getattr(torch.ops.aten, name)
        for op in (getattr(packet, overload) for overload in packet.overloads()):
            table = tables[op] = dict(op.py_kernels)
            for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
                if table.pop(key, None) and op._overloadname == "vec":
                    table[key] = functools.partial(upsample_by_factors, packet.default)
    for name in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
        packet = getattr(torch.ops.aten, name)
        for op in (packet.input, packet.data):
            kernels = op.py_kernels.items()
            tables[op] = {key: functools.partial(network, op, kernel) for key, kernel in kernels}
    return python_kernels(tables)


def network(op: Any, kernel: Any, *args: Any) -> Any:
    """Call a recurrent network's Python kernel, or eager's in C++ where there is dropout between layers: the
    condition for it in `_rnn_helper` of torch/_decomp/decompositions.py never holds (torch 2.11 to 2.15)."""
    given = dict(zip((a.name for a in op._schema.arguments), args))
    if not (given["train"] and given["dropout"] and given["num_layers"] > 1):
        result, *states = kernel(*args)
        # 2.11's kernel of LSTMs keeps a dimension of 1 in their states
        return result, *(state.squeeze(1) if state.dim() > 3 else state for state in states)
    # oneDNN's LSTM has no backward that a graph can call
    with torch.backends.mkldnn.flags(enabled=False):
        return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args)


def upsample_by_factors(op: Any, x: torch.Tensor, size: Any, *rest: Any) -> torch.Tensor:
    """Call `op` with a size, or with factors (the last of `rest`): the C++ composite can't read symbolic
    sizes. The real one: torch/_decomp/decompositions.py (upsample_compute_output_size)."""
    *corners, factors = rest
    if size is None:
        size = [
            old * int(factor) if factor == int(factor) else torch.sym_int(old * factor)
            for old, factor in zip(x.shape[2:], factors)
        ]
    return op(x, size, *corners, *(factors or [None] * len(size)))


def autograd_kernels(
    kernels: Mapping[Any, Callable[..., Any]],
) -> contextlib.AbstractContextManager[None]:
    """Inside, on this thread and under the python dispatcher, functions replace operators' gradients."""
    here, keys = threading.get_ident(), DispatchKey.__members__

    def chosen(op: Any, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here:
            return kernel(*args, **kwargs)
        with without_python_dispatcher():
            return op(*args, **kwargs)

    places = [keys[f"Autograd{name}"] for name in ("CPU", "CUDA", "XPU", "MPS", "Other")]
    return python_kernels(
        {
            op: op.py_kernels | dict.fromkeys(places, functools.partial(chosen, op, kernel))
            for op, kernel in kernels.items()
        }
    )


def onednn_linear() -> Any:
    """Return the operator x @ weight.t() + bias of oneDNN; None where torch was built without it."""
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return packet and packet.default
