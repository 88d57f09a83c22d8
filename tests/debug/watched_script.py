"""The script that the documents' commands run: one compiled function, trained, called with two sizes.

A parameter is copied, so that a post-grad pass has something to do; operators work in place, so that
functionalization has; a parameter is named like one of them.
"""

import sys

import torch

import minicompile as mc


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.Linear(8, 8)
        self.add_bias = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.second(self.first(x))
        hidden.mul_(2).add_(self.add_bias.clone()).sub_(1)
        waves = (hidden * 2).exp().sin()
        return waves / waves.sum(dim=-1, keepdim=True), waves.cos()


def with_break(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    print("a graph break")
    return y.cos()


if __name__ == "__main__":
    model = mc.compile(Model())
    if "inference" in sys.argv:
        with torch.no_grad():
            model(torch.ones(4, 8))
    else:
        sum(result.sum() for result in model(torch.ones(4, 8))).backward()
    if "twice" in sys.argv:
        model(torch.ones(6, 8))
    if "break" in sys.argv:
        mc.compile(with_break)(torch.ones(3))
