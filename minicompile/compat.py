"""The only place that touches private parts of torch or Triton, and where their versions differ.

Each function says which versions it is known for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = ["TorchDispatchMode", "map_aggregate"]  # private modules, re-exported

# Fake tensors and tracing (torch 2.11 to 2.13) ---------------------------------------------------


@functools.cache
def fake_tensor_type() -> type[torch.Tensor]:
    """The class of tensors that have a shape, dtype and device but no data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def fake_mode(symbolic: bool = False) -> Any:
    """A FakeTensorMode. `symbolic`: sizes may be SymInts of our own ShapeEnv, which torch's cache can't key.

    The first one costs most of a second, since torch imports a lot.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(shape_env=None, allow_non_fake_inputs=True)
    mode.static_shapes = not symbolic
    if symbolic:
        mode.cache_enabled = False
    return mode


def mode_of(fake: torch.Tensor) -> Any:
    """The FakeTensorMode that a fake tensor belongs to."""
    return fake.fake_mode  # type: ignore[attr-defined]


def new_fake(
    mode: Any,
    size: Sequence[Any],
    stride: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    offset: Any = 0,
) -> torch.Tensor:
    """A fake tensor of a given layout, made without an operator call (ten times cheaper)."""
    with _disable_current_modes():
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        if offset:
            last = sum((n - 1) * step for n, step in zip(size, stride) if n != 0)
            meta = torch.empty((offset + 1 + last,), dtype=dtype, device="meta")
            meta = meta.as_strided(size, stride, offset)
        return fake_tensor_type()(mode, meta, device)  # type: ignore[call-arg]


def no_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Inside, operators run as if no dispatch mode were active."""
    return _disable_current_modes()


@contextlib.contextmanager
def python_dispatcher() -> Iterator[None]:
    """Use torch's Python kernels of composite operators: without them batch norm hides that it mutates."""
    from torch._dispatch.python import enable_python_dispatcher

    with enable_python_dispatcher():
        yield


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Does the operator only call other operators (in every mode, autograd included)?"""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def storage_id(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory; works for fake tensors, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def tree_leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree)


def clear_saved_tensors(ctx: Any) -> None:
    """Let an autograd.Function's saved tensors die before its backward ends, unless the graph is retained."""
    clear = getattr(ctx, "maybe_clear_saved_tensors", None)
    if clear is not None:
        clear()


def any_autocast_enabled() -> bool:
    return torch._C._is_any_autocast_enabled()


def without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Inside, operators run in the dtypes they are given."""
    guard: contextlib.AbstractContextManager[Any] = torch._C._DisableAutocast()
    return guard


def graph_module(root: torch.nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    """A GraphModule that generates its Python code when first called: most of ours never are."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, class_name=name)


# Capture and guards (torch 2.11 to 2.13) ---------------------------------------------------------


@functools.cache
def fake_limits() -> tuple[type[BaseException], ...]:
    """What a fake tensor raises where eager would have looked at the data, or has no fake kernel."""
    from torch._subclasses import fake_tensor

    names = (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedFakeTensorException",
        "UnsupportedOperatorException",
    )
    return tuple(getattr(fake_tensor, name) for name in names if hasattr(fake_tensor, name))


def fake_of(mode: Any, tensor: torch.Tensor) -> torch.Tensor:
    """The fake of a real tensor: same metadata and class; views of one storage share a fake storage."""
    fake: torch.Tensor = mode.from_tensor(tensor, static_shapes=True)
    return fake


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Silences what fake tensors log when an operator refuses its arguments: here that is expected."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def tensor_guards(
    tensors: Sequence[torch.Tensor],
    symbolic: Mapping[int, Collection[int]] | None = None,
    native: bool = True,
) -> Callable[..., bool]:
    """One check for many tensors: class, dtype, sizes, strides, device, requires_grad; and all are distinct.

    torch's C++ TensorGuards where it exists, else (or with `native=False`) the same in Python. `symbolic`
    gives, by tensor number, the dimensions of any size; the strides of such a tensor are not checked.
    """
    free = symbolic or {}
    sizes: list[Any] = [
        [None if dim in free.get(i, ()) else size for dim, size in enumerate(tensor.shape)]
        for i, tensor in enumerate(tensors)
    ]
    strides: list[Any] = [
        [None if i in free else stride for stride in tensor.stride()]
        for i, tensor in enumerate(tensors)
    ]
    if native:
        try:
            from torch._C._dynamo.guards import TensorGuards

            check: Callable[..., bool] = TensorGuards(
                *tensors,
                dynamic_dims_sizes=sizes if free else None,
                dynamic_dims_strides=strides if free else None,
            ).check
            return check
        except (ImportError, TypeError):
            pass
    expected = [tensor_facts(tensor) for tensor in tensors]

    def agrees(i: int, tensor: torch.Tensor) -> bool:
        return (
            isinstance(tensor, torch.Tensor)
            and tensor_facts(tensor) == expected[i]
            and tensor.dim() == len(sizes[i])
            and all(a is None or a == b for a, b in zip(sizes[i], tensor.shape, strict=True))
            and all(a is None or a == b for a, b in zip(strides[i], tensor.stride(), strict=True))
        )

    def check_in_python(*given: torch.Tensor) -> bool:
        distinct = len(set(map(id, given))) == len(given)
        return distinct and all(agrees(i, tensor) for i, tensor in enumerate(given))

    return check_in_python


