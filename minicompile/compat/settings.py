"""Settings of a process that change what torch's functions compute: which there are, who reads and sets them.

Capture guards those that a graph relies on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from minicompile.compat.private import relies_on, take

AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")

any_autocast_enabled: Callable[[], bool] = take("torch._C._is_any_autocast_enabled", "capture")
without_autocast: Any = take("torch._C._DisableAutocast", "capture")
"""A context in which operators run in the dtypes they are given."""

GlobalStateGuard: Any = take("torch._C._dynamo.guards.GlobalStateGuard", "speed", otherwise=None)

function_modes = take("torch._C._len_torch_function_stack", "capture")
dispatch_modes = take("torch._C._len_torch_dispatch_stack", "capture")
transform_level = take("torch._C._functorch.maybe_current_level", "capture")
relies_on("torch.autograd.forward_ad._current_level", "capture")


def global_facts() -> dict[str, Any]:
    """The process-wide settings that change what torch functions compute."""
    blas = torch.backends.cuda.matmul
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "threads": torch.get_num_threads(),
        **{
            f"autocast {device}": (
                torch.is_autocast_enabled(device),
                torch.get_autocast_dtype(device),
            )
            for device in AUTOCAST_DEVICES
        },
        "autocast cache": torch.is_autocast_cache_enabled(),
        "float32 matmul precision": matmul_precision(),
        "reduced precision in matmul": (
            blas.allow_fp16_reduced_precision_reduction,
            blas.allow_bf16_reduced_precision_reduction,
        ),
        "active modes": active_modes(),
    }


def global_state_reads() -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
    """What the process-wide settings are read by: C functions and what they give; a dict, keys, values."""
    state = GlobalStateGuard()
    readers = (
        state.check,
        torch.is_inference_mode_enabled,
        function_modes,
        dispatch_modes,
        transform_level,
    )
    calls = tuple((read, read()) for read in readers)
    return calls, (vars(forward_ad), ("_current_level",), (forward_ad._current_level,))


def active_modes() -> dict[str, int]:
    """What changes the meaning of torch functions on this thread, and how many levels of it."""
    depths = {
        "a torch function mode": function_modes(),
        "a torch dispatch mode": dispatch_modes(),
        "a torch.func transform": transform_level() or 0,
        "forward-mode differentiation": forward_ad._current_level + 1,
    }
    return {what: depth for what, depth in depths.items() if depth}


read_precision = take("torch._C._get_fp32_precision_getter", "speed", otherwise=None)


def matmul_precision() -> Any:
    """Return the precision of float32 products by backend.

    `torch.get_float32_matmul_precision` raises once a program has set `fp32_precision`.
    """
    if read_precision is None:
        return torch.get_float32_matmul_precision()
    return tuple(read_precision(backend, "matmul") for backend in ("cuda", "mkldnn"))


set_grad_enabled: Any = take("torch._C._set_grad_enabled", "capture")
STATE_SETTERS: list[Any] = [
    set_grad_enabled,
    torch.set_autocast_enabled,
    torch.set_autocast_dtype,
    torch.set_autocast_cache_enabled,
    torch.clear_autocast_cache,
    torch.autocast_increment_nesting,
    torch.autocast_decrement_nesting,
]
"""Functions that set grad mode or autocast for the thread, or count the open autocast blocks."""


def _present(owner: str, names: str) -> list[Any]:
    """Return the functions of those names that this version of torch has."""
    functions = (take(f"{owner}.{name}", "recognition", otherwise=None) for name in names.split())
    return [function for function in functions if callable(function)]


STATE_READERS = [
    *_present(
        "torch",
        """
        is_grad_enabled is_autocast_enabled get_autocast_dtype
        get_autocast_gpu_dtype get_autocast_cpu_dtype is_autocast_cpu_enabled is_autocast_cache_enabled
        get_default_dtype are_deterministic_algorithms_enabled
        result_type promote_types can_cast""",
    ),
    *_present(
        "torch._C",
        """
        _get_tracing_state _is_tracing _get_deterministic_algorithms _log_api_usage_once
        _has_torch_function_unary _has_torch_function_variadic
        _is_torch_function_enabled _is_torch_function_mode_enabled
        _len_torch_function_stack _len_torch_dispatch_stack
        _is_any_autocast_enabled _is_autocast_available
        _has_cuda _has_mps _has_mkldnn _get_privateuse1_backend_name
        _functorch _cuda_isInBadFork _cuda_getDeviceCount""",
    ),
]
"""torch functions whose answers only depend on guarded global state, the frame's own writes, or the build."""

SETTING_READERS = [
    *_present("torch", "is_anomaly_enabled is_anomaly_check_nan_enabled get_num_threads"),
    *_present(
        "torch._C",
        """
        _get_deterministic_algorithms_warn_only _get_deterministic_fill_uninitialized_memory
        _get_cudnn_enabled _get_cudnn_deterministic _get_cudnn_benchmark _get_cudnn_allow_tf32
        _get_cublas_allow_tf32 _get_cublas_allow_fp16_reduced_precision_reduction
        _get_cublas_allow_bf16_reduced_precision_reduction _get_float32_matmul_precision
        _get_default_device _get_mkldnn_enabled _get_nnpack_enabled _get_fp32_precision_getter
        _get_math_sdp_enabled _get_flash_sdp_enabled _get_mem_efficient_sdp_enabled
        _get_cudnn_sdp_enabled _get_overrideable_sdp_enabled""",
    ),
]
"""torch functions that read other settings; a frame that asks gets a guard on the answer."""


@dataclass(frozen=True)
class Modes:
    """What `torch.no_grad` and `torch.autocast` set."""

    grad: bool
    casts: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    nesting: int
    """Open autocast blocks; the cache is cleared when the last one ends."""

    @staticmethod
    def now() -> Modes:
        casts = tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in AUTOCAST_DEVICES
        )
        torch.autocast_increment_nesting()
        nesting = torch.autocast_decrement_nesting()
        return Modes(torch.is_grad_enabled(), casts, torch.is_autocast_cache_enabled(), nesting)

    def set(self, nesting: int) -> None:
        """Make them this thread's, with so many open autocast blocks."""
        torch.set_grad_enabled(self.grad)
        for device, enabled, dtype in self.casts:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        while torch.autocast_increment_nesting() <= nesting:
            pass
        while torch.autocast_decrement_nesting() > nesting:
            pass


@contextlib.contextmanager
def restored_modes() -> Iterator[None]:
    """Grad mode and autocast as before, whatever happens inside."""
    before = Modes.now()
    try:
        yield
    finally:
        before.set(before.nesting)
