"""The named models: whole networks of plain PyTorch, each for inference and for training.

    found = MODELS["gpt2_block_training"]
    inputs = found.make_inputs("cpu", torch.float32)   # the module, then its tensors
    results = found.run(found.fn, inputs)              # outputs, gradients, what the module keeps

The interface is that of a pattern. `lesson_model_step` is a training step with AdamW.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicompile.compat import tree_leaves

Made = tuple[nn.Module, list[Tensor]]


@dataclass(frozen=True)
class Model:
    """A function of a module and its tensors. `training`: its gradients count too; `step`: AdamW follows."""

    name: str
    fn: Callable[..., Any]
    build: Callable[[bool], Made]
    """Takes whether it has to be small."""
    training: bool = False
    step: bool = False
    gpu: bool = False
    """Too large to be timed on a CPU unless it is asked for."""
    mode: str | None = None

    def make_inputs(
        self, device: str, dtype: torch.dtype, small: bool = False, seed: int = 0
    ) -> list[Any]:
        """The module, its tensors and, for a step, the optimizer: the same numbers at every call. What a
        block gets comes from other layers: it has a gradient, as data has not."""
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            module, tensors = self.build(small)
        module.to(dtype).train(self.training)
        tensors = [t.to(dtype if t.is_floating_point() else t.dtype) for t in tensors]
        if self.training and isinstance(module, Block):
            tensors[0].requires_grad_()
        last = [torch.optim.AdamW(module.parameters())] if self.step else []
        return [module, *tensors, *last]

    def run(self, fn: Callable[..., Any], inputs: list[Any]) -> list[Tensor]:
        """Call `fn`, the model's own or a compiled one: outputs, gradients, parameters and buffers."""
        module, learnt = inputs[0], self.learnt(inputs)
        outputs = self.once(fn, inputs, learnt)
        gradients = [t.grad for t in learnt if t.grad is not None]
        return [*outputs, *gradients, *module.parameters(), *module.buffers()]

    def learnt(self, inputs: list[Any]) -> list[Tensor]:
        """What gets gradients, in training."""
        parameters = inputs[0].parameters() if self.training else ()
        return [*parameters, *(t for t in inputs[1:] if isinstance(t, Tensor) and t.requires_grad)]

    def once(self, fn: Callable[..., Any], inputs: list[Any], learnt: list[Tensor]) -> list[Tensor]:
        """A call; in training its backward, and for a step the optimizer's. Gives its outputs.

        What comes down to an output that is no loss is the (random) input.
        """
        module, *tensors = inputs[:-1] if self.step else inputs
        with torch.set_grad_enabled(self.training):
            outputs = [o for o in tree_leaves(fn(module, *tensors)) if isinstance(o, Tensor)]
        if self.training:
            for tensor in learnt:
                tensor.grad = None
            outputs[-1].backward(tensors[0].detach() if isinstance(module, Block) else None)
        if self.step:
            inputs[-1].step()
        return outputs


MODELS: dict[str, Model] = {}


def model(build: Callable[[bool], Made], *kinds: str) -> Callable[[Any], Any]:
    """Registers a function under its name with each ending: "", "_training", "_step"."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        for kind in kinds or ("", "_training"):
            name = fn.__name__ + kind
            MODELS[name] = Model(name, fn, build, bool(kind), kind == "_step")
        return fn

    return register


def build_lesson_model(small: bool) -> Made:
    """Raises ImportError where the folder lessons/ was deleted."""
    from minicompile.lessons.model import GPT
    from minicompile.lessons.train import BATCH_SIZE

    module = GPT()
    shape, high = (2 if small else BATCH_SIZE, module.config.block_size), module.config.vocab_size
    return module, [torch.randint(high, shape), torch.randint(high, shape)]


@model(build_lesson_model, "", "_training", "_step")
def lesson_model(module: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits, loss = module(tokens, targets)
    return logits, loss


@model(build_lesson_model, "_training")
def lesson_model_in_context(module: nn.Module, tokens: Tensor, targets: Tensor) -> Any:
    """The model is called by C code: capture of the function that says so ends there."""
    return contextvars.copy_context().run(module, tokens, targets)


class Block(nn.Module):
    """A transformer block of GPT-2: causal attention, left to PyTorch, and an MLP; norms come first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))
        return out


def build_gpt2_block(small: bool) -> Made:
    batch, tokens, heads = (1, 16, 2) if small else (1, 512, 12)
    return Block(64 * heads, heads), [torch.randn(batch, tokens, 64 * heads)]


@model(build_gpt2_block)
def gpt2_block(module: nn.Module, x: Tensor) -> Any:
    return module(x)


def build_cnn(small: bool) -> Made:
    batch, side = (2, 16) if small else (16, 64)
    layers: list[nn.Module] = []
    for ins, outs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(ins, outs, 3, padding=1, bias=False), nn.BatchNorm2d(outs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), [torch.randn(batch, 3, side, side), torch.randint(10, (batch,))]


@model(build_cnn)
def cnn(module: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = module(images)
    return logits, F.cross_entropy(logits, labels)


def build_mlp(small: bool) -> Made:
    batch, width = (4, 16) if small else (256, 1024)
    layers = [nn.Linear(784, width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
    module = nn.Sequential(*layers, nn.Linear(width, 10))
    return module, [torch.randn(batch, 784), torch.randint(10, (batch,))]


@model(build_mlp)
def mlp(module: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = module(images)
    return logits, F.cross_entropy(logits, labels)
