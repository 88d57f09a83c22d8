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
