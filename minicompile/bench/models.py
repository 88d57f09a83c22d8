"""The named models: whole networks of plain PyTorch, each for inference and for training.

    model = MODELS["gpt2_block_training"]
    inputs = model.make_inputs("cpu", torch.float32)   # the module, then its tensors
    results = model.run(model.fn, inputs)              # outputs, gradients, inputs, what the module keeps

The interface is that of a pattern.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicompile.bench.patterns import Scale, Subject

Made = tuple[nn.Module, list[Tensor]]


def make_network(
    build: Callable[[bool], Made],
    training: bool,
    device: str,
    dtype: torch.dtype,
    scale: Scale = "large",
) -> list[Any]:
    """The module and its tensors: the same numbers at every call. What a block gets comes from other layers:
    it has a gradient, as data has not."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        module, tensors = build(scale == "small")
    module.to(dtype).train(training)
    tensors = [t.to(dtype if t.is_floating_point() else t.dtype) for t in tensors]
    tensors[0].requires_grad_(training and isinstance(module, GPT2Block))
    return [module, *tensors]


MODELS: dict[str, Subject] = {}


def register(
    name: str, fn: Callable[..., Any], build: Callable[[bool], Made], gpu: bool = False
) -> None:
    """Register a model for inference, and for training with "_training" behind its name."""
    for training in (False, True):
        full = name + "_training" * training
        MODELS[full] = Subject(full, fn, partial(make_network, build, training), training, gpu)


def classify(module: nn.Module, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The logits and the loss."""
    logits = module(x)
    return logits, F.cross_entropy(logits, labels)


def build_lesson_model(small: bool) -> Made:
    """Raises ImportError where the folder lessons/ was deleted."""
    from minicompile.lessons.model import GPT
    from minicompile.lessons.train import BATCH_SIZE

    module = GPT()
    shape, high = (2 if small else BATCH_SIZE, module.config.block_size), module.config.vocab_size
    return module, [torch.randint(high, shape), torch.randint(high, shape)]


class GPT2Block(nn.Module):
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
    return GPT2Block(64 * heads, heads), [torch.randn(batch, tokens, 64 * heads)]


def build_cnn(small: bool) -> Made:
    batch, side = (2, 16) if small else (16, 64)
    layers: list[nn.Module] = []
    for ins, outs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(ins, outs, 3, padding=1, bias=False), nn.BatchNorm2d(outs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), [torch.randn(batch, 3, side, side), torch.randint(10, (batch,))]


def build_mlp(small: bool) -> Made:
    batch, width = (4, 16) if small else (256, 1024)
    layers = [nn.Linear(784, width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
    module = nn.Sequential(*layers, nn.Linear(width, 10))
    return module, [torch.randn(batch, 784), torch.randint(10, (batch,))]


register("lesson_model", lambda module, *tokens: module(*tokens), build_lesson_model)
# called by C code: capture of the function that says so ends there
register(
    "lesson_model_in_context",
    lambda module, *tokens: contextvars.copy_context().run(module, *tokens),
    build_lesson_model,
)
register("gpt2_block", lambda module, x: module(x), build_gpt2_block)
register("cnn", classify, build_cnn)
register("mlp", classify, build_mlp)
