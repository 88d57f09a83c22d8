"""Samples of torch's operator database through lowering: results and gradients against eager.

    python -m tests.lowering.samples index_add roll                reference interpreter
    python -m tests.lowering.samples --how cpp --dynamic roll      compiled; sizes as symbols

Each line says how many samples agreed, which operators stayed extern and why, and what was wrong.
"""

from __future__ import annotations

import argparse
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from minicompile import compat
from minicompile.aot.autograd import ahead_of_time
from minicompile.aot.runtime import make_callable
from minicompile.debug.reference import run_reference
from minicompile.errors import Unsupported
from minicompile.lowering.ir import LoopGraph
from minicompile.lowering.lower import lower
from minicompile.ops.graph import Graph
from minicompile.options import Options
from minicompile.pipeline import compile_graph
from tests.aot.decomposition_samples import Sample, as_sample, database_samples, difference
from tests.aot.helpers import capture

__all__ = ["Found", "as_sample", "check", "run_operator"]

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
FAMILIES = """
    nn.functional.avg_pool1d nn.functional.avg_pool2d nn.functional.avg_pool3d nn.functional.max_pool1d
    nn.functional.max_pool2d nn.functional.max_pool3d nn.functional.adaptive_avg_pool1d
    nn.functional.adaptive_avg_pool2d nn.functional.adaptive_avg_pool3d nn.functional.adaptive_max_pool1d
    nn.functional.adaptive_max_pool2d nn.functional.adaptive_max_pool3d nn.functional.max_unpool2d
    nn.functional.max_unpool3d nn.functional.interpolate nn.functional.pad constant_pad_nd grid_sampler_2d
    nn.functional.unfold unfold unfold_copy nn.functional.pixel_shuffle nn.functional.pixel_unshuffle
    nn.functional.channel_shuffle roll repeat rot90 tril triu diag diag_embed diagonal diagonal_copy
    diagonal_scatter as_strided_scatter as_strided as_strided_copy select slice index_add index_copy
    index_fill index_put index_reduce index_select masked_fill masked_scatter put take take_along_dim
    scatter scatter_add scatter_reduce select_scatter slice_scatter gather nn.functional.embedding
    nn.functional.embedding_bag nn.functional.one_hot bucketize searchsorted nn.functional.nll_loss
    nn.functional.cross_entropy _unsafe_masked_index _unsafe_masked_index_put_accumulate alias_copy
    expand_copy narrow_copy permute_copy squeeze_copy split_with_sizes_copy transpose_copy unbind_copy
    unsqueeze_copy view_copy flip fliplr repeat_interleave block_diag"""
"""What pooling, resampling, padding, indexing and scatter are in the database: `families` for short."""

HOW = ("reference", "cpp", "triton")


@dataclass
class Found:
    """What became of some samples."""

    agreed: int = 0
    externs: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(operator, reason) of the calls that are no loops."""
    kernels: list[int] = field(default_factory=list)
    """Operations of each lowered graph."""
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    graphs: list[LoopGraph] = field(default_factory=list)
    overloads: set[str] = field(default_factory=set)
    """ATen overloads in samples that agreed without any extern call."""

    def note(self, graph: LoopGraph) -> None:
        self.graphs.append(graph)
        self.kernels.append(len(graph.operations))
        self.externs.update((str(kernel.op), kernel.reason) for kernel in graph.externs)


def runner(graph: Graph, how: str, found: Found) -> Callable[[list[Any]], list[Any]]:
    """A graph's callable."""
    options = Options(verify=True, device_codegen="triton" if how == "triton" else "auto")
    if how != "reference":
        made = compile_graph(graph, options)
        found.note(made.stages.loops)
        return made.finish()
    loops = lower(graph, options)
    found.note(loops)

    def run(inputs: list[Any]) -> list[Any]:
        given = list(inputs)
        inputs.clear()
        return run_reference(loops, given)

    return run


