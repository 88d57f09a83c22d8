"""Whole networks for GPUs, among the named models: those of `transformers`, with random weights.

They have no dropout, whose random numbers differ between compilers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicompile.bench.models import MODELS, Made, make_network, register
from minicompile.bench.patterns import Subject

BLOCKS = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
TEXT = {**BLOCKS, "vocab_size": 100, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
IMAGE = {**BLOCKS, "image_size": 32, "num_labels": 10}
RESNET = {"hidden_sizes": [16, 32], "depths": [1, 2], "embedding_size": 8, "num_labels": 10}
"""What makes them small."""


def network(module: nn.Module, given: Tensor, targets: Tensor) -> Any:
    """The logits; in training the loss too."""
    logits = module(given).logits
    if not module.training:
        return logits
    return logits, F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def building(
    name: str, small: dict[str, Any], *shape: int, **config: Any
) -> Callable[[bool], Made]:
    """Builds a module and its inputs: tokens of a shape or, for one dimension, images.

    What it gives raises ImportError where `transformers` is missing.
    """

    def build(is_small: bool) -> Made:
        import transformers

        kind = getattr(transformers, name)
        module = kind(kind.config_class(**(config | small if is_small else config)))
        if len(shape) == 2:
            size, high = (2, 16) if is_small else shape, module.config.vocab_size
            return module, [torch.randint(high, size), torch.randint(high, size)]
        count, side = (2, 32) if is_small else (*shape, 224)
        labels = torch.randint(module.config.num_labels, (count,))
        return module, [torch.randn(count, 3, side, side), labels]

    return build


GPT2 = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False}
LLAMA = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 12, "use_cache": False,
}  # fmt: skip
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
NETWORKS = {
    "gpt2": building("GPT2LMHeadModel", TEXT, 8, 512, **GPT2),
    "llama": building("LlamaForCausalLM", TEXT, 8, 512, **LLAMA),
    "bert": building("BertForMaskedLM", TEXT, 16, 256, **BERT),
    "vit": building("ViTForImageClassification", IMAGE, 64, num_labels=1000),
    "resnet50": building("ResNetForImageClassification", RESNET, 64, num_labels=1000),
}
"""GPT-2 124M, Llama-160M, BERT-base, ViT-B/16, ResNet-50."""

for _name, _build in NETWORKS.items():
    register(_name, network, _build, gpu=True)

_token = building("GPT2LMHeadModel", TEXT, 1, 1, **GPT2)
MODELS["gpt2_token"] = Subject(
    "gpt2_token", network, partial(make_network, _token, False), gpu=True, mode="reduce-overhead"
)
