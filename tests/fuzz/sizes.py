"""Random functions of tensors whose sizes matter: sizes decide branches, loops, shapes and values.

A program is made by running it: a line that fails at the first sizes is dropped, so that what is left
works at these, and mostly at others. Lines are filled-in templates:

    t a tensor      w one of the same shape if there is one      f a floating-point one
    m one with at least two dimensions, q one with at least three
    d, e dimensions of the tensor before     i, j, n sizes and arithmetic with them     c a small number
    a, b slice bounds      p a condition on sizes      v a float made of sizes
"""

from __future__ import annotations

import copy
import random
import re
from dataclasses import dataclass, field
from typing import Any

import torch

PRELUDE = "import math\nimport torch\nimport torch.nn.functional as F\n"
MOST_ELEMENTS = 1500
"""A program's tensors have no more at the first sizes."""
DTYPES = {"float32": 8, "float64": 3, "int64": 2, "bool": 1, "int32": 1}
LAYOUTS = {"plain": 9, "transposed": 2, "strided": 1, "channels last": 2, "expanded": 1}
SIZES = (0, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 8, 11, 13, 16)
RELATED = ("{a}", "{a}", "{a}", "2 * {a}", "{a} + {b}", "{a} * {b}", "{a} + 1", "4", "1")

Sizes = dict[str, int]


@dataclass(frozen=True)
class Input:
    """A tensor argument: each size is an expression over the program's symbols."""

    name: str
    shape: tuple[str, ...]
    dtype: str
    layout: str
    marked: tuple[int, ...]
    """The dimensions that `mark_dynamic` is told of, where not all are dynamic."""

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(self.shape)}] {self.layout}, {self.marked}"

    def make(self, sizes: Sizes) -> torch.Tensor:
        shape = [eval(text, {}, dict(sizes)) for text in self.shape]
        if self.layout == "transposed":
            shape[-1], shape[-2] = shape[-2], shape[-1]
        elif self.layout == "strided":
            shape[-1] *= 2
        elif self.layout == "expanded":
            rows, shape[0] = shape[0], 1
        dtype = getattr(torch, self.dtype)
        if dtype == torch.bool:
            made = torch.rand(shape) > 0.5
        elif dtype.is_floating_point:
            made = torch.randn(shape, dtype=dtype)
        else:
            made = torch.randint(-4, 9, shape, dtype=dtype)
        if self.layout == "transposed":
            made = made.transpose(-1, -2)
        elif self.layout == "strided":
            made = made[..., ::2]
        elif self.layout == "channels last":
            made = made.contiguous(memory_format=torch.channels_last)
        elif self.layout == "expanded":
            made = made.expand(rows, *shape[1:])
        return made


@dataclass
class Program:
    """A function's text, its arguments, and the sizes that it is called at."""

    inputs: list[Input]
    calls: list[Sizes]
    dynamic: bool
    """Every size is symbolic; else those marked."""
    trained: bool
    body: list[str] = field(default_factory=list)
    """Statements, of one or several lines."""
    returned: list[str] = field(default_factory=list)

    def function(self) -> str:
        body = [*self.body, f"return [{', '.join(self.returned)}]"]
        lines = [line for statement in body for line in statement.split("\n")]
        head = f"def f({', '.join(given.name for given in self.inputs)}):\n"
        return PRELUDE + head + "".join(f"    {line}\n" for line in lines)

    def __str__(self) -> str:
        about = [f"# {given}" for given in self.inputs]
        about.append(f"# dynamic={self.dynamic}, trained={self.trained}")
        about += [f"# call {sizes}" for sizes in self.calls]
        return "\n".join([*about, self.function()])


