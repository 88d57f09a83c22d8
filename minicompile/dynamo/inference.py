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
from minicompile.dynamo.builtins import means
from minicompile.dynamo.world import World


class InferenceBlock:
    """Stands for torch's C++ object of one block while the frame that opens it is captured."""

    before = False, False
    """Inference mode and grad mode before the block."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


means(InferenceMode)(
    lambda world, inference: (
        InferenceBlock()
        if inference
        else world.unsupported("inference-mode", "inference mode is left by a block")
    )
)


@means(InferenceBlock.__enter__)
def enter_block(world: World, block: InferenceBlock) -> None:
    """Switch the mode. Graphs record no grad mode for inference mode: they run in it as a whole."""
    recorder = world.recorder
    block.before = recorder.inference, torch.is_grad_enabled()
    recorder.blocks.append(recorder.places())
    recorder.inference = True
    settings.set_grad_enabled(False)


@means(InferenceBlock.__exit__)
def exit_block(world: World, block: InferenceBlock, *error: Any) -> None:
    recorder = world.recorder
    recorder.blocks.pop()
    recorder.inference, grad = block.before
    settings.set_grad_enabled(grad)


means(torch.is_inference_mode_enabled)(lambda world: world.recorder.inference)
means(torch.is_inference, torch.Tensor.is_inference)(
    lambda world, tensor: world.recorder.is_inference(tensor)
)
