"""A training step under DistributedDataParallel by eager, torch.compile and minicompile, in turns:

torchrun --standalone --nproc-per-node 2 -m tests.bench.ddp [--width 256] [--layers 6] [--gpt2]

One thread for each process, or a GPU through NCCL; processes that share one GPU talk through gloo, and their
times say little. --gpt2: its sizes (124 million parameters, 512 tokens), in float32. "one group":
minicompile's gradients all come out at the end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import minicompile as mc
from minicompile import compat
from minicompile.lessons.model import GPT, GPTConfig

WAYS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda model: model,
    "torch.compile": lambda model: torch.compile(model),
    "minicompile": lambda model: mc.compile(model),
    "one group": lambda model: mc.compile(model),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (
        ("width", 256),
        ("layers", 4),
        ("batch", 2),
        ("rounds", 8),
        ("bucket", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gpt2", action="store_true")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cuda, gpus = torch.cuda.is_available(), torch.cuda.device_count()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % gpus)
    own = cuda and gpus >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if own else "gloo")
    device = torch.device("cuda" if cuda else "cpu")
    config = GPTConfig(n_embd=chosen.width, n_layer=chosen.layers)
    if chosen.gpt2:
        config = GPTConfig(50257, 512, 12, 12, 768, tied=True, attention="library")
    steps: dict[str, Callable[..., torch.Tensor]] = {}
    for name, way in WAYS.items():
        torch.manual_seed(0)
        model = GPT(config).to(device)
        options = {"bucket_cap_mb": chosen.bucket} if chosen.bucket else {}
        ddp: Any = DistributedDataParallel(way(model), **options)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (2, chosen.batch, config.block_size)
        tokens = torch.randint(config.vocab_size, shape, generator=generator).to(device)

        def step(ddp: Any = ddp, optimizer: Any = optimizer, tokens: Any = tokens) -> torch.Tensor:
            loss: torch.Tensor = ddp(*tokens)[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        steps[name] = step
        if name == "one group":
            with mock.patch.object(compat, "ddp_buckets", lambda: None):
                ddp(*tokens)
    losses = {name: [step().item() for _ in range(3)] for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(chosen.rounds):
        for name, step in steps.items():
            dist.barrier()
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(3):
                step()
            if cuda:
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / 3 * 1e3)
    if dist.get_rank() == 0:
        size = sum(p.nbytes for p in model.parameters()) / 2**20
        where = f"{device.type}, {dist.get_backend()}"
        print(f"{size:.1f} MiB of parameters, {dist.get_world_size()} processes, {where}")
        for name, found in times.items():
            off = max(abs(a - b) for a, b in zip(losses[name], losses["eager"], strict=True))
            median, best = statistics.median(found), min(found)
            print(f"{name:14} {median:8.2f} ms a step, best {best:8.2f}, loss off by {off:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
