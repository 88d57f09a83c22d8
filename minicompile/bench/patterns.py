"""The named patterns: short functions of plain PyTorch that deep learning is made of, with realistic sizes.

    found = PATTERNS["layer_norm"]
    inputs = found.make_inputs("cpu", torch.float32)
    results = found.run(found.fn, inputs)              # outputs, gradients, inputs

A pattern is registered with its inputs, each named by its dimensions; SIZES says how large those are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minicompile.compat import tree_leaves

Scale = Literal["large", "small", "cache", "dram", "gpu"]
SCALES: tuple[Scale, ...] = get_args(Scale)

SIZES = {
    "B": (8, 2, 2, 16, 16), "H": (12, 2, 4, 4, 32), "T": (512, 16, 256, 512, 1024),
    "E": (64, 8, 64, 512, 128), "D": (768, 24, 768, 2048, 4096), "F": (2048, 40, 2048, 2048, 4096),
    "G": (2048, 40, 768, 4096, 8192), "V": (16384, 50, 4096, 32768, 50257),
    "16k": (16384, 70, 4096, 16384, 16384), "64k": (65536, 130, 4096, 65536, 65536),
    "N": (32, 2, 8, 64, 64), "C": (64, 8, 32, 64, 256), "Y": (56, 8, 28, 64, 56),
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
class Pattern:
    """A function and what it is called with. `training`: its gradients count too."""

    name: str
    fn: Callable[..., Any]
    inputs: tuple[Input, ...]
    training: bool = False

    def make_inputs(self, device: str, dtype: torch.dtype, scale: Scale = "large") -> list[Tensor]:
        """The same tensors at every call; those that get gradients require them."""
        made, generator = [], torch.Generator(device).manual_seed(0)
        for given in self.inputs:
            shape = shape_of(given.dims, scale)
            if given.below:
                (high,) = shape_of(given.below, scale)
                made.append(torch.randint(high, shape, generator=generator, device=device))
            else:
                made.append(torch.randn(shape, generator=generator, device=device).to(dtype))
                if given.positive:
                    made[-1].abs_().add_(0.01)
                made[-1].requires_grad_(self.training and not given.constant)
        return made

    def run(self, fn: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
        """Call `fn`, the pattern's own or a compiled one: outputs, gradients, inputs (maybe written to)."""
        torch.manual_seed(0)
        outputs = [leaf for leaf in tree_leaves(fn(*inputs)) if isinstance(leaf, Tensor)]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        sources = [output for output in outputs if output.requires_grad]
        down = [(0.5 + torch.arange(s.numel(), device=s.device).cos()).view(s.shape).to(s)
                for s in sources]  # fmt: skip
        gradients = torch.autograd.grad(sources, wanted, down) if wanted else ()
        return [*outputs, *gradients, *inputs]


def shape_of(dims: str, scale: Scale) -> list[int]:
    return [SIZES[dim][SCALES.index(scale)] for dim in dims.split()]


PATTERNS: dict[str, Pattern] = {}


def pattern(*inputs: str | Input, training: bool = False) -> Callable[[Any], Any]:
    """Registers a function under its name."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        given = tuple(Input(i) if isinstance(i, str) else i for i in inputs)
        PATTERNS[fn.__name__] = Pattern(fn.__name__, fn, given, training)
        return fn

    return register


@pattern("B T F", "F", training=True)
def gelu_bias(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@pattern("B T F", "B T F", training=True)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


@pattern("B T D", "D", "D", training=True)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


@pattern("B T D", "B T D", "D", training=True)
def rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As in a Llama block: the sum goes on as the next residual."""
    whole = x + residual
    scale = torch.rsqrt(whole.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (whole * scale).to(x.dtype) * weight, whole


@pattern("N C Y X", "C", "C")
def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 4, weight, bias))


@pattern("N C Y X", "C", "C", Input("C", constant=True), Input("C", constant=True), training=True)
def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """With the update of the running averages. An activation without a kink: of 50 million numbers one is so
    close to it that rounding decides its gradient."""
    return F.silu(F.batch_norm(x, mean, var, weight, bias, training=True))


@pattern("B H T T")
def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@pattern("B T D")
def softmax_4k(x: Tensor) -> Tensor:
    """Rows of 4,096 numbers on a GPU."""
    return torch.softmax(x, -1)