def tensor_facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a captured graph relies on in a tensor input besides its sizes, comparable with `==`."""
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.layout,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )


def global_facts() -> dict[str, Any]:
    """The process-wide settings that change what torch functions compute."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast cpu": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cuda": (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


def global_state_check(native: bool = True) -> Callable[[], bool]:
    """A check that the process-wide settings are as they are now; C++ where torch has it."""
    modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
    if native:
        try:
            from torch._C._dynamo.guards import GlobalStateGuard

            state = GlobalStateGuard().check
            functions, dispatches = modes
            inference = torch.is_inference_mode_enabled
            expected = inference()
            return lambda: (
                state() and not functions() and not dispatches() and inference() is expected
            )
        except ImportError:
            pass
    facts = global_facts()
    return lambda: global_facts() == facts


def active_modes() -> int:
    """How many torch function and dispatch modes are active on this thread."""
    return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()


def no_function_modes() -> Any:
    """Inside, `__torch_function__` modes are off."""
    return torch._C.DisableTorchFunction()


def state_setters() -> list[Any]:
    """Functions that set grad mode or autocast for the thread and return nothing."""
    return [
        torch._C._set_grad_enabled,
        torch.set_autocast_enabled,
        torch.set_autocast_dtype,
        torch.set_autocast_cache_enabled,
        torch.clear_autocast_cache,
    ]


def nesting_counters() -> list[Any]:
    """Functions that count how many autocast blocks are open, and return the count."""
    return [torch.autocast_increment_nesting, torch.autocast_decrement_nesting]


def state_readers() -> list[Any]:
    """torch functions without tensors whose answers only depend on guarded global state or on the build."""
    names = {
        torch: (
            *(
                "is_grad_enabled",
                "is_inference_mode_enabled",
                "is_autocast_enabled",
                "get_autocast_dtype",
            ),
            *("get_autocast_gpu_dtype", "get_autocast_cpu_dtype", "is_autocast_cpu_enabled"),
            *(
                "is_autocast_cache_enabled",
                "get_default_dtype",
                "is_anomaly_enabled",
                "result_type",
            ),
            *("is_tensor", "promote_types", "can_cast"),
            "are_deterministic_algorithms_enabled",
        ),
        torch._C: (
            *(
                "_get_tracing_state",
                "_is_tracing",
                "_get_deterministic_algorithms",
                "_get_cudnn_enabled",
            ),
            *(
                "_log_api_usage_once",
                "_has_torch_function",
                "_has_torch_function_unary",
                "_is_torch_function_enabled",
            ),
            *(
                "_has_torch_function_variadic",
                "_get_default_device",
                "_len_torch_function_stack",
                "_is_any_autocast_enabled",
            ),
            *(
                "_get_math_sdp_enabled",
                "_get_flash_sdp_enabled",
                "_get_mem_efficient_sdp_enabled",
                "_has_cuda",
                "_has_mps",
            ),
            *(
                "_get_privateuse1_backend_name",
                "_cuda_isInBadFork",
                "_has_mkldnn",
                "_get_float32_matmul_precision",
            ),
            *(
                "_is_torch_function_mode_enabled",
                "_functorch",
                "_is_autocast_available",
                "_get_autocast_supported_dtype",
            ),
            *(
                "_cuda_getDeviceCount",
                "_get_cudnn_deterministic",
                "_get_cudnn_benchmark",
                "_get_cublas_allow_tf32",
            ),
        ),
    }
    found = [getattr(owner, name, None) for owner, listed in names.items() for name in listed]
    return [function for function in found if callable(function)]