INTEGERS = """
{t}.shape[{d}]; {t}.size({d}); {t}.shape[-1]; len({t}); {t}.numel(); {t}.dim(); x.stride({d})
{t}.shape[{d}]; {t}.shape[{d}]; {t}.shape[0]; {n}; {n}; {n}; {c}; {n} // {c}; {n} % {c}; {n} % 8
{n} // {n}; {n} % {n}; {n} // max({n}, 1); -(-{n} // {c}); min({n}, {n}); max({n}, {n})
min({n}, {c}); max({n}, {c}); abs({n} - {n}); {n} ** 2; {n} ** {c}; {n} + {n}; {n} * {n}; {n} - {n}
{n} + {c}; {n} - {c}; {n} * {c}; -{n}; ({n} + 7) // 8 * 8; int({n} / 2); int({n} / {c})
int({n} * 0.5); int({n} * 0.3); round({n} * 0.5); int({v}); round({v}); math.ceil({n} / {c})
math.floor({n} / {c}); int(math.sqrt({n})); math.isqrt({n}); int({n} ** 0.5); divmod({n}, {c})[1]
int({p}); {n} & 3; {n} << 1; {n} >> 1; {n} | 1; {n}.bit_length(); math.gcd({n}, 12); sum({t}.shape)
math.prod({t}.shape); {t}.shape.numel(); max({t}.shape); min({t}.shape); {t}.storage_offset()
{n} if {p} else {c}; {n} and 2; {n} or 3; int(float({n})); int({n} == {n}); len({t}.shape[1:])
int(-{n} / {c}); sorted([{n}, {n}, {c}])[1]; [{n}, {n}][{n} % 2]; sum(range(min({n}, 5)))
int(1e3 * {n}) // 1000; int(str({n})); pow({n}, 2); {n} // -{c}; -{n} % {c}; {n} % -{c}
(-{n}) // {c}; int({n} * 0.29 * 100); int(0.1 * {n} * 10)
""".strip()
CONDITIONS = """
{n} % {c} == 0; {n} % {c} != 1; {n} > {n}; {n} == {n}; {n} <= {c}; {n} < {n} * 2
{t}.shape == {w}.shape; {n} % 8 == 0; {n} != {c}; {n} >= 4 and {n} < 8; not {n} > 2
{n} < 3 or {n} == {n}; {n} // 2 > 1; {n} in (2, 3, 5); {n} == {n} + {n}; {n} * {c} == {n}
2 < {n} < 6; {t}.numel() > 20; {t}.is_contiguous(); {t}.shape[-1] == {t}.shape[0]
{t}.shape[{d}] == 1; {n}; bool({n} - {c}); {n} / 2 > 2.5; math.sqrt({n}) > 2; x.stride({d}) == 1
{v} > {v}; {t}.dim() == 3; {t}.shape[0] > {w}.shape[-1]; {n} / 49 * 49 == {n}; {n} % {n} == 0
max({n}, {n}) > {c}; isinstance({n}, int); {n} // {c} == {n} % {c}; {t}.shape[1:] == {w}.shape[1:]
{n} ** 2 > 10; {n} * {n} == 16; ({n} + {c}) % 4 == 0; any(s == 2 for s in {t}.shape); all({t}.shape)
""".strip()
FLOATS = """
{n} / 2; {n} / {c}; 1 / ({n} + 1); math.sqrt({n}); {n} ** 0.5; {n} ** -0.5; {n} * 0.5; float({n})
{n} / {n}; 1.0 / {n}; math.log({n} + 1); {n} * 0.1 + 0.2; -{n} / 3; {n} // 2.0; {n} % 1.5
2.0 ** -{n}; math.exp(-{n}); math.sin({n}); min({n} / 2, 3.0); max({n} * 1.0, 0.5); abs({n} - 2.5)
round({n} / 3, 1); float({p}); 2.5; {n} * {n} / 7; math.floor({n} / 2) * 0.5
""".strip()
SHAPES = """
{t}.view({i}, -1); {t}.reshape(-1, {i}); {t}.reshape(-1); {t}.flatten(); {t}.flatten({d})
{m}.flatten(0, 1); {t}.unflatten({d}, ({c}, -1)); {t}.unflatten({d}, (-1, {i}))
{m}.reshape({m}.shape[-1], -1); {t}.view({t}.shape); {t}.view(*{t}.shape[:-1], {i}, -1)
{t}.reshape({i}, {j}); {m}.reshape(*{m}.shape[::-1]); {t}.reshape({t}.shape + (1,))
{t}.reshape({i}, -1, {j}); {m}.transpose({d}, {e}); {m}.t(); {m}.mT.reshape(-1, {i})
torch.cat([{t}, {w}], {d}); torch.cat([{t}, {t}[{a}:{b}]]); torch.cat([{t}, {w}, {t}], -1)
torch.stack([{t}, {w}], {d}); torch.cat([{t}, torch.zeros({c}, *{t}.shape[1:])])
{t}.split({i}, {d})[0]; {t}.split({i}, {d})[-1]; {t}.chunk({c}, {d})[-1]; {t}.chunk({c}, {d})[0]
{t}.split([{i}, {t}.shape[0] - {i}])[1]; torch.tensor_split({t}, {c}, {d})[-1]
F.pad({t}, ({c}, {i})); F.pad({t}, (-1, {c}), value=0.5); F.pad({m}, (0, 1, {i}, 1))
F.pad({q}, (1, 1), mode="reflect"); F.pad({q}, ({c}, 0), mode="circular")
F.pad({q}, (0, {i}), mode="replicate"); {t}.expand({i}, *{t}.shape); {t}.unsqueeze({d})
{t}.squeeze({d}); {t}.squeeze(); {t}[None].expand({c}, *{t}.shape)
{t}.sum({d}, keepdim=True).expand({t}.shape); {t}.sum({d}, keepdim=True).expand_as({t})
{t}.repeat({c}, *[1] * {t}.dim()); {t}.repeat({i}, *[1] * ({t}.dim() - 1))
{t}.repeat_interleave({c}, {d}); {t}.tile({c}); {t}.roll({i}, {d}); {t}.roll(-{c}); {t}.flip({d})
{m}.flip(0, 1); {t}.movedim({d}, 0); {t}[{i}]; {t}[{a}:]; {t}[:{b}]; {t}[{a}:{b}]; {t}[::{c}]
{t}[{a}::{c}]; {t}[..., {a}:{b}]; {t}[..., ::{c}]; {t}[..., -1]; {t}[-{i}:]; {t}[:-{i}]
{t}[..., :{i}]; {t}[..., {i} // 2:]; {m}[:, {a}:]; {m}[:, 0]; {m}[:, None]; {t}[-1]; {t}[1:-1]
{t}.narrow({d}, {i}, {j}); {t}.narrow({d}, 0, {i}); {t}.narrow({d}, {t}.shape[{d}] - {c}, {c})
{t}.select({d}, {i}); {t}.unfold({d}, {c}, {c}); {t}.unfold({d}, {i}, 1); {m}.diagonal()
{m}.diagonal({c} - 2); {t}.unbind({d})[-1]
{t}.index_select({d}, torch.arange({i}) % max({t}.shape[{d}], 1)); {t}[torch.arange({i})]
{t}[torch.tensor([0, -1])]; {t}.gather({d}, torch.zeros({t}.shape, dtype=torch.int64))
{t}.take_along_dim(torch.arange({t}.shape[-1]).flip(0).expand({t}.shape), -1); {m}.tril({i} - {j})
{m}.triu({c} - 2); {m}.permute({m}.dim() - 1, *range({m}.dim() - 1)); {t}.as_strided(({i},), (1,))
{m}.contiguous(); {t}.clone(); {t}.new_zeros({i}, {c}); {t}.new_ones({t}.shape)
torch.zeros_like({t}); torch.full_like({t}, {c}); torch.empty_like({t}).fill_(2); torch.arange({i})
torch.arange({i}, {j}); torch.arange(0, {i}, {c}); torch.arange({i}, 0, -1)
torch.arange({i}, dtype=torch.float32); torch.linspace(0, 1, {i}); torch.linspace(0, {i}, {c})
torch.full(({i}, {c}), {n}); torch.full(({i},), {v}); torch.eye({i}, {j}); torch.eye({i})
torch.ones({i}, {j}).tril(); torch.zeros({t}.shape[-1], {i}); torch.tensor([{i}, {j}])
torch.tensor({v}); torch.zeros(())
torch.meshgrid(torch.arange({i}), torch.arange({j}), indexing="ij")[0]
torch.tril_indices({i}, {i})[0]; torch.cartesian_prod(torch.arange({i}), torch.arange({c}))
F.one_hot(torch.arange({i}) % 3, 3); torch.outer(torch.arange({i}), torch.arange({j}))
torch.broadcast_to({t}, ({i}, *{t}.shape)); torch.atleast_2d({t}); torch.hstack([{t}, {w}])
torch.vstack([{t}, {w}]); torch.block_diag({m}, {m})
""".strip()
VALUES = """
{t} * {i}; {t} + {v}; {t} / {i}; {f} - {v}; {t} * {c}; {t} + {w}; {f} * {w}; {f} / ({w} * {w} + 1)
{t} + torch.arange({t}.shape[-1]); {t} * {t}.shape[{d}]; {f} / {t}.numel(); {i} - {f}
{i} / ({f} * {f} + 1); {f} // 1 * 0 + {i}; {t} % {i}; {t} // {i}; {t} + {t}[:1]; {m} + {m}[:, :1]
{m}.sum(-1, keepdim=True) * {m}; {m}[..., None] * {m}[..., None, :]; {t}[:, None] + {t}[None]
{t} + {m}; {f} + {t}; {t} == {w}; {f} > 0.5; torch.where({t} > 0, {t}, {i})
torch.where({t} > 0, {w}, {v}); {t}.masked_fill({t} > 1, {v}); {t}.clamp(max={i})
{t}.clamp(-{c}, {v}); {t}.sum(); {t}.sum({d}); {t}.sum(-1, keepdim=True); {t}.amax({d})
{t}.amin(-1); {f}.mean(); {f}.mean({d}); {f}.mean(-1, keepdim=True); {f}.var({d})
{f}.std(-1, unbiased=False); {t}.prod({d}); {t}.any({d}); {t}.all(); {m}.sum((0, 1))
{m}.sum((0, -1), keepdim=True); {f}.logsumexp({d}); {t}.cumsum({d}); {f}.norm(dim={d})
{f}.argmax({d}); {t}.count_nonzero({d}); {t}.max({d})[0]; {t}.sort({d})[0]; {f}.topk({c}, -1)[0]
{t}.max(); {f}.norm(); {f}.softmax({d}); {f}.softmax(-1); {f}.log_softmax({d})
F.layer_norm({f}, {f}.shape[-1:]); F.layer_norm({f}, ({i},)); F.layer_norm({f}, {f}.shape[1:])
F.normalize({f}, dim={d}); F.gelu({f}); {f}.sigmoid(); {f}.tanh(); {f}.relu()
{f}.exp().clamp(max=9); {f}.square(); {t}.float(); {t}.double(); {t}.to({w}.dtype); {t}.long()
{t}.bool(); {f}.abs().sqrt(); {t}.abs(); F.group_norm({q}, {c}); F.rms_norm({f}, {f}.shape[-1:])
F.batch_norm({q}, None, None, training=True); {m} @ {m}.mT; {m}.mT @ {m}; {m} @ {m}; {q} @ {q}.mT
torch.bmm({q}, {q}.mT); torch.einsum("...i,...j->...ij", {m}, {m})
torch.einsum("ij,kj->ik", {m}, {m}); torch.einsum("bij,bkj->bik", {q}, {q})
{m} @ torch.ones({m}.shape[-1], {i}); {t} @ {w}
F.linear({m}, torch.ones({c}, {m}.shape[-1]), torch.ones({c})); F.linear({m}, {m})
torch.addmm({m}, {m}, torch.eye({m}.shape[-1])); {f}.flatten().dot({f}.flatten())
torch.mv({m}, {t}); torch.tensordot({t}, {w}, {c}); torch.kron({m}, torch.ones(1, 2))
F.conv1d({q}, torch.ones(2, {q}.shape[1], {c}), padding={c} - 1)
F.conv1d({q}, torch.ones({q}.shape[1], 1, 2), groups={q}.shape[1], stride={c})
F.conv2d({q}, torch.ones(2, {q}.shape[1], 2, 2), padding=1); F.max_pool1d({q}.contiguous(), {c})
F.avg_pool1d({q}, 2, {c}); F.max_pool2d({q}, 2, ceil_mode=True); F.avg_pool2d({q}, 2)
F.adaptive_avg_pool1d({q}, {c}); F.adaptive_avg_pool1d({q}, {i}); F.adaptive_avg_pool2d({q}, {c})
F.adaptive_max_pool1d({q}, {c}); F.max_pool1d({q}.contiguous(), {i})
F.conv_transpose1d({q}, torch.ones({q}.shape[1], 2, 2), stride={c})
F.interpolate({q}, scale_factor={c}, mode="nearest"); F.interpolate({q}, size={i}, mode="nearest")
F.interpolate({q}, size=(2, {i}), mode="bilinear"); F.interpolate({q}, scale_factor=0.5)
F.interpolate({q}, scale_factor=1.5, mode="bilinear")
F.interpolate({q}, size={q}.shape[-1] * 2, mode="linear"); F.pixel_shuffle({q}, 2); F.glu({f}, {d})
F.interpolate({q}, scale_factor=1.5, mode="linear", align_corners=True); F.pixel_unshuffle({q}, 2)
F.unfold({q}, 2); F.cross_entropy({m}, torch.zeros({m}.shape[0], dtype=torch.int64))
F.cross_entropy({m}, torch.arange({m}.shape[0]) % 2, reduction="none")
F.embedding(torch.arange({i}) % 2, {m}); F.embedding({t}.long() % 2, torch.ones(2, {c}))
F.mse_loss({f}, {w}); F.nll_loss({m}.log_softmax(1), torch.arange({m}.shape[0]) % 2)
F.scaled_dot_product_attention({q}, {q}, {q})
F.scaled_dot_product_attention({q}, {q}, {q}, is_causal=True)
F.cosine_similarity({f}, {w}, dim={d}); torch.cdist({m}, {m})
F.binary_cross_entropy_with_logits({f}, {w}); F.smooth_l1_loss({f}, {w}); F.kl_div({f}, {w})
torch.zeros({i}, {c}).scatter_add(0, torch.zeros({i}, {c}, dtype=torch.int64), torch.ones({i}, {c}))
{t}.index_add(0, torch.arange({t}.shape[0]).flip(0), {w})
{t}.index_fill({d}, torch.tensor([0]), {i}); {t}.slice_scatter({w}[:1], 0, 0, 1)
{t}.select_scatter({w}[0], 0, -1); {t}.scatter({d}, torch.zeros({t}.shape, dtype=torch.int64), {w})
torch.bincount(torch.arange({i})); torch.searchsorted({t}.flatten(), {w})
torch.bucketize({t}, torch.arange({i})); {t}.diff(dim={d}); torch.trapezoid({f}, dim={d})
torch.histc({f}, {c}); {t}.lerp({w}, 0.5); torch.addcmul({f}, {t}, {w}); torch.logspace(0, 1, {i})
{m}.trace(); {f}.cumprod({d}); {f}.logcumsumexp({d}); torch.cummax({t}, {d})[0]
""".strip()
CHANGES = """
{t}[{i}] = {c}; {t}[{a}:{b}] = {v}; {t}[..., {a}:] += {i}; {t}[:1] = {t}[-1:]; {t}.mul_({c})
{t}.add_({i}); {t}[{a}:{b}].mul_(2); {t}.zero_(); {m}[:, {a}:{b}] *= 2; {t}[::2] = {i}
{m}[:, 0] = {m}[:, -1]; {t}.copy_({w}); {t}[{t} > 0] = 1; {t}.clamp_(max={i})
{t}.narrow({d}, 0, {i}).add_(1); {t}.view(-1)[:{i}] = 3; {m}.transpose({d}, {e}).mul_(2)
{t}.fill_({v}); {t}.index_add_({d}, torch.arange({t}.shape[{d}]), {w})
{t}.masked_fill_({t} > 1, {v}); {t}[torch.arange({i})] = 2; {m}.diagonal().fill_({i})
{t}.unsqueeze_(0); {m}.t_(); {t}.scatter_({d}, torch.zeros({t}.shape, dtype=torch.int64), {i})
""".strip()
BLOCKS = (
    "if {p}:\n    {T}\nelse:\n    {T}",
    "if {p}:\n    {T}",
    "if {p}:\n    {T}\nelif {p}:\n    {T}",
    "for k in range(min({n}, 3)):\n    {T}",
    "for k in range({n} % 4):\n    {T}",
    "{T} if {p} else {t}",
    "parts = [{t}.select({d}, k) * k for k in range(min({t}.shape[{d}], 3))]\n{x} = torch.stack(parts, -1)",
    "{x} = sum(part.sum() for part in {t}.split({c}, {d}))",
    "{x} = torch.cat([part * k for k, part in enumerate({t}.chunk({c}, {d}))], {d})",
    "rows, *rest = {t}.shape\n{x} = {t}.reshape(rows, -1)\nn0 = rows",
    "*rest, last = {t}.shape\n{x} = {t}.reshape(*rest, {c}, last // {c}).sum(-1)\nn1 = last",
    "n1 = 1\nwhile n1 < {n}:\n    n1 *= 2",
    "assert {p}",
    "shape = list({t}.shape)\nshape[{d}] = 1\n{x} = {t}.sum({d}, keepdim=True).reshape(shape)",
    "for size in {t}.shape:\n    {T} + size",
    "def inner(h, k):\n    return h * k + h.shape[0]\n{x} = inner({t}, {n})",
    "h, w = {m}.shape[-2:]\n{x} = {m}.reshape(-1, h // 2, 2, w).sum(2)\nn2 = h * w",
    "with torch.no_grad():\n    {T}",
    "{x} = torch.zeros({n})\nfor k in range(len({x})):\n    {x}[k] = k",
    "try:\n    {T}\nexcept RuntimeError:\n    n0 = 7",
    "b, n = {m}.shape[:2]\n{x} = {m}.reshape(b * n, -1).view(b, n, -1).transpose(0, 1)",
    "{x} = (lambda h: h.new_full(({n}, h.shape[-1]), {n}))({t})",
)


