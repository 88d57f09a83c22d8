"""Rules for torch functions that are no plain graph nodes: modules, global state, questions about compiling.

The real compiler: torch/_dynamo/variables/torch.py, nn_module.py, ctx_manager.py.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.utils import checkpoint

from minicompile import compat
from minicompile.dynamo.builtins import Args, Kwargs, refuse
from minicompile.dynamo.calls import Calls, call_rules
from minicompile.dynamo.interpreter import Frame
from minicompile.dynamo.result import Source

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# -- modules


@call_rules(compat.module_call())
def module_call(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    """`module(...)`: straight to `forward` if there are no hooks, else nn.Module's own code."""
    module, *rest = args
    frame = tracer.frame
    assert frame is not None
    before = frame.module_path
    frame.module_path = module_path(tracer, module)
    try:
        if any(compat.global_hook_tables()):
            return tracer.call_function(compat.module_call_impl(), args, kwargs)
        if has_hooks(tracer, module):
            guard_no_global_hooks(tracer)
            return tracer.call_function(compat.module_call_impl(), args, kwargs)
        guard_no_global_hooks(tracer)
        return tracer.call(tracer.load_attr(module, "forward"), tuple(rest), kwargs)
    finally:
        frame.module_path = before


def guard_no_global_hooks(tracer: Calls) -> None:
    for table in compat.global_hook_tables():
        tracker = tracer.hold(table, "hooks of every module")
        tracer.guard("length", tracker.source, len(table), "hooks that apply to every module")


def has_hooks(tracer: Calls, module: torch.nn.Module) -> bool:
    namespace = module.__dict__
    hooked = any(namespace.get(name) for name in HOOKS)
    owner = tracer.tracker(module)
    if owner is not None:
        if namespace.get("_compiled_call_impl") is not None:
            tracer.unsupported("a module with its own compiled call (module.compile())")
        if not hooked:
            tracer.guard("hooks", owner.source, False, "called without hooks")
    return hooked


def module_path(tracer: Calls, module: torch.nn.Module) -> str:
    """`transformer.h.0.attn`: the submodule's path from the module that was compiled."""
    owner = tracer.tracker(module)
    if owner is None:
        return type(module).__name__
    parts: list[str] = []
    source: Source | None = owner.source
    while source is not None:
        if source.kind in ("submodule", "attribute", "item") or source.key not in (
            "self",
            "globals",
        ):
            parts.append(str(source.key))
        source = source.base
    return ".".join(reversed(parts))


# -- global state


for _setter in compat.state_setters():

    def _set(tracer: Calls, args: Args, kwargs: Kwargs, setter: Any = _setter) -> None:
        setter(*args, **kwargs)
        tracer.recorder.statement(setter, (*args, *kwargs.values()))

    call_rules(_setter)(_set)

for _counter in compat.nesting_counters():

    def _count(tracer: Calls, args: Args, kwargs: Kwargs, counter: Any = _counter) -> Any:
        tracer.recorder.statement(counter, ())
        return counter()

    call_rules(_counter)(_count)


@call_rules(torch.set_grad_enabled)
def set_grad_enabled(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    made = object.__new__(torch.set_grad_enabled)
    tracer.call(torch.set_grad_enabled.__init__, (made, *args), kwargs)
    return made


for _reader in compat.state_readers():

    def _read(tracer: Calls, args: Args, kwargs: Kwargs, reader: Any = _reader) -> Any:
        return reader(*map(tracer.deep, args), **kwargs)

    call_rules(_reader)(_read)


for _predicate in compat.compiling_predicates():
    call_rules(_predicate)(lambda tracer, args, kwargs: True)

call_rules(*compat.tracing_predicates())(lambda tracer, args, kwargs: False)


@call_rules(torch.is_tensor)
def is_tensor(tracer: Calls, args: Args, kwargs: Kwargs) -> bool:
    return isinstance(args[0], torch.Tensor)


@call_rules(torch.overrides.has_torch_function, torch.overrides.is_tensor_like)
def overrides(tracer: Calls, args: Args, kwargs: Kwargs) -> bool:
    return False


@call_rules(torch.overrides.is_tensor_like)
def is_tensor_like(tracer: Calls, args: Args, kwargs: Kwargs) -> bool:
    return isinstance(args[0], torch.Tensor)


@call_rules(torch.compiler.disable)
def compiler_disable(tracer: Calls, args: Args, kwargs: Kwargs) -> Any:
    return tracer.unsupported("torch.compiler.disable is called inside the captured function")


@call_rules(torch._assert, torch._check)
def check(tracer: Calls, args: Args, kwargs: Kwargs) -> None:
    """A condition that must hold: known now, or an assertion of the graph."""
    condition, *message = args
    if isinstance(condition, torch.Tensor):
        tracer.unsupported(
            "torch._check on a tensor's data", "check it outside of the compiled function"
        )
    if not condition:
        text = (
            tracer.call(message[0], (), {})
            if message and callable(message[0])
            else message[0]
            if message
            else ""
        )
        raise (RuntimeError if not isinstance(text, BaseException) else type(text))(str(text))


refuse(
    "activation checkpointing",
    "compile the function without checkpoint",
    *(checkpoint.checkpoint, checkpoint.checkpoint_sequential),
)
refuse(
    "gradients are computed inside the captured function",
    "call backward outside",
    torch.autograd.grad,
    torch.autograd.backward,
)
refuse(
    "the random state is changed",
    "seed outside of the compiled function",
    torch.manual_seed,
    torch.seed,
    torch.set_rng_state,
)
refuse(
    "torch.func transforms",
    "",
    torch.vmap,
    torch.func.grad,
    torch.func.vjp,
    torch.func.jvp,
    torch.func.functional_call,
)


def module_of(frame: Frame) -> str:
    return frame.module_path


__all__ = ["has_hooks", "module_call", "types"]
