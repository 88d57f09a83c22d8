"""Control flow in the graph: one graph and no break, eager's values and gradients.

- Each program of the table, whichever way its tensors choose, with fixed and with symbolic sizes.
- What torch refuses (writes, aliases, results of different kinds, no rows) is refused when compiled too.
- Without the plug-in such a call ends the graph, with a reason in plain words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, cond, nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_rows

import minicompile as mc
from minicompile.ops.display import to_html
from tests.comparing import assert_as_eager
from tests.dynamo.helpers import explained

X, W = torch.linspace(-1, 2, 12).view(4, 3), torch.linspace(0, 1, 9).view(3, 3) - 0.3


def countdown(x: Tensor, w: Tensor) -> Any:
    """torch.while_loop's documentation: an iteration counter and a value."""
    with torch.no_grad():
        start = torch.zeros((), dtype=torch.int64)
        return while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a @ w + x), (start, x))


def until_small(x: Tensor, w: Tensor) -> Any:
    def halve(a: Tensor) -> tuple[Tensor]:
        return (cond(a.sum() > 5, lambda: a - x.abs(), lambda: a / 2),)

    with torch.no_grad():
        return while_loop(lambda a: a.sum() > 0.5, halve, (x,))


def gates(x: Tensor, w: Tensor) -> Any:
    """An LSTM-like cell over a sequence (pytorch's scan examples)."""

    def cell(state: tuple[Tensor, Tensor], row: Tensor) -> Any:
        h, c = state
        gate = (row @ w + h).sigmoid()
        c = gate * c + (1 - gate) * row.tanh()
        h = c.tanh() * gate
        return (h, c), {"h": h * 1, "gate": gate * 1}

    return scan(cell, (torch.zeros(3), torch.ones(3)), x)


def nested(x: Tensor, w: Tensor) -> Any:
    def inner(r: Tensor) -> Any:
        return cond(r.mean() > 0.7, lambda r: r.exp(), lambda r: r @ w, (r,))

    return cond(x.sum() > 0, lambda x: map_rows(inner, x), lambda x: x * x.shape[0], (x,))


