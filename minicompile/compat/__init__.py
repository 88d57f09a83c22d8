"""The only place that touches private parts of torch or Triton, and where their versions differ.

    takes    what the package needs of torch and Triton that their public API leaves out
    gives    it under a public name, alike in torch 2.11 to 2.13 and Triton 3.6 to 3.9
    decides  which private function answers, and what is done where a version lacks it

Each function says which versions it is known for. Read __init__.py first, then settings.py: what a process
has set. triton_api.py is about Triton and GPUs; torch_compiler.py alone knows the systems that we teach.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp.decompositions import upsample_compute_output_size as upsampled_size
from torch._dispatch.python import enable_python_dispatcher as python_dispatcher
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen
from torch.fx.node import map_aggregate
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes
from torch.utils._pytree import _broadcast_to_and_flatten as tree_spread
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from minicompile.ops.eager_checks import VARIANCE_OF, check_arguments
from minicompile.ops.strides import (
    UPSAMPLED_GRADIENTS,
    as_row_major_view,
    convolved,
    exactly_as_eager,
    has_open_batch,
    laid_out_as_eager,
    upsampled_gradient,
)

TensorGuards: Any = None
with contextlib.suppress(ImportError):
    from torch._C._dynamo.guards import TensorGuards  # type: ignore[no-redef, attr-defined]

__all__ = [
    "FakeTensor", "TorchDispatchMode", "map_aggregate", "no_dispatch_modes", "python_dispatcher",
    "tree_flatten", "tree_leaves", "tree_map", "tree_spread", "tree_unflatten",
]  # fmt: skip
"""From private modules, for use elsewhere."""

# Fake tensors and tracing (torch 2.11 to 2.13) ---------------------------------------------------


@contextlib.contextmanager
def upsampling_as_in_eager() -> Iterator[None]:
    """Upsampling is traced as eager's operators, not as what torch's Python kernels make of them."""
    taken: list[tuple[Any, dict[Any, Any]]] = []
    for name in filter(lambda name: "upsample_" in name, dir(torch.ops.aten)):
        packet = getattr(torch.ops.aten, name)
        for op in (getattr(packet, overload) for overload in packet.overloads()):
            taken.append((op, dict(op.py_kernels)))
            for key in (torch.DispatchKey.Autograd, torch.DispatchKey.CompositeImplicitAutograd):
                if op.py_kernels.pop(key, None) and op._overloadname == "vec":
                    op.py_kernels[key] = functools.partial(upsample_by_factors, packet.default)
            op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in taken:
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def upsample_by_factors(op: Any, x: torch.Tensor, size: Any, *rest: Any) -> torch.Tensor:
    """`op` of a size, or of factors (the last argument); the composite in C++ can't read symbolic sizes."""
    *corners, factors = rest
    size = upsampled_size(x.shape, size, factors)
    return op(x, size, *corners, *(factors or [None] * len(size)))


class EagerLayouts(FakeTensorMode):
    """Fake tensors with the strides that eager's results have."""

    random = False
    """Whether an operator drew random numbers."""
    env: Any = None
    """The `shapes.env.ShapeEnv` of symbolic sizes."""

    def __init__(self, symbolic: bool) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.static_shapes = not symbolic
        self.cache_enabled = self.cache_enabled and not symbolic
        self.answers: dict[Any, tuple[bool, tuple[Any, ...]]] = {}
        """(operator, arguments by type and layout) -> is the result a view of the first, its layout."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        check_arguments(func, args, kwargs, no_dispatch_modes)
        if not self.static_shapes:
            if func in UPSAMPLED_GRADIENTS:
                return upsampled_gradient(func, args[0], args[2])
            if has_open_batch(func, args):
                run = super().__torch_dispatch__
                return convolved(func, args, lambda args: run(func, types, args, kwargs))
            func, args = as_row_major_view(func, args)
            func = VARIANCE_OF.get(func, func)
        if func is torch.ops.aten._unique.default:  # torch 2.11 says that there is one element
            raise RuntimeError(f"the size of {func}'s result depends on data")
        if func is torch.ops.aten.addmm.dtype:  # torch 2.11 takes the dtype for a factor
            return torch.empty_like(args[0])
        found = laid_out_as_eager(func, args, super().__torch_dispatch__(func, types, args, kwargs))
        return exactly_as_eager(func, args, kwargs, found, no_dispatch_modes)


@functools.cache
def adds_products_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of half types can be added to a float32 matrix in place, without rounding it."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    with no_dispatch_modes(), contextlib.suppress(RuntimeError, TypeError):
        total, factor = (torch.ones(16, 16, device=device, dtype=d) for d in (torch.float32, dtype))
        torch.addmm(total, factor, factor, torch.float32, out=total)  # type: ignore[call-overload]
        return bool((total == 17).all())
    return False


def fake_mode(symbolic: bool = False) -> Any:
    """A FakeTensorMode. `symbolic`: sizes may be SymInts of our own ShapeEnv, not keys of torch's cache."""
    return EagerLayouts(symbolic)


