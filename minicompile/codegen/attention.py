"""Flash attention: a template of Triton kernels, in which functions say what is done to the scores.

Rows of scores never lie in memory. A program takes XBLOCK queries, goes over the keys, RBLOCK at a time, and
keeps for each query the largest score so far, the sum of 2^(score - largest) and the values so weighted;
where a larger score comes, both sums are scaled down. The backward computes scores again, and weights by the
largest score (`peak`) and the logarithm of that sum (`logs`): one kernel goes over the keys for the gradient
of queries, another over the queries for those of keys and values. A step of either begins with its two
products of loaded tiles: beside the second, exponents of the first are computed.

Where a band of scores counts, tiles outside of it are left out, and masked where they are at its edges. One
loop goes over all: each of several would begin with waiting for its first tiles. The programs that take
longest come first, those of some heads in turn, so that no long one is left to the end: as many heads as the
cache holds what their programs read.

Holes are in braces: functions `score` and `slope` (codegen/score.py) before the text; `{program(queries)}`,
which of them a program takes; `{start(k)}`, where a head's keys begin; `{place(k, j, d)}`, element d of key j
from there; `{mask(rows, d)}`, which of them exist; `{ends(keys)}`, where tiles begin and end, and from `left`
to `right` need no masks; numbers. A factor of all scores, `{times}`, is left out until they go into the
exponent: {scale} is that times log2(e). Where scores are SMALL, as products are, one instruction multiplies
and subtracts the largest exponent, later the logarithm of the whole sum. Others may be LARGE, as a finite
mask is, so that their exponents no longer differ: then the largest score is subtracted first.

Milakov and Gimelshein, Online normalizer calculation for softmax (2018); Dao et al., FlashAttention (2022);
Dao, FlashAttention-2 (2023). The real compiler: torch/_inductor/kernel/flex/.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import sympy
import torch

from minicompile.codegen.plan import INT32_END, KernelArgument, KernelPlan, power_of_two
from minicompile.codegen.printing import LinePrinter, kernel_template
from minicompile.codegen.score import BATCH, EVERYWHERE, HEAD, KEY, QUERY, Band, Scores, scores_of
from minicompile.codegen.triton_ops import TRITON_DTYPES
from minicompile.lowering.ir import Layout, TemplateKernel, View
from minicompile.ops.attention import ATTENTION, LOG2E
from minicompile.ops.device import Gpu, gpu_of
from minicompile.ops.dtypes import HALF_TYPES
from minicompile.scheduling.body import LoopBody
from minicompile.scheduling.nodes import ExternKernelSchedulerNode
from minicompile.shapes.expr import Size

PROGRAM = """@triton.jit
def {name}({parameters}, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    blocks = ({along} + XBLOCK - 1) // XBLOCK
    turn = tl.program_id(0) % (blocks * {together})
    first = {block} * XBLOCK
    pair = tl.program_id(0) // (blocks * {together}) * {together} + turn % {together}
    b, h = {pair}{numbers}"""

FORWARD = """
@triton.jit
def attend(
    sums, total, most, queries, k, v, b, h, i, rows,{others}
    begin, left, right, end, RBLOCK: tl.constexpr,
):
    dc, dr = tl.arange(0, {width})[:, None], tl.arange(0, {width})[None, :]
    for start in range(begin, end, RBLOCK):
        j = start + tl.arange(0, RBLOCK)[None, :]
        columns = (j < {keys}) | ({keys} % RBLOCK == 0)
        keys = tl.load(k + ({place(k, j, dc)}), {mask(columns, dc)}, other=0.0)
        s = tl.dot(queries, keys{precision})
        s = score(s, b, h, i, j, rows, columns{passed})
        if (start < left) | (start >= right):
            s = tl.where(columns, score_at_edge(s, b, h, i, j), float("-inf"))
        new = tl.maximum(most, tl.max(s, 1){top})
        base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2({power})
        shrink = tl.exp2({step})
        total = total * shrink + tl.sum(weights, 1)
        most = new
        n = start + tl.arange(0, RBLOCK)[:, None]
        there = (n < {keys}) | ({keys} % RBLOCK == 0)
        values = tl.load(v + ({place(v, n, dr)}), {mask(there, dr)}, other=0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None]{precision})
    return sums, total, most


