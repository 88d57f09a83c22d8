"""Compiled models in several processes: losses, gradients and buffers are those of eager."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch

from tests.aot.ddp_programs import TRAINING

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_pair(*checks: str, backend: str = "gloo") -> None:
    """Two processes that run checks of ddp_programs.py; starting them takes longer than most checks."""
    command = [sys.executable, "-m", "tests.aot.ddp_programs"]
    port = str(free_port())
    started = [
        subprocess.Popen(
            [*command, backend, str(rank), port, *checks],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            output, _ = process.communicate(timeout=500)
            assert process.returncode == 0, output[-3000:]
            assert {f"passed {name}" for name in checks} <= set(output.splitlines())
    finally:
        for process in started:
            process.kill()


@pytest.mark.long
def test_collectives_inside_of_compiled_functions() -> None:
    run_pair("collectives")


@pytest.mark.long
def test_training_under_ddp() -> None:
    run_pair(*TRAINING)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_training_and_collectives_on_two_gpus() -> None:
    run_pair(*TRAINING, "collectives", backend="nccl")
