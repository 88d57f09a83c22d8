"""Every object of a trace leads back to a line of source, and tells the truth about it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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


def trace_model(module: ModuleType) -> Trace:
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(n_layer=1, n_embd=16, n_head=2, block_size=8))
    tokens = torch.randint(0, 90, (2, 9))
    return mc.trace(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def kernel_lines(trace: Trace) -> Iterator[tuple[str, CodeLine]]:
    for name, stages in trace.graphs.items():
        for kernel in stages.kernels:
            for line in kernel.lines:
                yield f"{name}:{kernel.name}", line


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_model(lesson)


def test_every_node_buffer_scheduler_node_and_kernel_line_leads_to_the_users_source(trace):
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


def constants() -> list[tuple[str, int]]:
    """Lines of the lesson model's forward passes that hold a float constant of their own."""
    found = []
    for number, text in enumerate(MODEL_FILE.read_text().splitlines(), 1):
        match = re.search(r"\((1\.0) /", text)
        if match:
            found.append((match.group(1), number))
    return found


def changed_lines(
    before: list[tuple[str, CodeLine]], after: list[tuple[str, CodeLine]]
) -> list[CodeLine]:
    assert [kernel for kernel, _ in before] == [kernel for kernel, _ in after]
    return [new for (_, old), (_, new) in zip(before, after) if old.text != new.text]


def test_changing_the_models_constant_changes_only_kernel_lines_that_list_its_line(tmp_path):
    [(constant, number)] = constants()
    lines = MODEL_FILE.read_text().splitlines(keepends=True)
    first = tmp_path / "gpt_under_test.py"
    traces = []
    for value in (constant, "3.25"):
        lines[number - 1] = re.sub(r"\(\d+\.\d+ /", f"({value} /", lines[number - 1])
        first.write_text("".join(lines))
        traces.append(list(kernel_lines(trace_model(load(first)))))
    changed = changed_lines(*traces)
    assert changed
    assert {k.partition(":")[0] for k, line in traces[1] if line in changed} == {
        "forward",
        "backward",
    }
    for line in changed:
        assert (str(first), number) in {(s.file, s.line) for s in source_lines(line.origins)}, line


FUNCTION = """\
import torch


def f(x, y):
    a = x * 1.5
    b = torch.sin(a) + 2.5
    c = torch.softmax(b * y, -1)
    d = torch.where(c > 0.125, c, a)
    return (d - d.mean(-1, keepdim=True) * 3.5).sum(0)
"""


@pytest.mark.long
@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("constant", ["1.5", "2.5", "0.125", "3.5"])
def test_changing_a_constant_changes_only_kernel_lines_that_list_its_line(
    tmp_path, constant, language
):
    number = next(n for n, text in enumerate(FUNCTION.splitlines(), 1) if constant in text)
    path = tmp_path / "function_under_test.py"
    traces = []
    for value in (constant, "7.75"):
        path.write_text(FUNCTION.replace(constant, value))
        x = torch.randn(8, 16, requires_grad=True)
        compiled = mc.compile(load(path).f, options={"device_codegen": language})
        traces.append(list(kernel_lines(mc.trace(compiled, x, torch.randn(8, 16)))))
    changed = changed_lines(*traces)
    assert changed
    for line in changed:
        assert number in {s.line for s in source_lines(line.origins)}, line


def test_wrapper_lines_belong_to_what_they_call_allocate_and_free():
    def f(x, w, b):
        h = torch.relu(x * 2.0) @ w
        h = torch.sigmoid(h)
        values, _ = torch.sort(h @ w.t(), -1)
        return values.sum(0) + b

    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16)
    compiled = mc.compile(f, options={"fusion": False})
    traced = mc.trace(compiled, x, w, torch.randn(16))
    for stages in traced.graphs.values():
        externs = {kernel.name: kernel for kernel in stages.loops.externs}
        computed = {b.name: b for b in stages.loops.operations if b.name not in externs}
        made_by = {name: b.made_by for name, b in computed.items()}
        made_by |= {o.name: e.origins for e in externs.values() for o in e.outputs if o}
        made_by |= {given.name: given.origins for given in stages.loops.given}
        kernels = {kernel.name: kernel for kernel in stages.kernels}
        seen = set()
        for line in stages.wrapper.lines:
            text = line.text.strip()
            if match := re.match(
                r"(buf\d+) = empty_strided|(buf\d+) = .*# (?:reuse|in place)", text
            ):
                seen.add("allocation")
                assert line.origins == made_by[match.group(1) or match.group(2)], text
            elif (match := re.match(r"del (.*)", text)) and "results" not in text:
                names = made_by.keys() & set(match.group(1).split(", "))
                assert line.scaffold == (not names), text
                assert line.origins == frozenset().union(*(made_by[n] for n in names)), text
                seen.add("free")
            elif match := re.match(r"(?:torch|aten)\w*[._].*out=(buf\d+)", text):
                assert line.origins == externs[match.group(1)].origins, text
                seen.add("call with memory")
            elif match := re.match(r"(results|buf\d+) = aten\w*\(", text):
                assert line.origins in [kernel.origins for kernel in externs.values()], text
                seen.add("call")
            elif (name := text.partition("(")[0]) in kernels:
                lines = [part for part in kernels[name].lines if not part.scaffold]
                assert line.origins == frozenset().union(*(part.origins for part in lines)), text
                seen.add("kernel")
        assert seen >= {"allocation", "free", "kernel", "call with memory"}
    assert "call" in seen or traced.forward.loops.externs


def test_a_sum_of_gradients_belongs_to_the_readers_whose_gradients_it_adds():
    def f(x):
        h = torch.sin(x)
        for _ in range(3):
            h = h + torch.tanh(h)
        return h.sum()

    traced = mc.trace(f, torch.randn(8, 16, requires_grad=True))
    adds = [n for n in traced.aot.backward.nodes if str(n.target) == "aten.add.Tensor"]
    sums = [node for node in adds if node.meta["phase"] == "backward"]
    named = [sorted(origin.node for origin in origins_of(node)) for node in sums]
    found = [names for names in named if len(names) > 1]  # tanh's own gradient adds, too
    assert found == [["add_2", "tanh_2"], ["add_1", "tanh_1"], ["add", "tanh"]]


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


def test_a_no_op_leaves_no_trace_in_kernels():
    def f(x):
        h = torch.sin(x).view(8, 16)
        return torch.cos(h * 1)

    traced = mc.trace(f, torch.randn(8, 16))
    named = {o.node for _, line in kernel_lines(traced) for o in line.origins}
    assert named == {"sin", "cos"}


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_in_a_chain_every_line_that_computes_loads_or_stores_belongs_to_one_operation(language):
    def f(x):
        return torch.softmax(torch.relu(x * 2.0), -1)

    compiled = mc.compile(f, options={"device_codegen": language})
    traced = mc.trace(compiled, torch.randn(8, 32, requires_grad=True))
    lines = [line for _, line in kernel_lines(traced) if not line.scaffold]
    assert all(len(line.origins) == 1 for line in lines)
    for words in ("row_max", "max_combine", "row_sum", "tl.sum"):
        for line in (line for line in lines if words in line.text):
            assert {origin.node for origin in line.origins} == {"softmax"}
