"""Models, and the most memory that a step of each has live at once, by compiler.

A training step is a forward and a backward pass with no gradients before it, inference a forward pass; only
what is allocated during the step counts. The loss stands inside of the compiled function or outside: then
the gradient of the model's output comes from eager.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import minicompile as mc
from minicompile.bench.timing import peak_bytes

ROUNDING = 1 << 10
"""Bytes by which a step may be above eager's: scalars on the CPU."""


class Layer(nn.Module):
    """Pre-norm transformer block, attention written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(c, dim=2)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(c // self.heads)
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).contiguous().view(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """A GPT without its loss: scores of the next token, one row for each position."""

    def __init__(self, tokens: int, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.token(index) + self.position(torch.arange(index.shape[1], device=index.device))
        return self.head(self.norm(self.layers(x))).flatten(0, 1)


class Residual(nn.Module):
    """A block of a ResNet."""

    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(a, b, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(b), nn.BatchNorm2d(b)])
        self.short = nn.Conv2d(a, b, 1, stride, bias=False) if a != b else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.short(x))


def resnet(device: str, scale: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    blocks = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    images, target = torch.randn(8, 3, 16 * scale, 16 * scale), torch.randint(10, (8,))
    return model.to(device), images.to(device), target.to(device)


def mlp(device: str, scale: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    width = 128 * scale
    layers = [part for _ in range(6) for part in (nn.Linear(width, width), nn.GELU())]
    x, target = torch.randn(2 * width, width), torch.randint(width, (2 * width,))
    return nn.Sequential(*layers).to(device), x.to(device), target.to(device)


def gpt2(device: str, scale: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    vocabulary, length = 512 * scale, 64 * scale
    tokens = torch.randint(vocabulary, (2, length + 1), device=device)
    model = Language(vocabulary, 64 * scale, 3, length).to(device)
    return model, tokens[:, :-1], tokens[:, 1:].flatten()


MODELS = {"MLP": mlp, "GPT-2": gpt2, "ResNet": resnet}
COMPILERS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda fn: fn,
    "inductor": lambda fn: mc.compile(fn, fullgraph=True),
}

KINDS = ("inside", "outside", "none")
"""Where the loss is; "none": inference."""


def one_step(
    model: nn.Module, x: torch.Tensor, target: torch.Tensor, compiler: str, where: str
) -> Callable[[], None]:
    """Forward and backward of a model under a compiler, or without a loss its forward."""
    inside = where == "inside"

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), target)

    compiled = COMPILERS[compiler](loss if inside else model)

    def infer() -> None:
        with torch.no_grad():
            compiled(x)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        if inside:
            compiled(x, target).backward()
        else:
            F.cross_entropy(compiled(x), target).backward()

    if where == "none":
        model.eval()
    return infer if where == "none" else step


def measure(name: str, where: str, compilers: list[str], device: str, scale: int) -> dict[str, int]:
    """Return the peak bytes of a step of a model, by compiler."""
    found = {}
    for compiler in compilers:
        torch.manual_seed(0)
        step = one_step(*MODELS[name](device, scale), compiler, where)
        for _ in range(2):
            step()
        found[compiler] = peak_bytes(step, device)
    return found
