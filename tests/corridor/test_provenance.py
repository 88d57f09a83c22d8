"""Every object of a trace leads back to a line of source, and tells the truth about it."""

from __future__ import annotations

import importlib.util
import linecache
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import minicompile as mc
from minicompile.codegen.plan import CodeLine
from minicompile.lessons import model as lesson
from minicompile.ops.graph import origins_of
from minicompile.ops.origin import source_lines
from minicompile.pipeline_result import Trace

MODEL_FILE = Path(lesson.__file__)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def trace_edited(module: ModuleType, options: dict[str, Any]) -> Trace:
    """A training step of the lesson model, or of a module's function `f`."""
    torch.manual_seed(0)
    if hasattr(module, "GPT"):
        model = module.GPT(module.GPTConfig(n_layer=1, n_embd=16, n_head=2, block_size=8))
        tokens = torch.randint(0, 90, (2, 9))
        inputs = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        return mc.trace(mc.compile(model, options=options), *inputs)
    x = torch.randn(8, 16, requires_grad=True)
    return mc.trace(mc.compile(module.f, options=options), x, torch.rand(8, 16))


def kernel_lines(trace: Trace) -> Iterator[tuple[str, CodeLine]]:
    for name, stages in trace.graphs.items():
        for kernel in stages.kernels:
            for line in kernel.lines:
                yield f"{name}:{kernel.name}", line


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_every_node_buffer_scheduler_node_and_kernel_line_leads_to_the_users_source(language):
    trace = trace_edited(lesson, {"device_codegen": language})
    assert trace.aot is not None and trace.aot.backward is not None
    files = {str(MODEL_FILE)}

    def leads_home(origins) -> bool:
        return bool(origins) and all(line.file in files for line in source_lines(origins))

    graphs = [trace.capture.graph, trace.aot.forward, trace.aot.backward]
    for graph in graphs:
        for node in graph.nodes:
            if node.op.startswith("call"):
                assert leads_home(origins_of(node)), (graph.name, node.name, origins_of(node))
    for stages in trace.graphs.values():
        for operation in stages.loops.operations:
            assert leads_home(operation.origins), operation
        for node in [*stages.schedule.before, *stages.schedule.nodes]:
            assert leads_home(node.origins), node
    for kernel, line in kernel_lines(trace):
        if line.text.strip(" });{"):
            assert leads_home(line.origins), (kernel, line.text)


FUNCTION = """\
import torch
import torch.nn.functional as F


def f(x, y):
    a = x * 1.5
    b = torch.sin(a) + 2.5
    c = torch.softmax(b * y, -1)
    d = torch.where(c > 0.125, c, a)
    e = F.layer_norm(d.t(), (8,)).exp()
    g = torch.cumsum(e.half().float(), -1)
    return (g - g.mean(-1, keepdim=True) * 3.5).sum(0), e.relu().amax(0), x[(y * 3).long()[:, 0]]
"""
MODEL = MODEL_FILE.read_text()
EDITS: dict[str, tuple[str, str, str]] = {
    "a constant of the lesson model": (MODEL, "(1.0 /", "(3.25 /"),
    "an activation of the lesson model": (MODEL, "F.gelu(", "F.silu("),
    **{f"{number}": (FUNCTION, number, "7.75") for number in ("1.5", "2.5", "0.125", "3.5")},
    "an operation": (FUNCTION, "torch.sin(a)", "torch.cos(a)"),
    "a factor": (FUNCTION, "b * y", "b - y"),
    "after a norm": (FUNCTION, ".exp()", ".sigmoid()"),
    "a dtype": (FUNCTION, ".half()", ".bfloat16()"),
    "an index": (FUNCTION, "(y * 3)", "(y * 4)"),
}
ALIKE = {
    "partitioner": "default",
    "inline": "never",
    "assert_indirect_indexing": False,
    "cpp_flags": ("-O0",),
}
"""The compiler decides alike for both programs."""


def normal(text: str) -> str:
    """A kernel line without the numbers of values, arguments and loaded indices."""
    text = re.sub(r"(?<![A-Za-z])tmp\d+", "tmp", text.strip())
    text = re.sub(r"\b(in|out|in_out)_ptr\d+", "ptr", text)
    return re.sub(r"\bi\d+(?=\b|_bad)", "i", text)


