"""What capture can't do runs the frame in eager, with the reason, the user's line and a way out."""

from __future__ import annotations

import logging
import random
import time
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import minicompile as mc
from minicompile.errors import Unsupported
from tests.dynamo import break_captures
from tests.dynamo.helpers import compiled, equal, explained, lenient, outcome
from tests.dynamo.program_table import names

x = torch.randn(3, 4)


def item(a: torch.Tensor) -> Any:
    return a.sum().item()


def branch(a: torch.Tensor) -> torch.Tensor:
    return a if a.sum() > 0 else -a


def prints(a: torch.Tensor) -> torch.Tensor:
    print("hello")
    return a


def logs(a: torch.Tensor) -> torch.Tensor:
    logging.getLogger("x").debug("hello")
    return a


def draws(a: torch.Tensor) -> torch.Tensor:
    return a + 0 * random.random()


def times(a: torch.Tensor) -> torch.Tensor:
    return a + 0 * time.time()


def from_numpy(a: torch.Tensor) -> torch.Tensor:
    return a + torch.from_numpy(np.ones(4)).float()


def to_numpy(a: torch.Tensor) -> Any:
    return float(a.numpy().sum())


def data_dependent_shape(a: torch.Tensor) -> torch.Tensor:
    return a[a > 0]


def addresses(a: torch.Tensor) -> torch.Tensor:
    return a + 0 * id(a)


def own_metadata(a: torch.Tensor) -> torch.Tensor:
    a.resize_(1)
    return a + 1


WEIGHT = torch.ones(4, requires_grad=True)


def gradients(a: torch.Tensor) -> torch.Tensor:
    (a * WEIGHT).sum().backward()
    return a


