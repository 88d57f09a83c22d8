"""Random written-out attention through the template of kernels: `python -m tests.fuzz attention`.

What is done to the scores is drawn: caps, biases, masks, tensors made and written to in between; so
are sizes, dtypes and where inputs lie. Result and gradients are held against the same program in float64:
ours may be off by three times what eager is, or by some last digits of the dtype. Interpreted without a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import minicompile as mc
from tests.fuzz.running import namespace_of

DIGITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""By the largest number: what all may be off by."""
SCORES = (
    "s = {c} * torch.tanh(s / {c})",
    "s = -{c} * torch.tanh(s / {c})",
    "s = {c} * torch.sigmoid(s) - torch.tanh(s)",
    "s = s + {t}",
    "s = s + {t}",
    "s = s - {t}",
    "s = {t} + s",
    "s = s + slopes * (j - i)",
    "s = s - slopes * (i - j)",
    "s = s + slopes * (j - {n})",
    "s = s + (slopes * (j - i) + {t})",
    "s = s - (i - j).abs() / 8",
    "s = s * 2.0",
    "s = s + s * 0.1",
    "s = torch.relu(s) - 1",
    "s = s.float()",
    "s = torch.where(keep, s, -3.0)",
    "s = torch.where(keep, s, {low})",
    "s = s.masked_fill(~keep, {low})",
    "s = s.masked_fill(j > i, {low})",
    "s = s.masked_fill(j > i + {n}, {low})",
    "s = s.masked_fill((j > i) | (i - j >= {n}), {low})",
    "s = s.masked_fill((i - j).abs() > {n}, {low})",
    "s = s.masked_fill(j < {n}, {low})",
    "s = s + torch.where(j > i, {low}, 0.0)",
    "s = s + {ends}[:, None, None, :]",
)
IN_PLACE = (
    "s += {t}",
    "s -= {t}",
    "s *= 0.5",
    "s /= 2",
    "s.masked_fill_(~keep, {low})",
    "s.masked_fill_(j > i, {low})",
    "s.add_({t}, alpha=0.5)",
    "s.view(-1, *s.shape[2:]).mul_(2)",
)
MADE = (
    "low = bias * 2",
    "low = bias.cos()",
    "low = torch.zeros(q.shape[2], k.shape[2], device=q.device)",
    "low = torch.full((q.shape[2], k.shape[2]), -3.0, device=q.device).triu(1)",
    "low = bias.clone().view(-1).view(bias.shape)",
    "low = bias[:, :1]",
    "low = bias[..., :1] + 1",
)
FILLED = ("low[:, :3] = -5.0", "low.mul_(2)", "low.view(-1)[:7].fill_(1)")
WRITTEN = (*FILLED, "bias.add_(1)", "slopes.neg_()", "keep[..., :2] = True")
LOWS = ("-torch.inf", "-torch.inf", "-1e9", "-30.0", "{least}")