{program(queries)}
    k += {start(k)}
    v += {start(v)}
    i = first + tl.arange(0, XBLOCK)[:, None]
    dr = tl.arange(0, {width})[None, :]
    rows = (i < {queries}) | ({queries} % XBLOCK == 0)
    queries = tl.load(q + {start(q)} + ({place(q, i, dr)}), {mask(rows, dr)}, other=0.0)
    sums = tl.zeros([XBLOCK, {width}], tl.float32)
    total = tl.zeros([XBLOCK], tl.float32)
    most = tl.full([XBLOCK], float("-inf"), tl.float32)
    {ends(keys)}
    sums, total, most = attend(
        sums, total, most, queries, k, v, b, h, i, rows,{others}
        begin, left, right, end, RBLOCK,
    )
    result = sums / total[:, None]
    tl.store(out + {start(out)} + ({place(out, i, dr)}), result.to({dtype}), {mask(rows, dr)})
    tl.store(peak + {start(peak)} + {place(peak, i)}, {peak}, rows)
    tl.store(logs + {start(logs)} + {place(logs, i)}, {logs}, rows)
"""

QUERIES = """
@triton.jit
def gather(
    sums, queries, down, most, log, delta, k, v, b, h, i, rows,{others}
    begin, left, right, end, RBLOCK: tl.constexpr,
):
    dc = tl.arange(0, {width})[:, None]
    for start in range(begin, end, RBLOCK):
        j = start + tl.arange(0, RBLOCK)[None, :]
        columns = (j < {keys}) | ({keys} % RBLOCK == 0)
        keys = tl.load(k + ({place(k, j, dc)}), {mask(columns, dc)}, other=0.0)
        values = tl.load(v + ({place(v, j, dc)}), {mask(columns, dc)}, other=0.0)
        products = tl.dot(queries, keys{precision})
        ds = tl.dot(down, values{precision})
        s = score(products, b, h, i, j, rows, columns{passed})
        if (start < left) | (start >= right):
            s = tl.where(columns, score_at_edge(s, b, h, i, j), float("-inf"))
        weights = tl.exp2({share})
        ds = weights * (ds - delta)
        ds = slope(products, ds, b, h, i, j, rows, columns{passed}){outside}
        if {keys} % RBLOCK != 0:
            ds = tl.where(columns, ds, 0.0)
        sums = tl.dot(ds.to(keys.dtype), tl.trans(keys), sums{precision})
    return sums


{program(queries)}
    k += {start(k)}
    v += {start(v)}
    i = first + tl.arange(0, XBLOCK)[:, None]
    dr = tl.arange(0, {width})[None, :]
    rows = (i < {queries}) | ({queries} % XBLOCK == 0)
    queries = tl.load(q + {start(q)} + ({place(q, i, dr)}), {mask(rows, dr)}, other=0.0)
    down = tl.load(gradient + {start(gradient)} + ({place(gradient, i, dr)}), {mask(rows, dr)}, other=0.0)
    most = tl.load(peak + {start(peak)} + ({place(peak, i)}), rows, other=0.0)
    log = tl.load(logs + {start(logs)} + ({place(logs, i)}), rows, other=float("inf"))
    delta = tl.load(delta + {start(delta)} + ({place(delta, i)}), rows, other=0.0)
    sums = tl.zeros([XBLOCK, {width}], tl.float32)
    {ends(keys)}
    sums = gather(
        sums, queries, down, most, log, delta, k, v, b, h, i, rows,{others}
        begin, left, right, end, RBLOCK,
    )
    tl.store(dq + {start(dq)} + ({place(dq, i, dr)}), (sums * {factor}).to({dtype}), {mask(rows, dr)})