@pattern("D 16k")
def softmax_16k(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@pattern("T 64k")
def softmax_64k(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@pattern("B H T E", "B H T E", "B H T E", training=True)
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written out, with a causal mask."""
    length = q.shape[-2]
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    return torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ v


@pattern("B T H E", Input("T E", constant=True), Input("T E", constant=True))
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, by halves."""
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x * cos[:, None] + turned * sin[:, None]


@pattern("T V", Input("T", below="V"), training=True)
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


@pattern("G D", "V D", Input("G", below="V"), training=True)
def next_token_loss(x: Tensor, words: Tensor, labels: Tensor) -> Tensor:
    """The end of a language model: its logits are larger than anything else."""
    return F.cross_entropy(F.linear(x, words), labels)


@pattern("B T D", Input("B T D", below="2"), training=True)
def bce_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


@pattern("G D", "V D", training=True)
def word_logits(x: Tensor, words: Tensor) -> Tensor:
    """By the library alone; on a GPU of GPT-2's vocabulary, whose size is odd."""
    return F.linear(x, words)


@pattern("B T D", training=True)
def row_entropy(logits: Tensor) -> Tensor:
    """How sure a policy is of its next action."""
    return torch.special.entr(torch.softmax(logits, -1)).sum(-1)


@pattern(*(3 * ["G F"]), Input("G F", positive=True), *(3 * ["F"]), Input("F", positive=True))
def adamw_step(p0: Tensor, g0: Tensor, m0: Tensor, v0: Tensor,
               p1: Tensor, g1: Tensor, m1: Tensor, v1: Tensor) -> None:  # fmt: skip
    """In place, for a weight and a bias."""
    for p, g, m, v in ((p0, g0, m0, v0), (p1, g1, m1, v1)):
        p.mul_(1 - 1e-3 * 0.01)
        m.lerp_(g, 1 - 0.9)
        v.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
        p.addcdiv_(m, (v.sqrt() / math.sqrt(1 - 0.999)).add_(1e-8), value=-1e-2)


@pattern("N C Y X", training=True)
def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(x), 3, stride=2, padding=1)


@pattern("N C Y X", training=True)
def avg_pool(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=2, padding=1)


@pattern("N C Y X", training=True)
def upsample_nearest(x: Tensor) -> Tensor:
    return F.relu(F.interpolate(x, scale_factor=2.0, mode="nearest"))


@pattern("B C Y X")
def upsample_bilinear(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


@pattern(Input("B T", below="V"), "V D", "T D", "D", "D", training=True)
def embedding_sum(
    tokens: Tensor, words: Tensor, places: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """The start of BERT and GPT: two embeddings, added and normalised."""
    return F.layer_norm(F.embedding(tokens, words) + places, (words.shape[1],), weight, bias)


@pattern("G G", "G G")
def transposed_add(x: Tensor, y: Tensor) -> Tensor:
    return x.t() + 2 * y


@pattern("B T D")
def cumsum(x: Tensor) -> Tensor:
    return torch.cumsum(x * x, -1)


@pattern("T V")
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy decoding: the likeliest token and its probability."""
    best, at = torch.softmax(logits, -1).max(-1)
    return at, best


@pattern("B T F", "B T F")
def column_sums(down: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """What a bias and a scale get in the backward."""
    return down.sum((0, 1)), (down * x).sum((0, 1))


@pattern("B T F")
def square_sum(x: Tensor) -> Tensor:
    """What the norm of a gradient needs."""
    return (x * x).sum()


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


@pattern("B T F", "B T F", training=True)
def swiglu_function(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU with its backward written by hand, as libraries of fused operators have it."""
    return SwiGLU.apply(gate, up)  # type: ignore[no-any-return]


@pattern("B T F", "F", training=True)
def checkpointed_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Activations that the backward computes again."""
    return checkpoint(lambda x: F.gelu(F.gelu(x + bias) + bias), x, use_reentrant=False)  # type: ignore[no-any-return]


@pattern("B T D", "B T D", training=True)
def dropout_residual(x: Tensor, residual: Tensor) -> Tensor:
    """Dropout written out: the same numbers are dropped whatever the dtype."""
    kept = torch.rand(x.shape, device=x.device) >= 0.1
    return x * kept / 0.9 + residual


@pattern("B T D", "D", training=True)
def mapped_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm written for one row, and mapped over all."""

    def one(row: Tensor) -> Tensor:
        return row * torch.rsqrt((row * row).mean() + 1e-6) * weight

    return torch.vmap(torch.vmap(one))(x)
