"""What test_distributed.py runs in each of two processes:

python -m tests.aot.ddp_programs BACKEND RANK PORT CHECK..."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minicompile as mc

WORLD = 2


def device() -> torch.device:
    """This process's own."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


class Net(nn.Module):
    """Layers, a batch norm (buffers), a parameter used at both ends."""

    def __init__(self, layers: int = 6, width: int = 32, broken: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.BatchNorm1d(width)
        self.spare = nn.Linear(width, width)
        self.broken, self.use_spare = broken, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = nn.functional.gelu(layer(x)) + x
            if self.broken and number == 2:
                print(end="")
        x = self.norm(x)
        if self.use_spare:
            x = self.spare(x)
        return x @ self.first.weight


def batches(count: int, width: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(8, width, generator=generator).to(device()) for _ in range(count)]


def train(
    how: str,
    steps: int = 3,
    quiet: bool = False,
    spare: bool = True,
    broken: bool = False,
    **options: Any,
) -> list[torch.Tensor]:
    """Losses and all parameters' gradients, step by step. `quiet`: every other step under no_sync."""
    torch.manual_seed(0)
    model = Net(broken=broken).to(device())
    model.use_spare = spare
    inner = mc.compile(model) if how == "inside" else model
    wrapped = DistributedDataParallel(inner, bucket_cap_mb=0.01, **options)
    call = mc.compile(wrapped) if how == "outside" else wrapped
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    seen: list[torch.Tensor] = []
    for number, x in enumerate(batches(steps)):
        with wrapped.no_sync() if quiet and number % 2 == 0 else nullcontext():
            loss = call(x).square().mean()
            loss.backward()
        seen.append(loss.detach())
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if not (quiet and number % 2 == 0):
            optimizer.step()
            optimizer.zero_grad()
    return seen + list(model.buffers())


TRAINING: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused parameters": {"find_unused_parameters": True, "spare": False},
    "static graph": {"static_graph": True},
    "no_sync": {"quiet": True, "steps": 4},
    "gradient as bucket view": {"gradient_as_bucket_view": True},
    "graph break": {"broken": True},
}


def same_as_eager(**options: Any) -> None:
    expected = train("eager", **options)
    for how in ("inside", "outside"):
        mc.reset()
        found = train(how, **options)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# Collectives inside of compiled functions


def functional(x: torch.Tensor) -> torch.Tensor:
    """The second result is never read: the other process waits for it all the same."""
    total = fc.all_reduce(x * 2, "sum", dist.group.WORLD)
    fc.all_reduce(x.cos(), "max", dist.group.WORLD)
    return total.sin() / WORLD + x


def in_place(x: torch.Tensor) -> torch.Tensor:
    """Not functional: between two graphs."""
    y = x * 2
    dist.all_reduce(y)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return y + x


def example() -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() + 5)
    return torch.randn(4, 6, generator=generator).to(device())


def collectives_are_left_to_eager() -> None:
    for function in (functional, in_place):
        given, mine = example(), example()
        torch.testing.assert_close(mc.compile(function)(mine), function(given))
        torch.testing.assert_close(mine, given)
    reasons = str(mc.explain(in_place)(example()).breaks)
    assert "[several-processes]" in reasons, reasons


def main(backend: str, rank: str, port: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(int(rank))
    store = dist.TCPStore("127.0.0.1", int(port), WORLD, rank == "0")
    dist.init_process_group(backend, store=store, rank=int(rank), world_size=WORLD)
    for name in names:
        mc.reset()
        if name in TRAINING:
            same_as_eager(**TRAINING[name])
        else:
            collectives_are_left_to_eager()
        print("passed", name, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # the interpreter's end may meet threads of gloo that still run


if __name__ == "__main__":
    main(*sys.argv[1:])
