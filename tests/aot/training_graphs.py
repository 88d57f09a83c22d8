"""Models whose training graphs the partitioner and the clock are tried on, captured whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from minicompile.api import backends, reset
from minicompile.api import compile as compile_
from minicompile.dynamo.result import Capture
from minicompile.ops.registry import scoped
from minicompile.pipeline import aot_eager

WIDTH, LAYERS, HEADS, BATCH, LENGTH, VOCABULARY = 64, 2, 2, 4, 32, 256
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
TRANSFORMER = {
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}

Made = tuple[nn.Module, dict[str, torch.Tensor]]


def token_ids() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2(layers: int = LAYERS) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=WIDTH,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        **TOKENS,
    )
    return GPT2LMHeadModel(config), token_ids()


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=VOCABULARY, **TRANSFORMER, **TOKENS)
    return BertForMaskedLM(config), token_ids()


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=4 * WIDTH,
        num_layers=LAYERS, num_heads=HEADS, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), token_ids()


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, **TRANSFORMER, **TOKENS)
    return LlamaForCausalLM(config), token_ids()


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=32, patch_size=8, num_labels=5, problem_type="single_label_classification",
        **TRANSFORMER,
    )  # fmt: skip
    labels = torch.arange(BATCH) % 5
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(BATCH, 3, 32, 32),
        "labels": labels,
    }


class Residual(nn.Module):
    """Two convolutions with batch norm, added to what came in; the first may halve the image."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.short = nn.Sequential()
        if stride != 1:
            conv = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(
            Residual(16, 16, 1), Residual(16, 24, 2), Residual(24, 24, 1), Residual(24, 32, 2)
        )
        self.head = nn.Linear(32, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        x = F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1)
        return F.cross_entropy(self.head(x), labels)


def resnet() -> Made:
    return ResNet(), {"images": torch.randn(BATCH, 3, 32, 32), "labels": torch.arange(BATCH)}


MODELS: dict[str, Callable[..., Made]] = {
    "gpt2": gpt2, "bert": bert, "t5": t5, "llama": llama, "vit": vit, "resnet": resnet,
}  # fmt: skip


def capture_of(target: Any, *args: Any, **kwargs: Any) -> Capture:
    """The one graph that a call of a function or module is captured as."""
    found: list[Capture] = []

    with scoped():

        @backends("keep")
        def keep(options: Any) -> Any:
            def compile_with(capture: Capture) -> Any:
                found.append(capture)
                return aot_eager(capture, options)

            return compile_with

        compile_(target, backend="keep", fullgraph=True, dynamic=False)(*args, **kwargs)
    reset()
    (capture,) = found
    return capture


def training_capture(name: str, **sizes: int) -> Capture:
    """A model of `MODELS` as one captured graph, dropout on."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](**sizes)
    return capture_of(model.train(), **inputs)
