"""What lowering promises, as a table of programs: each becomes loops alone, and these compute eager's values,
dtypes, sizes and strides. The other files of this folder say more of one family, and of what isn't loops.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.conftest import check

aten = torch.ops.aten
NAN, INF = math.nan, math.inf


def numbers(*size: int, step: float = 0.7) -> torch.Tensor:
    """Numbers of both signs, other ones for another step."""
    return torch.arange(math.prod(size)).mul(step).sin().view(size) * 3


INPUTS = {
    "x": numbers(4, 6),
    "y": numbers(4, 6, step=0.9),
    "t": numbers(4, 6, 5),
    "v": numbers(6, step=1.1),
    "i": torch.tensor([0, 3, 2, 0]),
    "j": torch.tensor([3, -1, -4, 1]),
    "m": torch.tensor([True, False, True, False]),
    "n": torch.tensor([[1.0, NAN, 3.0, -0.0], [-INF, 2.0, INF, 0.0]]),
    "byte": torch.arange(5, dtype=torch.uint8),
    "one": numbers(4, 1),
    "none": numbers(3, 0),
    "small": torch.full((1000,), 127, dtype=torch.int8),
}
"""By the names of a program's parameters."""

Program = Callable[..., Any]

CREATION: dict[str, Program] = {
    "exact sequences": lambda x: torch.arange(11) * 1_000_000_000,
    "sequences": lambda x: [torch.arange(3, 20, 4), torch.arange(9, -3, -5), torch.arange(0)],
    "int32 sequences": lambda x: torch.arange(5, dtype=torch.int32) + 2**40 // 2**12,
    "float sequences": lambda x: [
        torch.arange(5, dtype=d) for d in (torch.float32, torch.bfloat16)
    ],
    "iota": lambda x: torch.ops.prims.iota(
        4, start=2, step=3, dtype=torch.int64, device="cpu", requires_grad=False
    ),
    "full": lambda x: [torch.full((2, 2), 7), torch.full((), 0.5, dtype=torch.bfloat16)],
    "zeros, ones": lambda x: [torch.zeros(3, dtype=torch.bool), torch.ones(2, 0)],
    "likes": lambda x: [torch.full_like(x, 3.5), torch.zeros_like(x, dtype=torch.int64)],
    "news": lambda x: [torch.ones_like(x), x.new_zeros(4), x.new_full((2,), 9)],
    "eye": lambda x: [torch.eye(3), torch.eye(2, 4, dtype=torch.int32), torch.scalar_tensor(2.5)],
    "triangles": lambda x: [f(x, k) for f in (torch.tril, torch.triu) for k in (-2, 0, 1, 9)],
    "triangles of bools and NaN": lambda n: [n.bool().tril(), n.tril(), n.triu(1)],
}

JOINING: dict[str, Program] = {
    "cat": lambda x, y: [torch.cat([x, y * 2, x.exp()], d) for d in (0, 1, -1)],
    "stack": lambda x, y: [torch.stack([x, y], d) for d in (0, 1, -1)],
    "cat of nothing": lambda x, y: torch.cat([x, torch.empty(0), y]) + 1,
    "cat of dtypes": lambda x, y: torch.cat([x, y.bfloat16(), x > 0]),
    "cat of one": lambda x: [torch.cat([x]), torch.cat([x[:0], x[:0]])],
    "padding": lambda x: [
        aten.constant_pad_nd(z, pad, 1)
        for pad in ((1, 2), (0, 0), (-1, 2), (1, 1, 2, 0), (-1, -1), (0, 0, 0, 3))
        for z in (x, x.t(), x.int(), x > 0)
    ],
    "select_scatter": lambda x, v: [
        aten.select_scatter(x, v, 0, -1),
        aten.select_scatter(x, v[:4], 1, 2),
    ],
    "slice_scatter": lambda x, v: aten.slice_scatter(x, v.expand(2, 6), 0, 1, 3),
    "slice_scatter, from the end": lambda x: aten.slice_scatter(x, x[:, :4] * 0, 1, -5, -1),
    "slice_scatter, all and none": lambda x: [
        aten.slice_scatter(x, x * 2),
        aten.slice_scatter(x, x[2:2], 0, 2, 2),
    ],
    "roll": lambda x: [x.roll(1, 0), x.roll((-2, 9), (0, 1)), x.roll(3), x.roll(0, 1)],
    "repeat": lambda x: [x.repeat(2, 3), x.repeat(2, 1, 1), x.sin().repeat(1, 2), x[:0].roll(1, 0)],
}

