"""`mc.disable`, `mc.allow_in_graph`, and what torch.compile promises about the modules it wraps."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import minicompile as mc
from minicompile.errors import OptionError, Unsupported
from tests.dynamo.helpers import compiled, equal, explained, frames_of, lenient

x = torch.randn(3, 4)


# -- disable


def below(a: torch.Tensor) -> torch.Tensor:
    return a.cos()


@mc.disable(reason="it talks to the outside")
def outside(a: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Adds."""
    return below(a) + k


def calls_outside(a: torch.Tensor) -> torch.Tensor:
    return outside(a * 2, k=3).sin()


def test_a_call_of_a_disabled_function_is_a_graph_break_that_gives_the_reason() -> None:
    run = lenient(calls_outside)
    for _ in range(2):
        assert equal(run(x), calls_outside(x))
    found = explained(run)
    assert (found.graph_count, found.op_count, len(found.breaks)) == (2, 2, 1)
    assert "outside is under mc.disable: it talks to the outside" in found.breaks[0].reason
    assert found.breaks[0].user_line is not None
    assert found.breaks[0].user_line.function == "calls_outside"
    frames = frames_of(run)
    assert not frames.dispatchers  # nor what it calls
    with pytest.raises(Unsupported, match=r"under mc\.disable: it talks(?s:.*)at .*test_controls"):
        compiled(calls_outside)(x)


def test_a_disabled_function_below_an_eager_frame_and_what_it_calls_stay_in_eager() -> None:
    def function(a: torch.Tensor) -> Any:
        try:
            raise KeyError
        except KeyError:
            print(end="")
        return outside(a), below(a)

    run = lenient(function)
    for _ in range(2):
        assert equal(run(x), function(x))
    frames = frames_of(run)
    calls = [(made.name, made.explanation().compiled_calls) for made in frames.dispatchers]
    assert calls in ([("below", 2)], [])  # [] without a C compiler


def test_a_disabled_module() -> None:
    class Net(nn.Module):
        def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = wrap(nn.Linear(4, 4))

        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(a).relu()).relu()

    plain, net = Net(lambda module: module), Net(mc.disable(reason="strange"))
    assert list(net.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(net.state_dict())
    run = lenient(net)
    for _ in range(2):
        assert equal(run(x), plain(x))
    assert isinstance(net.second, nn.Linear) and mc.compile(net.second) is net.second
    found = explained(run)
    assert "Linear is under mc.disable: strange" in found.breaks[0].reason
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(mc.disable(net.second)))):
        assert [name for name, _ in other.named_parameters()]
    again = copy.deepcopy(net)
    assert again.second.weight is not net.second.weight and equal(again(x), net(x))
    assert "under mc.disable" in str(mc.explain(again)(x).breaks[0])


# -- allow_in_graph


@pytest.fixture(autouse=True)
def no_trace() -> Any:
    with mc.scoped():
        yield


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_an_allowed_function_is_one_node(backend: str) -> None:
    def opaque(
        a: torch.Tensor, k: float, *, add: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(a, object):
            print(end="")  # what capture can't do
        return a.sin() * k, add + 1

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        one, two = opaque(a * 2, 0.5, add=b)
        return one + two.relu()

    assert mc.allow_in_graph(opaque) is opaque
    run = compiled(function, backend=backend)
    ours, theirs = (torch.randn(4).copy_(torch.ones(4)).requires_grad_() for _ in range(2))
    for _ in range(2):
        found, wanted = run(x, ours), function(x, theirs)
        torch.testing.assert_close(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad)
    explanation = explained(run)
    assert explanation.op_count == 4 and "opaque(" in explanation.code[0]


def test_another_function_in_its_place_is_not_the_allowed_one() -> None:
    def scaled(k: float) -> Any:
        return lambda a: a * k

    table = {"f": mc.allow_in_graph(scaled(2.0))}

    def function(a: torch.Tensor) -> torch.Tensor:
        return table["f"](a)  # type: ignore[no-any-return]

    run = compiled(function)
    assert equal(run(x), x * 2)
    table["f"] = scaled(3.0)
    assert equal(run(x), x * 3)


def test_an_allowed_function_that_changes_its_argument() -> None:
    def opaque(a: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * 2

    def function(a: torch.Tensor) -> torch.Tensor:
        b = a.clone()
        return opaque(b) + b + opaque(a)

    mc.allow_in_graph(opaque)
    for backend in ("eager", "aot_eager", "inductor"):
        mine, other = x.clone(), x.clone()
        torch.testing.assert_close(compiled(function, backend=backend)(mine), function(other))
        assert equal(mine, other)


weight = torch.ones(4, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda a: a * weight, "fake"),
        (lambda a: {"a": a + 1}, "gave a dict"),
        (lambda a: a[a > 0], "depends on the tensor's data"),
    ],
)
def test_the_limits_of_an_allowed_function(function: Any, reason: str) -> None:
    mc.allow_in_graph(function)

    def outer(a: torch.Tensor) -> Any:
        return function(a.abs() + 1)

    run = lenient(outer)
    for _ in range(2):
        assert equal(run(x), outer(x))
    assert "allowed in the graph" in explained(run).breaks[0].reason
    with pytest.raises(Unsupported, match=r"(?i)" + reason):
        compiled(outer)(x)


