"""The same lines of source at every operator level, side by side: which operators each became."""

from __future__ import annotations

import functools
from collections import Counter
from fnmatch import fnmatchcase
from itertools import starmap

import torch
from torch._ops import OpOverload

from minicompile.aot.levels import LevelGraph
from minicompile.lessons.pictures import Picture
from minicompile.ops.display import count_text
from minicompile.ops.graph import user_line
from minicompile.ops.nodes import is_pointwise
from minicompile.ops.philox import PHILOX
from minicompile.pipeline_result import Trace
from minicompile.show.html import box, code, table, text

TITLES = ("Full ATen", "Core ATen", "Prims")

COLOURS = {
    "pointwise": "#bfdbfe", "reduction": "#fdba74", "view": "#e5e7eb", "creation": "#e9d5ff",
    "cast": "#fde68a", "indexing": "#bbf7d0", "fused": "#fecaca", "library": "#c7d2fe",
}  # fmt: skip


FAMILIES = {
    "cast": "convert_element_type _to_copy complex polar",
    "reduction": "sum prod amax amin any all argmax argmin var_mean",
    "scan": "cumsum cumprod cummax cummin logcumsumexp",
    "view": "view permute expand slice select squeeze unsqueeze as_strided diagonal unfold"
    " view_as_real view_as_complex _conj",
    "creation": "full iota arange linspace logspace empty_permuted",
    "indexing": "index index_* _unsafe_masked_index* gather scatter scatter_* *_scatter put embedding"
    " masked_scatter* cat _chunk_cat constant_pad_nd flip unfold_backward repeat_interleave",
    "window": "*pool* *_pad?d* *upsample* im2col col2im",
    "library": "mm bmm addmm baddbmm addmv addbmm addr vdot dot mv convolution* _scaled_mm"
    " *attention* *_fft_* linalg_* _linalg_* *cholesky* lu_unpack geqrf ormqr triangular_solve _trilinear"
    " *_norm_* grid_sampler* *cdist* *pdist* *embedding*"
    " sort topk kthvalue *median mode searchsorted bucketize isin *hist* *segment_reduce* renorm hash_tensor"
    " nonzero_static",
}
"""Beside pointwise, random and custom operators: family -> names. The library computes as a whole what no
formula in simpler operators gives as fast, or as exactly."""


@functools.cache
def common_family(op: OpOverload) -> str | None:
    """The family of an operator, by its tags and its name."""
    if op.namespace not in ("aten", "prims"):
        return "random" if op is PHILOX else "custom"
    if torch.Tag.nondeterministic_seeded in op.tags:
        return "random"
    for name, patterns in FAMILIES.items():
        if any(fnmatchcase(op.overloadpacket.__name__, pattern) for pattern in patterns.split()):
            return name
    return "pointwise" if is_pointwise(op) else None


def family(graph: LevelGraph, op: OpOverload) -> str:
    """An operator's family; "fused" for those that only this level and the ones above it have."""
    above = graph.level == "full" or (graph.level == "core" and torch.Tag.core in op.tags)
    return common_family(op) or ("fused" if above else "extern")


def families(graph: LevelGraph) -> str:
    """How many operations of a graph there are, of which families."""
    counts = Counter(family(graph, op) for _, op in graph.calls).most_common()
    return f"{graph.op_count} operations: {', '.join(f'{n} {name}' for name, n in counts)}"


def chip(name: str, kind: str) -> str:
    look = f"background-color:{COLOURS.get(kind, '#f3f4f6')};color:#111827"
    look += ";padding:0px 5px;margin:2px;border-radius:4px;display:inline-block"
    return f'<span style="{look}" title="{text(kind)}">{text(name)}</span>'


def fall(trace: Trace) -> Picture:
    """What each line of a traced function became at the levels full, core and prims; forward only."""
    assert trace.aot is not None
    levels = trace.aot.levels
    rows: dict[str, dict[str, list[tuple[str, str]]]] = {}
    for level, graph in levels.items():
        for node, op in graph.calls:
            at = user_line(node)
            if at is not None and node.meta.get("phase") != "backward":
                row = rows.setdefault(at.text, {name: [] for name in levels})
                row[level].append((op.overloadpacket.__name__, family(graph, op)))
    whole = f"{trace.name}, level by level"
    lines, cells, counts = [whole], [], Counter[str]()
    for line, row in rows.items():
        lines.append(line)
        for title, calls in zip(TITLES, row.values()):
            names = " ".join(name for name, _ in calls)
            lines.append(f"  {title:<9} {len(calls):>2}: {names}")
            counts[title] += len(calls)
        cells.append([code(line, wrap=True), *("".join(starmap(chip, c)) for c in row.values())])
    about = ", ".join(f"{title} {count_text(n, 'operation')}" for title, n in counts.items())
    legend = "".join(chip(kind, kind) for kind in COLOURS)
    shown = table(("line", *TITLES), cells)
    return Picture("\n".join(lines), box(whole, about, f"<p>{legend}</p>", shown))