@dataclass(frozen=True)
class Program:
    """A function of q, k, v, bias, slopes, keep, and what it is called with."""

    text: str
    sizes: tuple[int, int, int, int, int]
    """Batch, heads, queries, keys, elements of a head."""
    dtype: torch.dtype
    seed: int
    layout: str

    def inputs(self, dtype: torch.dtype, device: str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def made(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(self.dtype).to(device, dtype)

        batch, heads, rows, columns, head = self.sizes
        q, k, v = (made(batch, heads, n, head) for n in (rows, columns, columns))
        if self.layout == "heads last":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        if self.layout == "elements first":
            q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
        if self.layout == "one head for all":
            k, v = (x[:, :1].expand(x.shape) for x in (k, v))
        bias, slopes = made(rows, columns), made(heads, 1, 1).abs() / 8
        keep = torch.rand(rows, columns, generator=generator) < 0.7
        keep[:, 0] = True
        found = [x.detach().requires_grad_() for x in (q, k, v)]
        return [*found, bias, slopes, keep.to(device)]

    @property
    def function(self) -> Callable[..., Tensor]:
        return self.compiled(self.text)

    @property
    def exact(self) -> Callable[..., Tensor]:
        """Where the program asks for float32, this does for float64."""
        text = self.text.replace("float32", "float64")
        return self.compiled(text.replace(".float()", ".double()"))

    def compiled(self, text: str) -> Callable[..., Tensor]:
        made: Callable[..., Tensor] = namespace_of(text, f"attention {self.seed}")["fn"]
        return made


def generate(seed: int) -> Program:
    pick = random.Random(seed)
    rows = pick.choice((1, 5, 33, 64, 100, 130, 150))
    columns = pick.choice((rows, rows, rows, 1, 40, 129, 200))
    heads, head = pick.choice((1, 2, 3)), pick.choice((8, 16, 24, 32, 64))
    made = pick.sample(MADE, 1) if pick.random() < 0.6 else []
    dtype = pick.choice(tuple(DIGITS))
    given = {
        "c": lambda: str(pick.choice((0.5, 2.0, 9.0, 30.0, 50.0))),
        "n": lambda: str(pick.choice((0, 1, 7, 40, 64))),
        "t": lambda: pick.choice(("bias", "low", "low") if made else ("bias",)),
        "low": lambda: pick.choice(LOWS).format(least=torch.finfo(dtype).min),
        "ends": lambda: "(j / 9).expand(k.shape[0], -1)",
    }
    steps = [
        line.format(**{name: value() for name, value in given.items()})
        for line in pick.choices(SCORES, k=pick.choice((1, 1, 2, 2, 3, 4)))
    ]
    early = []
    if made and pick.random() < 0.6:  # something is written to before it is read
        early.append(pick.choice(FILLED))
        steps.insert(pick.randrange(len(steps) + 1), "s = s + low")
    if pick.random() < 0.2:
        line = pick.choice(WRITTEN)
        if made or line not in FILLED:
            steps.insert(pick.randrange(len(steps) + 1), line)
    softmax = pick.choice(
        ("torch.softmax(s, -1)", "s.softmax(-1)", "torch.softmax(s, -1, dtype=torch.float32)")
    )
    scale = pick.choice(("* 0.25", "/ q.shape[-1] ** 0.5", "* 0.1", ""))
    product = f"q @ k.transpose(-2, -1) {scale}".strip()
    if pick.random() < 0.1:
        line = pick.choice(IN_PLACE).format(**{name: value() for name, value in given.items()})
        steps.insert(pick.choice((0, 0, len(steps))), line)
    end = pick.choice(("out", "out", "out.transpose(1, 2).flatten(2)", "out * 2 + 1"))
    lines = [
        "i = torch.arange(q.shape[2], device=q.device)[:, None]",
        "j = torch.arange(k.shape[2], device=q.device)[None, :]",
        *made,
        *early,
        f"s = {product}",
        *steps,
        f"w = {softmax}.to(v.dtype)",
        "out = w @ v",
        f"return {end}",
    ]
    text = "import torch\n\n\ndef fn(q, k, v, bias, slopes, keep):\n    " + "\n    ".join(lines)
    layout = pick.choice(("whole", "whole", "heads last", "elements first", "one head for all"))
    sizes = (pick.choice((1, 2)), heads, rows, columns, head)
    return Program(text, sizes, dtype, seed, layout)


def answers(fn: Callable[..., Tensor], given: list[Tensor]) -> list[Tensor]:
    """The result, its gradients, and what the tensors hold that may be written to."""
    out = fn(*given)
    down = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out)
    return [out.detach(), *torch.autograd.grad(out, given[:3], down), *given[3:5]]


REFUSED = "eager can't"
NAMES = ("result", "dq", "dk", "dv", "bias", "slopes")


def difference(program: Program, compiled: Callable[..., Tensor], device: str = "cpu") -> str:
    """Where the compiled program is wrong; "" if nowhere. Rows that count nothing are eager's NaN, and what
    they do to gradients isn't compared."""
    try:
        right = answers(program.exact, program.inputs(torch.float64, device))
        eager = answers(program.function, program.inputs(program.dtype, device))
    except (
        RuntimeError
    ):  # a tensor that autograd needs was written to, a mask that the dtype has no room for
        return REFUSED
    if not eager[0].isnan().equal(right[0].isnan()):  # numbers that the dtype has no room for
        return REFUSED
    ours = answers(compiled, program.inputs(program.dtype, device))
    least = 1.0 if program.sizes[3] == 1 else 0.1  # one key's gradients are rounding alone
    for name, exact, theirs, mine in zip(NAMES, right, eager, ours, strict=True):
        known = exact.isfinite()
        if name == "result" and not mine.isnan().equal(exact.isnan()):
            return f"{name}: NaN at other places"
        if not known.all() and name != "result":
            continue
        size = exact[known].abs().max().clamp(min=least).item() if known.any() else least
        theirs_off, off = (((x - exact)[known].abs() / size) for x in (theirs, mine))
        limit = DIGITS[program.dtype]
        if theirs_off.isfinite().all() and theirs_off.numel():
            limit = max(limit, 3 * theirs_off.max().item())
        if not (off <= limit).all():
            return f"{name}: off by {off.max().item():.2e} of {size:.2e}, at most {limit:.2e}"
    return ""


def template(fn: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    chosen = {"plugins": ["flash_attention"], "device_codegen": "triton", **options}
    return mc.compile(fn, dynamic=False, options=chosen)


def wrong(seed: int) -> str:
    """Where a seed's program is wrong when it is compiled; "" if nowhere."""
    program, device = generate(seed), "cuda" if torch.cuda.is_available() else "cpu"
    try:
        why = difference(program, template(program.function, disk_cache=False), device)
    finally:
        mc.reset()
    return "" if why == REFUSED else why
