"""`mc.launches`: every step of the generated Python has its time, and the answer is the compiled one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import minicompile as mc
from minicompile.debug.launch_times import Instrumented, LaunchTimeline
from minicompile.debug.variant import Case
from minicompile.options import Options
from minicompile.scheduling.nodes import ExternKernelSchedulerNode


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.two(torch.tanh(self.one(x))), -1).square().sum()


@pytest.fixture(scope="module")
def found() -> list[LaunchTimeline]:
    return mc.launches(mc.compile(Small()), torch.ones(3, 8), repeats=3)


def test_every_kernel_and_library_call_of_the_schedule_occurs_once_and_in_order(
    found: list[LaunchTimeline],
) -> None:
    trace = mc.trace(Small(), torch.ones(3, 8))
    assert [t.graph for t in found] == ["forward", "backward"]
    for timeline, stages in zip(found, trace.graphs.values()):
        kernels = iter(stages.kernels)
        wanted = [
            ("extern", str(node.kernel.op).split(".")[1])
            if isinstance(node, ExternKernelSchedulerNode)
            else ("kernel", next(kernels).name)
            for node in stages.schedule.nodes
        ]
        steps = [s for s in timeline.launches if s.kind in ("kernel", "extern")]
        assert len(steps) == len(wanted) > 0
        for step, (kind, name) in zip(steps, wanted):
            assert step.kind == kind and name in step.text


def test_steps_are_the_lines_of_the_wrapper_each_once(found: list[LaunchTimeline]) -> None:
    wrapper = mc.trace(Small(), torch.ones(3, 8)).wrapper
    start = next(i for i, line in enumerate(wrapper.lines) if line.text == "def call(args):")
    told = "\n".join(step.text for step in found[0].launches)
    assert told == "\n".join(line.text for line in wrapper.lines[start + 1 :])


def test_the_answer_is_that_of_the_compiled_call() -> None:
    measured, compiled = Instrumented(Options()), mc.compile(Small())
    model = Small()
    run = Case(model, []).by(measured.backend).prepare(model)
    x = torch.randn(3, 8)
    ours, theirs = run(x), compiled(x)
    ours.backward()
    theirs.backward()
    assert torch.equal(ours, theirs)
    pairs = zip(model.parameters(), compiled.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert [graph.graph for graph in measured.graphs] == ["forward", "backward"]
    assert [len(graph.runs) for graph in measured.graphs] == [1, 1]


def test_what_is_not_compiled_says_so() -> None:
    def generator(x: torch.Tensor) -> Any:
        yield x + 1

    with pytest.raises(mc.Unsupported, match=r"mc\.explain"):
        mc.launches(generator, torch.ones(2), repeats=1)
