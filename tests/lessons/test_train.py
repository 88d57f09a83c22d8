"""Training measures what it says, and a compiler can be put in its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minicompile.lessons.model import GPT, GPTConfig
from minicompile.lessons.train import train

SMALL = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)


def test_compile_function_sees_the_model_and_runs_every_step():
    calls: list[int] = []

    def counting(model: GPT) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            calls.append(1)
            return model(*args)

        return run

    model = GPT(SMALL)
    result = train(model, 5, counting)
    assert len(calls) == len(result.losses) == 5
