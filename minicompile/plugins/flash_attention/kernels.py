"""Flash attention: a template of Triton kernels, in which functions say what is done to the scores.

Rows of scores never lie in memory. A program takes XBLOCK queries, goes over the keys, RBLOCK at a time, and
keeps for each query the largest score so far, the sum of 2^(score - largest) and the values so weighted;
where a larger score comes, both sums are scaled down. The backward computes scores again, and weights by the
largest score (`peak`) and the logarithm of that sum (`logs`): one kernel goes over the keys for the gradient
of queries, another over the queries for those of keys and values. A step of either begins with its two
products of loaded tiles: beside the second, exponents of the first are computed.

Where a band of scores counts, tiles outside of it are left out, and masked where they are at its edges. One
loop goes over all: each of several would begin with waiting for its first tiles. Programs that take longest
come first.

Holes are in braces: functions `score` and `slope` (score.py) before the text; `{program(queries)}`, which of
them a program takes; `{start(k)}`, where a head's keys begin; `{place(k, j, d)}`, element d of key j from
there; `{mask(rows, d)}`, which of them exist; `{ends(keys)}`, where tiles begin and end, and from `left` to
`right` need no masks; numbers. A factor of all scores is left out until they go into the exponent: {scale} is
that times log2(e). Where scores are SMALL, products times a number, one instruction multiplies and
subtracts the largest exponent, later the logarithm of the whole sum. Others may be LARGE, as a finite mask
is, so that their exponents no longer differ: then the largest score is subtracted first.

Milakov and Gimelshein, Online normalizer calculation for softmax (2018); Dao et al., FlashAttention (2022);
Dao, FlashAttention-2 (2023). The real compiler: torch/_inductor/kernel/flex/.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import sympy
import torch

from minicompile.codegen.plan import (
    INT32_END,
    KernelArgument,
    TemplatePlan,
    power_of_two,
    template_plan,
)
from minicompile.codegen.printing import LinePrinter, kernel_template
from minicompile.codegen.triton_ops import TRITON_DTYPES
from minicompile.errors import Unsupported
from minicompile.lowering.ir import Layout, View
from minicompile.ops.device import Gpu, gpu_of
from minicompile.ops.dtypes import HALF_TYPES
from minicompile.plugins.flash_attention.operators import ATTENTION, ATTENTION_BACKWARD, LOG2E
from minicompile.plugins.flash_attention.score import BATCH, HEAD, KEY, QUERY, Scores, scores_of
from minicompile.scheduling.body import LoopBody
from minicompile.scheduling.nodes import ExternKernelSchedulerNode
from minicompile.shapes.expr import Size

PROGRAM = """@triton.jit
def {name}({parameters}, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    blocks = ({along} + XBLOCK - 1) // XBLOCK
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    first = {block} * XBLOCK
    b, h = {pair}"""

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
        s = score(tl.dot(queries, keys{precision}), b, h, i, j, rows, columns{passed})
        if (start < left) | (start >= right):
            s = tl.where(columns{band}, s, float("-inf"))
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
        edge = (start < left) | (start >= right)
        if edge:
            s = tl.where(columns{band}, s, float("-inf"))
        weights = tl.exp2({share})
        ds = weights * (ds - delta)
        ds = slope(products, ds, b, h, i, j, rows, columns{passed}){outside(columns)}
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
        edge = (start < left) | (start >= right)
        if edge:
            s = tl.where(rows{band}, s, float("-inf"))
        most = tl.load(peak + {place(peak, i)}, rows, other=0.0)
        log = tl.load(logs + {place(logs, i)}, rows, other=0.0)
        weights = tl.exp2({share})
        ds = weights * (ds - tl.load(delta + {place(delta, i)}, rows, other=0.0))
        ds = slope(products, ds, b, h, i, j, rows, columns{passed}){outside(rows)}
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
        if edge:
            ds = tl.where({0}{1}, ds, 0.0)"""
"""Weights there may be no numbers, where no score of a row counts, and slopes of what isn't there neither."""

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
    "peak": "most[:, None]",
    "logs": "tl.log2(total)[:, None]",
    "share": "(s - most) * {scale} - log",
}

OPERANDS = ["q", "k", "v"]
GIVEN = ["gradient", "peak", "logs", "delta"]
RESULTS = {ATTENTION: ["out", "peak", "logs"], ATTENTION_BACKWARD: ["dq", "dk", "dv"]}
PARTS = {
    "forward": (FORWARD, OPERANDS, ["out", "peak", "logs"]),
    "queries": (QUERIES, OPERANDS + GIVEN, ["dq"]),
    "keys": (KEYS, OPERANDS + GIVEN, ["dk", "dv"]),
}
"""Of each kernel its text, what it reads and what it writes."""


