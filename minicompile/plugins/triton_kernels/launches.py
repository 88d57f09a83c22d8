"""`kernel[grid](x, y, n, BLOCK=64)`: a launch of a Triton kernel is an operator that writes to its arguments.

    minicompile::triton_add_4c1f09(Tensor x, Tensor(a0!) y, SymInt n, SymInt[] launch_grid) -> ()

Tensors and symbolic numbers are the operator's arguments. The kernel's other arguments (`BLOCK`) are
constants of the operator. The grid is computed at capture; for an autotuned kernel, once for each
configuration. Later stages treat a launch like any operator that users define.

A tensor that the kernel may write to must be all of its memory. Compiled code may pass a copy instead, and a
pointer into a part of some memory can reach the rest, which the copy hasn't.
The real compiler: torch/_higher_order_ops/triton_kernel_wrap.py.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from minicompile import compat
from minicompile.dynamo.builtins import means
from minicompile.dynamo.refusals import LAUNCHES
from minicompile.dynamo.variables import is_constant
from minicompile.dynamo.world import World
from minicompile.ops.writes import written_arguments
from minicompile.plugins.triton_kernels.writes import written_parameters
from minicompile.runtime.gpu_kernel import POINTER_TYPES

_library = torch.library.Library("minicompile", "FRAGMENT")

NUMBERS = {"i64": "SymInt", "fp32": "float"}
"""Triton's types of symbolic numbers, and those of an operator's schema."""
OPERANDS = (torch.Tensor, torch.SymInt, torch.SymFloat)
Constants = tuple[tuple[str, str, Any], ...]
"""What a kernel is called with besides operands: name, text and value. The text tells 0.0 from -0.0."""


def layers(kernel: Any) -> Iterator[Any]:
    """Yield a kernel's decorators from the outermost, then the kernel itself."""
    while hasattr(kernel, "run"):
        yield kernel
        kernel = getattr(kernel, "fn", None)


def settings(kernel: Any) -> list[dict[str, Any]]:
    """Return the arguments that each configuration of an autotuned kernel sets; of another kernel, none."""
    tuned = next((layer for layer in layers(kernel) if hasattr(layer, "configs")), None)
    return [{}] if tuned is None else [dict(config.kwargs) for config in tuned.configs]


def compile_time_parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of the parameters that are annotated as `tl.constexpr`."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if "constexpr" in str(p.annotation)}


@means(*LAUNCHES)
def launch(
    world: World, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any
) -> None:
    """Record a launch. It gives None in a graph, not the compiled kernel."""
    if warmup:
        world.unsupported("triton-kernel", "a Triton kernel is compiled ahead of its launch")
    rely_on(world, kernel, "the kernel")
    *_, inner = layers(kernel)
    arguments = dict(zip(inner.arg_names, args)) | kwargs
    compile_time = compile_time_parameters(inner.fn)
    operands: dict[int, Any] = {}
    names = defaultdict[int, list[str]](list)
    """For each operand, by its id: the parameters that take it."""
    for name, value in arguments.items():
        if isinstance(value, OPERANDS) and name not in compile_time:
            operands[id(value)] = value
            names[id(value)].append(name)
        else:
            arguments[name] = value = world.pinned(world.deep(value))
            if not is_constant(value):
                if name not in compile_time:
                    what = f"a Triton launch with an argument of type {type(value).__name__}"
                    world.unsupported("triton-kernel", what, "pass tensors and numbers")
                rely_on(world, value, name)
    every = [complete(world, kernel, arguments | setting) for setting in settings(kernel)]
    grids = [world.deep(world.call(grid, (v,), {}) if callable(grid) else grid) for v in every]
    sizes = [size for sizes in grids for size in [*sizes, 1, 1][:3]]
    values = [*operands.values()]
    operator = operator_of(
        kernel,
        tuple((tuple(names[id(x)]), triton_type(x)) for x in values),
        constants(arguments, operands),
        tuple(constants(v, operands) for v in every),
    )
    memory = [compat.storage_id(x) for x in values if isinstance(x, torch.Tensor)]
    for tensor in written_arguments(operator, values, {}):
        if memory.count(compat.storage_id(tensor)) > 1 or is_part(tensor):
            what = "a Triton launch that writes to a view: its pointers may reach what lies around"
            world.unsupported("triton-kernel", what, "pass the tensor itself")
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            # autograd knows nothing of what a kernel does
            values[i] = world.torch_call(torch.Tensor.detach, (value,), {})
    world.torch_call(operator, (*values, sizes), {})


