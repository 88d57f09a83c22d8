"""CUDA graphs, with mode="reduce-overhead".

- A later call replays what an earlier one launched, where that gives what the call would have given: other
  inputs, written inputs, other sizes, training.
- What can't be captured runs as without the plug-in, and the log says why.

Without a GPU a stand-in captures (minicompile/lessons/replay.py).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minicompile as mc
from minicompile.lessons.replay import StandIn
from minicompile.plugins.cuda_graphs import replay as cuda_graphs
from tests.comparing import assert_same, fresh

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


class Counted:
    """Captures, replays, and inputs that are copied before each replay."""

    def __init__(self) -> None:
        self.captures = self.replays = self.copies = 0


@pytest.fixture(params=["cpu", GPU])
def device(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    mc.reset()
    if request.param == "cpu":
        monkeypatch.setattr(cuda_graphs, "around", partial(cuda_graphs.around, gpu=StandIn))
    yield request.param
    mc.reset()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Recordings made and runs of them, on any device."""
    found, recording = Counted(), cuda_graphs.Recording
    run, init = recording.run, recording.__init__

    def count_run(self: Any, *given: Any) -> Any:
        found.replays += 1
        return run(self, *given)

    def count_init(self: Any, *given: Any) -> None:
        init(self, *given)
        found.captures += 1
        found.copies += len(self.copies)

    monkeypatch.setattr(recording, "run", count_run)
    monkeypatch.setattr(recording, "__init__", count_init)
    return found


def graphed(fn: Any, **how: Any) -> Any:
    return mc.compile(fn, mode="reduce-overhead", fullgraph=True, **how)