"""

KEYS = """
@triton.jit
def spread(
    sums_k, sums_v, keys, values, q, gradient, peak, logs, delta, b, h, j, columns,{others}
    begin, left, right, end, RBLOCK: tl.constexpr,
):
    dc, dr = tl.arange(0, {width})[:, None], tl.arange(0, {width})[None, :]
    for start in range(begin, end, RBLOCK):
        i = start + tl.arange(0, RBLOCK)[None, :]
        rows = (i < {queries}) | ({queries} % RBLOCK == 0)
        queries = tl.load(q + ({place(q, i, dc)}), {mask(rows, dc)}, other=0.0)
        n = start + tl.arange(0, RBLOCK)[:, None]
        there = (n < {queries}) | ({queries} % RBLOCK == 0)
        down = tl.load(gradient + ({place(gradient, n, dr)}), {mask(there, dr)}, other=0.0)
        products = tl.dot(keys, queries{precision})
        ds = tl.dot(values, tl.trans(down){precision})
        s = score(products, b, h, i, j, rows, columns{passed})
        if (start < left) | (start >= right):
            s = tl.where(rows, score_at_edge(s, b, h, i, j), float("-inf"))
        most = tl.load(peak + {place(peak, i)}, rows, other=0.0)
        log = tl.load(logs + {place(logs, i)}, rows, other=0.0)
        weights = tl.exp2({share})
        ds = weights * (ds - tl.load(delta + {place(delta, i)}, rows, other=0.0))
        ds = slope(products, ds, b, h, i, j, rows, columns{passed}){outside}
        if {queries} % RBLOCK != 0:
            ds = tl.where(rows, ds, 0.0)
        sums_v = tl.dot(weights.to(down.dtype), down, sums_v{precision})
        sums_k = tl.dot(ds.to(queries.dtype), tl.trans(queries), sums_k{precision})
    return sums_k, sums_v


{program(keys)}
    q += {start(q)}
    gradient += {start(gradient)}
    peak += {start(peak)}
    logs += {start(logs)}
    delta += {start(delta)}
    j = first + tl.arange(0, XBLOCK)[:, None]
    dr = tl.arange(0, {width})[None, :]
    columns = (j < {keys}) | ({keys} % XBLOCK == 0)
    keys = tl.load(k + {start(k)} + ({place(k, j, dr)}), {mask(columns, dr)}, other=0.0)
    values = tl.load(v + {start(v)} + ({place(v, j, dr)}), {mask(columns, dr)}, other=0.0)
    sums_k = tl.zeros([XBLOCK, {width}], tl.float32)
    sums_v = tl.zeros([XBLOCK, {width}], tl.float32)
    {ends(queries)}
    sums_k, sums_v = spread(
        sums_k, sums_v, keys, values, q, gradient, peak, logs, delta, b, h, j, columns,{others}
        begin, left, right, end, RBLOCK,
    )
    tl.store(dk + {start(dk)} + ({place(dk, j, dr)}), (sums_k * {factor}).to({dtype}), {mask(columns, dr)})
    tl.store(dv + {start(dv)} + ({place(dv, j, dr)}), sums_v.to({dtype}), {mask(columns, dr)})
"""

NO_SLOPE = """
        if (start < left) | (start >= right):
            ds = tl.where({}, ds, 0.0)"""
"""Outside of the band, for rows of which no score counts: their weights aren't 0 but no numbers."""

# up to 10^5 weights keep the precision of half types; from 10^9 on they overflow
SMALL = {
    "top": " * {scale}",
    "power": "s * {scale} - base[:, None]",
    "step": "most - base",
    "peak": "tl.zeros([XBLOCK, 1], tl.float32)",
    "logs": "(most + tl.log2(total))[:, None]",
    "share": "s * {scale} - log",
}
LARGE = {
    "top": "",
    "power": "(s - base[:, None]) * {scale}",
    "step": "(most - base) * {scale}",
    "peak": "most[:, None]{times}",
    "logs": "tl.log2(total)[:, None]",
    "share": "(s{times} - most) * {log2e} - log",
}


@dataclass(frozen=True)
class Block:
    """Tiles of one kernel: XBLOCK, RBLOCK, warps, and how many tiles are loaded ahead."""

    x: int
    r: int
    warps: int
    stages: int