@dataclass(frozen=True)
class AttentionTiles:
    """Tiles of one kernel: XBLOCK, RBLOCK, warps, and how many tiles are loaded ahead."""

    x: int
    r: int
    warps: int
    stages: int


HOPPER = {
    ("forward", 64): AttentionTiles(64, 64, 4, 3), ("forward", 128): AttentionTiles(128, 64, 4, 2),
    ("queries", 64): AttentionTiles(64, 64, 4, 3), ("queries", 128): AttentionTiles(128, 64, 8, 3),
    ("keys", 64): AttentionTiles(64, 128, 4, 2), ("keys", 128): AttentionTiles(64, 64, 4, 2),
}  # fmt: skip
"""The fastest of some for half types and heads up to this size, on an H100 or H200 (with heads of 128 the
forward's spills 72 bytes, and yet is)."""
MARGIN = 4096
"""Bytes for numbers of rows."""


def block_for(
    part: str, width: int, dtype: torch.dtype, scores: Scores, gpu: Gpu
) -> AttentionTiles:
    """Choose tiles: small where products take plain registers, or scores take some of their own. What scores
    read is loaded ahead, too, so with it less fits into shared memory."""
    block = HOPPER[part, max(width, 64)]
    if scores.read or not scores.scale:
        block = replace(block, r=min(block.r, 64))
    if dtype not in HALF_TYPES:
        r = 16 if part == "keys" or width > 64 else 32
        block = AttentionTiles(32, r, 4 if width <= 64 else 8, 1)

    def shared(block: AttentionTiles) -> int:
        """Bytes, or a little more: one or two tiles stay, two of R rows and those of scores come."""
        stay = block.x * width * dtype.itemsize * (1 if part == "forward" else 2)
        step = 2 * block.r * width * dtype.itemsize + block.x * block.r * scores.read
        return stay + block.stages * step + MARGIN * (part == "keys")

    while shared(block) > gpu.shared_bytes and block.stages > 1:
        fewer = block.r <= 32
        block = replace(block, stages=block.stages - fewer, r=block.r if fewer else block.r // 2)
    return block


def shifted(text: str, by: int) -> str:
    return f"{text} {'-' if by < 0 else '+'} {abs(by)}" if by else text


def ends_of(other: int, low: int | None, high: int | None) -> list[str]:
    """Return where the tiles that count begin and end, and from where to where they need no masks: element x
    of this axis meets those from x + low to x + high of `other`."""
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
class AttentionPlan(TemplatePlan):
    """A kernel of attention: programs take `tiles["x"]` of the last loop of `ranges`, of one batch and head,
    and go over `reduction_ranges` in steps of `tiles["r"]`. `body` is what is done to the scores."""

    part: str
    """The key in PARTS."""
    scores: Scores
    tensors: dict[str, Layout]
    """By their names in the text."""

    @property
    def batch(self) -> dict[sympy.Symbol, Size]:
        return {loop: size for loop, size in self.ranges.items() if loop in (BATCH, HEAD)}

    @property
    def axes(self) -> dict[str, dict[sympy.Symbol, Size]]:
        x = {loop: size for loop, size in self.ranges.items() if loop not in (BATCH, HEAD)}
        return {"x": x, "r": self.reduction_ranges}


@kernel_template("attention")
class AttentionPrinter(LinePrinter):
    """Fills the holes of a text."""

    plan: AttentionPlan

    def __init__(self, plan: AttentionPlan) -> None:
        super().__init__(plan)
        self.scores, self.tensors = plan.scores, plan.tensors
        q, (_, heads, queries, keys) = self.tensors["q"], sizes_of(self.tensors)
        self.head, self.width = int(q.size[3]), width_of(q)  # type: ignore[arg-type]
        exact = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
        band = self.scores.band
        later = plan.part != "keys" and band.low is not None and band.high is None
        block = "tl.program_id(0) % blocks"
        others = self.scores.others
        self.holes = {
            **(SMALL if self.scores.small else LARGE),
            "name": plan.name,
            "parameters": ", ".join(a.name for a in plan.arguments),
            "queries": str(queries),
            "keys": str(keys),
            "pair": f"pair // {heads}, pair % {heads}",
            "block": f"(blocks - 1 - {block})" if later else f"({block})",  # the longest first
            "width": str(self.width),
            "dtype": TRITON_DTYPES[q.dtype],
            "precision": "" if q.dtype in HALF_TYPES else f', input_precision="{exact}"',
            "scale": repr(LOG2E * self.scores.factor),
            "band": band.condition,
            "factor": repr(self.scores.slope_factor),
            "others": "".join(f" {name}," for name in others),
            "passed": "".join(f", {name}" for name in others),
        }

    def kernel(self) -> None:
        """Collect all lines: the functions of scores, then the text. What nobody reads isn't stored."""
        text, _, results = PARTS[self.plan.part]
        for line in self.scores.functions():
            self.line(line, self.whole)
        stored = {a.name for a in self.plan.arguments}
        unread = tuple(f"    tl.store({name} " for name in results if name not in stored)
        kept = (line for line in text.splitlines() if not line.startswith(unread))
        for line in self.fill("\n".join(kept)).strip().splitlines():
            self.line(line, self.whole)

    def program(self, along: str) -> str:
        """Return the kernel's head: which queries or keys a program takes, of which batch and head."""
        return self.fill(PROGRAM.replace("{along}", self.holes[along]))

    def start(self, name: str) -> str:
        layout = self.tensors[name]
        offset = f" + {layout.offset}" if layout.offset else ""
        return f"b * {layout.stride[0]} + h * {layout.stride[1]}{offset}"

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
        band, other = self.scores.band, int(self.holes[along])
        ends = [band.low, band.high]
        if self.plan.part != "keys":
            ends = [None if end is None else -end for end in reversed(ends)]
        return "\n    ".join(ends_of(other, *ends))

    def outside(self, there: str) -> str:
        return "" if self.scores.small else NO_SLOPE.format(there, self.holes["band"])

    def fill(self, text: str) -> str:
        def hole(match: re.Match[str]) -> str:
            name, arguments = match.groups()
            if arguments is None:
                return self.fill(self.holes[name])
            return str(getattr(self, name)(*arguments.split(", ")))

        return re.sub(r"\{(\w+)(?:\((.*?)\))?\}", hole, text)


def width_of(q: Layout) -> int:
    """Return how many lanes the elements of a head take."""
    return max(power_of_two(int(q.size[3])), 16)  # type: ignore[arg-type]


def sizes_of(tensors: dict[str, Layout]) -> tuple[int, int, int, int]:
    """Return the size of the scores."""
    return (*map(int, tensors["q"].size[:3]), int(tensors["k"].size[2]))  # type: ignore[return-value, arg-type]


@template_plan(ATTENTION, ATTENTION_BACKWARD)
def attention_plan(node: ExternKernelSchedulerNode, language: str, position: int) -> TemplatePlan:
    """Return the plan of an attention's kernel, or of its backward's two. Raises Unsupported."""
    if language != "triton":
        raise Unsupported("its template is of Triton kernels")
    kernel, parts = node.kernel, ["forward"]
    q, k, v, others, text, *given = kernel.args
    if kernel.op is ATTENTION_BACKWARD:
        parts = ["queries", "keys"]
    views: dict[str, View] = dict(zip(OPERANDS + GIVEN, (q, k, v, *given)))
    size, device = sizes_of({n: x.layout for n, x in views.items()}), q.layout.device
    layouts = [view.layout for view in others]
    scores = scores_of(text, size, layouts, q.layout, training=bool(given))
    views |= dict(zip(scores.others, others))
    results = {n: o for n, o in zip(RESULTS[kernel.op], kernel.outputs) if o is not None}
    tensors = {n: x.layout for n, x in (views | results).items()}
    buffers = {n: v.buffer for n, v in views.items()} | {n: o.name for n, o in results.items()}
    width = width_of(q.layout)

    def plan(part: str) -> AttentionPlan:
        _, reads, writes = PARTS[part]
        block = block_for(part, width, q.layout.dtype, scores, gpu_of(device))
        x, r = (KEY, QUERY) if part == "keys" else (QUERY, KEY)
        ranges = scores.body.all_ranges
        body = LoopBody("score", {n: ranges[n] for n in (BATCH, HEAD, x)}, {r: ranges[r]})
        body.values = scores.body.values
        return AttentionPlan(
            name="_".join(["triton_attention", *[part] * (part != "forward"), str(position)]),
            language=language,
            device=device,
            node=node,  # type: ignore[arg-type]
            body=body,
            phases=(),
            arguments=tuple(
                KernelArgument(n, buffers[n], tensors[n].dtype, "in" if n in views else "out")
                for n in (*reads, *scores.others, *writes)
                if n in buffers
            ),
            sizes=(),
            reduction="attention",
            tiles={"x": block.x, "r": block.r, "stages": block.stages},
            num_warps=block.warps,
            index_dtype=torch.int32,
            part=part,
            scores=scores,
            tensors=tensors,
        )

    plans = tuple(plan(part) for part in parts if results.keys() & PARTS[part][2])
    if len(parts) == 1:
        return plans[0]
    return replace(plans[0], name=f"triton_attention_backward_{position}", launches=plans)
