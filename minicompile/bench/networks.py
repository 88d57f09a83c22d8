"""Whole networks for GPUs, among the named models: those of `transformers`, with random weights.

They have no dropout, whose random numbers differ between compilers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicompile.bench.models import MODELS, Made, Model

SMALL_TEXT = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 100,
}
SMALL_TEXT |= {
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GPT2 = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False}
LLAMA = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "num_key_value_heads": 12, "use_cache": False,
}  # fmt: skip
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL_IMAGE = {
    "image_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SMALL_IMAGE |= {"intermediate_size": 64, "num_labels": 10}
SMALL_RESNET = {"hidden_sizes": [16, 32], "depths": [1, 2], "embedding_size": 8, "num_labels": 10}


def network(module: nn.Module, given: Tensor, targets: Tensor) -> Any:
    """The logits; in training the loss too."""
    logits = module(given).logits
    if not module.training:
        return logits
    return logits, F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def built(name: str, small: bool, config: dict[str, Any], small_config: dict[str, Any]) -> Any:
    """A module of `transformers`. Raises ImportError where that is missing."""
    import transformers

    kind = getattr(transformers, name)
    return kind(kind.config_class(**(config | small_config if small else config)))


def text(name: str, config: dict[str, Any], batch: int, length: int) -> Callable[[bool], Made]:
    """Builds a language model and its tokens."""

    def build(small: bool) -> Made:
        module = built(name, small, config, SMALL_TEXT)
        shape = (2, 16) if small else (batch, length)
        tokens, targets = (torch.randint(module.config.vocab_size, shape) for _ in range(2))
        return module, [tokens, targets]

    return build


def images(
    name: str, config: dict[str, Any], small_config: dict[str, Any], batch: int
) -> Callable[[bool], Made]:
    """Builds a classifier and its images."""

    def build(small: bool) -> Made:
        module = built(name, small, config, small_config)
        count, side = (2, 32) if small else (batch, 224)
        labels = torch.randint(module.config.num_labels, (count,))
        return module, [torch.randn(count, 3, side, side), labels]

    return build


NETWORKS: dict[str, Callable[[bool], Made]] = {
    "gpt2": text("GPT2LMHeadModel", GPT2, 8, 512),
    "llama": text("LlamaForCausalLM", LLAMA, 8, 512),
    "bert": text("BertForMaskedLM", BERT, 16, 256),
    "vit": images("ViTForImageClassification", {"num_labels": 1000}, SMALL_IMAGE, 64),
    "resnet50": images("ResNetForImageClassification", {"num_labels": 1000}, SMALL_RESNET, 64),
}
"""GPT-2 124M, Llama-160M, BERT-base, ViT-B/16, ResNet-50."""

for _name, _build in NETWORKS.items():
    for _training in (False, True):
        _full = _name + "_training" * _training
        MODELS[_full] = Model(_full, network, _build, _training, gpu=True)

one_token = text("GPT2LMHeadModel", GPT2, 1, 1)
MODELS["gpt2_token"] = Model("gpt2_token", network, one_token, gpu=True, mode="reduce-overhead")
