"""torch's own compiler, which ours is compared with.

Each function takes what it needs when it is called: importing torch._dynamo and torch._inductor takes more
than a second. A part that is gone is a reason why there is no comparison.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from minicompile.compat.private import later

compile_fx = later("torch._inductor.compile_fx.compile_fx", "comparison")
"""Compiles a graph of torch functions by torch's AOT autograd and Inductor, which may change it."""
inductor_config = later("torch._inductor.config", "comparison")
functorch_config = later("torch._functorch.config", "comparison")
graph_lowering = later("torch._inductor.graph.GraphLowering", "comparison")
dynamo_counters = later("torch._dynamo.utils.counters", "comparison")
"""torch.compile's counters: by kind, how often what happened."""
dynamo_config = later("torch._dynamo.config", "comparison")

Tell = Callable[[str, Any, str], None]
"""Takes a stage, its graph, its code: ("joint", fx.GraphModule, "") or ("lowered", GraphLowering, text)."""


@contextlib.contextmanager
def inductor_told(tell: Tell, **settings: Any) -> Iterator[list[str]]:
    """Inside, `tell` hears what Inductor makes. Gives sentences on what this version of torch won't tell.

    "joint" comes before its passes, "lowered" once for forward and once for backward: the GraphLowering,
    whose `orig_gm` is the ATen graph, with the text of the module. `settings` go into Inductor's config; its
    caches of whole graphs are off, those of compiled kernels on.
    """
    config, lowering = inductor_config(), graph_lowering()
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
        with config.patch(settings), functorch_config().patch(enable_autograd_cache=False):
            yield missing
    finally:
        for name, value in before.items():
            setattr(lowering, name, value)


def inductor_kernels(lowering: Any) -> int:
    """Count the fused groups of loops of a GraphLowering that is compiled."""
    nodes = lowering.scheduler.nodes
    return sum(
        not node.is_extern() and type(node).__name__ != "NopKernelSchedulerNode" for node in nodes
    )


@contextlib.contextmanager
def torch_compile_anew() -> Iterator[None]:
    """Inside, torch.compile has compiled nothing and seen no sizes, and raises its errors. Afterwards it has
    forgotten all."""
    torch.compiler.reset()
    try:
        with dynamo_config().patch(suppress_errors=False):
            yield
    finally:
        torch.compiler.reset()


def torch_original(target: Any) -> Any:
    """What was given to torch.compile, if the target is what that returned."""
    target = getattr(target, "_orig_mod", target)
    return getattr(target, "_torchdynamo_orig_callable", target)
