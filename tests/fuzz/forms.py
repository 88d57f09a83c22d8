"""What a random program may do with tensors, by subject; `{t}`, `{u}` are tensors, `{i}` is an integer.

Rounding differs between a program and its kernels, so nothing exact may hang on a last digit: thresholds and
conversions to integers lie off the values that formulas like to give (`{steps}` are whole numbers made so),
and `argmax` chooses among whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable

STEPS = "(({t}).float().nan_to_num().clamp(-9, 9) * 3 + 0.137).floor()"
"""Whole numbers that follow from a tensor."""

SOME = ("0", "-1", "0, keepdim=True", "-1, keepdim=True")
CHOICES = {
    "key": ("x", "y", "q"),
    "dim": ("", *SOME),
    "some": SOME,
    "several": ("(0, 1)", "(0, -1)", "(-2, -1), keepdim=True", "(), keepdim=True"),
    "wide": ("torch.float64", "torch.float32"),
    "whole": ("torch.int64", "torch.int32", "torch.int16", "torch.int8"),
    "any": ("torch.float64", "torch.float32", "torch.int64", "torch.uint8", "torch.bool"),
    "half": ("torch.bfloat16", "torch.float16"),
}

ARITHMETIC = (
    "{t} + {u}",
    "{t} * {i}",
    "{t} - SCALE",
    "torch.sin({t})",
    "{t}.relu()",
    "torch.where({t} > 0.13, {t}, {u})",
    "{t}.clone()",
    "{t}.detach()",
    "sum(steps({t}, {i} % 4))",
    "torch.cat([{t}, {u}])[: len({t})]",
    "torch.stack([{t}, {t}]).sum(0)",
    "({t} if flag else {u})",
    "({t} if {i} > 2 else {u})",
    "F.dropout({t}.float(), 0.5, flag)",
    "{t} + torch.rand(4)",
    "{t} + torch.ones({t}.shape[-1])",
    "{t}.flip(0)",
    "{t} @ torch.ones(4, 4)",
    "{t}.reshape(-1)[:4]",
    "{t} / ({u}.abs() + 1)",
)

PYTHON = (
    "helper({t}, {i})",
    "helper({t}, 2, {u}, sign=-1)",
    "scaled({t})",
    "scaled({t}, by={i})",
    "speak({t}, 'h')",
    "box({t})",
    "box.doubled",
    "box.value",
    "(box + {t}).value",
    "box.bump({t}).value",
    "items[0]",
    "items[{i} % len(items)]",
    "table['x']",
    "table.get('{key}', {t})",
    "functools.partial(helper, sign=-1)({t})",
    "functools.reduce(lambda p, q: p + q, [{t}, {u}])",
    "max([{t}, {u}], key=lambda v: v.dim())",
)

DTYPES = (
    "{t}.to({wide})",
    "{t}.double() + {u}",
    "{t}.to({u}.dtype)",
    "{t}.type_as({u})",
    "{steps}.to({whole}) + {i}",
    "{steps}.to({whole}) // 2",
    "{steps}.to({whole}) % 3 + {u}",
    "{steps}.abs().to(torch.uint8) * 40",
    "-{steps}.to(torch.int32)",
    "{steps}.to(torch.int64) / 2",
    "({steps}.to(torch.int64) & 5) | {i}",
    "{steps}.to(torch.int64) << 2",
    "({t} > 0.13)",
    "~({t} > 0.13)",
    "({t} > 0.13) & ({u} < 0.71)",
    "({t} > 0.13).to({whole}) - 1",
    "({t} > 0.13) * {u}",
    "torch.where({t} > 0.13, {i}, {u})",
    "torch.where({t} > 0.13, 1, 2)",
    "torch.arange({i} % 5, dtype={whole})",
    "torch.arange(4, dtype={whole}) * {t}",
    "torch.full((1, 4), {i}) + {t}",
    "torch.zeros(4, dtype={whole}) + 1.5",
    "torch.tensor([1, 2, 3, {i}]) * {t}",
    "torch.tensor({i}, dtype=torch.float64) * {t}",
    "torch.ones_like({t}, dtype={any})",
    "{t}.new_zeros(4) + {i}",
    "torch.full_like({t}, 2) ** {steps}.clamp(0, 3)",
    "torch.result_type({t}, {u}) is torch.float64 and {t} or {u}",
    "{t} == {u}",
    "torch.maximum({t}, {u}.to({t}.dtype))",
)

HALF = (
    "torch.tanh({t}).to({half})",
    "torch.tanh({t}).to({half}) + torch.tanh({u}).to({half})",
    "(torch.tanh({t}).to({half}) * SCALE).float()",
    "torch.tanh({t}).to({half}).sum({dim})",
    "torch.tanh({t}).to({half}) + {u}",
    "F.softmax(torch.tanh({t}).to({half}), -1)",
    "torch.arange(4).to({half}) + {i}",
    "{t}.detach().tanh().half().relu().to({half})",
)
"""These round so much that programs with them are compared more loosely."""

REDUCTIONS = (
    "{t}.sum(0, keepdim=True) + {u}",
    "{t}.mean() + {u}",
    "F.softmax({t}.float(), -1)",
    "F.log_softmax({t}.float(), 0)",
    "{t}.sum({dim})",
    "{t}.sum({several})",
    "{t}.float().mean({dim})",
    "{t}.float().mean({several})",
    "{t}.amax({several})",
    "{t}.amin({some}) + {u}",
    "{t}.max({some}).values",
    "{t}.float().var({dim}, correction=0)",
    "({t}.float().var({some}, unbiased=False) + 0.1).sqrt()",
    "{t}.tanh().prod({some})",
    "{t}.cumsum(0)",
    "{t}.cumsum(-1) * {i}",
    "{t}.flip(0).cumsum(0, dtype=torch.float64)",
    "{t}.logsumexp({some})",
    "({t}.float().square().sum({dim}) + 0.1).sqrt()",
    "({t} > 0.13).any({dim})",
    "({t} > 0.13).all({dim})",
    "({t} > 0.13).sum({dim})",
    "{steps}.argmax({dim})",
    "{steps}.to(torch.int64).argmin({some})",
    "{steps}.to({whole}).sum({dim})",
    "{steps}.to(torch.int64).prod({some})",
    "{steps}.cummax(0).values",
    "{t}[:0].sum({dim})",
    "{t}[:0].float().mean(0)",
    "{t}[:0].prod(0)",
    "{t}[..., :0].any(-1)",
    "{t}[:0].amax({some})",
    "torch.cat([{t}[:0], {u}])",
    "torch.einsum('ij,kj->ik', {t}, {u})",
    "({t}.unsqueeze(0) * {u}.unsqueeze(1)).sum(0)",
    "torch.sort({steps}, -1).values",
    "{t}.gather(-1, {steps}.long().remainder({t}.shape[-1]))",
    "{t}[..., {steps}.to(torch.int64).flatten()[:3] % 4]",
    "torch.zeros(5, 4).index_add(0, torch.arange(len({t})) % 5, {t}.detach().float())",
    "F.one_hot({steps}.long().remainder(5), 5).sum(0)",
)

MODULES = (
    "net({t}.float())",
    "net.norm({t}.float())",
    "net.batch({t}.float())",
    "net.conv({t}.float().unsqueeze(-2)).squeeze(-2)",
    "net.words({steps}.long().remainder(5))",
    "net.words.weight[: len({t})] + {t}",
    "net.chain({t}.float())",
    "net.chain[0]({t}.float())[..., :4]",
    "net.same({t})",
    "net.average({t})",
    "net.average({t}) + net.average({u})",
    "net.average.mean * {t}",
    "net.linear.weight @ {t}.float().mT",
    "F.linear({t}.float(), net.linear.weight, net.linear.bias)",
    "F.layer_norm({t}.float(), (4,))",
    "torch.tanh({t}).float() @ net.linear.weight.t()",
    "F.mse_loss(net({t}.float()), torch.tanh({u}.detach().float()))",
    "F.cross_entropy(net({t}.float()), {steps}[..., 0].long().remainder(4))",
    "sum(p.square().mean() for p in net.parameters()) + {t}",
    "sum(b.float().mean() for b in net.buffers()) * {t}",
    "{t} + len(list(net.children()))",
    "learn(net, {t}, {i} % 3)",
)

FORMS = {
    "arithmetic": (20, ARITHMETIC),
    "python": (17, PYTHON),
    "dtypes": (12, DTYPES),
    "reductions": (14, REDUCTIONS),
    "modules": (9, MODULES),
}
"""What there is, and how often it is chosen."""

WRITES = (
    "{t}.add_({i})",
    "{t}.mul_(2)",
    "{t} += {u}.detach()",
    "{t} *= {i}",
    "{t}[0] = {i}",
    "{t}[..., 1] += 1",
    "{t}[{t} > 0.13] = 0",
    "{t}.copy_({u})",
    "torch.add({t}, 1, out={u})",
    "{t}.zero_()",
    "{t}.clamp_(max=2)",
    "{t}.data.add_(1)",
    "{t} -= {u}",
    "{t}[0] = {u}[-1]",
    "{t}[::2] *= 2",
    "{t}.masked_fill_({u} > 0.13, {i})",
    "{t}.t().add_({u}.t())",
    "{t}[torch.tensor([0, 1])] = {u}[:2].detach()",
    "{t}.index_add_(0, torch.tensor([0, 0, 1]), {u}[:1].detach() * torch.ones(3, 1))",
    "{t}.scatter_(0, torch.zeros(1, 4, dtype=torch.int64), {i})",
    "net.average.mean.mul_({i})",
)


def blanks(t: str, u: str, i: str, pick: Callable[..., str]) -> dict[str, str]:
    """What stands for the names in braces; `pick` chooses among strings."""
    found = {"t": t, "u": u, "i": i, "steps": STEPS.format(t=t)}
    return found | {name: pick(*among) for name, among in CHOICES.items()}
