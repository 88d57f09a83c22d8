"""Small models, traced from their Python source to kernels: the explorers of the gallery."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import minicompile as mc
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.ops.display import to_html
from minicompile.show.html import STYLE

CPU, GPU = {"device_codegen": "cpp"}, {"device_codegen": "triton"}
"""Options: kernels for a CPU, and kernels as a GPU gets them. No GPU is needed to write those."""


class ResidualBlock(nn.Module):
    """Two convolutions and a way around them, as a ResNet has."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first_norm(self.first(x)))
        h = self.second_norm(self.second(h))
        return F.relu(x + h)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each row of `q` gathers rows of `v` by how well their keys fit."""
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    weights = torch.softmax(scores, -1)
    return weights @ v


def first_steps(x: Tensor, w: Tensor) -> Tensor:
    """The function of the front page."""
    scores = torch.relu(x @ w)
    return torch.softmax(scores, -1)


def first_inputs() -> list[Tensor]:
    return [torch.randn(64, 32), torch.randn(32, 48)]


def gpt() -> tuple[Any, list[Tensor]]:
    tokens = torch.randint(0, 60, (2, 65))
    model = GPT(GPTConfig(n_layer=1))
    return model, [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]


def resnet() -> tuple[Any, list[Tensor]]:
    return ResidualBlock(16), [torch.randn(2, 16, 16, 16)]


def attended() -> tuple[Any, list[Tensor]]:
    return attention, [torch.randn(2, 4, 64, 16) for _ in range(3)]


MODELS = {
    "gpt": ("A small GPT, one training step", gpt),
    "resnet": ("A block of a ResNet, one training step", resnet),
    "attention": ("Attention, written out", attended),
}
TARGETS = {"cpu": ("C++ for a CPU", CPU), "gpu": ("Triton for a GPU", GPU)}


def explorer(model: Any, arguments: list[Tensor], options: dict[str, str]) -> str:
    """The linked view of a trace as HTML, without the style sheet that the pages have."""
    trace = mc.trace(mc.compile(model, options=options), *arguments)
    return to_html(trace.explore()).removeprefix(STYLE)


def pages() -> Iterator[tuple[str, str]]:
    """Name and text of each page of the gallery, and of the picture on the front page."""
    torch.manual_seed(0)
    names = []
    for key, (title, make) in MODELS.items():
        for target, (language, options) in TARGETS.items():
            name = f"{key}_{target}"
            names.append(name)
            model, arguments = make()
            yield f"{name}.html.txt", explorer(model, arguments, options)
            yield f"{name}.md", PAGE.format(title=f"{title}: {language}", name=name)
    yield "first.html.txt", explorer(first_steps, first_inputs(), CPU)
    yield "index.md", INDEX.format(names="\n".join(names))


PAGE = """---
hide-toc: true
---

# {title}

Point at a line: all that shares an operation with it lights up, from Python to the kernel. A click pins it,
arrow keys move, Escape lets go. The strip above the panes opens the other stages.

```{{raw}} html
:file: {name}.html.txt
```
"""

INDEX = """# One model, top to bottom

Each page is a saved explorer: every stage that one call of a model goes through, side by side. They need no
Python; in a notebook `mc.trace(model, *inputs).explore()` makes one of your own model.

```{{toctree}}
:maxdepth: 1

{names}
```
"""