def add(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    return carry + row, carry * row


def recurrence(a: Any, b: Any) -> Any:
    """x[t] = a[t] x[t-1] + b[t], as state-space models scan it."""
    return a[0] * b[0], b[0] * a[1] + b[1]


def autocast(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return cond(x.sum() > 0, lambda: x @ w, lambda: (x @ w.t()).relu())


PROGRAMS: dict[str, Callable[..., Any]] = {
    # from the documentation of torch.cond
    "cos_sin": lambda x, w: cond(x.sum() > 4, lambda x: x.cos(), lambda x: x.sin(), (x,)),
    "by_shape": lambda x, w: cond(x.shape[0] > 4, lambda x: x.cos() + w[0], lambda x: x.sin(), (x,)),
    "closure": lambda x, w: cond(w.sum() > x.sum(), lambda: x @ w, lambda: (x * 2) @ w.t()) + 1,
    "containers": lambda x, w: cond(
        x[0, 0] < 0,
        lambda d: {"y": d["x"] + 1, "z": w * 2},
        lambda d: {"y": d["x"] * 3, "z": w.exp()},
        ({"x": x},),
    ),
    "no_gradient_on_one_side": lambda x, w: cond(
        x.sum() > 4, lambda x: x * w[1], lambda x: torch.full_like(x, 2), (x,)
    ),
    "python_number": lambda x, w: cond(3 > 2, lambda x: x @ w, lambda x: x, (x,)),
    "autocast": autocast,
    "nested": nested,
    # from the documentation of while_loop, scan, map, associative_scan
    "countdown": countdown,
    "until_small": until_small,
    "cumulative": lambda x, w: scan(add, w[0] * 1, x),
    "reverse": lambda x, w: scan(add, torch.zeros(3), x @ w, reverse=True),
    "columns": lambda x, w: scan(lambda c, r: (c * 1.5, c.cos() + r), x.sum(1), x, dim=1),
    "gates": gates,
    "map": lambda x, w: map_rows(lambda r, w: (r @ w).relu() + r, x, w),
    "map_pairs": lambda x, w: map_rows(lambda p: (p[0] - p[1].sum(), p[1] * 2), (x, x @ w)),
    "prefix_products": lambda x, w: associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic"),
    "recurrence": lambda x, w: associative_scan(
        recurrence, (x.sigmoid(), x @ w), 1, reverse=True, combine_mode="generic"
    ),
}  # fmt: skip


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return mc.compile(fn, fullgraph=True, **options)


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_one_graph_and_gives_eagers_values_and_gradients(
    name: str, dynamic: bool
) -> None:
    fn, w = PROGRAMS[name], W.clone().requires_grad_()
    run = compiled(fn, dynamic=dynamic)
    for x in (X, -X, X + 1, X):  # either way, and again
        assert_as_eager(run, fn, x.clone().requires_grad_(), w, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert_as_eager(run, fn, X, W, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_compile_makes_no_fewer_graphs(name: str) -> None:
    torch._dynamo.reset()
    explanation = torch._dynamo.explain(PROGRAMS[name])(X, W)
    assert explanation.graph_count >= 1
    assert mc.explain(PROGRAMS[name])(X, W).graph_count <= explanation.graph_count


def test_parameters_train() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = cond(x.sum() > 0, self.a, lambda x: self.b(x).tanh(), (x,))
            return scan(lambda c, r: (self.a(c) + r, c * r), y[0] * 1, y)[1]

    model = Model()
    run = compiled(model)
    for x in (X, -X, X):
        assert_as_eager(run, model, x, module=model)
    assert "a_weight" in str(mc.trace(model, X).capture)


def changes_a_list(x: Tensor) -> Any:
    calls = []

    def branch(x: Tensor) -> Tensor:
        calls.append(1)
        return x + 1

    return cond(x.sum() > 0, branch, lambda x: x * 2, (x,)), len(calls)


REFUSED: dict[str, Callable[..., Any]] = {
    "dtype": lambda x: cond(x.sum() > 0, lambda x: x + 1, lambda x: x.double(), (x,)),
    "alias": lambda x: cond(x.sum() > 0, lambda x: x, lambda x: x + 1, (x,)),
    "view": lambda x: cond(x.sum() > 0, lambda x: x[0], lambda x: x[1] + 1, (x,)),
    "write": lambda x: cond(x.sum() > 0, lambda x: x.add_(1) * 2, lambda x: x + 1, (x,)),
    "object": changes_a_list,
    "no_rows": lambda x: scan(add, torch.zeros(3), x[:0]),
    "carry": lambda x: scan(lambda c, r: ((c + r).double(), c * r), torch.zeros(3), x),
    "map_alias": lambda x: map_rows(lambda r: r, x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_not_captured(name: str) -> None:
    fn = REFUSED[name]
    with pytest.raises(Exception) as expected:
        fn(X.clone())
    with pytest.raises(type(expected.value)):
        mc.compile(fn)(X.clone())


def test_gradients_of_a_while_loop_and_numbers_as_results_are_left_to_torch() -> None:
    for fn in (
        lambda x: while_loop(lambda a: a.sum() < 9, lambda a: (a * 2 + 1,), (x,))[0],
        lambda x: cond(x.sum() > 0, lambda x: (x + 1, 3), lambda x: (x * 2, 4), (x,)),
    ):
        assert_as_eager(mc.compile(fn), fn, X.clone().requires_grad_())


def test_a_loop_without_turns_gives_new_tensors() -> None:
    run, x = (
        compiled(lambda x: while_loop(lambda a: a.sum() < 0, lambda a: (a + 1,), (x,))),
        X.abs(),
    )
    run(x)[0].zero_()
    assert x.sum() > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_run_bodies(backend: str) -> None:
    w = W.clone().requires_grad_()
    for fn in (nested, gates, countdown):
        assert_as_eager(compiled(fn, backend=backend), fn, X, w, rtol=1e-4, atol=1e-5)


def test_pictures_and_stages_show_the_bodies() -> None:
    trace = mc.trace(PROGRAMS["cos_sin"], X.clone().requires_grad_(), W)
    assert all(f"x.{name}()" in str(trace.capture) for name in ("cos", "sin"))
    assert all(name in to_html(trace.capture) for name in ("cos", "sin"))
    assert {name.rpartition("_")[2] for name in trace.graphs} == {
        "forward",
        "backward",
        "true",
        "false",
    }
    assert "    if buf" in trace.wrapper.text and "else:" in trace.wrapper.text


def test_without_the_plugin_the_call_ends_the_graph() -> None:
    chosen = [name for name in mc.Options().plugins if name != "control_flow"]
    fn = PROGRAMS["cos_sin"]
    run = mc.compile(fn, options={"plugins": chosen})
    assert_as_eager(run, fn, X, W)
    (stop,) = {stop.id for stop in explained(run).breaks}
    assert stop == "control-flow"