INDEXING: dict[str, Program] = {
    "one": lambda t, i: t[i],
    "second": lambda t, i: t[:, i],
    "adjacent pair": lambda t, i, j: t[:, i, j],
    "separated pair": lambda t, i, j: t[i, :, j],
    "broadcast pair": lambda t, i, j: t[i[:, None], j[None]],
    "matrix": lambda t, i, j: t[torch.stack([i, j])],
    "int32": lambda t, i: t[i.int()],
    "computed": lambda t, i: t[(i + 1) % 3],
    "of a view": lambda t, i: t.transpose(0, 2)[i],
    "of a value": lambda t, i, j: t.exp()[i, j] + 1,
    "constant": lambda t: t[torch.tensor([2, -1])],
    "empty": lambda t, i: t[i[:0]],
    "gather": lambda x, i: [x.gather(0, i[None]), x.gather(1, i[:, None])],
    "index_select": lambda x, i: x.index_select(1, i),
    "embedding": lambda x, i: [F.embedding(i, x.half()), F.embedding(i.int(), x)],
    "mask of one value": lambda x, m: [
        aten.index_put(x, [x > 0], x[0, 0]),
        aten.index_put(x, [m], x[1, 1]),
    ],
    "add rows": lambda x, i, y: aten.index_put(x, [i], y, True),
    "add a number": lambda x, i, y: aten.index_put(x, [None, i], y[:1, :1], True),
    "add integers": lambda i, j: aten.index_put(j, [i], i * 9, True),
    "scatter_add": lambda x, i, y: x.scatter_add(0, i[:, None].expand(4, 6), y),
    "scatter_add to a value": lambda x, i, y: (x * 2).scatter_add(1, i[None], y) + x,
    "base stays": lambda x, i, y: [x.sin(), aten.index_put(x.sin(), [i], y, True), x.sin() * 2],
    "one value": lambda x, i: [
        aten.scatter.value(x, 0, i[None], 7.5),
        aten.index_put(x, [i], x[0, 0]),
    ],
}

ELEMENTS: dict[str, Program] = {
    "numbers wrap around": lambda byte: [byte + -3, byte * 300, byte < -3],
    "where": lambda x, i: [
        torch.where(i[:, None] > 1, x, i[:, None]),
        torch.where(i > 1, i, -1),
        torch.where(i > 1, 1.5, 0.0),
    ],
    "masked_fill": lambda n, i: [
        n.masked_fill(i > 1, -INF),
        i.masked_fill(i > 1, 7),
        n.bfloat16().masked_fill(i > 1, 0.1),
    ],
    "clamp to NaN": lambda n, v: [
        torch.clamp(n, v[:4], None).maximum(v[:4]),
        torch.maximum(v[:4], n),
        torch.clamp(v[:4], n, None),
    ],
    "powers": lambda n: [2.0**n, torch.pow(n.double(), n.double().abs())],
    "bits": lambda i, m: [i & 5, i | m, i ^ i.int(), ~i, ~m, m & ~m, m ^ True],
    "shifts": lambda i: [i << 2, i >> 1, i.int() << i.int()],
}

REDUCTIONS: dict[str, Program] = {
    "where the largest bool is": lambda m: list((m[None] & m[:, None]).max(1)),
    "of one element": lambda one: [torch.var(one, 1), torch.mean(one, 1)],
    "NaN stays": lambda n: [n.amax(1), n.amin(1), *n.max(1), *n.min(1), n.argmax(), n.argmin()],
    "integers are added as int64": lambda small: [small.sum(), small[:10].prod()],
    "in another dtype": lambda x: [x.sum(dtype=torch.float64), x.sum(1, dtype=torch.float64)],
    "mean in another dtype": lambda x, i: [
        x.bfloat16().mean(0, dtype=torch.float32),
        i.mean(0, dtype=torch.float32),
    ],
    "count_nonzero": lambda n: [aten.count_nonzero(n), aten.count_nonzero(n, [1])],
    "infinities and NaN in running sums": lambda n: [n.cumsum(1), n.cumprod(1)],
}

VIEWS: dict[str, Program] = {
    "stride zero": lambda x: [x.sin().expand(5, 4, 6), (x + 1)[:1].expand(3, 6)],
    "as_strided": lambda x: x.as_strided((3, 2), (2, 1), 1) + 1,
    "as_strided of a value": lambda x: [
        x.sin().as_strided((4, 4), (6, 1), 2),
        x.sin().t().as_strided((3, 3), (1, 2)),
    ],
    "scans of scans": lambda x: [x.cumsum(0).cumsum(-1).t(), x.t().cumprod(1)[::2]],
}

LIBRARY: dict[str, Program] = {
    "sequences between floats": lambda x: [torch.arange(5.0), torch.linspace(0, 1, 7)],
    "a write with steps": lambda x: aten.slice_scatter(x, x[:, :3] * 0, 1, 1, None, 2),
    "a write with steps from the end": lambda x: aten.slice_scatter(x, x[:, :2], 1, -5, -1, 3),
    "reductions of none": lambda none: [torch.var(none, 1), torch.mean(none, 1), none.sum(1)],
    "a scan of one element": lambda one: [one.cumsum(1), one.cumprod(1)],
    "a diagonal": lambda x: x.sin().diagonal(1, 0, 1) + 1,
    "windows": lambda x: x.sin().unfold(1, 3, 2) + 1,
    "a rolled sum of windows": lambda x: x.unfold(0, 2, 1).sum(-1),
}
"""What loops could compute, and rarely have to."""

FAMILIES = {
    "creation": CREATION,
    "joining": JOINING,
    "indexing": INDEXING,
    "elements": ELEMENTS,
    "reductions": REDUCTIONS,
    "views": VIEWS,
}
PROGRAMS = {f"{f}: {name}": fn for f, table in FAMILIES.items() for name, fn in table.items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_loops_that_compute_what_eager_does(name: str) -> None:
    program = PROGRAMS[name]
    check(program, *(INPUTS[given] for given in inspect.signature(program).parameters))


@pytest.mark.parametrize("name", LIBRARY)
def test_a_rare_program_is_left_to_the_library(name: str) -> None:
    program = LIBRARY[name]
    given = [INPUTS[name] for name in inspect.signature(program).parameters]
    assert check(program, *given, externs=None).externs