def numbers(device: str, *shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(device)


def written(x: Tensor, total: Tensor) -> Tensor:
    total.add_(x)
    return total * 2


def returned(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    z = x + y
    return x, y.t(), z, z.t(), z


def draw(*shape: int, keep: Callable[[Tensor], Tensor] = lambda x: x) -> Callable[..., Tensor]:
    return lambda device, step: keep(numbers(device, *shape, seed=step + 10 * len(shape)))


CALLS: dict[str, tuple[Callable[..., Any], list[Callable[[str, int], Tensor]]]] = {
    "new inputs": (lambda x, w: (x @ w).relu().sum(1), [draw(4, 8), draw(8, 8)]),
    "strided and expanded": (
        lambda x, y: x * 2 + y,
        [
            draw(6, 8, keep=lambda x: x[:, ::2]),
            draw(6, 1, keep=lambda y: y.expand(6, 4)),
        ],
    ),
    "unaligned": (lambda x: (x + 1).sum(0), [draw(65, keep=lambda x: x[1:])]),
    "empty": (lambda x: (x + 1).sum(0), [draw(0, 3)]),
    "results that are inputs": (returned, [draw(4, 4), draw(4, 4)]),
    "written to": (written, [draw(16), draw(16)]),
}


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_replayed(device, counted, name, stays):
    """The same memory each time, or other inputs while the last ones are held."""
    fn, make = CALLS[name]
    compiled, held = graphed(fn, dynamic=False), []
    given = [draw(device, 0) for draw in make]
    for step in range(6):
        if not stays:
            given = [draw(device, step) for draw in make]
        copies = fresh(given)
        held.append(given)
        assert_same(compiled(*given), fn(*copies), rtol=1e-5, atol=1e-5)
        assert_same(given, copies)
    assert counted.replays >= 3 or name in ("empty", "strided and expanded")
    if name == "results that are inputs":
        out = compiled(*given)
        assert out[0] is given[0] and out[1].data_ptr() == given[1].data_ptr()
        assert out[2].data_ptr() == out[3].data_ptr() and out[2] is out[4]


def test_what_stays_is_not_copied(device, counted):
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(device).eval()
    compiled, held = graphed(module), []
    with torch.no_grad():
        for step in range(5):
            held.append(numbers(device, 4, 8, seed=step))
            torch.testing.assert_close(compiled(held[-1]), module(held[-1]))
    assert counted.copies == counted.captures == 1


def test_parameters_that_move_are_seen(device, counted):
    module = nn.Linear(8, 8).to(device)
    compiled, x, held = graphed(module), numbers(device, 4, 8), []
    with torch.no_grad():
        for step in range(10):
            torch.testing.assert_close(compiled(x), module(x))
            if step % 3 == 2:
                held.append(module.weight.data)
                module.weight.data = numbers(device, 8, 8, seed=step)
            module.bias.add_(1)
    assert counted.replays >= 2


@pytest.mark.parametrize("moves", [False, True])
def test_results_stay(device, counted, moves):
    compiled, x = graphed(lambda x: x * 2), numbers(device, 16)
    held, inputs = [], []
    for step in range(6):
        inputs.append(torch.full_like(x, step) if moves else x.fill_(step))
        held.append(compiled(inputs[-1]))
    assert all((kept == 2 * step).all() for step, kept in enumerate(held))
    assert counted.replays


def test_inference_mode(device, counted):
    fn = lambda x: x * 2  # noqa: E731
    compiled, held = graphed(fn), []
    for mode in (True, False) * 2:
        for _ in range(4):
            held.append(numbers(device, 16))
            with torch.inference_mode(mode):
                out = compiled(held[-1])
                assert out.is_inference() == fn(held[-1]).is_inference() == mode
                torch.testing.assert_close(out, fn(held[-1]))
    assert counted.replays


def test_sizes_and_numbers_have_their_own(device, counted):
    fn = lambda x, k: x.sin() * k  # noqa: E731
    compiled = graphed(fn, dynamic=True)
    for _ in range(4):
        for size, k in ((5, 2.0), (9, 2.0), (5, 3.5), (5, 0.0), (5, -0.0)):
            x = numbers(device, size, seed=size)
            torch.testing.assert_close(compiled(x, k), fn(x, k))
            assert compiled(x, k).signbit().equal(fn(x, k).signbit())
    assert counted.captures >= 3 and counted.replays >= 3


def test_there_are_not_too_many_recordings(device, counted):
    compiled, out = graphed(lambda x: x + 1, dynamic=True), io.StringIO()
    with mc.logs("cudagraphs", file=out):
        for _ in range(3):
            for size in range(2, 2 + 3 * cuda_graphs.MOST_RECORDINGS):
                assert compiled(torch.full((size,), 3.0, device=device)).eq(4).all()
    assert counted.captures <= 2 * cuda_graphs.MOST_RECORDINGS
    assert "others run without" in out.getvalue()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.two(torch.tanh(self.norm(self.one(x))))
        return logits, logits.square().mean()


PLANS: dict[str, Callable[[list[Tensor]], object]] = {
    "one by one": lambda losses: None,
    "two forwards": lambda losses: sum(losses).backward(),
    "no backward": lambda losses: losses[1].backward(),
    "twice": lambda losses: (losses[1].backward(retain_graph=True), losses[1].backward()),
}
"""What is differentiated after two forwards; or each loss at once."""


def train(device: str, compiled: bool, name: str, to_none: bool) -> list[Any]:
    """Losses, gradients and parameters of a plan."""
    net = Net().to(device)
    forward = graphed(net) if compiled else net
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    history: list[Any] = []
    for step in range(8):
        batches = [numbers(device, 6, 8, seed=10 * step + i) for i in range(2)]
        optimizer.zero_grad(set_to_none=to_none)
        losses = []
        for x in batches:
            losses.append(forward(x)[1])
            if name == "one by one":
                losses[-1].backward()
        PLANS[name](losses)
        history += [loss.detach() for loss in losses]
        optimizer.step()
        history += [p.grad.clone() for p in net.parameters()]
    return [*history, *net.parameters(), *net.buffers()]


def test_losses_that_are_differentiated_one_after_the_other(device, counted):
    def losses(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w).tanh().mean(), (x @ w).sigmoid().sum(0)

    found = []
    for call in (graphed(losses), losses):
        w = numbers(device, 8, 8).requires_grad_()
        for step in range(12):
            first, second = call(numbers(device, 4, 8, seed=step), w)
            first.backward()
            if step % 4 == 3:  # while the other's saved values live
                call(numbers(device, 4, 8, seed=100), w)[1].sum().backward()
            second.sum().backward()
        found.append(w.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert counted.replays >= 4


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", PLANS)
def test_training(device, counted, name, to_none):
    ours, right = (train(device, compiled, name, to_none) for compiled in (True, False))
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    assert counted.replays >= (6 if name == "one by one" else 4)


def test_a_saved_result_that_is_written_to_harms_nothing(device):
    """Eager refuses this backward. A result that is handed out as a copy is no longer what was saved."""
    net = Net().to(device)
    fn = lambda x: torch.exp(net.one(x))  # noqa: E731
    compiled, x = graphed(fn), numbers(device, 6, 8)
    fn(x).sum().backward()
    right = net.one.weight.grad
    for hold in (False, True):
        for step in range(7):
            net.zero_grad()
            out = compiled(x)
            with torch.no_grad():
                out.add_(step)
            try:
                out.sum().backward()
                torch.testing.assert_close(net.one.weight.grad, right)
            except RuntimeError as error:
                assert "inplace operation" in str(error)
            if not hold:
                del out


def test_threads(device):
    fn = lambda x, w: (x @ w).sum(1)  # noqa: E731
    w, compiled = numbers(device, 8, 8), graphed(fn)

    def right(number: int) -> bool:
        given = [numbers(device, 4, 8, seed=100 * number + step) for step in range(20)]
        return all(torch.allclose(compiled(x, w), fn(x, w), atol=1e-5) for x in given)

    assert right(9)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, range(4)))


def told(fn: Any, *args: Any, calls: int = 3) -> str:
    out = io.StringIO()
    with mc.logs("cudagraphs", file=out):
        compiled = graphed(fn)
        for _ in range(calls):
            compiled(*args)
    return out.getvalue()


def test_a_capture_that_fails_is_told(device, monkeypatch, counted):
    failing = lambda *given: (_ for _ in ()).throw(RuntimeError("operation not permitted\n"))  # noqa: E731
    monkeypatch.setattr(StandIn if device == "cpu" else cuda_graphs.CudaCapture, "capture", failing)
    x = numbers(device, 4)
    said = told(lambda x: x + 1, x, calls=6)
    assert said.count("forward: no CUDA graph: operation not permitted\n") == 1
    assert not counted.replays


@torch.library.custom_op(
    "tests_cuda_graphs::looks_at_data", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def looks_at_data(x: Tensor) -> Tensor:
    return x + x.sum().item()


@looks_at_data.register_fake
def like(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_what_looks_at_data_is_not_captured(device, counted):
    x = numbers(device, 9)
    said = told(lambda x: looks_at_data(x) * 2, x)
    assert "looks_at_data.default has the tag cudagraph_unsafe" in said
    assert not counted.captures


def test_a_stream_that_is_captured_by_someone_else(device, counted, monkeypatch):
    x, compiled = numbers(device, 8), graphed(lambda x: x * 3)
    for _ in range(4):
        compiled(x)
    before = counted.replays
    if device == "cpu":
        monkeypatch.setattr(StandIn, "place", lambda self: None)
        out = compiled(x)
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(x)
        graph.replay()
    assert counted.replays == before
    torch.testing.assert_close(out, x * 3)


def test_a_cpu_has_no_cuda_graphs(counted):
    mc.reset()
    said = told(lambda x: x + 1, torch.ones(3))
    assert said.splitlines()[0].endswith("forward: no CUDA graph: x is on the CPU")
    assert len(said.splitlines()) == 1 and not counted.captures


@pytest.mark.gpu
@pytest.mark.parametrize("fallback", [True, False])
def test_random_numbers_go_on(fallback):
    fn = lambda x: x + torch.rand_like(x)  # noqa: E731
    compiled, x = (
        graphed(fn, options={"fallback_random": fallback}),
        torch.zeros(1000, device="cuda"),
    )
    drawn = []
    for _ in range(3):
        torch.manual_seed(3)
        drawn.append([compiled(x).clone() for _ in range(8)])
    assert all(not a.equal(b) for i, a in enumerate(drawn[0]) for b in drawn[0][:i])
    assert all(map(torch.equal, drawn[1], drawn[2]))
    if fallback:
        torch.manual_seed(3)
        assert all(a.equal(fn(x)) for a in drawn[1])


@pytest.mark.gpu
def test_streams_have_their_own():
    mc.reset()
    compiled, side = graphed(lambda x: (x * 2).sin()), torch.cuda.Stream()
    x = torch.ones(1000, device="cuda")
    for step in range(12):
        x.fill_(step)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if step % 2 else torch.cuda.current_stream()):
            out = compiled(x)
        torch.cuda.synchronize()
        torch.testing.assert_close(out, (x * 2).sin())


@pytest.mark.gpu
def test_a_replay_costs_less_than_launches(counted):
    """Counted in calls that Python makes: none of the kernels' launchers runs."""
    mc.reset()

    def fn(x: Tensor) -> Tensor:
        for _ in range(20):
            x = torch.softmax(x @ x, -1)
        return x

    compiled, x = graphed(fn), torch.randn(64, 64, device="cuda")
    for _ in range(4):
        compiled(x)
    with torch.profiler.profile() as found:
        compiled(x)
        torch.cuda.synchronize()
    launches = [e for e in found.events() if "Launch" in e.name]
    assert counted.replays >= 2 and len(launches) <= 3
    torch.testing.assert_close(compiled(x), fn(x), rtol=1e-3, atol=1e-4)