@pytest.mark.long
@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_a_source_line_changes_only_kernel_lines_that_list_it(
    tmp_path: Path, name: str, language: str
) -> None:
    text, old, new = EDITS[name]
    number = text[: text.index(old)].count("\n") + 1
    path, others, changed = tmp_path / "edited.py", [], []
    for edited in (text, text.replace(old, new, 1)):
        path.write_text(edited)
        linecache.clearcache()
        traced = trace_edited(load(path), {"device_codegen": language, **ALIKE})
        lines = [line for _, line in kernel_lines(traced) if not line.scaffold]
        listed = [(normal(k.text), {s.line for s in source_lines(k.origins)}) for k in lines]
        others.append(Counter((t, *sorted(found)) for t, found in listed if number not in found))
        changed.append(Counter(t for t, found in listed if number in found))
    assert others[0] == others[1], (others[0] - others[1], others[1] - others[0])
    assert changed[0] != changed[1]


WRAPPER_LINES = {
    "allocation": r"(buf\d+) = (?:empty_strided|.*# (?:reuse|in place))",
    "call": r"(?:torch|aten)\w*[._].*out=(buf\d+)",
    "kernel": r"(\w+_fused_\w+)\(",
}
"""What a line names that made it."""


def test_wrapper_lines_belong_to_what_they_call_and_allocate():
    def f(x, w, b):
        h = torch.relu(x * 2.0) @ w
        h = torch.sigmoid(h)
        values, _ = torch.sort(h @ w.t(), -1)
        return values.sum(0) + b

    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16)
    compiled = mc.compile(f, options={"fusion": False})
    for stages in mc.trace(compiled, x, w, torch.randn(16)).graphs.values():
        externs = {kernel.name: kernel.origins for kernel in stages.loops.externs}
        made_by = externs | {
            b.name: b.made_by for b in stages.loops.operations if b.name not in externs
        }
        for kernel in stages.kernels:
            parts = [part.origins for part in kernel.lines if not part.scaffold]
            made_by[kernel.name] = frozenset().union(*parts)
        seen = set()
        for line in stages.wrapper.lines:
            for kind, pattern in WRAPPER_LINES.items():
                if match := re.match(pattern, line.text.strip()):
                    assert line.origins == made_by[match.group(1)], line.text
                    seen.add(kind)
        assert seen == {*WRAPPER_LINES}


def test_a_sum_of_gradients_belongs_to_the_reader_whose_gradient_it_adds():
    def f(x):
        h = torch.sin(x)
        for _ in range(3):
            h = h + torch.tanh(h)
        return h.sum()

    traced = mc.trace(f, torch.randn(8, 16, requires_grad=True))
    adds = [n for n in traced.aot.backward.nodes if str(n.target) == "aten.add.Tensor"]
    sums = [node for node in adds if node.meta["phase"] == "backward"]
    named = [[origin.node for origin in origins_of(node)] for node in sums]
    assert named == [["tanh_2"], ["tanh_1"], ["tanh"]]


def test_a_line_with_a_constant_belongs_to_the_line_that_made_the_constant():
    def f(x):
        half = torch.full((), 0.5)
        far = torch.full((8, 16), 7.25)
        return torch.where(x > 0, x * half, far) * torch.sin(far * 1)

    for language in ("cpp", "triton"):
        traced = mc.trace(mc.compile(f, options={"device_codegen": language}), torch.randn(8, 16))
        lines = [line for _, line in kernel_lines(traced) if not line.scaffold]
        for constant, maker in (("0.5", "full"), ("7.25", "full_1")):
            [line] = [line for line in lines if constant in line.text]
            assert maker in {origin.node for origin in line.origins}, line


CHAINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: torch.softmax(torch.relu(x * 2.0), -1),
    "halves": lambda x: (x.half() * 2.5).relu().float().amax(-1),
}


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("name", CHAINS)
def test_in_a_chain_every_line_that_computes_loads_or_stores_belongs_to_one_operation(
    name: str, language: str
) -> None:
    compiled = mc.compile(CHAINS[name], options={"device_codegen": language})
    traced = mc.trace(compiled, torch.randn(8, 32, requires_grad=True))
    lines = [line for _, line in kernel_lines(traced) if not line.scaffold]
    assert lines and all(len(line.origins) == 1 for line in lines)
    for words in ("row_max", "max_combine", "row_sum", "tl.sum"):
        for line in (line for line in lines if words in line.text and name == "rows"):
            assert {origin.node for origin in line.origins} == {"softmax"}
