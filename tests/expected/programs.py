"""Small programs whose every stage is written down: `tests/expected/NAME.txt` (`python -m tests.expected`).

Together they lead through most decisions of the rooms. A row: inputs, and options that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import minicompile as mc


class Row(NamedTuple):
    """A program, its inputs, how to compile it."""

    function: Callable[..., Any]
    inputs: list[Any]
    dynamic: bool | None
    options: dict[str, Any]


ROWS: dict[str, Row] = {}
Function = Callable[..., Any]


def row(
    *inputs: Any, dynamic: bool | None = None, **options: Any
) -> Callable[[Function], Function]:
    """Register a program by its name. A tuple of sizes is a float32 tensor that requires grad, a list one
    that doesn't."""

    def add(function: Function) -> Function:
        made = [tensor(x) for x in inputs]
        ROWS[function.__name__] = Row(function, made, dynamic, options)
        return function

    return add


def tensor(given: Any) -> Any:
    if isinstance(given, list):
        return torch.zeros(given)
    return torch.zeros(given, requires_grad=True) if isinstance(given, tuple) else given


def ints(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(size, dtype=dtype)


def dynamic(*size: int, grad: bool = True) -> Tensor:
    """A tensor whose first size is symbolic."""
    x = torch.zeros(size, requires_grad=grad)
    mc.mark_dynamic(x, 0)
    return x


# -- reductions


@row([8, 16], (16, 16))
def softmax_of_a_product(x, w):
    y = (x @ w).softmax(-1) * 1
    y[0].mul_(2)
    return y.sum(0), y.t()


@row(dynamic(8, 32), (32,), (32,))
def layer_norm(x, w, b):
    return F.layer_norm(x, (32,), w, b) + x


@row([6, 5, 8])
def reductions(x):
    y = x > 0
    found = x.amax(0), x.argmax(1), x.amin((0, 2)), x.argmin(), x.prod(2), y.any(1), y.all()
    return *found, x.var(2), x.std(0, correction=0), x.mean((0, 1), keepdim=True), x.norm(dim=1)


@row([3, 70000], [4096, 256])
def long_rows_and_columns(x, y):
    return x.softmax(-1), x.sum(), y.sum(0), (y * y).sum((0, 1)), y.max(1).values


@row(dynamic(12, 40, grad=False))
def reductions_of_symbolic_length(x):
    return x.sum(0), x.mean(), x.log_softmax(0), x.amax(1), x.argmin(0)


@row([5, 9], dynamic(7, 3, grad=False))
def scans(x, y):
    return x.cumsum(1), x.cumprod(0), y.cumsum(0).sin(), x.cummax(1).values, x.logcumsumexp(1)


@row([4, 6], torch.zeros(4, 6, dtype=torch.float16), torch.zeros(4, 6, dtype=torch.bfloat16))
def half_precision(x, h, b):
    return h.softmax(1), b.sum(1), (h + b), h * 2 + 1, b.exp().to(torch.float16), x.half().sum(0)


# -- indices


@row((7, 5), ints(4), [3, 5])
def gathers_and_scatters(x, i, y):
    rows, places = x[i], i[:, None].expand(4, 5)
    picked = x.gather(0, places), x.index_select(1, i), F.embedding(i, x)
    z = torch.zeros(7, 5).index_add(0, i, rows).scatter_add(0, places, rows)
    w = z.clone()
    w[i] = 1.0
    return (
        *picked,
        z,
        w.index_put((i, i), rows[:, 0], accumulate=True),
        y.take_along_dim(places[:3], 0),
    )


@row((6, 8), [6, 4])
def pieces(x, y):
    a, b = x.split(4, 1)
    whole = torch.cat([a, y, b], 1)
    return (
        whole.roll(1, 0),
        whole.flip(1),
        F.pad(a, (1, 2), value=1.5),
        torch.stack([a, b]),
        x[1::2, -3:],
    )


@row((4, 6), [4, 6])
def slices_are_written(x, y):
    z = x * 1
    z[1:3, ::2] = y[1:3, ::2]
    z[:, 1].copy_(y[:, 0])
    z.diagonal().add_(1)
    return (
        z.tril(1) + z.triu(-1),
        z.repeat(2, 3),
        z.unfold(1, 3, 2),
        z.view(2, 2, 6).transpose(0, 2),
    )


@row(dynamic(6, 4))
def views_of_symbolic_size(x):
    n = x.size(0)
    y = x.view(n * 2, 2).reshape(-1) + torch.arange(n * 4)
    return (
        y.view(n, 4).t().contiguous(),
        y[: n - 1],
        x.expand(3, n, 4).sum(0),
        x[1:],
        F.pad(x, (1, 1)),
    )


@row(torch.zeros(2, 3, 4, 5).permute(0, 2, 3, 1), [3], [5, 4])
def layouts(x, w, y):
    return (
        x * w,
        x.contiguous().sin(),
        y.t() + y.t().contiguous(),
        x.flatten(1).exp(),
        x.permute(3, 1, 0, 2).cos(),
    )


@row([4, 1, 6], [5, 1], ints(2, 3, dtype=torch.int32))
def broadcasts(x, y, i):
    return (
        x + y,
        torch.where(x > 0, y, 2.0),
        x.clamp(-1, 1),
        x.clamp(min=y),
        x.masked_fill(y < 0, 3),
        i / 2,
    )


# -- elements


@row([10])
def functions_of_floats(x):
    names = (
        "abs acos asinh atan ceil cos erf exp expm1 floor log log1p log2 neg reciprocal round rsqrt"
    )
    more = "sigmoid sign sin sinh sqrt square tan tanh trunc isnan isinf frac exp2 lgamma erfinv"
    found = [getattr(torch, name)(x) for name in f"{names} {more}".split()]
    return (
        *found,
        F.gelu(x),
        F.gelu(x, approximate="tanh"),
        F.silu(x),
        F.softplus(x),
        F.elu(x),
        F.hardtanh(x),
    )


@row([10], [10])
def functions_of_two_floats(x, y):
    found = x.atan2(y), x.fmod(y), x % y, x // y, x**y, x**2, x**-0.5, x.minimum(y), x.maximum(y)
    return (
        *found,
        x.copysign(y),
        torch.hypot(x, y),
        x.nextafter(y),
        x / 3,
        2 - x,
        x.lerp(y, 0.3),
        x.addcmul(x, y),
    )


@row(ints(9), ints(9, dtype=torch.int32), ints(9, dtype=torch.uint8), ints(9, dtype=torch.bool))
def functions_of_integers(i, j, k, b):
    found = (
        i // 3,
        i % j,
        i / j,
        i << 2,
        i >> 1,
        i & j,
        ~i,
        i | 4,
        i ^ j,
        k + 200,
        k * k,
        -j,
        j.abs(),
    )
    return (
        *found,
        b & ~b,
        b ^ b,
        b.int() + j,
        i.float(),
        i.clamp(1, 5),
        i == j,
        i.pow(2),
        i.sum(),
        k.sum(),
    )


@row([3, 4], ints(3))
def tensors_are_created(x, i):
    new = (
        torch.arange(2, 8, 2),
        torch.full((2, 3), 7.0),
        torch.eye(3),
        torch.linspace(0, 1, 4),
        torch.tensor(3),
    )
    like = x.new_zeros(2), torch.ones_like(x), torch.empty_like(x).fill_(2), F.one_hot(i, 5)
    return (
        *new,
        *like,
        torch.randn(2),
        torch.rand_like(x),
        torch.tril(torch.ones(3, 3)),
        x.bernoulli(),
    )


# -- layers, with gradients


@row(dynamic(5, 8), (16, 8), (16,), (4, 16))
def two_layers(x, w, b, v):
    h = F.gelu(F.linear(x, w, b))
    return F.mse_loss(F.linear(F.dropout(h, 0.5), v), x[:, :4])


@row((2, 4, 8, 8), (4,), (4,), [4], [4], (3, 4, 3, 3))
def images(x, w, b, mean, var, k):
    y = F.batch_norm(F.relu(x), mean, var, w, b, training=True)
    y = F.group_norm(y, 2, w, b)
    z = F.max_pool2d(F.conv2d(y, k, padding=1), 2)
    return F.interpolate(z, scale_factor=2) + F.avg_pool2d(
        F.interpolate(y[:, :3], scale_factor=2.0), 2
    )


@row((2, 2, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4))
def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@row((6, 5), ints(6), [6, 5])
def losses(x, target, y):
    parts = F.cross_entropy(x, target, label_smoothing=0.1), F.smooth_l1_loss(x, y), F.l1_loss(x, y)
    more = (
        F.binary_cross_entropy_with_logits(x, y),
        F.kl_div(x, y),
        F.huber_loss(x, y),
        F.nll_loss(x, target),
    )
    return sum(parts) + sum(more)


@row((4, 4), (4, 4), [4, 4])
def products(a, b, c):
    x = torch.einsum("ij,kj->ik", a, b).relu()
    y = torch.addmm(c, x, b, beta=2, alpha=0.5).relu().mm(a)
    return (y @ c.t()).tanh(), torch.bmm(a[None], b[None]), a.mv(c[0]), torch.outer(a[0], b[1])


@row((12, 16), (16, 16), (16, 16), memory_budget=0.5)
def recomputed(x, v, w):
    return ((x @ v).sin().cos().exp() @ w).softmax(-1).sum() + x.sigmoid().sum()


@row((8, 8), (8,), partitioner="default", inline="never")
def everything_in_memory(x, w):
    return (x.sin() * w).softmax(-1).sum(0)


@row((4, 4), [4], fusion=False)
def one_kernel_each(x, y):
    return x.exp().sum(1) + y, (x + y).cos()


# -- arguments and results


@row([4], [4], (4,))
def arguments_are_written(x, y, w):
    x.add_(w.detach())
    y[1:].copy_(x[:3])
    z = w * x
    return z, z[1:], x, y.view(2, 2), w.detach(), w.view(2, 2), 3, None


@row((3, 4), [3, 4], 2, 0.5, dynamic=True)
def everything_is_symbolic(x, y, n, p):
    if x.size(0) > 2 and y.size(1) != n:
        x = x * n + y.sum() * p
    return x.reshape(-1)[: n + 1], x.size(0) * n


@row([8], [8], [8])
def grad_mode_and_autocast(x, y, z):
    with torch.no_grad():
        z = z + x.mean()
    with torch.autocast("cpu", torch.bfloat16):
        a = x[None] @ y[:, None]
    return a, z.detach().sort().values, z.topk(2), torch.fft.rfft(y).abs()


class Model(nn.Module):
    """Capture sees containers, buffers, closures, a helper with defaults, and loops."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])
        self.register_buffer("steps", torch.zeros(()))
        self.scale, self.names, self.seen = 2.0, {"a": 1, "b": (2, 3)}, []

    def forward(self, x: Tensor, flags: dict[str, Any], *more: Tensor, bias: Any = None) -> Any:
        self.steps += 1
        self.seen.append("called")
        for number, layer in enumerate(self.layers):
            x = layer(x) + number
        if flags.get("double") and bias is None:
            x = x * self.names["b"][0] * self.scale
        total = sum((m.sum() for m in more), start=torch.zeros(()))
        made = {f"{k}!": x * v for k, v in self.names.items() if isinstance(v, int)}
        flags["seen"] = len(more)
        return made, [total, *(m[0] for m in more)], x.shape, isinstance(x, Tensor)


@row([2, 4], {"double": True}, [3], [4])
def a_module(x, flags, a, b):
    return MODEL(x, flags, a, b)


MODEL = Model()
