"""Rules for torch functions that are no plain graph nodes: modules, global state, questions about compiling.

The real compiler: torch/_dynamo/variables/torch.py, nn_module.py, ctx_manager.py.
"""

from __future__ import annotations

from typing import Any

import torch

from minicompile import compat
from minicompile.dynamo.builtins import means
from minicompile.dynamo.calls import Calls, call_rules
from minicompile.dynamo.result import Source
from minicompile.dynamo.variables import HOOKS

# -- modules


@means(compat.module_call)
def module_call(tracer: Calls, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """`module(...)`: straight to `forward` if there are no hooks, else nn.Module's own code."""
    frame = tracer.frame
    assert frame is not None
    before = frame.module_path
    frame.module_path = module_path(tracer, module)
    try:
        hooked = any(compat.GLOBAL_HOOK_TABLES)
        if not hooked:
            for table in compat.GLOBAL_HOOK_TABLES:
                tracker = tracer.hold(table, "hooks of every module")
                tracer.guard("length", tracker.source, 0, "hooks that apply to every module")
            hooked = has_hooks(tracer, module)
        function = compat.module_call_impl if hooked else tracer.load_attr(module, "forward")
        if frame.called is module:  # so that a break inside can cut this frame at the call
            frame.called = function
        if hooked:
            return tracer.call_function(function, (module, *args), kwargs)
        return tracer.call(function, args, kwargs)
    finally:
        frame.module_path = before


def has_hooks(tracer: Calls, module: torch.nn.Module) -> bool:
    namespace = module.__dict__
    hooked = any(namespace.get(name) for name in HOOKS)
    owner = tracer.tracker(module)
    if owner is not None:
        if namespace.get("_compiled_call_impl") is not None:
            what = "a module with its own compiled call (module.compile())"
            tracer.unsupported("nested-compile", what)
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
        if source.key not in (None, "self", "globals"):
            parts.append(str(source.key))
        source = source.base
    return ".".join(reversed(parts))


# -- global state


@means(*compat.STATE_SETTERS, named=True)
def set_state(tracer: Calls, setter: Any, *args: Any, **kwargs: Any) -> Any:
    """Sets the state now, and again when the graph runs."""
    found = setter(*args, **kwargs)
    tracer.recorder.statement(setter, (*args, *kwargs.values()))
    return found


means(*compat.STATE_READERS, named=True)(
    lambda tracer, reader, *args, **kwargs: reader(*map(tracer.deep, args), **kwargs)
)


@means(*compat.SETTING_READERS, named=True)
def read_setting(tracer: Calls, reader: Any, *args: Any) -> Any:
    """Reads a setting that is no part of the guarded global state: the answer gets a guard of its own."""
    source = Source("setting", args, tracer.hold(reader, f"torch.{reader.__name__}").source)
    return tracer.wrap(reader(*args), source, "a setting of torch")


@means(torch.set_grad_enabled)
def set_grad_enabled(tracer: Calls, mode: Any) -> Any:
    made = object.__new__(torch.set_grad_enabled)
    tracer.call(torch.set_grad_enabled.__init__, (made, mode), {})
    return made


call_rules(*compat.compiling_predicates())(lambda tracer, args, kwargs: True)
call_rules(*compat.TRACING_PREDICATES, torch.overrides.has_torch_function)(
    lambda tracer, args, kwargs: False
)
call_rules(torch.is_tensor, torch.overrides.is_tensor_like)(
    lambda tracer, args, kwargs: isinstance(args[0], torch.Tensor)
)


@means(torch._assert, torch._check)
def check(tracer: Calls, condition: Any, message: Any = "") -> None:
    """A condition that must hold, and is known now."""
    if isinstance(condition, torch.Tensor):
        hint = "check it outside of the compiled function"
        tracer.unsupported("branch-on-tensor", "torch._check on a tensor's data", hint)
    if not condition:
        text = tracer.call(message, (), {}) if callable(message) else message
        raise (type(text) if isinstance(text, BaseException) else RuntimeError)(str(text))