def new_fake(
    mode: Any,
    size: Sequence[Any],
    stride: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    offset: Any = 0,
) -> torch.Tensor:
    """A fake tensor of a given layout, made without an operator call (ten times cheaper)."""
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        if offset:
            last = sum((n - 1) * step for n, step in zip(size, stride) if n != 0)
            meta = torch.empty((offset + 1 + last,), dtype=dtype, device="meta")
            meta = meta.as_strided(size, stride, offset)
        return FakeTensor(mode, meta, device)


def fake_view(
    mode: Any, base: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any
) -> torch.Tensor:
    """The same for a view of a fake tensor's memory, of its dtype."""
    with torch._C._DisableTorchDispatch():
        return FakeTensor(mode, base.as_strided(size, stride, offset), base.device)


def symbolic_layout(fake: torch.Tensor) -> bool:
    """Whether a fake tensor's layout is kept as symbols, which may be of known numbers by now."""
    return bool(fake._has_symbolic_sizes_strides)  # type: ignore[attr-defined]


def fakes_again(mode: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes fakes of tensors, new ones even of those that the mode has met."""
    converter = fake_tensor.FakeTensorConverter(copy_data=False)
    return lambda tensor: converter.from_real_tensor(mode, tensor)


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Does the operator only call other operators (in every mode, autograd included)?"""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory; works for fake tensors, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def empty_strided_cpu(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """New memory on the CPU: torch's own helper is twice as fast as the operator."""
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


with contextlib.suppress(ImportError):
    from torch._C._dynamo.guards import (  # type: ignore[no-redef, attr-defined]
        _empty_strided_cpu as empty_strided_cpu,
    )


storage_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda pointer: 0)
"""Owners in C++ of the storage at a pointer: tensors, autograd graphs, one for all of Python. 0: unknown."""


def storage_pointer(storage: torch.UntypedStorage) -> int:
    """Where it is itself, not its data."""
    return int(storage._cdata)


def tensor_on(
    storage: torch.UntypedStorage, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A tensor that begins where a storage on the CPU does: no view of another one."""
    return empty_strided_cpu((0,), (1,), dtype).set_(storage, 0, size, stride)


negative_view = torch._neg_view
creation_meta = torch._C._autograd._get_creation_meta
"""How a view was made, which decides whether autograd lets it be written to."""
set_creation_meta = torch._C._autograd._set_creation_meta
VIEW_AS_USUAL = torch._C._autograd.CreationMeta.DEFAULT
VIEW_OF_FUNCTION = torch._C._autograd.CreationMeta.IN_CUSTOM_FUNCTION
VIEW_OF_SEVERAL = torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE


top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""Called with True: the user's functions that get what is saved for the backward, and give it; or None."""


class WatchedHooks:
    """The user's hooks on saved tensors while a graph runs. As `torch.utils.checkpoint` ends a second run by
    what its hook raises, that waits in `ended`: what eager changed before, the graph's caller has yet to."""

    def __init__(self) -> None:
        autograd, self.ended = torch._C._autograd, None  # type: Any, Exception | None
        self.pack, unpack = top_saved_tensors_hooks(True)
        autograd._push_saved_tensors_default_hooks(self, unpack)
        self.leave = autograd._pop_saved_tensors_default_hooks

    def __call__(self, saved: torch.Tensor) -> Any:
        try:
            return saved if self.ended else self.pack(saved)
        except checkpoint._StopRecomputationError as error:
            self.ended = error
            return saved


def of_hook(error: BaseException) -> bool:
    """Did the user's hook for what is saved raise it?"""
    code = WatchedHooks.__call__.__code__
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


UNPACKS_ONE = hasattr(torch._C._autograd.SavedTensor, "unpack")
"""Whether one saved tensor can be had without the others (PyTorch 2.12)."""


def saved_tensors(ctx: Any, numbers: Collection[int]) -> dict[int, torch.Tensor]:
    """Some of an autograd.Function's saved tensors. The others may have been written to, if `UNPACKS_ONE`;
    else a write to any of them is an error as soon as one is wanted. RuntimeError once they are freed."""
    raw = ctx._raw_saved_tensors
    if not UNPACKS_ONE:
        return dict(enumerate(ctx.saved_tensors)) if numbers else {}
    return {i: raw[i].unpack() for i in numbers}


def clear_saved_tensors(ctx: Any) -> None:
    """Let an autograd.Function's saved tensors die before its backward ends, unless the graph is retained."""
    clear = getattr(ctx, "maybe_clear_saved_tensors", None)
    if clear is not None:
        clear()


graph_task = torch._C._current_graph_task_id
"""The number of the backward pass that runs in this thread; -1 for none."""
retains_graph = torch._C._autograd._get_current_graph_task_keep_graph


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` where no transform of torch.func is active: 2 microseconds less."""
    return super(torch.autograd.Function, function).apply  # type: ignore[no-any-return, misc]


def keeps_something(node: Any) -> bool:
    """Does a backward free values of an autograd node? Those of Python functions and writes to views may."""
    if isinstance(node, torch.autograd.function.BackwardCFunction) or node.name() == "CopySlices":
        return True
    kept = (name[4:] for name in dir(type(node)) if name.startswith("_raw_saved_"))
    try:
        with no_dispatch_modes():
            return any(getattr(node, name) is not None for name in kept)
    except RuntimeError:  # it was written to since
        return True


has_storage = torch._C._has_storage
"""Not true of sparse tensors, nor of the tensors that `vmap` and its like hand to functions."""
is_view = torch.Tensor._is_view
"""Whether autograd follows writes from the tensor to the one it was made of."""


def how_made(tensor: torch.Tensor) -> Any:
    """What autograd lets be done in place to a view; None if it is none."""
    return (creation_meta(tensor), has_forgotten_history(tensor)) if is_view(tensor) else None


def has_forgotten_history(view: torch.Tensor) -> bool:
    """Has a view's base come to require grad since it was made? Autograd takes it for a leaf, and refuses
    writes, until somebody asks for its history: so what is asked here is a write, of what doesn't fit."""
    if not is_view(view) or creation_meta(view) != VIEW_AS_USUAL:
        return False
    base = autograd_base(view)
    if base.is_leaf or not base.requires_grad:
        return base.requires_grad and view.is_leaf  # of a leaf none may be written to
    try:
        with torch.enable_grad():
            view.add_(torch.empty(()).expand(2, *[1] * view.dim()))
    except RuntimeError as error:
        return str(error).startswith("a leaf Variable")
    return False


def autograd_base(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which autograd takes this one to be a view; itself if it is none."""
    return tensor if tensor._base is None else tensor._base


below_autograd = torch._C._AutoDispatchBelowAutograd
"""A context in which operators leave no history for a backward pass."""


@contextlib.contextmanager
def autograd_kernels(kernels: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Under the python dispatcher these functions replace operators' autograd formulas, on this thread."""
    here, keys = threading.get_ident(), torch._C.DispatchKey.__members__

    def chosen(op: Any, kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here:
            return kernel(*args, **kwargs)
        with torch._C._DisablePythonDispatcher():
            return op(*args, **kwargs)

    before = {op: op.py_kernels for op in kernels}
    try:
        for op, kernel in kernels.items():
            places = (keys[f"Autograd{name}"] for name in ("CPU", "CUDA", "XPU", "MPS", "Other"))
            guarded = functools.partial(chosen, op, kernel)
            op.py_kernels = {**op.py_kernels, **dict.fromkeys(places, guarded)}
            op._dispatch_cache.clear()
        yield
    finally:
        for op, known in before.items():
            op.py_kernels = known
            op._dispatch_cache.clear()


@contextlib.contextmanager
def composite_kernels(kernels: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Under the python dispatcher `kernels[op]`, given torch's own Python kernel and then the arguments,
    replaces that kernel (torch 2.11 to 2.15). Without one, torch's kernel in C++ stays."""
    keys = (torch.DispatchKey.Autograd, torch.DispatchKey.CompositeImplicitAutograd)
    before = {op: op.py_kernels for op in kernels}
    try:
        for op, kernel in kernels.items():
            own = {key: op.py_kernels[key] for key in keys if key in op.py_kernels}
            replaced = {key: functools.partial(kernel, torchs) for key, torchs in own.items()}
            op.py_kernels = {**op.py_kernels, **replaced}
            op._dispatch_cache.clear()
        yield
    finally:
        for op, known in before.items():
            op.py_kernels = known
            op._dispatch_cache.clear()


_NAMES = """all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single
    barrier batch_isend_irecv broadcast broadcast_object_list gather gather_object irecv isend recv reduce
    reduce_scatter reduce_scatter_tensor scatter scatter_object_list send"""
FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"
"""A module that takes two seconds to import: known by name."""
COLLECTIVES = [
    getattr(torch.distributed, n) for n in _NAMES.split() if hasattr(torch.distributed, n)
]
"""What processes do together, in place. None where torch was built without."""


def is_collective(op: Any) -> bool:
    """Whether an operator exchanges tensors with other processes, or waits for that: in one order for all."""
    return getattr(op, "namespace", "").startswith("_c10d_functional")


def wait_tensor() -> torch._ops.OpOverload:
    """The operator that waits for a collective's result; of another tensor it does nothing."""
    op: torch._ops.OpOverload = torch.ops._c10d_functional.wait_tensor.default
    return op


def group_name(group: Any) -> str | None:
    """The name by which operators know a ProcessGroup (torch 2.11 to 2.13); None for anything else."""
    known = getattr(torch.distributed, "ProcessGroup", ())
    return str(group.group_name) if isinstance(group, known) else None


def group_size(name: str) -> int:
    """How many processes a group has."""
    c10d: Any = torch.distributed.distributed_c10d
    return int(c10d._resolve_process_group(name).size())


def ddp_buckets() -> tuple[int, int, list[torch.Tensor]] | None:
    """In a DistributedDataParallel's forward: the bytes that fill its first and its later buckets, and the
    parameters whose gradients it sums over processes (torch 2.11 to 2.13)."""
    module: Any = torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()
    if module is None:
        return None
    first = rest = module.bucket_bytes_cap
    if module.bucket_bytes_cap_default:
        first = min(getattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", rest), rest)
    return first, rest, [p for p in module._module_parameters if p.requires_grad]


any_autocast_enabled = torch._C._is_any_autocast_enabled
without_autocast = torch._C._DisableAutocast
"""A context in which operators run in the dtypes they are given."""


def graph_module(root: torch.nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    """A GraphModule that generates its Python code when first called: most of ours never are."""
    return _LazyGraphModule(root, graph, class_name=name)


def boxed_function(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A graph as a function of one list, which it empties, so that values die after their last use."""
    gm.graph.set_codegen(_BoxedCodeGen())
    run: Callable[[list[Any]], Any] = fx.GraphModule(gm, gm.graph).forward
    return run


# Capture and guards (torch 2.11 to 2.13) ---------------------------------------------------------


FAKE_LIMITS: tuple[type[BaseException], ...] = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
"""What a fake tensor raises where eager would have looked at the data, or has no fake kernel."""


@contextlib.contextmanager
def quiet_fakes() -> Iterator[list[warnings.WarningMessage]]:
    """Silences what fake tensors log and warn in this thread: operators do it themselves when they run.

    Gives the list of the warnings.
    """
    thread, show, filters = threading.get_ident(), warnings.showwarning, list[Any](warnings.filters)
    heard: list[warnings.WarningMessage] = []

    def hear(*warning: Any, **kwargs: Any) -> None:
        message, category, _, line, *_ = warning
        actions = (
            action
            for action, text, kind, module, at in filters
            if (text is None or text.match(str(message))) and issubclass(category, kind)
            if module is None and at in (0, line)
        )
        if threading.get_ident() == thread:
            heard.append(warnings.WarningMessage(*warning, **kwargs))
        elif (
            next(actions, "default") != "ignore"
        ):  # another thread's, for which `always` is not meant
            show(*warning, **kwargs)

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings(action="always"):
            warnings.showwarning = hear
            yield heard
    finally:
        logger.disabled = before


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Hides the user's hooks on saved tensors: they are not meant for fake ones."""
    found, autograd = [], torch._C._autograd
    while (top := top_saved_tensors_hooks(True)) is not None:
        found.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(found):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def tensor_guards(
    tensors: Sequence[torch.Tensor],
    free: Mapping[int, Collection[int]] = {},
    native: bool = True,
    different: bool = True,
) -> Callable[..., bool]:
    """One check for many tensors: that each has the same `tensor_facts`, and that all are different.

    In C++ where torch has TensorGuards, else (or with `native=False`) in Python. `free` gives, by tensor
    number, the dimensions of any size; the strides of such a tensor are not checked.
    """

    def facts(given: Sequence[Any]) -> list[Any]:
        pairs = ((t, free.get(i, ())) for i, t in enumerate(given))
        return [isinstance(t, torch.Tensor) and tensor_facts(t, dims) for t, dims in pairs]

    if TensorGuards is None or not native or not different:
        expected = facts(tensors)
        return lambda *given: (
            (not different or len(set(map(id, given))) == len(given)) and facts(given) == expected
        )
    sizes: list[Any] = [_sizes(tensor, free.get(i, ())) for i, tensor in enumerate(tensors)]
    strides: list[Any] = [
        [None] * tensor.dim() if i in free else list(tensor.stride())
        for i, tensor in enumerate(tensors)
    ]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _sizes(tensor: torch.Tensor, free: Collection[int]) -> list[int | None]:
    return [None if dim in free else size for dim, size in enumerate(tensor.shape)]


TENSOR_FACTS = (
    *("class", "dtype", "device", "requires_grad", "layout", "conjugate", "negative", "inference"),
    *("shape", "strides"),
)


def tensor_facts(tensor: torch.Tensor, free: Collection[int] = ()) -> tuple[Any, ...]:
    """What a captured graph relies on in a tensor input, comparable with `==`; the same for its fake.

    In the order of TENSOR_FACTS. `free`: dimensions of any size; if there are any, strides are left out.
    """
    cls = type(tensor)
    if cls is FakeTensor:
        cls = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor
    return (
        *(cls, tensor.dtype, tensor.device, tensor.requires_grad, tensor.layout),
        *(tensor.is_conj(), tensor.is_neg(), tensor.is_inference()),
        *(tuple(_sizes(tensor, free)), None if free else tensor.stride()),
    )


def onednn_linear() -> Any:
    """x @ weight.t() + bias by oneDNN, an operator; None where torch was built without it."""
    packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return packet and packet.default


no_function_modes = torch._C.DisableTorchFunction
"""A context in which `__torch_function__` modes are off."""


def is_operator_binding(function: Any) -> bool:
    """Whether a C function calls one of torch's operators (`torch.relu`, `torch._C._nn.gelu`)."""
    owner = function.__self__
    if owner is None or type(owner) is type(torch._C._VariableFunctions):
        return bool(getattr(torch._C._VariableFunctions, function.__name__, None) == function)
    names = ("_nn", "_fft", "_linalg", "_special", "_sparse", "_nested")
    return any(owner is getattr(torch._C, name, None) for name in names)


def wrapped_original(function: Any) -> Any:
    """What `torch.compiler.disable` or torch itself wrapped, None if the function isn't such a wrapper.

    torch wraps some functions of its own (`torch.manual_seed`) when torch._dynamo is imported, and
    `nn.Module.__init__` at the first use of torch.compile.
    """
    if function.__qualname__ == "install_generation_tagging_init.<locals>.patched_init":
        return function.__closure__[0].cell_contents
    if getattr(function, "_torchdynamo_disable", False):
        return getattr(function, "_torchdynamo_orig_callable", None)
    if function.__code__.co_filename == torch._compile.__file__:
        return getattr(function, "__wrapped__", None)
    return None


TensorBase = torch._C.TensorBase
"""The C class below torch.Tensor, which defines its methods."""

BUILTINS = {"nn": torch._C._nn, "C": torch._C}
"""Where functions live that torch writes in C++, among others."""

GLOBAL_HOOK_TABLES: list[dict[Any, Any]] = [
    getattr(torch.nn.modules.module, f"_global_{kind}_hooks")
    for kind in ("backward_pre", "backward", "forward_pre", "forward")
]
"""The hooks that apply to every nn.Module."""

module_call, module_getattr = torch.nn.Module.__call__, torch.nn.Module.__getattr__
module_call_impl: Any = torch.nn.Module._call_impl
"""What `nn.Module.__call__` ends in: hooks around `forward`."""
