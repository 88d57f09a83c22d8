"""Training programs of the kinds that people compile, small, with random data: text and fits.

Each builds a model from torch's global generator, compiles what its original's users compile, and returns
one training step. The originals are named in the docstrings; no line is theirs. The others are in
`control_programs.py`, `image_programs.py` and `diffusion_programs.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

Compile = Callable[[Any], Any]
Step = Callable[[], Tensor]
"""Trains once and returns the loss."""

PROGRAMS: dict[str, Callable[[Compile], Step]] = {}


def program(function: Callable[[Compile], Step]) -> Callable[[Compile], Step]:
    """Register a program by its function's name."""
    PROGRAMS[function.__name__] = function
    return function


def supervised(
    call: Any,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    loss_of: Callable[[Any, Any], Tensor] = F.cross_entropy,
    clip: Iterable[Tensor] = (),
) -> Step:
    """The usual loop's body over pairs of inputs and targets, round and round."""
    forever, clipped = itertools.cycle(batches), list(clip)

    def step() -> Tensor:
        inputs, target = next(forever)
        optimizer.zero_grad()
        loss = loss_of(call(inputs), target)
        loss.backward()
        if clipped:
            nn.utils.clip_grad_norm_(clipped, 1.0)
        optimizer.step()
        return loss.detach()

    return step


# -- language models

VOCABULARY, CONTEXT, WIDTH, HEADS = 100, 16, 64, 4


