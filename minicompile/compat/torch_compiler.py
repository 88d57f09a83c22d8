"""torch's own compiler, which ours is compared with and whose halves it can replace (torch 2.11 to 2.13).

Each function imports what it needs: torch._dynamo and torch._inductor together take more than a second.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

HigherOrderOperator = torch._ops.HigherOrderOperator

Tell = Callable[[str, Any, str], None]
"""Takes a stage, its graph, its code: ("joint", fx.GraphModule, "") or ("lowered", GraphLowering, text)."""


def torch_fake_mode() -> Any:
    """The kind of FakeTensorMode that torch's compiler works with."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def backend_fakes(inputs: Sequence[Any]) -> list[Any]:
    """For what Dynamo gives a backend (real tensors) fakes with its symbols, as before its graph ran;
    outside of Dynamo what is given.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return list(inputs)
    convert, known = context.fake_mode.from_tensor, context.tensor_to_context
    tensors = (isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) for x in inputs)
    return [
        convert(x, static_shapes=x not in known) if real else x for x, real in zip(inputs, tensors)
    ]


def inductor(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A graph of torch functions compiled by torch's AOT autograd and Inductor, which may change it."""
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, inputs)
    return compiled


@contextlib.contextmanager
def inductor_told(tell: Tell, **settings: Any) -> Iterator[list[str]]:
    """Inside, `tell` hears what Inductor makes. Gives sentences on what this version of torch won't tell.

    "joint" comes before its passes, "lowered" once for forward and once for backward: the GraphLowering,
    whose `orig_gm` is the ATen graph, with the text of the module. `settings` go into Inductor's config; its
    caches of whole graphs are off, those of compiled kernels on.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config, graph

    lowering: Any = graph.GraphLowering
    names, texts, missing = ("compile_to_module", "save_output_code"), list[str](), list[str]()
    before = {name: lowering.__dict__[name] for name in names if name in lowering.__dict__}

    def compile_to_module(self: Any) -> Any:
        made = before["compile_to_module"](self)
        tell("lowered", self, texts.pop() if texts else "")
        return made

    if len(before) == len(names):
        lowering.compile_to_module = compile_to_module
        lowering.save_output_code = staticmethod(texts.append)
    else:
        missing.append(f"torch {torch.__version__} does not show Inductor's graphs and code")
    settings["fx_graph_cache"] = False
    if hasattr(config, "joint_custom_pre_pass"):
        settings["joint_custom_pre_pass"] = lambda graph: tell("joint", graph.owning_module, "")
    else:
        missing.append(f"torch {torch.__version__} does not show its joint graph")
    try:
        with config.patch(settings), functorch_config.patch(enable_autograd_cache=False):
            yield missing
    finally:
        for name, value in before.items():
            setattr(lowering, name, value)


def inductor_kernels(lowering: Any) -> tuple[int, int]:
    """(fused groups of loops, library calls) of a GraphLowering that is compiled."""
    calls = [node.node for node in lowering.scheduler.nodes if node.is_extern()]
    loops = [node for node in lowering.scheduler.nodes if not node.is_extern()]
    nothing = sum(type(node).__name__ == "NopKernelSchedulerNode" for node in loops)
    return len(loops) - nothing, sum(type(call).__name__ != "MultiOutput" for call in calls)


def torch_counters() -> Any:
    """What torch.compile counts: by kind, how often what happened."""
    from torch._dynamo.utils import counters

    return counters


def frame_evaluator() -> tuple[Callable[[], int], Callable[[int], None]]:
    """What evaluates the interpreter's frames (PEP 523): how to read it, how to put it back. torch.compile
    leaves its own in place when it raises (2.11 to 2.13), and then no other, such as ours, can be used.
    """
    api = ctypes.pythonapi
    current = api.PyInterpreterState_Get
    current.restype = ctypes.c_void_p
    get, put = api._PyInterpreterState_GetEvalFrameFunc, api._PyInterpreterState_SetEvalFrameFunc
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    put.restype, put.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p]
    return lambda: int(get(current())), lambda evaluator: put(current(), evaluator)


@contextlib.contextmanager
def torch_compile_as_found() -> Iterator[None]:
    """What torch.compile keeps for the process is as before, afterwards: its counters, the sizes it has seen,
    its config, and no compiled code for functions that had none. Inside it has seen no sizes, and its errors
    are raised.
    """
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo import config, convert_frame, pgo

    read, put = frame_evaluator()
    evaluator = read()
    counters, state = torch_counters(), ("_CODE_STATE", "_INIT_CODE_STATE")
    counted = {kind: found.copy() for kind, found in counters.items()}
    sizes = {name: getattr(pgo, name) for name in state if hasattr(pgo, name)}
    trackers = (convert_frame.input_codes, convert_frame.output_codes)
    known = [len(tracker.seen) for tracker in trackers]
    try:
        vars(pgo).update(dict.fromkeys(sizes))
        counters.clear()
        with config.patch(suppress_errors=False):
            yield
    finally:
        put(evaluator)
        vars(pgo).update(sizes)
        counters.clear()
        counters.update(counted)
        for tracker, count in zip(trackers, known):
            new = [code for ref in tracker.seen[count:] if (code := ref()) is not None]
            del tracker.seen[count:]
            tracker.seen_ids.difference_update(map(id, new))
            for code in new:
                reset_code(code)


def torch_original(target: Any) -> Any:
    """What was given to torch.compile, if the target is what that returned."""
    target = getattr(target, "_orig_mod", target)
    return getattr(target, "_torchdynamo_orig_callable", target)


def torch_kernel_count() -> int:
    """How many kernels Inductor has generated in this process."""
    from torch._inductor import metrics

    return int(metrics.generated_kernel_count)