def symbols(inputs: list[torch.Tensor]) -> dict[tuple[int, int], str] | None:
    """A symbol for each size from 2 on of the contiguous inputs; equal sizes share one."""
    found = {
        (k, dim): f"s{size}"
        for k, x in enumerate(inputs)
        if x.is_contiguous()
        for dim, size in enumerate(x.shape)
        if size >= 2
    }
    return found or None


def check(sample: Sample, found: Found, how: str = "reference", dynamic: bool = False) -> None:
    """Compare a sample's results and gradients with eager's."""
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in sample.inputs]
    try:
        torch.manual_seed(0)
        expected = eager_results(sample.fn, inputs)
    except Exception:  # eager refuses: nothing to compare
        return
    training = any(x.requires_grad for x in inputs)
    try:
        with compat.quiet_fakes():
            graph, fakes, env = capture(sample.fn, inputs, symbols(inputs) if dynamic else None)
            aot = ahead_of_time(graph, fakes, Options(), training=training, shape_env=env)
        forward = runner(aot.forward, how, found)
        backward = runner(aot.backward, how, found) if aot.backward is not None else None
    except (Unsupported, *compat.FAKE_LIMITS) as error:
        found.refused[f"{type(error).__name__}: {str(error)[:90]}"] += 1
        return
    graphs = found.graphs[-1 if backward is None else -2 :]
    compiled = make_callable(aot, forward, backward, "sample")
    fresh = [x.detach().clone().requires_grad_(x.requires_grad) for x in sample.inputs]
    torch.manual_seed(0)
    try:
        got = eager_results(lambda *given: compiled(list(given)), fresh)
    except Exception as error:
        found.wrong.append(f"{sample.name}: {type(error).__name__}: {error}")
        return
    for number, (ours, wanted) in enumerate(zip(got, expected, strict=True)):
        if what := difference(ours, wanted, strides=False):
            found.wrong.append(f"{sample.name}: value {number}: {what[:300]}")
            return
    found.agreed += 1
    if not any(graph.externs for graph in graphs):
        targets = {node.target for node in aot.level("full").nodes}
        found.overloads |= {str(op) for op in targets if isinstance(op, torch._ops.OpOverload)}


def eager_results(fn: Callable[..., Any], inputs: list[torch.Tensor]) -> list[Any]:
    """Results, then gradients for fixed cotangents."""
    results = fn(*inputs)
    results = list(results) if isinstance(results, tuple | list) else [results]
    roots = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    leaves = [x for x in inputs if x.requires_grad]
    if not roots or not leaves:
        return results
    torch.manual_seed(1)
    cotangents = [torch.randn(x.shape, dtype=torch.float64).to(x.dtype) for x in roots]
    return results + list(torch.autograd.grad(roots, leaves, cotangents, allow_unused=True))


def run_operator(
    name: str,
    most: int,
    dtypes: Iterable[torch.dtype] = DTYPES,
    how: str = "reference",
    dynamic: bool = False,
) -> Found:
    """The first samples of an operator, of each dtype."""
    found = Found()
    for dtype in dtypes:
        for sample in database_samples(name, dtype, most):
            check(sample, found, how, dynamic)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--how", choices=HOW, default="reference")
    parser.add_argument("--dynamic", action="store_true")
    parser.add_argument("--most", type=int, default=20)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    overloads: set[str] = set()
    for name in FAMILIES.split() if chosen.names == ["families"] else chosen.names:
        try:
            found = run_operator(name, chosen.most, how=chosen.how, dynamic=chosen.dynamic)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        overloads |= found.overloads
        most = max(found.kernels, default=0)
        print(f"{name}: {found.agreed} agree, at most {most} operations", flush=True)
        for (op, reason), count in found.externs.most_common():
            print(f"    extern {count} x {op}: {reason}")
        for why, count in found.refused.most_common():
            print(f"    refused {count} x {why}")
        for line in found.wrong[:8]:
            print(f"    WRONG {line}", flush=True)
    print(f"{len(overloads)} overloads in samples without an extern call:")
    print("\n".join(textwrap.wrap(" ".join(sorted(overloads)), 110)))


if __name__ == "__main__":
    main()