def texts(rows: int = 4, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Batches of random tokens, each with its next tokens."""
    tokens = [torch.randint(VOCABULARY, (rows, CONTEXT + 1)) for _ in range(count)]
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class LSTMLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2)
        self.decode = nn.Linear(WIDTH, VOCABULARY)
        self.decode.weight = self.embed.weight

    def forward(self, tokens: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.drop(self.embed(tokens)), hidden)
        decoded = self.decode(self.drop(output)).view(-1, VOCABULARY)
        return F.log_softmax(decoded, dim=1), hidden

    def start(self, rows: int) -> tuple[Tensor, ...]:
        weight = next(self.parameters())
        return tuple(weight.new_zeros(2, rows, WIDTH) for _ in range(2))


@program
def word_lstm(compile: Compile) -> Step:
    """pytorch/examples word_language_model: hidden states go on from segment to segment, by-hand descent."""
    model = LSTMLanguageModel()
    compiled = compile(model)
    text = torch.randint(VOCABULARY, (3 * 12 + 6, 4))
    starts, hidden = itertools.cycle(range(0, len(text) - 1, 12)), model.start(4)

    def step() -> Tensor:
        nonlocal hidden
        at = next(starts)
        data, target = text[at : at + 12], text[at + 1 : at + 13].reshape(-1)
        data = data[: len(target) // 4]
        model.zero_grad()
        output, hidden = compiled(data, tuple(h.detach() for h in hidden))
        loss = F.nll_loss(output, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-0.5)
        return loss.detach()

    return step


class TransformerLanguageModel(nn.Module):
    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None
        angles = torch.arange(64)[:, None] * torch.exp(
            torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH)
        )
        places = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
        self.register_buffer("places", places[:, None])
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.2)
        self.embed, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.2)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decode = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.mask is None or self.mask.size(0) != len(tokens):
            self.mask = torch.log(torch.tril(torch.ones(len(tokens), len(tokens))))
        x = self.embed(tokens) * math.sqrt(WIDTH)
        x = self.drop(x + self.places[: x.size(0)])
        return F.log_softmax(self.decode(self.encoder(x, mask=self.mask)), dim=-1)


@program
def word_transformer(compile: Compile) -> Step:
    """pytorch/examples word_language_model with `--model Transformer`: a mask that is kept between calls."""
    model = TransformerLanguageModel()
    batches = [(x.t().contiguous(), y.t().reshape(-1)) for x, y in texts()]
    loss = lambda out, target: F.nll_loss(out.view(-1, VOCABULARY), target)  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return supervised(compile(model), optimizer, batches, loss, model.parameters())


class GPTBlock(nn.Module):
    """Flash attention as nanoGPT has it; or minGPT's, written out, with a buffer for a mask."""

    bias: Tensor

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.flash = flash
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.ModuleDict(
            {"fc": nn.Linear(WIDTH, 4 * WIDTH), "out": nn.Linear(4 * WIDTH, WIDTH)}
        )
        self.drop = nn.Dropout(0.1)
        if not flash:
            self.register_buffer("bias", torch.ones(1, 1, CONTEXT, CONTEXT).tril())

    def gelu(self, x: Tensor) -> Tensor:
        if self.flash:
            return F.gelu(x)
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        parts = self.attend(self.norm_1(x)).split(c, dim=2)
        q, k, v = (p.view(b, t, HEADS, c // HEADS).transpose(1, 2) for p in parts)
        if self.flash:
            chance = self.drop.p if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            y = self.drop(F.softmax(scores, dim=-1)) @ v
        x = x + self.drop(self.project(y.transpose(1, 2).contiguous().view(b, t, c)))
        return x + self.drop(self.mlp.out(self.gelu(self.mlp.fc(self.norm_2(x)))))


class GPT(nn.Module):
    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([GPTBlock(flash) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if flash:
            self.tokens.weight = self.head.weight

    def forward(self, index: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        b, t = index.size()
        assert t <= CONTEXT, f"Cannot forward a sequence of length {t}"
        x = self.tokens(index) + self.places(torch.arange(0, t, dtype=torch.long))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        flat = logits.view(-1, logits.size(-1)), targets.reshape(-1)
        return logits, F.cross_entropy(*flat, ignore_index=-1)

    def groups(self) -> list[dict[str, Any]]:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


@program
def nanogpt(compile: Compile) -> Step:
    """karpathy/nanoGPT: two batches to a step, a learning rate by hand, an evaluation between."""
    model = GPT(flash=True)
    compiled = compile(model)
    optimizer = torch.optim.AdamW(model.groups(), lr=1e-3, betas=(0.9, 0.95))
    batches, count = itertools.cycle(texts()), itertools.count()

    def step() -> Tensor:
        if next(count) % 4 == 2:
            compiled.eval()
            with torch.no_grad():
                compiled(*next(batches))
            compiled.train()
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + math.cos(next(count) / 10))
        for _ in range(2):
            _, loss = compiled(*next(batches))
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


@program
def mingpt(compile: Compile) -> Step:
    """karpathy/minGPT: written-out attention, the loss inside the model."""
    model = GPT(flash=False)
    compiled = compile(model)
    optimizer = torch.optim.AdamW(model.groups(), lr=3e-4)
    both = lambda batch: compiled(*batch)[1]  # noqa: E731
    batches = [(batch, None) for batch in texts()]
    return supervised(both, optimizer, batches, lambda loss, _: loss, model.parameters())


class MambaBlock(nn.Module):
    def __init__(self, states: int = 4, rank: int = 2) -> None:
        super().__init__()
        inner = 2 * WIDTH
        self.states, self.rank = states, rank
        self.into = nn.Linear(WIDTH, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, rank + 2 * states, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.a_log = nn.Parameter(torch.log(torch.arange(1.0, states + 1).repeat(inner, 1)))
        self.d, self.out = nn.Parameter(torch.ones(inner)), nn.Linear(inner, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, residual: Tensor) -> Tensor:
        power = residual.pow(2).mean(-1, keepdim=True)
        x = residual * torch.rsqrt(power + 1e-5) * self.scale
        length = x.shape[1]
        x, gate = self.into(x).chunk(2, dim=-1)
        x = F.silu(self.conv(x.transpose(1, 2))[:, :, :length].transpose(1, 2))
        delta, b, c = self.x_proj(x).split([self.rank, self.states, self.states], dim=-1)
        y = self.scan(x, F.softplus(self.dt_proj(delta)), -torch.exp(self.a_log.float()), b, c)
        return residual + self.out(y * F.silu(gate))

    def scan(self, u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        decay = torch.exp(torch.einsum("bld,dn->bldn", delta, a))
        drive = torch.einsum("bld,bln,bld->bldn", delta, b, u)
        state, outputs = torch.zeros_like(decay[:, 0]), []
        for i in range(u.shape[1]):
            state = decay[:, i] * state + drive[:, i]
            outputs.append(torch.einsum("bdn,bn->bd", state, c[:, i, :]))
        return torch.stack(outputs, dim=1) + u * self.d


@program
def mamba(compile: Compile) -> Step:
    """johnma2006/mamba-minimal: a selective scan that is a loop over positions."""
    embed, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    model = nn.Sequential(embed, MambaBlock(), MambaBlock(), head)
    head.weight = embed.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return supervised(compile(model), optimizer, texts(2), token_loss)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of features turned by their position's angles, as by lucidrains' rotary embeddings."""
    one, other = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-other, one], -1).flatten(-2)
    return x * angles.cos() + turned * angles.sin()


class Residual(nn.Module):
    """A layer of x-transformers: a norm, the layer, what it is added to."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.gain, self.layer = nn.Parameter(torch.ones(WIDTH)), layer

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return x + self.layer(F.normalize(x, dim=-1) * WIDTH**0.5 * self.gain, **kwargs)


class RotaryAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU())

    def forward(self, x: Tensor, mask: Tensor | None = None, angles: Any = None) -> Tensor:
        split = lambda t, h: t.unflatten(-1, (h, -1)).transpose(1, 2)  # noqa: E731
        q = split(self.q(x), HEADS)
        k, v = (split(t, HEADS // 2) for t in self.kv(x).chunk(2, dim=-1))
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        q, k = (rotated(F.normalize(t, dim=-1), angles) for t in (q, k))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * 10
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -torch.finfo(scores.dtype).max)
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(causal, -torch.finfo(scores.dtype).max)
        y = torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1, dtype=torch.float32), v)
        return self.out(y.transpose(1, 2).flatten(2))


class GatedFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.into(x).chunk(2, dim=-1)
        return self.out(F.dropout(x * F.gelu(gate), 0.1, self.training))


class Decoder(nn.Module):
    rates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        kinds = ("attend", "feed") * 2
        self.layers = nn.ModuleList(
            Residual(RotaryAttention() if kind == "attend" else GatedFeedForward())
            for kind in kinds
        )
        self.kinds = kinds
        half = WIDTH // HEADS // 2
        self.register_buffer("rates", 1e4 ** -(torch.arange(half) / half), persistent=False)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        angles = torch.arange(tokens.shape[1])[:, None] * self.rates
        shared = {"mask": mask, "angles": angles.repeat_interleave(2, -1)}
        x = self.embed(tokens)
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = layer(x, **(shared if kind == "attend" else {}))
        return self.head(x)


class AutoregressiveWrapper(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        given, target = tokens[:, :-1], tokens[:, 1:]
        kept = torch.rand(given.shape).argsort(dim=-1) >= 2
        return F.cross_entropy(self.net(given, mask=kept).transpose(1, 2), target)


@program
def x_transformers(compile: Compile) -> Step:
    """lucidrains/x-transformers: rotary, grouped keys of unit length, gated layers, masked tokens."""
    model = AutoregressiveWrapper(Decoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = [(torch.cat([x, y[:, -1:]], 1), None) for x, y in texts()]
    loss = lambda loss, _: loss  # noqa: E731
    return supervised(compile(model), optimizer, batches, loss, model.parameters())


# -- fits


class GraphAttention(nn.Module):
    def __init__(self, inputs: int, outputs: int, heads: int, mean: bool = False) -> None:
        super().__init__()
        self.heads, self.mean, self.outputs = heads, mean, outputs
        self.weight = nn.Parameter(torch.empty(inputs, heads * outputs))
        self.attention = nn.Parameter(torch.empty(heads, 2 * outputs, 1))
        for p in self.parameters():
            nn.init.xavier_normal_(p)

    def forward(self, h: Tensor, adjacent: Tensor) -> Tensor:
        n = h.shape[0]
        h = torch.mm(h, self.weight).view(n, self.heads, self.outputs).permute(1, 0, 2)
        source = torch.matmul(h, self.attention[:, : self.outputs, :])
        target = torch.matmul(h, self.attention[:, self.outputs :, :])
        scores = F.leaky_relu(source + target.mT, 0.2)
        scores = torch.where(adjacent > 0, scores, -9e16 * torch.ones_like(scores))
        h = torch.matmul(F.dropout(F.softmax(scores, dim=-1), 0.6, training=self.training), h)
        return h.mean(dim=0) if self.mean else h.permute(1, 0, 2).reshape(n, -1)


class GAT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = GraphAttention(8, 8, 4), GraphAttention(32, 3, 1, mean=True)

    def forward(self, x: Tensor, adjacent: Tensor) -> Tensor:
        x = F.elu(self.one(F.dropout(x, 0.6, training=self.training), adjacent))
        x = self.two(F.dropout(x, 0.6, training=self.training), adjacent)
        return F.log_softmax(x, dim=1)


@program
def gat(compile: Compile) -> Step:
    """pytorch/examples gat: a whole graph in each step, a loss on some of its nodes."""
    model = GAT()
    compiled = compile(model)
    adjacent = ((torch.rand(200, 200) < 0.02) | torch.eye(200, dtype=torch.bool)).float()
    trained = torch.arange(40)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    loss = lambda out, labels: F.nll_loss(out[trained], labels[trained])  # noqa: E731
    batch = torch.rand(200, 8), torch.randint(3, (200,))
    return supervised(lambda x: compiled(x, adjacent), optimizer, [batch], loss)


class Positive(nn.Module):
    """A raw parameter and its softplus, as gpytorch's constraints have it."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.zeros(1, 1))

    @property
    def value(self) -> Tensor:
        return F.softplus(self.raw)


class GaussianProcess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.length, self.scale, self.noise = Positive(), Positive(), Positive()
        self.mean = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> MultivariateNormal:
        scaled = (x - x.mean(-2, keepdim=True)).div(self.length.value)
        norms = scaled.pow(2).sum(-1, keepdim=True)
        squares = (norms + norms.mT - 2 * scaled @ scaled.mT).clamp_min_(0)
        kernel = self.scale.value * squares.div_(-2).exp_()
        kernel = kernel + torch.eye(len(x)) * (self.noise.value + 1e-4)
        return MultivariateNormal(self.mean.expand(len(x)), kernel)


@program
def gaussian_process(compile: Compile) -> Step:
    """cornellius-gp/gpytorch, exact regression: a kernel matrix, its Cholesky factor, a log likelihood."""
    model = GaussianProcess()
    x = torch.linspace(0, 1, 100)[:, None]
    y = torch.sin(x[:, 0] * 6) + torch.randn(100) * 0.2
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss_of = compile(lambda x, y: -model(x).log_prob(y) / len(y))
    return supervised(lambda x: loss_of(x, y), optimizer, [(x, y)], lambda loss, _: loss)