def seeds(a: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return a + torch.rand(4)


def default_device(a: torch.Tensor) -> Any:
    with torch.device("meta"):
        return a, torch.zeros(2).device.type


class Counting:
    made = 0

    def __init_subclass__(cls) -> None:
        Counting.made += 1


def subclasses(a: torch.Tensor) -> Any:
    class Local(Counting):
        pass

    return a, Local.__name__


CASES = [
    (default_device, "__enter__ is called"),
    (subclasses, "__build_class__ is called"),
    (item, "`.item`"),
    (branch, "branches on a tensor's data"),
    (prints, "print"),
    (logs, "getLogger is called"),
    (draws, "Random.random"),
    (times, "time.time"),
    (from_numpy, "numpy"),
    (to_numpy, "`.numpy`"),
    (data_dependent_shape, "depends on the tensor's data"),
    (addresses, "id is called"),
    (own_metadata, "`.resize_` of a tensor is used"),
    (gradients, "`.backward`"),
    (seeds, "seed is called"),
]


@pytest.mark.parametrize(
    ("function", "reason"), CASES, ids=lambda case: getattr(case, "__name__", "")
)
def test_unsupported_python_gives_eagers_result_and_says_why(function: Any, reason: str) -> None:
    run = lenient(function)
    for _ in range(2):
        assert equal(outcome(run, x.clone()), outcome(function, x.clone()))
    found = explained(run).breaks[0]
    assert reason in found.reason
    assert found.user_line is not None and found.user_line.function == function.__name__
    with pytest.raises(Unsupported, match=r"at .*test_breaks\.py"):
        compiled(function)(x.clone())


def test_a_generator_function_compiled_directly() -> None:
    def function(a: torch.Tensor) -> Iterator[torch.Tensor]:
        yield a
        yield a * 2

    run = lenient(function)
    assert equal(list(run(x)), [x, x * 2])
    assert "generator function" in explained(run).breaks[0].reason
    assert "generator function" in str(mc.explain(function)(x))


def test_capture_never_runs_a_handler_of_the_user_for_its_own_refusals() -> None:
    def function(a: torch.Tensor) -> Any:
        try:
            return a.sum().item()
        except Exception:
            return "swallowed"

    assert lenient(function)(torch.ones(2)) == 2.0


def test_a_function_that_asked_not_to_be_compiled() -> None:
    @torch.compiler.disable
    def outside(a: torch.Tensor) -> torch.Tensor:
        return a + 1

    def function(a: torch.Tensor) -> torch.Tensor:
        return outside(a) * 2

    run = lenient(function)
    assert equal(run(x), (x + 1) * 2)
    assert "torch.compiler.disable" in explained(run).breaks[0].reason


def test_a_break_in_a_callee_cuts_both_frames() -> None:
    def helper(a: torch.Tensor) -> torch.Tensor:
        b = a.exp()
        print(end="")
        return b * 2

    def function(a: torch.Tensor) -> torch.Tensor:
        rows = [a.sin()]
        rows.append(helper(a + 1))
        return rows[0] + rows[1]

    run = lenient(function, options={"plugins": "none"})
    assert equal(run(x), function(x)) and equal(run(x + 1), function(x + 1))
    found = explained(run)
    assert found.graph_count == 3 and found.eager_calls == 0
    assert [capture.graph.op_count for capture in found.captures] == [3, 1, 1]


def test_breaks_in_a_loop_reuse_their_graphs_and_nest_nothing() -> None:
    def function(a: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        while total < limit:
            total = total + a.amax()
        return total

    run, a = lenient(function), torch.ones(3)
    for limit in (3, 600):
        assert equal(run(a, torch.tensor(limit)), function(a, torch.tensor(limit)))
    assert explained(run).graph_count <= 5 and not explained(run).limit_reached


def test_iterators_go_on_where_they_stood() -> None:
    def function(a: torch.Tensor, given: list[int], table: dict[str, int]) -> Any:
        seen: list[Any] = []
        for place, (n, key) in enumerate(zip(given, table)):
            a = a * n
            print(end="")
            seen.append((place, n, key))
        for key, value in table.items():
            print(end="")
            seen.append((key, value))
        for n in reversed(given):
            print(end="")
            seen.append(n)
        return a, seen

    run = lenient(function)
    for given in ([2, 3, 4], [2, 3, 4], [5]):
        table = {"p": 1, "q": 2, "r": 3}
        assert equal(run(x, given, table), function(x, given, table))
    assert explained(run).eager_calls == 0


def test_a_break_in_an_except_block_runs_the_raising_instruction_natively() -> None:
    def function(a: torch.Tensor, table: dict[str, int]) -> Any:
        b = a * 2
        try:
            table["missing"]
        except KeyError as error:
            print(end="")
            last = traceback.extract_tb(error.__traceback__)[-1]
            return b.cos(), last.line
        return a

    run = lenient(function)
    assert equal(run(x, {}), function(x, {})) and equal(run(x, {}), function(x, {}))
    assert explained(run).graph_count == 1 and explained(run).eager_calls == 0


def test_what_a_resumed_frame_only_passes_on_is_not_guarded() -> None:
    def function(a: torch.Tensor, name: str) -> Any:
        b = a.sin()
        print(end="")
        b = b.cos()
        print(end="")
        return b, name

    run = lenient(function)
    with pytest.warns(UserWarning, match="compiled 8 times"):  # where it is returned
        for number in range(12):
            assert equal(run(x, str(number)), function(x, str(number)))
    assert explained(run).graph_count == 1 + 1 + 8


# A thousand frames of one function have a thousand times the places of that function.
LEFT_OUT = {*break_captures.LIFETIMES, "endless_recursion"}
PLACES = [pair for pair in names() if pair[1] not in LEFT_OUT]


@pytest.mark.long
@pytest.mark.parametrize(("table", "name"), PLACES, ids=[name for _, name in PLACES])
def test_a_capture_can_be_broken_anywhere(table: str, name: str) -> None:
    outcome = break_captures.Outcome()
    outcome.program(table, name, every=40, random_runs=1)
    assert not outcome.wrong and outcome.runs


def test_the_captures_are_really_cut_there() -> None:
    outcome = break_captures.Outcome()
    outcome.program("table_functions", "order_of_evaluation", every=2)
    assert outcome.cut >= 0.8 * outcome.runs


def raises_when_it_runs(a: torch.Tensor, log: list[Any]) -> Any:
    """Nobody knows before the graph runs that the index is too large."""
    log.append("before")
    with torch.no_grad():
        b = a + 1
        try:
            b = b[torch.tensor([0, 7]) + 0 * a.shape[0]]
        except IndexError:
            log.append("caught")
        c = b * 2
    log.append("after")
    return c


def test_effects_and_handlers_of_a_frame_whose_graph_raises() -> None:
    ours: list[Any] = []
    theirs: list[Any] = []
    run = lenient(raises_when_it_runs)
    for _ in range(2):
        found, expected = run(x, ours), raises_when_it_runs(x, theirs)
        assert equal(found, expected) and ours == theirs
    assert "caught" in ours and torch.is_grad_enabled()
    told = explained(run)
    assert told.eager_calls == 2 and told.breaks[-1].reason.startswith("a graph raised IndexError")


def mixes_dtypes(a: torch.Tensor, log: list[Any]) -> Any:
    """Fake tensors take this product; the graph raises, and the frame runs in eager."""
    log.append(a)
    return a @ torch.ones(4, dtype=torch.float64)


def resizes(a: torch.Tensor, log: list[Any]) -> Any:
    log.append(torch.empty(0))
    return torch.add(a, 1, out=log[-1])


@pytest.mark.parametrize("function", [mixes_dtypes, resizes])
def test_what_fakes_take_and_tensors_refuse(function: Any) -> None:
    ours: list[Any] = []
    theirs: list[Any] = []
    a, b = x.clone(), x.clone()
    run = lenient(function)
    for _ in range(2):
        found = outcome(lambda a: run(a, ours), a)
        assert equal(found, outcome(lambda b: function(b, theirs), b))
        assert torch.equal(a, b) and len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))


def writes_behind_autograd(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = a * b
    b.data.add_(1)
    return product


def test_a_write_through_data_stays_unseen_by_autograd() -> None:
    grads = []
    for function in (writes_behind_autograd, lenient(writes_behind_autograd)):
        a, b = x.clone().requires_grad_(), torch.ones(4)
        function(a, b).sum().backward()
        grads.append((a.grad, b))
    assert equal(*grads)


def views_before_its_base_has_history(a: torch.Tensor, b: torch.Tensor) -> Any:
    view = b.unsqueeze(0)
    if (b > 0).any():
        b.copy_(a)
    return b, view


def test_a_view_older_than_its_bases_history_is_no_internal_error() -> None:
    leaf = x.clone().requires_grad_()
    run = lenient(views_before_its_base_has_history)
    expected = views_before_its_base_has_history(leaf * 1, x.abs())
    assert equal(run(leaf * 1, x.abs()), expected)
    stops = [(stop.id, stop.kind) for stop in explained(run).breaks]
    assert stops == [("branch-on-tensor", "instruction"), ("tensor-kind", "instruction")]
