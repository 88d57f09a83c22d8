"""Models of `transformers` for packages."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from minicompile.bench.networks import TEXT

SMALL = {**TEXT, "num_hidden_layers": 1}


class Logits(nn.Module):
    """What a model gives, without its own class of results; with random weights."""

    def __init__(self, name: str, small: bool = True, **config: Any) -> None:
        transformers = pytest.importorskip("transformers")
        super().__init__()
        kind = getattr(transformers, name)
        self.model = kind(kind.config_class(**config, **(SMALL if small else {})))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits
