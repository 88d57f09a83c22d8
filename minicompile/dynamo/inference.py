"""Inference mode during capture: a frame that opens `torch.inference_mode()`, and one that runs under it.

Capture leaves inference mode, because its tensors have neither versions nor bases; `Recorder.inference` says
what eager's mode would be. A graph lies as a whole inside or outside of the mode, and runs there: so its
results are inference tensors where eager's are.
In torch.compile: torch/_dynamo/variables/ctx_manager.py (InferenceModeVariable).
"""

from __future__ import annotations

from typing import Any

import torch

from minicompile.compat import settings
from minicompile.compat.inference import InferenceMode
from minicompile.dynamo.calls import Calls, call_rules


class InferenceBlock:
    """Stands for torch's C++ object of one block while the frame that opens it is captured."""

    def __init__(self, inference: bool) -> None:
        self.inference = inference
        self.before = False, False
        """Inference mode and grad mode before the block."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


@call_rules(InferenceMode)
def make_block(tracer: Calls, args: Any, kwargs: Any) -> InferenceBlock:
    return InferenceBlock(*args, **kwargs)


@call_rules(InferenceBlock.__enter__)
def enter_block(tracer: Calls, args: Any, kwargs: Any) -> None:
    """Switch the mode. Graphs record no grad mode for inference mode: they run in it as a whole."""
    block, recorder = args[0], tracer.recorder
    block.before = recorder.inference, torch.is_grad_enabled()
    if not block.inference:
        if recorder.inference:
            tracer.unsupported("inference-mode", "inference mode is left inside of its block")
        tracer.call(settings.set_grad_enabled, (True,), {})
        return
    recorder.blocks.append(recorder.places())
    recorder.inference = True
    settings.set_grad_enabled(False)


@call_rules(InferenceBlock.__exit__)
def exit_block(tracer: Calls, args: Any, kwargs: Any) -> None:
    block, recorder = args[0], tracer.recorder
    inference, grad = block.before
    if not block.inference:
        tracer.call(settings.set_grad_enabled, (grad,), {})
        return
    recorder.blocks.pop()
    recorder.inference = inference
    settings.set_grad_enabled(grad)


@call_rules(torch.is_inference_mode_enabled)
def is_inference_mode_enabled(tracer: Calls, args: Any, kwargs: Any) -> bool:
    return tracer.recorder.inference


@call_rules(torch.is_inference, torch.Tensor.is_inference)
def is_inference(tracer: Calls, args: Any, kwargs: Any) -> bool:
    return tracer.recorder.is_inference(args[0])
