"""Whole small models through the room: losses and gradients equal eager's, at other sizes too."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minicompile.options import Options
from tests.aot.helpers import compile_aot, module_function
from tests.comparing import assert_as_eager


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1)
        )


class Layer(nn.Module):
    """Pre-norm transformer block, attention written out."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
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


class Gpt(nn.Module):
    def __init__(self, tokens=11, width=16, heads=2, layers=2, context=8):
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, index, target):
        x = self.token(index) + self.position(torch.arange(index.shape[1], device=index.device))
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.view(-1, scores.shape[-1]), target.view(-1))


class Unrolled(nn.Module):
    """A GRU cell over a sequence."""

    def __init__(self):
        super().__init__()
        self.x, self.h = nn.Linear(4, 18), nn.Linear(6, 18)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 6)
        for step in x.unbind(1):
            xr, xz, xn = self.x(step).chunk(3, -1)
            hr, hz, hn = self.h(h).chunk(3, -1)
            r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
            h = (1 - z) * torch.tanh(xn + r * hn) + z * h
        return h


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, stride=2, bias=False),
        )
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.hardswish(self.norm(self.conv2(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def tokens(batch=3, length=8):
    return [torch.randint(11, (batch, length)), torch.randint(11, (batch, length))]


MODELS = {
    "mlp": (Mlp, lambda: [torch.randn(5, 6)]),
    "gpt": (Gpt, tokens),
    "gru": (Unrolled, lambda: [torch.randn(3, 5, 4)]),
    "cnn": (Cnn, lambda: [torch.randn(2, 3, 10, 10)]),
}


def assert_trains_like_eager(call, module, inputs, state):
    close = {"rtol": 1e-5, "atol": 1e-6}
    assert_as_eager(
        lambda *given: call([*state, *given])[0], module, *inputs, module=module, **close
    )


OPTIONS = {
    "min_cut": Options(),
    "default": Options(partitioner="default"),
    "no memory": Options(memory_budget=0.0),
    "some memory": Options(memory_budget=0.4),
}


@pytest.mark.long
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_model_trains_like_eager(name, option):
    torch.manual_seed(0)
    make, example = MODELS[name]
    module, inputs = make(), example()
    fn, state = module_function(module)
    call, result = compile_aot(fn, [*state, *inputs], options=OPTIONS[option])
    assert_trains_like_eager(call, module, inputs, state)
    if option != "no memory":
        assert result.partition.saved_bytes <= result.partition.default_bytes