def compiling_predicates() -> list[Any]:
    """Functions by which a program asks whether it is being compiled."""
    import sys

    found = [torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling]
    dynamo = sys.modules.get("torch._dynamo")  # asked only if the program imported it
    external = sys.modules.get("torch._dynamo.external_utils")
    for module in (dynamo, external):
        predicate = getattr(module, "is_compiling", None)
        if predicate is not None:
            found.append(predicate)
    return found


def tracing_predicates() -> list[Any]:
    """Functions by which a program asks whether another tracer is at work."""
    jit: Any = torch.jit
    return [jit.is_tracing, jit.is_scripting, torch.compiler.is_exporting]


def is_operator_binding(function: Any) -> bool:
    """Whether a C function calls one of torch's operators (`torch.relu`, `torch._C._nn.gelu`)."""
    owner = function.__self__
    if owner is None or type(owner) is type(torch._C._VariableFunctions):
        return bool(getattr(torch._C._VariableFunctions, function.__name__, None) == function)
    names = ("_nn", "_fft", "_linalg", "_special", "_sparse", "_nested")
    return any(owner is getattr(torch._C, name, None) for name in names)


def disabled_original(function: Any) -> Any:
    """What `torch.compiler.disable` wrapped, None if the function isn't such a wrapper.

    torch wraps some functions of its own (`torch.manual_seed`) when torch._dynamo is imported.
    """
    if getattr(function, "_torchdynamo_disable", False):
        return getattr(function, "_torchdynamo_orig_callable", None)
    if function.__code__.co_filename == torch._compile.__file__:
        return getattr(function, "__wrapped__", None)
    return None


def tensor_base() -> type:
    """The C class below torch.Tensor, which defines its methods."""
    return torch._C.TensorBase


def global_hook_tables() -> list[dict[Any, Any]]:
    """The dicts of hooks that apply to every nn.Module."""
    module = torch.nn.modules.module
    names = (
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
    )
    return [getattr(module, name) for name in names]


def module_call() -> Any:
    """The function that `nn.Module.__call__` is."""
    return torch.nn.Module.__call__


def module_getattr() -> Any:
    return torch.nn.Module.__getattr__


def module_call_impl() -> Any:
    """What `nn.Module.__call__` ends in: hooks around `forward`."""
    return torch.nn.Module._call_impl


# Triton (3.6.0 to 3.9.0) -------------------------------------------------------------------------------


def triton_compile(
    function: Any,
    signature: dict[str, str],
    constants: dict[str, int],
    divisible: Collection[str],
    target: Any,
    options: dict[str, Any],
) -> Any:
    """Compile a JITFunction for a GPUTarget: no driver is needed. `divisible`: arguments that 16 divides."""
    import triton
    from triton.compiler import ASTSource

    place = {name: (i,) for i, name in enumerate(signature)}
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={place[name]: value for name, value in constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in divisible},
    )
    return triton.compile(source, target=target, options=options)


def gpu_target(backend: str, arch: int | str) -> Any:
    """`("cuda", 90)` or `("hip", "gfx942")` as Triton's own kind of target."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(backend, arch, 64 if backend == "hip" else 32)


def current_gpu_target() -> Any:
    """The target of the current CUDA device."""
    from triton.runtime import driver

    return driver.active.get_current_target()


def triton_launch(compiled: Any) -> tuple[Callable[..., Any], Any, Any]:
    """(run, function, metadata) of a compiled kernel, loaded on the current device.

    `run(x, y, z, stream, function, metadata, None, None, None, *arguments)` is what Triton's own launch ends
    in, without its 8 microseconds of argument analysis. Where a version differs, `run` goes the long way.
    """
    compiled[(1, 1, 1)]  # loads the binary
    try:
        return compiled.run, compiled.function, compiled.packed_metadata
    except AttributeError:
        return _plain_launch(compiled), None, None


def _plain_launch(compiled: Any) -> Callable[..., None]:
    def run(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        arguments = rest[5:]
        compiled[(x, y, z)](*arguments, stream=stream)

    return run


def triton_interpreter() -> tuple[Any, Any]:
    """(the interpreter's module, the type of compiled functions): runtime/interpreter.py mends both."""
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    return interpreter, JITFunction


def nvidia_tool(name: str) -> str | None:
    """Path of "cuobjdump" or "nvdisasm", which Triton's wheels bring along; None if it isn't there."""
    from triton import knobs

    try:
        return str(getattr(knobs.nvidia, name).path)
    except (AttributeError, RuntimeError):
        return None


def cuda_launch_state() -> tuple[Callable[[], int], Callable[[int], int]]:
    """(current device index, a device's current stream), each a C function of under 0.1 microseconds."""
    return torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