def choices(text: str) -> list[str]:
    return [each.strip() for line in text.split("\n") for each in line.split("; ")]


TABLE = {name: choices(text) for name, text in (
    ("n", INTEGERS), ("p", CONDITIONS), ("v", FLOATS),
    ("shape", SHAPES), ("value", VALUES), ("change", CHANGES),
)}  # fmt: skip


class Maker:
    """Fills in templates. `values` are the program's variables after the lines so far."""

    def __init__(self, draw: random.Random, values: dict[str, Any]) -> None:
        self.draw, self.values = draw, values
        self.last = ""
        """The tensor whose dimensions `{d}` and `{e}` are."""

    def tensor(self, wanted: str) -> str:
        tensors = {k: v for k, v in self.values.items() if isinstance(v, torch.Tensor)}
        shape = tensors[self.last].shape if self.last in tensors else None
        fits = {
            "t": lambda value: value.dim() > 0,
            "w": lambda value: value.shape == shape,
            "f": lambda value: value.dim() > 0 and value.is_floating_point(),
            "m": lambda value: value.dim() >= 2,
            "q": lambda value: value.dim() >= 3,
        }[wanted]
        found = [name for name, value in tensors.items() if fits(value)] or [*tensors]
        return self.draw.choice([*found, *found[-2:]])

    def number(self, depth: int) -> str:
        known = [name for name, value in self.values.items() if isinstance(value, int)]
        if known and self.draw.random() < 0.3:
            return self.draw.choice(known)
        text = self.draw.choice(TABLE["n"][: 11 if depth > 1 else None])
        text = self.fill(text, depth + 1)
        return text if re.fullmatch(r"[\w.]+(\(.*?\)|\[.*?\])?", text) else f"({text})"

    def fill(self, template: str, depth: int = 0) -> str:
        """A template with everything in braces replaced, from the left; `{m}` is always the same tensor."""
        known: dict[str, str] = {}

        def replaced(match: re.Match[str]) -> str:
            name = match[1]
            if name in "tfmqw":
                if name not in known or (name == "t" and self.draw.random() < 0.1):
                    known[name] = self.tensor(name)
                if name != "w":
                    self.last = known[name]
                return known[name]
            if name in "de":
                rank = self.values[self.last].dim() if self.last in self.values else 1
                return str(self.draw.randrange(-rank, rank) if rank else 0)
            if name == "c":
                return str(self.draw.choice((1, 2, 2, 3, 4)))
            if name in "ab":
                bound = self.draw.choice(("0", "1", "2", "-1", "-2", "", "{n}", "-{n}", "{n} // 2"))
                return self.fill(bound, depth + 1)
            if name in "ijn":
                last = self.last
                text = self.number(depth)
                self.last = last
                return text
            if name in "pv":
                last = self.last
                text = self.fill(self.draw.choice(TABLE[name]), depth + 1)
                self.last = last
                return text if name == "p" or not depth else f"({text})"
            if name == "x":
                return known.setdefault("x", self.fresh())
            return match[0]

        return re.sub(r"\{(\w)\}", replaced, template)

    def fresh(self) -> str:
        old = [name for name in self.values if re.fullmatch(r"t\d", name)]
        if old and (len(old) > 5 or self.draw.random() < 0.3):
            return self.draw.choice(old)
        return f"t{len(old)}"

    def statement(self) -> str:
        kind = self.draw.choices(
            ["shape", "value", "change", "n", "v", "block"], [9, 8, 2, 3, 1, 5]
        )[0]
        if kind == "block":
            name = self.draw.choice([*self.values])
            target = name if isinstance(self.values[name], torch.Tensor) else self.fresh()
            template = self.draw.choice(BLOCKS)
            for _ in range(template.count("{T}")):
                tensor = self.fill(self.draw.choice(TABLE[self.draw.choice(("shape", "value"))]))
                template = template.replace("{T}", f"{target} = {tensor}", 1)
            return self.fill(template)
        filled = self.fill(self.draw.choice(TABLE[kind]))
        if kind == "change":
            return filled
        if kind in "nv":
            return f"{self.draw.choice(('n0', 'n1', 'n2')) if kind == 'n' else 'v0'} = {filled}"
        return f"{self.fresh()} = {filled}"


