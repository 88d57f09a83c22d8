"""Real models, small: what the corridor is checked against. Nothing in minicompile knows their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicompile.lessons.model import GPT, GPTConfig

Model = tuple[nn.Module, dict[str, torch.Tensor]]

TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2(scale: int = 1) -> Model:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=32 * scale, n_head=2, vocab_size=64, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **TOKENS,
    )  # fmt: skip
    return GPT2LMHeadModel(config), _ids(labels=True)


def llama(scale: int = 1) -> Model:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32 * scale, intermediate_size=64 * scale,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=64, **TOKENS,
    )  # fmt: skip
    return LlamaForCausalLM(config), _ids(labels=True)


def bert(scale: int = 1) -> Model:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=2, hidden_size=32 * scale, intermediate_size=64 * scale,
        num_attention_heads=2, vocab_size=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **TOKENS,
    )  # fmt: skip
    return BertForMaskedLM(config), _ids(labels=True)


def vit(scale: int = 1) -> Model:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32 * scale, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64 * scale, image_size=16, patch_size=8, num_labels=5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification",  # else set by the first call
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 16, 16, generator=generator)
    return ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.tensor([0, 3]),
    }


def _ids(labels: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (2, 8), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if labels:
        inputs["labels"] = ids.clone()
    return inputs


ZOO: dict[str, Callable[..., Model]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit}


def outputs(result: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model's output by name."""
    return {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}


class Conv(nn.Module):
    """Halves an image, doubles it again by a factor, and counts in batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        wide = F.relu(self.norm(self.first(x)))
        again = F.interpolate(self.second(wide), scale_factor=2.0, mode="nearest")
        return {"loss": F.max_pool2d(wide + again, 2).square().mean()}


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda make=make: make()[0] for name, make in ZOO.items()},
    "conv": Conv,
    "lesson": lambda: GPT(GPTConfig(n_layer=1, n_embd=16, n_head=2, block_size=8)),
}
Size = tuple[int, ...]


def inputs_of(name: str, size: Size) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Random inputs, and which of their dimensions the sizes are."""
    if name == "conv":
        return {"x": torch.randn(size[0], 3, *size[1:])}, (0, 2, 3)
    if name == "vit":
        images = torch.randn(*size, 3, 16, 16)
        return {"pixel_values": images, "labels": torch.randint(0, 5, size)}, (0,)
    ids = torch.randint(1, 64, size)
    if name == "lesson":
        return {"idx": ids, "targets": ids.clone()}, (0,)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}, (0, 1)
