"""Compiled graphs on disk: what comes back is what was made, and whatever decides it is in the key.

Graphs on the CPU stand for those on a GPU: their kernels are Triton's, and only written down.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import minicompile as mc
from minicompile import pipeline
from minicompile.lowering.lower import lowering
from minicompile.ops.events import Compilation, Watch, observer
from minicompile.ops.graph import Graph
from minicompile.ops.registry import scoped, without
from minicompile.options import Options
from minicompile.runtime import graph_cache
from minicompile.runtime.triton import gpu_kernels

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
WATCH = Watch(Compilation(0, 0, "f", Options()))


@pytest.fixture(autouse=True)
def on_cpu(request, monkeypatch) -> None:
    if "gpu" in request.keywords:
        return
    monkeypatch.setattr(graph_cache, "KIND", "cpu")
    monkeypatch.setattr(graph_cache, "gpu_text", str)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def graphs_of(fn: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> list[Graph]:
    """The ATen graphs that lowering gets."""
    compiled = mc.compile(fn, options={"device_codegen": "triton"}, dynamic=dynamic)
    aot = mc.trace(compiled, *inputs).aot
    assert aot is not None
    return [aot.forward] if aot.backward is None else [aot.forward, aot.backward]


def key(fn: Callable[..., Any], *inputs: Any, written_back: Any = None, **options: Any) -> Any:
    chosen = Options(**{"device_codegen": "triton"} | options)
    return graph_cache.key_of(graphs_of(fn, *inputs)[0], chosen, written_back or {}, WATCH)


def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = F.layer_norm(x, x.shape[-1:]) @ w
    return F.gelu(y).softmax(-1).sum(0)


X = torch.randn(4, 8)


def test_what_comes_back_is_what_was_made(tmp_path) -> None:
    options = Options(device_codegen="triton", cache_dir=str(tmp_path))
    graphs = graphs_of(block, X, torch.randn(8, 8, requires_grad=True))
    assert len(graphs) == 2
    for graph in graphs:
        name = graph_cache.key_of(graph, options, {}, WATCH)
        assert name is not None and graph_cache.read(name, options) is None
        made = pipeline.compile_graph(graph, options)
        assert made.stages is not None
        graph_cache.keep(name, made.stages.wrapper, made.modules, options)
        found = graph_cache.read(name, options)
        assert found is not None
        wrapper, kernels = found
        assert (wrapper.text, wrapper.name, wrapper.owned) == (
            made.stages.wrapper.text,
            made.stages.wrapper.name,
            made.stages.wrapper.owned,
        )
        assert kernels
        assert kernels == gpu_kernels(kernel for m in made.modules for kernel in m.kernels)
        assert [k.key for k in kernels.values()] == [
            k.key for k in gpu_kernels(k for m in made.modules for k in m.kernels).values()
        ]
    file = tmp_path / "graphs" / f"{name}.json"
    file.write_bytes(file.read_bytes().replace(b"launch", b"Launch"))
    assert graph_cache.read(name, options) is None


def test_the_second_time_nothing_is_lowered(monkeypatch, tmp_path) -> None:
    started = []

    def start_kept(wrapper: Any, kernels: Any, options: Options) -> Any:
        started.append((wrapper.text, sorted(kernels)))
        return lambda: None

    monkeypatch.setattr(pipeline, "start_kept", start_kept)
    options = Options(device_codegen="triton", cache_dir=str(tmp_path))
    (graph,) = graphs_of(block, X, torch.randn(8, 8))
    first = pipeline.ready(graph, "forward", options, {}, WATCH)
    assert first.stages is not None and not started
    monkeypatch.setattr(pipeline, "lower", None)
    second = pipeline.ready(graph, "forward", options, {}, WATCH)
    assert second.stages is None and second.modules == []
    names = sorted(kernel.name for kernel in first.stages.kernels)
    assert started == [(first.stages.wrapper.text, names)]


def test_whatever_decides_is_in_the_key() -> None:
    """Each differs from all others; the same function asked again has the same key."""
    keys = [
        key(lambda x: x.sin() + 1, X),
        key(lambda x: x.sin() + 1.5, X),
        key(lambda x: x.sin() * 0.0, X),
        key(lambda x: x.sin() * -0.0, X),
        key(lambda x: x.cos() + 1, X),
        key(lambda x: x.sin() + 1, X.double()),
        key(lambda x: x.sin() + 1, X.t().contiguous().t()),
        key(lambda x: x.sin() + 1, X[:, :4]),
        key(lambda x: x.sin() + 1, torch.randn(8, 4)),
        key(lambda x: x.sin() + 1, X, fusion=False),
        key(lambda x: x.sin() + 1, X, written_back={0: 0}),
        key(lambda x: (x.sin() + 1, x.cos()), X),
        key(lambda x: x.sin().sum(0), X),
        key(lambda x: x.sin().sum(1), X),
        key(lambda x: x.sin().sum((0, 1)), X),
        key(lambda x: x.sin()[1:], X),
        key(lambda x: x.sin()[2:], X),
        key(lambda x: x.sin().to(torch.float16), X),
        key(lambda x: x.sin().to(torch.bfloat16), X),
        key(lambda x: torch.full_like(x, 1), X),
        key(lambda x: torch.full_like(x, 1, dtype=torch.bool), X),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert keys[0] == key(lambda x: x.sin() + 1, X)
    assert keys[0] == key(lambda x: x.sin() + 1, torch.zeros(4, 8), progress=False)


def test_settings_of_torch_are_in_the_key(monkeypatch) -> None:
    (graph,) = graphs_of(lambda x: x.sin(), X)

    def found() -> str | None:
        return graph_cache.key_of(graph, Options(), {}, WATCH)

    before = found()
    with torch.inference_mode():
        assert found() != before
    torch.use_deterministic_algorithms(True)
    try:
        assert found() != before
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(graph_cache, "gpu_text", lambda device: "another")
    assert found() not in (before, None)


def test_what_has_no_text_has_no_key(monkeypatch) -> None:
    sizes = graphs_of(lambda x: x.sin(), X, dynamic=True)[0]
    constants = graphs_of(lambda x: x[:, :3] + torch.tensor([1.0, 2.0, 3.0]), X)[0]
    for graph in (sizes, constants):
        assert graph_cache.key_of(graph, Options(), {}, WATCH) is None
    monkeypatch.setattr(graph_cache, "KIND", "cuda")
    (on_cpu,) = graphs_of(lambda x: x.sin(), X)
    assert graph_cache.key_of(on_cpu, Options(), {}, WATCH) is None


def test_rules_from_elsewhere_and_rules_taken_away_are_seen() -> None:
    (graph,) = graphs_of(lambda x: x.sin(), X)

    def found() -> str | None:
        return graph_cache.key_of(graph, Options(), {}, WATCH)

    before = found()
    with without("lowering:aten.cos"):
        assert found() not in (before, None)
    with scoped():
        lowering(torch.ops.aten.cos.default)(lambda ctx, x: x)
        assert found() is None
    with scoped():
        observer("mine")(lambda event: None)
        assert found() is None
    assert found() == before


def test_who_watches_sees_every_stage(tmp_path) -> None:
    (graph,) = graphs_of(lambda x: x.sin(), X)
    listened = Watch(Compilation(0, 0, "f", Options()))
    listened.listeners.append(lambda event: None)
    assert graph_cache.key_of(graph, Options(), {}, listened) is None
    for options in (
        Options(logs="schedule"),
        Options(trace=True),
        Options(disk_cache=False),
        Options(mode="reduce-overhead"),
    ):
        assert graph_cache.key_of(graph, options, {}, WATCH) is None


@pytest.mark.gpu
def test_on_a_gpu_a_kept_graph_gives_the_same(monkeypatch, tmp_path) -> None:
    x, w = torch.randn(64, 96, device="cuda"), torch.randn(96, 128, device="cuda")
    read, found = graph_cache.read, []

    def read_and_tell(*given: Any) -> Any:
        found.append(read(*given))
        return found[-1]

    monkeypatch.setattr(graph_cache, "read", read_and_tell)
    results = []
    for _ in range(2):
        mc.reset()
        weight = w.clone().requires_grad_()
        y = mc.compile(block, options={"cache_dir": str(tmp_path)}, dynamic=False)(x, weight)
        y.square().sum().backward()
        results.append((y.detach(), weight.grad))
    assert [kept is not None for kept in found] == [False, False, True, True]
    weight = w.clone().requires_grad_()
    y = block(x, weight)
    y.square().sum().backward()
    for first, second, eager in zip(*results, (y.detach(), weight.grad)):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, eager, rtol=1e-4, atol=1e-4)