def random_input(draw: random.Random, name: str, symbols: list[str]) -> Input:
    rank = draw.choice((1, 2, 2, 2, 3, 3, 4))
    dtype = draw.choices([*DTYPES], [*DTYPES.values()])[0]
    layout = draw.choices([*LAYOUTS], [*LAYOUTS.values()])[0]
    if (layout == "transposed" and rank < 2) or (layout == "channels last" and rank != 4):
        layout = "plain"
    shape = [
        draw.choice(RELATED).format(a=draw.choice(symbols), b=draw.choice(symbols))
        for _ in range(rank)
    ]
    if not any(text.isidentifier() for text in shape):
        shape[draw.randrange(rank)] = draw.choice(symbols)
    marked = [dim for dim in range(rank) if draw.random() < 0.6] or [0]
    return Input(name, tuple(shape), dtype, layout, tuple(marked))


def random_calls(draw: random.Random, symbols: list[str], count: int) -> list[Sizes]:
    """The first sizes, `count` others, one of which is the first again."""
    pool = draw.sample(range(2, 9), len(symbols))
    first = dict(zip(symbols, pool, strict=True))
    if draw.random() < 0.15:
        first[draw.choice(symbols)] = draw.choice([0, 1, *first.values()])
    others = []
    for _ in range(count - 1):
        sizes = {name: draw.choice(SIZES) for name in symbols}
        if draw.random() < 0.3:
            sizes = dict.fromkeys(symbols, draw.choice(SIZES))
        elif draw.random() < 0.3:
            sizes = {**first, draw.choice(symbols): draw.choice(SIZES)}
        others.append(sizes)
    others.insert(draw.randrange(count), first)
    return [first, *others]


