"""Real models through the whole corridor: same loss and gradients as eager, one graph each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import minicompile as mc
from tests.corridor.zoo import ZOO, outputs

pytest.importorskip("transformers")
TOLERANCE = 1e-4


def run_training(
    model: torch.nn.Module, call: Any, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Loss, outputs and every gradient by name."""
    model.zero_grad(set_to_none=True)
    result = call(**inputs)
    result.loss.backward()
    found = {f"output {k}": v.detach() for k, v in outputs(result).items()}
    found.update({f"grad {k}": p.grad for k, p in model.named_parameters() if p.grad is not None})
    return found


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("name", ZOO)
def test_training_gives_eager_loss_and_gradients_from_one_graph(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = ZOO[name]()
    model.train()
    reference = copy.deepcopy(model)
    want = run_training(reference, reference, inputs)
    compiled = mc.compile(model, fullgraph=True)
    got = run_training(model, compiled, inputs)
    assert_close(got, want)
    report = mc.explain(model)(**inputs)
    assert (report.graph_count, len(report.breaks)) == (1, 0)
