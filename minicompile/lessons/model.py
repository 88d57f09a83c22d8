"""The lesson model: a character-level GPT small enough to draw.

    tokens (B, T) -> embedding + position -> n_layer x Block -> layer norm -> head -> logits (B, T, vocab)
    Block: x + attention(norm(x)), then x + mlp(norm(x))

B is the batch, T the tokens in a row, C = n_embd the width, H = n_head, D = C / H. It is plain PyTorch.
The switches are there for lessons: each makes one thing happen that a compiler must cope with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minicompile.lessons.data import VOCABULARY


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and switches of the lesson model; the heads divide the width."""

    vocab_size: int = len(VOCABULARY)
    block_size: int = 64
    """Most tokens the model looks back at."""
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 64
    attention: Literal["written", "library"] = "written"
    """"written" spells out matmul, mask and softmax; "library" calls F.scaled_dot_product_attention."""
    dropout: float = 0.0
    debug_print: bool = False
    """Each block prints the mean of its input: Python that no graph can hold."""


class LayerCache:
    """Keys and values of one attention layer, (B, H, block_size, D) each, written in place."""

    def __init__(self, config: GPTConfig, batch: int, like: Tensor) -> None:
        shape = (batch, config.n_head, config.block_size, config.n_embd // config.n_head)
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def append(self, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Write (B, H, T, D) at position `start`; give back everything up to there."""
        end = start + keys.size(2)
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        return self.keys[:, :, :end], self.values[:, :, :end]


class Attention(nn.Module):
    """Causal self-attention: each token gathers from itself and the tokens before it."""

    mask: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.project = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        size = config.block_size
        self.register_buffer(
            "mask", torch.ones(size, size, dtype=torch.bool).tril(), persistent=False
        )

    def forward(self, x: Tensor, cache: LayerCache | None = None, start: int = 0) -> Tensor:
        batch, length, width = x.shape
        heads = self.config.n_head
        q, k, v = self.qkv(x).split(width, dim=2)
        q = q.view(batch, length, heads, width // heads).transpose(1, 2)
        k = k.view(batch, length, heads, width // heads).transpose(1, 2)
        v = v.view(batch, length, heads, width // heads).transpose(1, 2)
        if cache is not None:
            k, v = cache.append(k, v, start)
        visible = self.mask[start : start + length, : start + length]
        if self.config.attention == "library":
            p = self.config.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=p)
        else:
            scores = q @ k.transpose(2, 3) * (1.0 / math.sqrt(width // heads))
            scores = scores.masked_fill(~visible, float("-inf"))
            y = self.dropout(torch.softmax(scores, dim=-1)) @ v
        y = y.transpose(1, 2).reshape(batch, length, width)
        out: Tensor = self.project(y)
        return out


class MLP(nn.Module):
    """Two linear layers with GELU between, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.widen = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.project = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.widen(x))
        out: Tensor = self.dropout(self.project(x))
        return out


class Block(nn.Module):
    """One transformer block: attention, then an MLP, each on normed input and added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.norm1 = nn.LayerNorm(config.n_embd)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: LayerCache | None = None, start: int = 0) -> Tensor:
        if self.config.debug_print:
            print(f"block input has mean {x.mean().item():+.4f}")
        x = x + self.attention(self.norm1(x), cache, start)
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """The lesson model. Weights come from torch's global generator: seed it for a repeatable start."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        config = config or GPTConfig()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.apply(initialize)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        caches: list[LayerCache] | None = None,
        start: int = 0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`idx` (B, T) int64 -> logits (B, T, vocab); with `targets` (B, T) also the mean cross-entropy.

        With `caches` (one a block), `idx` continues a text of which `start` tokens are already cached.
        Raises ValueError if the text is longer than block_size.
        """
        length = idx.size(1)
        if start + length > self.config.block_size:
            raise ValueError(
                f"{start + length} tokens are more than block_size={self.config.block_size}"
            )
        where = torch.arange(start, start + length, device=idx.device)
        x = self.dropout(self.tokens(idx) + self.positions(where))
        for layer, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[layer], start)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss

    def make_caches(self, batch: int) -> list[LayerCache]:
        """Empty key/value caches, one a block."""
        return [LayerCache(self.config, batch, self.tokens.weight) for _ in self.blocks]


def initialize(module: nn.Module) -> None:
    """GPT-2's start: small normal weights, zero biases."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def generate(model: GPT, idx: Tensor, count: int, cache: bool = False) -> Tensor:
    """Continue `idx` (B, T) by `count` greedy tokens. `cache` computes each token once, with in-place caches.

    Raises ValueError if the text would not fit in block_size.
    """
    caches = model.make_caches(idx.size(0)) if cache else None
    training, start = model.training, 0
    model.eval()
    for _ in range(count):
        logits = model(idx[:, start:], None, caches, start)
        start = idx.size(1) if cache else 0
        idx = torch.cat([idx, logits[:, -1:].argmax(-1)], dim=1)
    model.train(training)
    return idx
