"""Training programs that learn to act, as `programs.py` has them of text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from tests.corridor.programs import Compile, Step, program


class Policy(nn.Module):
    """Chooses actions; keeps what a finished episode needs."""

    def __init__(self, critic: bool) -> None:
        super().__init__()
        self.body, self.action = nn.Linear(4, 128), nn.Linear(128, 2)
        self.drop, self.value = nn.Dropout(0.6), nn.Linear(128, 1) if critic else None
        self.saved: list[Any] = []
        self.rewards: list[float] = []

    def forward(self, x: Tensor) -> Any:
        if self.value is not None:
            x = F.relu(self.body(x))
            return F.softmax(self.action(x), dim=-1), self.value(x)
        return F.softmax(self.action(F.relu(self.drop(self.body(x)))), dim=1)


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
def reinforce(compile: Compile) -> Step:
    """pytorch/examples reinforcement_learning/reinforce."""
    policy = Policy(critic=False)
    compiled = compile(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def choose(state: Tensor) -> int:
        chances = Categorical(compiled(state.unsqueeze(0)))
        action = chances.sample()
        policy.saved.append(chances.log_prob(action))
        return int(action.item())

    def step() -> Tensor:
        returns = episode(policy, choose)
        losses = [-log * r for log, r in zip(policy.saved, returns, strict=True)]
        optimizer.zero_grad()
        loss = torch.cat(losses).sum()
        loss.backward()
        optimizer.step()
        del policy.rewards[:], policy.saved[:]
        return loss.detach()

    return step


@program
def actor_critic(compile: Compile) -> Step:
    """pytorch/examples reinforcement_learning/actor_critic, with choosing and finishing compiled as well."""
    policy = Policy(critic=True)
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