def complete(world: World, kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Add the arguments that heuristics work out from the others, and the kernel's defaults."""
    for layer in layers(kernel):
        for name, heuristic in getattr(layer, "values", {}).items():
            arguments[name] = world.pinned(world.call(heuristic, (dict(arguments),), {}))
    parameters = inspect.signature(layer.fn).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return defaults | arguments


def constants(arguments: Mapping[str, Any], operands: Container[int]) -> Constants:
    """Return the arguments that are no operands."""
    given = arguments.items()
    return tuple((name, repr(value), value) for name, value in given if id(value) not in operands)


def triton_type(value: Any) -> str:
    """Return Triton's name for the type of a tensor or a symbolic number."""
    if isinstance(value, torch.Tensor):
        return POINTER_TYPES.get(value.dtype, "*i8")
    return "i64" if isinstance(value, torch.SymInt) else "fp32"


def is_part(tensor: torch.Tensor) -> bool:
    """Does a tensor's memory hold more than its elements, each once? Its clone would lie differently."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def rely_on(world: World, value: Any, what: str) -> None:
    """Guard that an object is the same one in later calls."""
    tracker = world.tracker(value)
    if tracker is None:
        what = f"{what} of a Triton launch, made in the captured function"
        world.unsupported("triton-kernel", what, "make it outside")
    world.guard("identity", tracker.source, value, "a Triton kernel is launched with it")


@functools.cache
def operator_of(
    kernel: Any,
    operands: tuple[tuple[tuple[str, ...], str], ...],
    fixed: Constants,
    compiled_for: tuple[Constants, ...],
) -> OpOverload:
    """Return the operator that launches a kernel. It takes `operands`, and a grid for each configuration.

    It is compiled for the constants of each configuration to see what it writes to.
    """
    *_, inner = layers(kernel)
    types = tuple((name, type) for names, type in operands for name in names)
    written = set().union(*(written_parameters(inner, types, each) for each in compiled_for))
    for layer in layers(kernel):
        written.update(getattr(layer, "reset_to_zero", ()))
        if any(config.pre_hook for config in getattr(layer, "configs", ())):
            written.update(name for name, _ in types)  # a hook is Python that gets all arguments
    given = {name: value for name, _, value in fixed}
    chosen = settings(kernel)

    def run(*values: Any) -> None:
        *tensors, sizes = values

        def grid(arguments: Mapping[str, Any]) -> tuple[int, ...]:
            fits = (all(arguments[k] == v for k, v in setting.items()) for setting in chosen)
            first = 3 * [*fits].index(True)
            return tuple(sizes[first : first + 3])

        named = {name: x for (names, _), x in zip(operands, tensors) for name in names}
        arguments = named | given
        first = []  # by place, since a parameter may be named `grid`, as one of the launcher's is
        for name in inner.arg_names:
            if name not in arguments:
                break
            first.append(arguments.pop(name))
        kernel[grid](*first, **arguments)

    parameters = []
    for place, (names, type) in enumerate(operands):
        tensor = "Tensor" if written.isdisjoint(names) else f"Tensor(a{place}!)"
        parameters.append(f"{NUMBERS.get(type, tensor)} {names[0]}")
    # by what it is, so that a graph that another process stored means the same
    about = [inspect.getsource(inner.fn), getattr(inner, "cache_key", ""), chosen, operands, fixed]
    digest = hashlib.sha256(repr(about).encode()).hexdigest()
    name = f"triton_{inner.fn.__name__}_{digest[:12]}"
    while hasattr(torch.ops.minicompile, name):  # another kernel of the same text
        name += "_"
    _library.define(f"{name}({', '.join([*parameters, 'SymInt[] launch_grid'])}) -> ()")
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"minicompile::{name}", lambda *_: None, lib=_library)
    operator: OpOverload = getattr(torch.ops.minicompile, name).default
    return operator
