"""The named models, compiled."""

from __future__ import annotations

import pytest
import torch

import minicompile
from minicompile.bench.cases import MODELS

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_eager_s_numbers(name: str) -> None:
    model = MODELS[name]
    if model.gpu:
        pytest.importorskip("transformers")
    whole = "in_context" not in name  # whose point is a graph break
    fns = (model.fn, minicompile.compile(model.fn, fullgraph=whole))
    eager, ours = (model.run(f, model.make_inputs("cpu", torch.float32, "small")) for f in fns)
    torch.testing.assert_close(ours, eager, rtol=2e-5, atol=2e-5)