def generate(seed: int, length: int = 6, calls: int = 10) -> Program:
    """The program of a seed: some `length` statements, called at one size and then at `calls` others."""
    draw = random.Random(seed)
    symbols = ["a", "b", "c"][: draw.randint(1, 3)]
    inputs = [random_input(draw, name, symbols) for name in "xyz"[: draw.choice((1, 1, 2, 2, 3))]]
    program = Program(
        inputs, random_calls(draw, symbols, calls), draw.random() < 0.6, draw.random() < 0.4
    )
    values: dict[str, Any] = {given.name: given.make(program.calls[0]) for given in inputs}
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    length = draw.randint(1, length)
    for _ in range(40 * length):
        if len(program.body) == length:
            break
        text = Maker(draw, {k: v for k, v in values.items() if usable(v)}).statement()
        tried = copy.deepcopy({k: v for k, v in values.items() if usable(v)})
        try:
            exec(text, {**names, **tried}, tried)
        except Exception:
            continue
        sizes = [v.numel() for v in tried.values() if isinstance(v, torch.Tensor)]
        numbers = [v for v in tried.values() if type(v) in (int, float)]
        if max(sizes) <= MOST_ELEMENTS and all(abs(number) < 1e6 for number in numbers):
            program.body.append(text)
            values = tried
    program.returned = [name for name in values if re.fullmatch(r"[tnv]\d|[xyz]", name)]
    return program


def usable(value: Any) -> bool:
    return isinstance(value, torch.Tensor | int | float)
