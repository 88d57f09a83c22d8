"""`mc.compare_with_torch`: both compilers stage by stage."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import nn

import minicompile as mc
from minicompile.compat import torch_compiler
from minicompile.debug.torch_side import CompilerSide
from minicompile.extension import lowering
from minicompile.lessons.model import GPT, GPTConfig
from minicompile.lowering.rules.common import elementwise
from minicompile.ops.display import to_html

AGREE = "both agree with eager"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graph_by_graph(gm: Any, inputs: Any) -> Any:
    """torch's AOT autograd alone, in place of Inductor, which takes seconds for each graph."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(gm, inputs)


@pytest.fixture
def without_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_compiler, "compile_fx", lambda: graph_by_graph)


def subtract(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x - w)


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 4), torch.randn(4, requires_grad=True)


# -- what both made


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = torch.relu(x @ w)
    return torch.softmax(h, -1)


@pytest.mark.long
def test_every_stage_of_both_and_inductors_code() -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    found = mc.compare_with_torch(layer, x, w)
    assert found.conclusion == AGREE and not found.notes, str(found)
    for side in (found.ours, found.theirs):
        assert side.accuracy.verdict in ("same as eager", "as accurate as eager"), str(found)
        assert side.accuracy.gradient_error is not None
        assert side.seconds and side.kernels
    trace = mc.trace(layer, x, w)
    assert found.ours.kernels == sum(len(graph.kernels) for graph in trace.graphs.values())
    [mine], [other] = found.stages["graph"][0], found.stages["graph"][1]
    assert str(mine) == str(trace.capture.graph) and mine.op_count == other.op_count == 3
    for name in ("aot.joint", "aot.forward", "aot.backward"):
        for [graph] in found.stages[name]:
            assert f"test_torch_side.py:{layer.__code__.co_firstlineno + 1} in layer" in str(graph)
            assert "aten.mm.default" in str(graph)
            assert name != "aot.joint" or "# backward pass" in str(graph)
    _, code = found.stages["code"]
    assert [made.name for made in code] == ["forward, by Inductor", "backward, by Inductor"]
    assert all("async_compile.cpp" in made.text for made in code)
    for side in (found.ours, found.theirs):
        row = dict(zip(CompilerSide.HEAD, side.cells(), strict=True))
        assert (row["graphs"], row["kernels"]) == ("1", str(side.kernels))
    html = to_html(found["code"]) + to_html(found["graph"])
    assert "at::vec::" in html and "by Dynamo" in html and "<script src" not in html
    assert "eager</b>" in to_html(found) and to_html(found) == to_html(found)


@pytest.mark.long
def test_the_lesson_model_with_a_break(without_cpp: None) -> None:
    config = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4)
    model, tokens = GPT(config), torch.randint(config.vocab_size, (2, 4))

    def broken(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens)
        print(end="")
        return logits * 2

    found = mc.compare_with_torch(broken, tokens)
    assert found.conclusion == AGREE, str(found)
    assert [len(graphs) for graphs in found.stages["graph"]] == [2, 2]
    told = {note.split(":")[0] for note in found.notes}
    assert told == {"break by minicompile", "break by torch.compile"}


@pytest.mark.long
def test_buffers_inputs_and_sizes_that_change(without_cpp: None) -> None:
    cnn = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    images = torch.randn(2, 2, 5, 5)
    before, pixels = copy.deepcopy(cnn.state_dict()), images.clone()
    found = mc.compare_with_torch(cnn, images)
    assert found.conclusion == AGREE, str(found)
    assert None not in (found.ours.accuracy.state_error, found.theirs.accuracy.state_error)
    torch.testing.assert_close(dict(cnn.state_dict()), dict(before), rtol=0, atol=0)
    assert torch.equal(images, pixels) and cnn[0].weight.grad is None

    def grown(x: torch.Tensor) -> torch.Tensor:
        return (x.mul_(2) + 1).view(-1, 2).sum(0) * x.shape[0]

    found = mc.compare_with_torch(mc.compile(grown, dynamic=True), torch.randn(6, 4))
    assert found.conclusion == AGREE, str(found)
    [mine], [other] = found.stages["graph"][0], found.stages["graph"][1]
    assert "s0" in mine.signature and "Sym(s" in other.signature


# -- which compiler


@pytest.mark.long
def test_a_wrong_compiler_is_named(monkeypatch: pytest.MonkeyPatch, without_cpp: None) -> None:
    with mc.scoped():

        @lowering(torch.ops.aten.relu.default)
        def negative(ctx: Any, x: Any) -> Any:
            return elementwise(ctx, lambda ops, v: ops.neg(v), x)

        found = mc.compare_with_torch(subtract, *arguments())
    assert found.conclusion == "minicompile: wrong", str(found)

    def off(gm: Any, inputs: Any) -> Any:
        run = graph_by_graph(gm, inputs)
        return lambda *args: [result + 0.1 for result in run(*args)]

    monkeypatch.setattr(torch_compiler, "compile_fx", lambda: off)
    found = mc.compare_with_torch(subtract, *arguments())
    assert found.conclusion == "torch.compile: wrong", str(found)


# -- what can go wrong


def test_a_failure_of_torch_stands_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(gm: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernel for that")

    monkeypatch.setattr(torch_compiler, "compile_fx", lambda: refuses)
    found = mc.compare_with_torch(subtract, *arguments())
    assert "RuntimeError: no kernel for that" in "".join(found.notes)
    assert found.theirs.seconds is None and found.ours.seconds
    assert found.stages["graph"][1] and not found.stages["code"][1]
    assert found.conclusion == "torch.compile: raised" and to_html(found)


@pytest.mark.long
def test_nothing_is_left_behind(without_cpp: None) -> None:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list as entries

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return log.append(1) or linear(x) + torch.rand(4)

    linear, log = nn.Linear(4, 4), list[int]()
    x, w = torch.randn(3, 4), torch.randn(3, 4)
    theirs = torch.compile(subtract, backend="eager")
    theirs(x, w)
    config, state = torch._dynamo.config.get_config_copy(), torch.get_rng_state()
    inductor = torch._inductor.config.get_config_copy()
    mc.compare_with_torch(shifted, x)
    mc.compare_with_torch(theirs, x, w)
    assert log == [] and linear.weight.grad is None and torch.equal(state, torch.get_rng_state())
    assert not entries(shifted.__code__) and not entries(nn.Linear.forward.__code__)
    assert torch._dynamo.config.get_config_copy() == config
    assert torch._inductor.config.get_config_copy() == inductor
