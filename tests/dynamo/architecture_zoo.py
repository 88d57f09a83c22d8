"""Architectures of transformers at tiny sizes, with random weights: nothing is downloaded, dropout is off."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 64
TOKENS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "vocab_size": VOCABULARY}
"""Sizes and token numbers that every text model takes."""
TINY = {
    **TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
GROUPED = {**TINY, "num_key_value_heads": 1, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMAGE = {"image_size": 16, "patch_size": 8, "num_labels": 3}
STAGES = {"depths": [1, 1], "hidden_sizes": [8, 16]}
SOUND = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
TWO_STACKS = {
    **TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 0,
    "scale_embedding": True,
}

Inputs = dict[str, torch.Tensor]


def token_ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 8))


def text() -> Inputs:
    """Two sequences, of which the second is padded."""
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 6:] = 0
    return {"input_ids": token_ids(), "attention_mask": mask}


def labelled_text() -> Inputs:
    return {**text(), "labels": token_ids()}


def two_texts() -> Inputs:
    return {**text(), "decoder_input_ids": token_ids(), "labels": token_ids()}


def images() -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 2])}


def images_and_text() -> Inputs:
    return {**text(), "pixel_values": torch.randn(2, 3, 16, 16)}


def sound() -> Inputs:
    return {"input_values": torch.randn(2, 400)}


def spectrum() -> Inputs:
    return {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": token_ids()}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One model class, the fields of its configuration, and what a call of it takes."""

    name: str
    family: str
    model: str
    config: str
    fields: dict[str, Any]
    inputs: Callable[[], Inputs]
    in_float64: bool
    """Whether every operator in it has a kernel for float64."""
    asks: bool
    """Whether it asks if it is being compiled, and then computes in another way."""

    def make(self) -> tuple[torch.nn.Module, Inputs]:
        """The model and its inputs, the same ones every time. Raises ImportError without transformers."""
        import transformers

        torch.manual_seed(0)
        config = without_dropout(getattr(transformers, self.config)(**self.fields))
        return getattr(transformers, self.model)(config), self.inputs()


def without_dropout(config: Any) -> Any:
    """A configuration, and those inside it, with every probability of dropping something at 0."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            without_dropout(value)
        elif isinstance(value, float) and ("drop" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    return config


ALL: dict[str, Architecture] = {}


def architecture(
    family: str,
    name: str,
    model: str,
    inputs: Callable[[], Inputs],
    config: str = "",
    **fields: Any,
) -> None:
    """List `<name><model>` of transformers, configured by `<name>Config` unless it says otherwise."""
    config = f"{config or name}Config"
    in_float64 = family != "experts"  # which are multiplied by torch._grouped_mm
    asks = name == "Mamba"  # which scans in parallel, with torch's associative_scan
    ALL[name] = Architecture(
        name, family, f"{name}{model}", config, fields, inputs, in_float64, asks
    )


encoder = functools.partial(architecture, "encoder")
decoder = functools.partial(architecture, "decoder")
encoder_decoder = functools.partial(architecture, "encoder-decoder")
experts = functools.partial(architecture, "experts")
vision = functools.partial(architecture, "vision")
audio = functools.partial(architecture, "audio")
state_space = functools.partial(architecture, "state-space")

encoder("Bert", "ForMaskedLM", labelled_text, **TINY)
encoder("Albert", "ForMaskedLM", labelled_text, **TINY, embedding_size=16)
encoder(
    "DistilBert",
    "ForMaskedLM",
    labelled_text,
    **TOKENS,
    dim=32,
    n_layers=2,
    n_heads=2,
    hidden_dim=64,
)
encoder(
    "DebertaV2",
    "ForMaskedLM",
    labelled_text,
    **TINY,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    position_buckets=4,
)
encoder("MPNet", "ForMaskedLM", labelled_text, **TINY)
encoder("ModernBert", "ForMaskedLM", labelled_text, **TINY, cls_token_id=0, sep_token_id=2)

decoder("GPT2", "LMHeadModel", labelled_text, **TOKENS, n_embd=32, n_layer=2, n_head=2)
decoder("GPTNeoX", "ForCausalLM", labelled_text, **TINY)
decoder("Llama", "ForCausalLM", labelled_text, **GROUPED)
decoder("Mistral", "ForCausalLM", labelled_text, **GROUPED, sliding_window=4)
decoder("Gemma2", "ForCausalLM", labelled_text, **GROUPED, sliding_window=4)
decoder("Phi", "ForCausalLM", labelled_text, **TINY)
decoder("OPT", "ForCausalLM", labelled_text, **TINY, ffn_dim=64, word_embed_proj_dim=32)
decoder("Bloom", "ForCausalLM", labelled_text, **TOKENS, hidden_size=32, n_layer=2, n_head=2)
decoder("Falcon", "ForCausalLM", labelled_text, **TINY)

encoder_decoder(
    "T5",
    "ForConditionalGeneration",
    two_texts,
    **TOKENS,
    d_model=32,
    d_kv=16,
    d_ff=64,
    num_layers=2,
    num_heads=2,
    decoder_start_token_id=0,
)
encoder_decoder("Bart", "ForConditionalGeneration", two_texts, **TWO_STACKS)

experts("Mixtral", "ForCausalLM", labelled_text, **GROUPED, num_local_experts=4)
experts("Qwen2Moe", "ForCausalLM", labelled_text, **GROUPED, **EXPERTS, num_experts=4)

vision("ViT", "ForImageClassification", images, **TINY, **IMAGE)
vision("Beit", "ForImageClassification", images, **TINY, **IMAGE)
vision(
    "Swin",
    "ForImageClassification",
    images,
    image_size=16,
    patch_size=2,
    window_size=2,
    embed_dim=8,
    depths=[2, 1],
    num_heads=[1, 2],
    num_labels=3,
)
vision("ConvNext", "ForImageClassification", images, **STAGES, num_stages=2, num_labels=3)
vision("ResNet", "ForImageClassification", images, **STAGES, embedding_size=8, num_labels=3)

architecture(
    "vision-language",
    "CLIP",
    "Model",
    images_and_text,
    text_config=TINY,
    vision_config={**TINY, **IMAGE},
    projection_dim=16,
)

audio(
    "Whisper",
    "ForConditionalGeneration",
    spectrum,
    **{key: value for key, value in TWO_STACKS.items() if key != "max_position_embeddings"},
    num_mel_bins=8,
    max_source_positions=16,
    max_target_positions=16,
)
audio("Wav2Vec2", "ForCTC", sound, **TINY, **SOUND)
audio("Hubert", "Model", sound, **TINY, **SOUND)

state_space("Mamba", "ForCausalLM", labelled_text, **TINY, state_size=4)
state_space(
    "Mamba2",
    "ForCausalLM",
    labelled_text,
    **TINY,
    state_size=4,
    num_heads=4,
    head_dim=16,
    n_groups=2,
    chunk_size=4,
)
state_space(
    "RecurrentGemma",
    "ForCausalLM",
    labelled_text,
    **GROUPED,
    lru_width=32,
    attention_window_size=4,
    block_types=["recurrent", "attention"],
)
state_space("Rwkv", "ForCausalLM", labelled_text, **TOKENS, hidden_size=32, num_hidden_layers=2)