HOPPER = {
    ("forward", 64): [Block(64, 64, 4, 3)],
    ("queries", 64): [Block(64, 64, 4, 3)],
    ("keys", 64): [Block(64, 128, 4, 2), Block(64, 64, 4, 2)],
    ("forward", 128): [Block(128, 64, 4, 2)],
    ("queries", 128): [Block(128, 64, 8, 3)],
    ("keys", 128): [Block(64, 64, 4, 2)],
}
"""The fastest of some for half types and heads up to this size, on an H100 or H200 (with heads of 128 the
forward's spills 72 bytes, and yet is); the last where scores take registers of their own."""
OTHERS = {
    ("forward", 64): [Block(128, 64, 8, 3)],
    ("queries", 64): [Block(64, 32, 4, 2)],
    ("keys", 64): [Block(64, 64, 8, 2)],
    ("forward", 128): [Block(64, 64, 4, 2)],
    ("queries", 128): [Block(64, 32, 4, 2)],
    ("keys", 128): [Block(64, 32, 8, 2)],
}
"""What finds its registers on an A100; not measured."""
MARGIN = 4096
"""Bytes for numbers of rows."""


def block_for(part: str, width: int, dtype: torch.dtype, scores: Scores, gpu: Gpu) -> Block:
    """Small where products take plain registers. What scores read is loaded ahead, too, so with it less fits
    into shared memory."""
    known, size = HOPPER if gpu.capability == (9, 0) else OTHERS, max(width, 64)
    block = known[part, size][0 if scores.is_plain else -1]
    if dtype not in HALF_TYPES:
        r = 16 if part == "keys" or width > 64 else 32
        block = Block(32, r, 4 if width <= 64 else 8, 1)

    def shared(block: Block) -> int:
        """Bytes, or a little more: one or two tiles stay, two of R rows and those of scores come."""
        stay = block.x * width * dtype.itemsize * (1 if part == "forward" else 2)
        step = 2 * block.r * width * dtype.itemsize + block.x * block.r * scores.read
        return stay + block.stages * step + MARGIN * (part == "keys")

    while shared(block) > gpu.shared_bytes and block.stages > 1:
        fewer = block.r <= 32
        block = replace(block, stages=block.stages - fewer, r=block.r if fewer else block.r // 2)
    return block


def heads_together(band: Band, pairs: int, read: int, gpu: Gpu) -> int:
    """Of so many heads the most whose tiles (`read` bytes of each) lie in a third of the cache. One where all
    programs take equally long."""
    if (band.low is None) == (band.high is None):
        return 1
    most = max(gpu.l2_bytes // 3 // read, 1)
    return max(n for n in range(1, min(most, pairs) + 1) if pairs % n == 0)


def shifted(text: str, by: int) -> str:
    return f"{text} {'-' if by < 0 else '+'} {abs(by)}" if by else text


def ends_of(other: int, low: int | None, high: int | None) -> list[str]:
    """Where the tiles that count begin and end, and from where to where they need no masks: element x of
    this axis meets those from x + low to x + high of `other`."""
    begin, left, end, whole = "0", "0", str(other), str(other)
    if low is not None:
        begin = f"tl.maximum({shifted('first', low)}, 0) // RBLOCK * RBLOCK"
        left = shifted("first + XBLOCK", low - 1)
    if high is not None:
        end = f"tl.minimum({shifted('first + XBLOCK', high)}, {other})"
        whole = f"tl.maximum(tl.minimum({shifted('first', high + 1)}, {other}), 0)"
    right = f"{whole} // RBLOCK * RBLOCK"
    return [f"begin = {begin}", f"left = {left}", f"right = {right}", f"end = {end}"]


@dataclass(eq=False, kw_only=True)
class AttentionPlan(KernelPlan):
    """A kernel of attention: programs take `tiles["x"]` of the last loop of `ranges`, of one batch and head,
    and go over `reduction_ranges` in steps of `tiles["r"]`. `body` is what is done to the scores."""

    part: str
    """The key in PARTS."""
    scores: Scores
    tensors: Mapping[str, Layout]
    """By their names in the text."""
    together: int
    """Heads of which programs take turns."""

    @property
    def batch(self) -> dict[sympy.Symbol, Size]:
        return dict(list(self.ranges.items())[:2])

    @property
    def axes(self) -> dict[str, dict[sympy.Symbol, Size]]:
        return {"x": dict(list(self.ranges.items())[2:]), "r": self.reduction_ranges}


@kernel_template("attention")
class AttentionPrinter(LinePrinter):
    """Fills the holes of a text."""

    plan: AttentionPlan

    def __init__(self, plan: AttentionPlan) -> None:
        super().__init__(plan)
        self.scores, self.tensors, self.part = plan.scores, plan.tensors, plan.part
        q, k = self.tensors["q"], self.tensors["k"]
        self.head = int(q.size[3])  # type: ignore[arg-type]
        self.width = width_of(q)
        exact = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
        band = self.scores.band
        later = self.part != "keys" and band.low is not None and band.high is None
        unit = self.scores.factors["y0"]
        small = self.scores.small and q.dtype in HALF_TYPES
        self.known = {
            **(SMALL if small else LARGE),
            "name": plan.name,
            "parameters": ", ".join(a.name for a in plan.arguments),
            "queries": str(q.size[2]),
            "keys": str(k.size[2]),
            "numbers": "".join(f"\n    {x} = {load}" for x, load in self.scores.numbers.items()),
            "pair": self.scores.pair(int(q.size[0]), int(q.size[1])),  # type: ignore[arg-type]
            "width": str(self.width),
            "dtype": TRITON_DTYPES[q.dtype],
            "precision": "" if q.dtype in HALF_TYPES else f', input_precision="{exact}"',
            "scale": repr(LOG2E * unit),
            "times": "" if unit == 1 else f" * {unit}",
            "log2e": repr(LOG2E),
            "outside": NO_SLOPE.format(band.condition)
            if self.scores.may_end and band != EVERYWHERE
            else "",
            "factor": repr(self.scores.factors.get("y1", 1.0)),
            "others": "".join(f" {name}," for name in self.scores.others),
            "passed": "".join(f", {name}" for name in self.scores.others),
            # the longest first
            "block": f"({'blocks - 1 - ' if later else ''}turn // {plan.together})",
            "together": str(plan.together),
        }

    def kernel(self) -> None:
        """All lines: the functions of scores, then the text. What nobody reads isn't stored."""
        text, _, made = PARTS[self.part]
        origins, given = self.plan.node.origins, {a.name for a in self.plan.arguments}
        self.lines += self.scores.functions(self.tensors["q"].dtype in HALF_TYPES, origins)
        unread = tuple(f"    tl.store({name} " for name in made if name not in given)
        kept = (line for line in text.splitlines() if not line.startswith(unread))
        for line in self.fill("\n".join(kept)).strip().splitlines():
            self.line(line, origins)

    def program(self, along: str) -> str:
        """The kernel's head, and which queries or keys its program takes, of which batch and head."""
        return self.fill(PROGRAM.replace("{along}", self.known[along]))

    def start(self, name: str) -> str:
        layout = self.tensors[name]
        steps = [f"{x}.to(tl.int64) * {s}" for x, s in zip("bh", layout.stride)]
        return " + ".join([*steps, *[str(layout.offset)] * bool(layout.offset)])

    def place(self, name: str, *indices: str) -> str:
        layout = self.tensors[name]
        terms = []
        for index, size, step in zip(indices, layout.size[2:], layout.stride[2:]):
            wide = ".to(tl.int64)" * ((int(size) - 1) * int(step) >= INT32_END)  # type: ignore[arg-type]
            terms.append(f"{index}{wide}" if step == 1 else f"{index}{wide} * {step}")
        return " + ".join(terms)

    def mask(self, there: str, d: str) -> str:
        return there if self.width == self.head else f"{there} & ({d} < {self.head})"

    def ends(self, along: str) -> str:
        """Each line is indented as the hole's."""
        band, other = self.scores.band, int(self.known[along])
        ends = [band.low, band.high]
        if self.part != "keys":
            ends = [None if end is None else -end for end in reversed(ends)]
        return "\n    ".join(ends_of(other, *ends))

    def fill(self, text: str) -> str:
        def hole(found: re.Match[str]) -> str:
            name, given = found.groups()
            return (
                self.fill(self.known[name])
                if given is None
                else getattr(self, name)(*given.split(", "))
            )

        return re.sub(r"\{(\w+)(?:\((.*?)\))?\}", hole, text)


PARTS = {
    "forward": (FORWARD, ["q", "k", "v"], ["out", "peak", "logs"]),
    "queries": (QUERIES, ["gradient", "q", "k", "v", "peak", "logs", "delta"], ["dq"]),
    "keys": (KEYS, ["gradient", "q", "k", "v", "peak", "logs", "delta"], ["dk", "dv"]),
}
"""Of each kernel its text, what it reads and what it writes."""


def width_of(q: Layout) -> int:
    """Lanes for the elements of a head."""
    return max(power_of_two(int(q.size[3])), 16)  # type: ignore[arg-type]


def attention_plan(node: ExternKernelSchedulerNode, position: int) -> KernelPlan:
    """The plan of an attention's kernel, or of its backward's two. Raises Unsupported."""
    kernel = node.kernel
    assert isinstance(kernel, TemplateKernel)
    forward, given = kernel.op is ATTENTION, list(kernel.args)
    names = PARTS["forward" if forward else "keys"][1]
    views: dict[str, View] = dict(zip(names, given))
    others = given[len(names)]
    q, k = views["q"].layout, views["k"].layout
    batch, heads, rows, columns = (int(size) for size in (*q.size[:3], k.size[2]))  # type: ignore[arg-type]
    sizes, read = (batch, heads, rows, columns), [view.layout for view in others]
    scores = scores_of(kernel, sizes, read)
    views |= dict(zip(scores.others, others))
    made = ["out", "peak", "logs"] if forward else ["dq", "dk", "dv"]
    results = {n: o for n, o in zip(made, kernel.outputs) if o is not None}
    tensors = {n: x.layout for n, x in (views | results).items()}
    buffers = {n: v.buffer for n, v in views.items()} | {n: o.name for n, o in results.items()}

    def plan(part: str) -> AttentionPlan:
        _, reads, writes = PARTS[part]
        arguments = (
            KernelArgument(n, buffers[n], tensors[n].dtype, "in" if n in views else "out")
            for n in (*reads, *scores.others, *writes)
            if n in buffers
        )
        gpu, width = gpu_of(q.device), width_of(q)
        block = block_for(part, width, q.dtype, scores, gpu)
        read = 2 * (rows if part == "keys" else columns) * width * q.dtype.itemsize
        pairs: dict[sympy.Symbol, Size] = {BATCH: batch, HEAD: heads}
        ranges = {**pairs, QUERY: rows}, {KEY: columns}
        if part == "keys":
            ranges = {**pairs, KEY: columns}, {QUERY: rows}
        return AttentionPlan(
            name="_".join(["triton_attention", *[part] * (part != "forward"), str(position)]),
            language="triton",
            device=q.device,
            node=node,  # type: ignore[arg-type]
            body=LoopBody("score", *ranges, scores.edge.values),
            phases=(),
            arguments=tuple(arguments),
            sizes=(),
            reduction="attention",
            tiles={"x": block.x, "r": block.r, "stages": block.stages},
            num_warps=block.warps,
            index_dtype=torch.int32,
            part=part,
            scores=scores,
            tensors=tensors,
            together=heads_together(scores.band, batch * heads, read, gpu),
        )

    parts = ["forward"] if forward else ["queries", "keys"]
    plans = tuple(plan(part) for part in parts if results.keys() & PARTS[part][2])
    if forward:
        return plans[0]
    return replace(plans[0], name=f"triton_attention_backward_{position}", launches=plans)
