"""The named patterns: short functions of plain PyTorch that deep learning is made of, with realistic sizes.

    pattern = PATTERNS["layer_norm"]
    inputs = pattern.make_inputs("cpu", torch.float32)
    results = pattern.run(pattern.fn, inputs)          # outputs, gradients, inputs

A pattern is registered with its inputs, each named by its dimensions; SIZES says how large those are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minicompile.compat import tree_leaves

Scale = Literal["large", "small", "cache", "dram", "gpu"]
SCALES: tuple[Scale, ...] = get_args(Scale)

SIZES = {
    "B": (8, 2, 2, 16, 16), "H": (12, 2, 4, 4, 32), "T": (512, 16, 256, 512, 1024),
    "E": (64, 8, 64, 512, 128), "D": (768, 24, 768, 2048, 4096), "F": (2048, 40, 2048, 2048, 4096),
    "G": (2048, 40, 768, 4096, 8192), "V": (16384, 50, 4096, 32768, 50257),
    "N": (32, 2, 8, 64, 64), "C": (64, 8, 32, 64, 256), "Y": (56, 8, 28, 64, 56),
    "16k": (16384, 70, 4096, 16384, 16384), "64k": (65536, 130, 4096, 65536, 65536),
    "X": (56, 12, 28, 64, 56), "2": (2, 2, 2, 2, 2),
}  # fmt: skip
"""Dimensions at each of SCALES: usual, for tests, tensors of a few MB, of 67 MB, of 50 million numbers."""

MEMORY_BOUND = (
    "gelu_bias", "swiglu", "layer_norm", "rms_norm", "group_norm", "softmax", "cross_entropy", "rope",
    "bce_loss", "adamw_step", "embedding_sum", "transposed_add",
)  # fmt: skip
"""The twelve by which a code generator is judged: kinds of kernels, each once."""

ON_GPU = (
    "gelu_bias", "swiglu", "layer_norm", "layer_norm, training", "rms_norm", "rms_norm, training",
    "softmax_4k", "softmax_16k", "softmax_64k", "rope", "cross_entropy, training", "bce_loss, training",
    "batch_norm, training", "transposed_add", "column_sums", "square_sum", "embedding_sum", "adamw_step",
    "cumsum", "argmax",
)  # fmt: skip
"""The twenty for GPUs; "training" times the backward too."""


@dataclass(frozen=True)
class Input:
    """A tensor by its dimensions: numbers of the pattern's dtype, or whole ones below a dimension's size."""

    dims: str
    below: str = ""
    constant: bool = False
    """Never asked for a gradient."""
    positive: bool = False


@dataclass(frozen=True)
class Subject:
    """What is measured: a function of tensors and perhaps a module. `training`: its gradients count too."""

    name: str
    fn: Callable[..., Any]
    make_inputs: Callable[..., list[Any]]
    """Takes device, dtype and scale; gives the same numbers at every call."""
    training: bool = False
    gpu: bool = False
    """Too large to be timed on a CPU unless it is asked for."""
    mode: str | None = None
    """What compilers are given as `mode`."""

    def run(self, fn: Callable[..., Any], inputs: list[Any]) -> list[Tensor]:
        """Call `fn`, the subject's own or a compiled one: outputs, gradients, what the inputs are then."""
        torch.manual_seed(0)
        outputs = self.outputs(fn, inputs)
        return [*outputs, *gradients(trained(inputs), outputs, factors(outputs)), *held(inputs)]

    def outputs(self, fn: Callable[..., Any], inputs: list[Any]) -> list[Tensor]:
        with torch.set_grad_enabled(self.training):
            return [leaf for leaf in tree_leaves(fn(*inputs)) if isinstance(leaf, Tensor)]

    def step(self, fn: Callable[..., Any], inputs: list[Any]) -> Callable[[], object]:
        """What is timed: a call, in training with the backward; its results are dropped."""
        down, wanted = factors(self.outputs(fn, inputs)), trained(inputs)
        return lambda: gradients(wanted, self.outputs(fn, inputs), down)


def held(inputs: list[Any]) -> list[Tensor]:
    """The tensors among inputs, those of modules included."""
    own = ([*x.parameters(), *x.buffers()] if isinstance(x, nn.Module) else [x] for x in inputs)
    return list(itertools.chain(*own))