# -- modules: each convention of torch.compile, asked of both


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.ones(4))
        self.width = 4

    @property
    def double_width(self) -> int:
        return self.width * 2

    def helper(self, a: torch.Tensor) -> torch.Tensor:
        return self(a) + 1

    def __len__(self) -> int:
        return len(self.body)

    def __getitem__(self, index: int) -> nn.Module:
        return self.body[index]

    def forward(self, a: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        out = self.body(a) * self.scale + self.offset
        return out * 2 if twice else out


def set_attribute(run: Any) -> Any:
    run.width = 7
    run.extra = nn.Linear(2, 2)
    return run.width, run._orig_mod.width, run.double_width, run._orig_mod.extra is run.extra


def call_in_eval(run: Any) -> Any:
    run.eval()
    return run(x), run(x, twice=True), run.training, run._orig_mod.body.training


def to_double(run: Any) -> Any:
    same = run.eval().to(torch.float64) is run
    return same, run._orig_mod.scale.dtype, run(x.double()).dtype


def train_a_step(run: Any) -> Any:
    run.eval()
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    run(x).sum().backward()
    optimizer.step()
    return [p.detach() for p in run._orig_mod.parameters()], run(x)


def hooks(run: Any) -> Any:
    seen: list[str] = []
    run.eval()
    run._orig_mod.body[0].register_forward_hook(lambda *args: seen.append("inner"))
    run(x)
    return seen


def saved_and_loaded(run: Any) -> Any:
    file = io.BytesIO()
    torch.save(run._orig_mod.state_dict(), file)
    file.seek(0)
    other = Net()
    other.load_state_dict(torch.load(file))
    return [equal(a, b) for a, b in zip(other.parameters(), run.parameters())]


def copied(run: Any) -> Any:
    other = copy.deepcopy(run.eval())
    return (
        isinstance(other, nn.Module),
        other._orig_mod.scale is not run._orig_mod.scale,
        equal(other(x), run(x)),
    )


CONVENTIONS: list[Callable[[Any], Any]] = [
    lambda run: isinstance(run, nn.Module),
    lambda run: (run.width, run.double_width, len(run)),
    lambda run: isinstance(run._orig_mod, Net) and type(run._orig_mod) is Net,
    lambda run: [tuple(p.shape) for p in run.parameters()],
    lambda run: len(list(run.buffers())),
    lambda run: (run.train() is run, run.training, run._orig_mod.training),
    lambda run: run.zero_grad(),
    lambda run: run.requires_grad_(False) is run and not run._orig_mod.scale.requires_grad,
    lambda run: (hasattr(run, "nothing"), hasattr(run, "offset")),
    lambda run: run.eval().helper(x),
    set_attribute, call_in_eval, to_double, train_a_step, hooks, saved_and_loaded, copied,
]  # fmt: skip


@pytest.mark.parametrize("ask", CONVENTIONS)
def test_a_compiled_module_answers_as_torch_compiles_does(ask: Callable[[Any], Any]) -> None:
    first = Net()
    second = copy.deepcopy(first)
    torch._dynamo.reset()
    theirs = ask(torch.compile(first, backend="eager"))
    assert equal(ask(mc.compile(second, backend="eager")), theirs)


def test_disable_is_a_decorator_and_keeps_the_functions_face() -> None:
    plain = mc.disable(below)
    assert plain.__name__ == "below" and outside.__doc__ == "Adds."
    assert equal(outside(x, 2), x.cos() + 2)
    assert mc.compile(outside) is outside
    assert equal(mc.disable(compiled(below))(x), below(x))
    with pytest.raises(OptionError, match=r"under mc\.disable"):
        mc.explain(outside)(x)


def test_a_disabled_method_and_a_disabled_lambda() -> None:
    class Model:
        k = 2

        @mc.disable
        def run(self, a: torch.Tensor) -> torch.Tensor:
            return a * self.k

    model = Model()
    bound, anonymous = mc.disable(model.run), mc.disable(lambda a: a + 1)
    run = lenient(lambda a: anonymous(bound(model.run(a) + 1)))
    assert equal(run(x), (x * 2 + 1) * 2 + 1)
    # two breaks at one line for one reason are one
    assert len(explained(run).breaks) == 2 and explained(run).graph_count == 4
