"""A small function that trains: a matrix product, fused loops, a reduction, and a backward."""

import torch


def scores(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = torch.relu(scores(x, w) + b)
    weights = torch.softmax(h, -1)
    return (weights * h).sum()


def example() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    w, b = torch.randn(32, 16), torch.randn(16)
    return torch.randn(64, 32), w.requires_grad_(), b.requires_grad_()
