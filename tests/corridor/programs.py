"""Training programs of the kinds that people compile, small, with random data: text, and learning to act.

Each builds a model from torch's global generator, compiles what its original's users compile, and returns
one training step. The originals are named in the docstrings; no line is theirs. Those of images are in
`image_programs.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

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
    text = torch.randint(VOCABULARY, (2 * 6 + 4, 4))
    starts, hidden = itertools.cycle(range(0, len(text) - 1, 6)), model.start(4)

    def step() -> Tensor:
        nonlocal hidden
        at = next(starts)
        data, target = text[at : at + 6], text[at + 1 : at + 7].reshape(-1)
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
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.ModuleDict(
            {"fc": nn.Linear(WIDTH, 4 * WIDTH), "out": nn.Linear(4 * WIDTH, WIDTH)}
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        parts = self.attend(self.norm_1(x)).split(c, dim=2)
        q, k, v = (p.view(b, t, HEADS, c // HEADS).transpose(1, 2) for p in parts)
        chance = self.drop.p if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=True)
        x = x + self.drop(self.project(y.transpose(1, 2).contiguous().view(b, t, c)))
        return x + self.drop(self.mlp.out(F.gelu(self.mlp.fc(self.norm_2(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([GPTBlock() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
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
    model = GPT()
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


# -- learning to act


class Policy(nn.Module):
    """Chooses actions; keeps what a finished episode needs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.action, self.value = nn.Linear(4, 64), nn.Linear(64, 2), nn.Linear(64, 1)
        self.saved: list[Any] = []
        self.rewards: list[float] = []

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.body(x))
        return F.softmax(self.action(x), dim=-1), self.value(x)


def episode(policy: Policy, choose: Callable[[Tensor], int], length: int = 6) -> Tensor:
    """Play in a made-up world; the normalized returns."""
    state = torch.randn(4)
    for _ in range(length):
        action = choose(state)
        policy.rewards.append(float(state[action]))
        state = 0.9 * state + torch.randn(4) * (0.1 + 0.1 * action)
    total, returns = 0.0, []
    for reward in policy.rewards[::-1]:
        total = reward + 0.99 * total
        returns.insert(0, total)
    found = torch.tensor(returns)
    return (found - found.mean()) / (found.std() + 1e-8)


@program
def actor_critic(compile: Compile) -> Step:
    """pytorch/examples reinforcement_learning/actor_critic, with choosing and finishing compiled as well."""
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-2)

    @compile
    def choose(state: Tensor) -> int:
        probabilities, value = policy(state)
        chances = Categorical(probabilities)
        action = chances.sample()
        policy.saved.append((chances.log_prob(action), value))
        return action.item()  # type: ignore[no-any-return]

    @compile
    def finish(returns: Tensor) -> Tensor:
        policy_losses, value_losses = [], []
        for (log, value), total in zip(policy.saved, returns, strict=True):
            policy_losses.append(-log * (total - value.item()))
            value_losses.append(F.smooth_l1_loss(value, torch.stack([total])))
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        del policy.rewards[:], policy.saved[:]
        return loss.detach()

    return lambda: finish(episode(policy, choose))


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 3))

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        chances = Categorical(logits=self.actor(x))
        if action is None:
            action = chances.sample()
        return action, chances.log_prob(action), chances.entropy(), self.critic(x)


@program
def ppo(compile: Compile) -> Step:
    """vwxyzjn/cleanrl ppo.py: the acting policy and the update on a minibatch are compiled."""
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    act = compile(agent.get_action_and_value)

    @compile
    def update(obs: Tensor, actions: Tensor, logs: Tensor, gains: Tensor, goals: Tensor) -> Tensor:
        _, new_logs, entropy, values = agent.get_action_and_value(obs, actions)
        change = new_logs - logs
        ratio = change.exp()
        with torch.no_grad():
            distance = ((ratio - 1) - change).mean()
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        clipped = -gains * torch.clamp(ratio, 0.8, 1.2)
        policy_loss = torch.max(-gains * ratio, clipped).mean()
        value_loss = 0.5 * ((values.view(-1) - goals) ** 2).mean()
        loss = policy_loss - 0.01 * entropy.mean() + 0.5 * value_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        return loss.detach() + 0 * distance

    def step() -> Tensor:
        obs = torch.randn(128, 4)
        with torch.no_grad():
            actions, logs, _, values = act(obs)
        goals = torch.randn(128) + values.flatten()
        for rows in torch.randperm(128).split(32):
            parts = (x[rows] for x in (obs, actions, logs, goals - values.flatten(), goals))
            loss = update(*parts)
        return loss

    return step