def trained(inputs: list[Any]) -> list[Tensor]:
    """The tensors among inputs and their parameters that get a gradient."""
    return [tensor for tensor in held(inputs) if tensor.requires_grad]


def gradients(wanted: list[Tensor], outputs: list[Tensor], down: list[Tensor]) -> list[Tensor]:
    """The gradients of what is `wanted`, given those of the outputs."""
    sources = differentiable(outputs)
    if not sources or not wanted:
        return []
    results = torch.autograd.grad(sources, wanted, down, allow_unused=True)
    return [gradient for gradient in results if gradient is not None]


def differentiable(outputs: list[Tensor]) -> list[Tensor]:
    """The outputs that gradients are taken of: where the last one is a number, it is a loss."""
    sources = [output for output in outputs if output.requires_grad]
    return sources[-1:] if sources and sources[-1].dim() == 0 else sources


def factors(outputs: list[Tensor]) -> list[Tensor]:
    """Gradients of the outputs: the same at every call, and different from element to element."""
    return [
        (0.5 + torch.arange(x.numel(), device=x.device).cos()).view(x.shape).to(x)
        for x in differentiable(outputs)
    ]


def make_tensors(
    inputs: Sequence[Input],
    training: bool,
    device: str,
    dtype: torch.dtype,
    scale: Scale = "large",
) -> list[Tensor]:
    """The same tensors at every call; those that get gradients require them."""
    tensors, generator = [], torch.Generator(device).manual_seed(0)
    for about in inputs:
        shape = shape_of(about.dims, scale)
        if about.below:
            (high,) = shape_of(about.below, scale)
            tensors.append(torch.randint(high, shape, generator=generator, device=device))
        else:
            tensors.append(torch.randn(shape, generator=generator, device=device).to(dtype))
            if about.positive:
                tensors[-1].abs_().add_(0.01)
            tensors[-1].requires_grad_(training and not about.constant)
    return tensors


def shape_of(dims: str, scale: Scale) -> list[int]:
    return [SIZES[dim][SCALES.index(scale)] for dim in dims.split()]


PATTERNS: dict[str, Subject] = {}


def register(
    name: str, fn: Callable[..., Any], *inputs: str | Input, training: bool = False
) -> None:
    tensors = [Input(i) if isinstance(i, str) else i for i in inputs]
    PATTERNS[name] = Subject(name, fn, partial(make_tensors, tensors, training), training)


register("gelu_bias", lambda x, bias: F.gelu(x + bias), "B T F", "F", training=True)
register("swiglu", lambda gate, up: F.silu(gate) * up, "B T F", "B T F", training=True)
register(
    "layer_norm",
    lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
    "B T D",
    "D",
    "D",
    training=True,
)
register("group_norm", lambda x, w, b: F.silu(F.group_norm(x, 4, w, b)), "N C Y X", "C", "C")
register("softmax", lambda x: torch.softmax(x, -1), "B H T T")
register("softmax_4k", lambda x: torch.softmax(x, -1), "B T D")  # on a GPU, rows of 4,096 numbers
register("softmax_16k", lambda x: torch.softmax(x, -1), "D 16k")
register("softmax_64k", lambda x: torch.softmax(x, -1), "T 64k")
register(
    "cross_entropy",
    lambda x, labels: F.cross_entropy(x, labels),
    "T V",
    Input("T", below="V"),
    training=True,
)
# by the library alone; on a GPU of GPT-2's vocabulary, whose size is odd
register("word_logits", lambda x, words: F.linear(x, words), "G D", "V D", training=True)
register("max_pool", lambda x: F.max_pool2d(F.relu(x), 3, 2, 1), "N C Y X", training=True)
register("avg_pool", lambda x: F.avg_pool2d(x, 3, 2, 1), "N C Y X", training=True)
register(
    "upsample_nearest",
    lambda x: F.relu(F.interpolate(x, scale_factor=2.0)),
    "N C Y X",
    training=True,
)
register("transposed_add", lambda x, y: x.t() + 2 * y, "G G", "G G")
register("cumsum", lambda x: torch.cumsum(x * x, -1), "B T D")
# what the norm of a gradient needs
register("square_sum", lambda x: (x * x).sum(), "B T F")
# what a bias and a scale get in the backward
register("column_sums", lambda d, x: (d.sum((0, 1)), (d * x).sum((0, 1))), "B T F", "B T F")


def rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As in a Llama block: the sum goes on as the next residual."""
    whole = x + residual
    scale = torch.rsqrt(whole.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (whole * scale).to(x.dtype) * weight, whole


register("rms_norm", rms_norm, "B T D", "B T D", "D", training=True)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """With the update of the running averages. An activation without a kink: of 50 million numbers one is so
    close to it that rounding decides its gradient."""
    return F.silu(F.batch_norm(x, mean, var, weight, bias, training=True))


register(
    "batch_norm",
    batch_norm,
    "N C Y X",
    "C",
    "C",
    Input("C", constant=True),
    Input("C", constant=True),
    training=True,
)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written out, with a causal mask."""
    length = q.shape[-2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    return torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ v


register("attention", attention, "B H T E", "B H T E", "B H T E", training=True)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, by halves."""
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x * cos[:, None] + turned * sin[:, None]


register("rope", rope, "B T H E", Input("T E", constant=True), Input("T E", constant=True))


def next_token_loss(x: Tensor, words: Tensor, labels: Tensor) -> Tensor:
    """The end of a language model: its logits are larger than anything else."""
    return F.cross_entropy(F.linear(x, words), labels)


register("next_token_loss", next_token_loss, "G D", "V D", Input("G", below="V"), training=True)


def bce_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


register("bce_loss", bce_loss, "B T D", Input("B T D", below="2"), training=True)


def row_entropy(logits: Tensor) -> Tensor:
    """How sure a policy is of its next action."""
    return torch.special.entr(torch.softmax(logits, -1)).sum(-1)


register("row_entropy", row_entropy, "B T D", training=True)


def adamw_step(p0: Tensor, g0: Tensor, m0: Tensor, v0: Tensor,
               p1: Tensor, g1: Tensor, m1: Tensor, v1: Tensor) -> None:  # fmt: skip
    """In place, for a weight and a bias."""
    for p, g, m, v in ((p0, g0, m0, v0), (p1, g1, m1, v1)):
        p.mul_(1 - 1e-3 * 0.01)
        m.lerp_(g, 1 - 0.9)
        v.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
        p.addcdiv_(m, (v.sqrt() / math.sqrt(1 - 0.999)).add_(1e-8), value=-1e-2)


register(
    "adamw_step",
    adamw_step,
    *(3 * ["G F"]),
    Input("G F", positive=True),
    *(3 * ["F"]),
    Input("F", positive=True),
)


def embedding_sum(
    tokens: Tensor, words: Tensor, places: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """The start of BERT and GPT: two embeddings, added and normalised."""
    return F.layer_norm(F.embedding(tokens, words) + places, (words.shape[1],), weight, bias)


register(
    "embedding_sum", embedding_sum, Input("B T", below="V"), "V D", "T D", "D", "D", training=True
)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy decoding: the likeliest token and its probability."""
    best, at = torch.softmax(logits, -1).max(-1)
    return at, best


register("argmax", argmax, "T V")


class SwiGLU(torch.autograd.Function):
    """SwiGLU that computes silu(gate) again in its backward instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (gate, up) = gradients, ctx.saved_tensors
        s = torch.sigmoid(gate)
        return gradient * up * s * (1 + gate * (1 - s)), gradient * gate * s


# its backward is written by hand, as in libraries of fused operators
register(
    "swiglu_function", lambda gate, up: SwiGLU.apply(gate, up), *(2 * ["B T F"]), training=True
)


def checkpointed_gelu(x: Tensor, bias: Tensor) -> Any:
    """Activations that the backward computes again."""
    return checkpoint(lambda x: F.gelu(F.gelu(x + bias) + bias), x, use_reentrant=False)


register("checkpointed_gelu", checkpointed_gelu, "B T F", "F", training=True)


def dropout_residual(x: Tensor, residual: Tensor) -> Tensor:
    """Dropout written out: the same numbers are dropped whatever the dtype."""
    kept = torch.rand(x.shape, device=x.device) >= 0.1
    return x * kept / 0.9 + residual


register("dropout_residual", dropout_residual, *(2 * ["B T D"]), training=True)


def mapped_norm(x: Tensor, weight: Tensor) -> Any:
    """RMSNorm written for one row, and mapped over all."""

    def one(row: Tensor) -> Tensor:
        return row * torch.rsqrt((row * row).mean() + 1e-6) * weight

    return torch.vmap(torch.vmap(one))(x)


register("mapped_norm", mapped_norm, "B T D", "D", training=True)
