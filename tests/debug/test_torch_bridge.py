"""Halves joined: Dynamo's graph through our rooms, ours through torch's compiler. Eager is the oracle."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import fx, nn

import minicompile as mc
from minicompile.compat import torch_compiler
from minicompile.debug import torch_bridge
from minicompile.ops.events import Event, observer
from minicompile.options import Options
from minicompile.pipeline_result import Trace
from tests.comparing import assert_as_eager

ROOT = Path(__file__).parent.parent.parent
counters = torch._dynamo.utils.counters


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def without_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's AOT autograd alone stands for Inductor, which takes seconds for each graph."""
    from torch._dynamo.backends.debugging import aot_eager

    monkeypatch.setattr(
        torch_compiler, "compile_fx", lambda: lambda gm, inputs: aot_eager(gm, inputs)
    )


def training(x: torch.Tensor, w: torch.Tensor) -> Any:
    h = torch.relu(x @ w)
    return torch.softmax(h, -1), h[:, :2]


def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.mul_(0.5)
    return x @ w


def in_place_with_history(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    x.mul_(w.sum())
    return x.sin()


def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ w)
    torch._dynamo.graph_break()
    return (y * 2).softmax(-1)


def switches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x @ w
    return y + w.sum()


def statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU())


def by_dynamo(target: Any, **options: Any) -> Any:
    return torch.compile(target, backend=torch_bridge.backend, **options)


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(6, 4), torch.randn(4, 4, requires_grad=True)


FUNCTIONS = [training, in_place, in_place_with_history, broken, switches]


@pytest.mark.long
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_graph_of_dynamo_computes_what_eager_does(function: Any) -> None:
    assert_as_eager(by_dynamo(function), function, *matrices())
    assert not counters["minicompile"]


def by_inductor(target: Any, **options: Any) -> Any:
    return mc.compile(target, backend="torch_inductor", **options)


@pytest.mark.long
@pytest.mark.parametrize("compiler", [by_dynamo, by_inductor])
def test_parameters_are_trained_and_buffers_updated(compiler: Any, without_cpp: None) -> None:
    module = statistics()
    assert_as_eager(compiler(module), module, torch.randn(6, 4), module=module)
    assert not counters["minicompile"]


def test_kernels_name_the_users_lines() -> None:
    traces: list[Trace] = []

    def watched(capture: Any) -> Any:
        traces.append(Trace.watching(capture))
        return mc.api.find_backend("inductor", Options())(capture)

    torch.compile(training, backend=lambda gm, x: torch_bridge.backend(gm, x, compile=watched))(
        torch.randn(6, 4), torch.randn(4, 4)
    )
    [trace] = traces
    assert trace.name == "training"
    first = training.__code__.co_firstlineno
    [kernel] = trace.kernels
    named = {line.line for line in trace.source_lines()}
    assert named == {first + 1, first + 2}
    assert {at.line for origin in kernel.origins for at in origin.stack} == named


def test_what_our_rooms_cannot_do_runs_in_eager_and_is_counted() -> None:
    def mapped(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row.sum() * 2)(x)

    events: list[Event] = []
    x = torch.randn(3, 4)
    with mc.scoped():
        observer("test")(events.append)
        with pytest.warns(UserWarning, match=r"in eager: torch\.compile's graph calls .*functorch"):
            torch.testing.assert_close(by_dynamo(mapped)(x), mapped(x))
    [(reason, count)] = counters["minicompile"].items()
    assert "functorch" in reason and count == 1
    assert [event.kind for event in events] == ["start", "break"]


def test_an_internal_error_is_no_wrong_answer() -> None:
    def failing(capture: Any) -> Any:
        raise KeyError("a bug")

    x = torch.randn(3, 4)
    compiled = torch.compile(
        torch.sin, backend=lambda gm, x: torch_bridge.backend(gm, x, compile=failing)
    )
    with pytest.warns(UserWarning, match="internal error of minicompile: KeyError: 'a bug'"):
        torch.testing.assert_close(compiled(x), torch.sin(x))


def test_memory_that_inputs_share_at_a_later_call() -> None:
    def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    compiled = by_dynamo(written)
    apart, together = torch.ones(8), torch.ones(8)
    torch.testing.assert_close(compiled(apart[:4], torch.ones(4)), torch.full((4,), 2.0))
    with pytest.warns(UserWarning, match="share memory in another way"):
        found = compiled(together[:4], together[2:6])
    plain = torch.ones(8)
    torch.testing.assert_close(found, written(plain[:4], plain[2:6]))
    torch.testing.assert_close(together, plain)


def test_tensors_that_dynamo_left_in_the_module_are_inputs() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.scale = nn.Parameter(torch.randn(4)), torch.arange(4.0)

        def forward(self, x: torch.Tensor) -> Any:
            return (x * self.w + self.scale,)

    root = Root()
    gm = fx.symbolic_trace(root)
    assert [n.op for n in gm.graph.nodes].count("get_attr") == 2
    x = torch.randn(3, 4)
    compiled = torch_bridge.backend(gm, [x])
    with torch.no_grad():
        root.w.mul_(2)
    compiled(x)[0].sum().backward()
    torch.testing.assert_close(compiled(x), root(x))
    torch.testing.assert_close(root.w.grad, x.sum(0))
    assert not counters["minicompile"]


def test_the_entry_point_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the installed package declares it in its metadata."""
    from torch._dynamo.backends import registry

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(group, names)] = project["entry-points"].items()
    folder = tmp_path / "minicompile-0.1.0.dist-info"
    folder.mkdir()
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in names.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: minicompile\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "minicompile" in importlib.metadata.entry_points(group="torch_dynamo_backends").names
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    monkeypatch.setattr(registry, "_COMPILER_FNS", dict(registry._COMPILER_FNS))
    registry._discover_entrypoint_backends.cache_clear()
    registry._lazy_import.cache_clear()
    assert registry.lookup_backend("minicompile") is torch_bridge.backend
    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(torch.sin, backend="minicompile")(x), x.sin())


# -- the other way


@pytest.mark.long
@pytest.mark.parametrize("function", [training, in_place, broken], ids=lambda f: f.__name__)
def test_torch_compiles_what_we_captured(function: Any, without_cpp: None) -> None:
    compiled = by_inductor(function)
    assert_as_eager(compiled, function, *matrices())
    told = mc.api.dispatcher_of(compiled).explanation()
    assert told.compiled_calls == 1 and told.op_count


def test_symbols_are_fixed_for_torch_and_the_reason_is_told(without_cpp: None) -> None:
    compiled = by_inductor(lambda x: x.sum(0) * x.size(0), dynamic=True)
    for size in (4, 5, 4):
        torch.testing.assert_close(compiled(torch.ones(size, 3)), torch.full((3,), 1.0 * size**2))
    told = mc.api.dispatcher_of(compiled).explanation()
    assert told.graph_count == 2
    assert "x.size(0) == 4  # torch's Inductor is given plain sizes" in str(told)


def test_what_torch_refuses_runs_in_eager_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(gm: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernel for that")

    monkeypatch.setattr(torch_compiler, "compile_fx", lambda: refuses)
    compiled, x = by_inductor(torch.nn.ReLU()), torch.randn(3)
    torch.testing.assert_close(compiled(x), x.relu())
    told = mc.api.dispatcher_of(compiled).explanation()
    assert "torch's Inductor raised RuntimeError: no kernel for that" in told.breaks[0].reason
