"""What capture promises, each promise with one small program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minicompile as mc
from tests.comparing import assert_as_eager, equal

RATE = 2


def eagerly(function: Any, **options: Any) -> Any:
    """Compile; graphs run as they were captured."""
    return mc.compile(function, backend="eager", **options)


def versions(run: Any) -> int:
    """Return how often a function was captured."""
    return len(mc.timeline(run)[0].answered) - 1


def test_values_are_eagers_to_the_bit_and_one_graph_serves_all_calls() -> None:
    def program(a: Tensor, names: list[str]) -> Any:
        return {name: getattr(a, name)(0) for name in names}, [row * i for i, row in enumerate(a)]

    run = eagerly(program, fullgraph=True)
    for _ in range(3):
        assert_as_eager(run, program, torch.randn(3, 4), ["sum", "amax"], rtol=0, atol=0)
    assert versions(run) == 1


def test_gradients_flow_through_graphs_and_the_breaks_between_them() -> None:
    def program(a: Tensor, w: Tensor) -> Tensor:
        b = a @ w
        print(end="")
        return b.relu().sum()

    w = torch.randn(4, 2, requires_grad=True)
    assert_as_eager(eagerly(program), program, torch.randn(3, 4), w, rtol=0, atol=0)


def test_writes_outside_happen_once_and_where_eagers_do() -> None:
    class Holder:
        count = 0

    def program(a: Tensor, holder: Holder, log: list[Any]) -> Tensor:
        global RATE
        RATE += 1
        holder.count += 1
        log.append(a[0])
        a.mul_(RATE)
        return a + holder.count

    global RATE
    run, found = eagerly(program), []
    for function in (program, run):
        a, holder, log, RATE = torch.ones(3), Holder(), list[Any](), 2
        results = [function(a, holder, log) for _ in range(3)]
        found.append((results, a, holder.count, log, RATE))
    assert equal(*found)


def test_side_effects_keep_their_order_across_breaks_and_exceptions() -> None:
    class Noted:
        def __init__(self, log: list[str]) -> None:
            self.log = log

        def __enter__(self) -> None:
            self.log.append("enter")

        def __exit__(self, *error: object) -> None:
            self.log.append(f"leave {error[0]}")

    def program(a: Tensor, log: list[str], fail: bool) -> Tensor:
        try:
            with Noted(log):
                a = a * 2
                print(end="")
                log.append("after")
                if fail:
                    raise KeyError("asked for")
                a = a + 1
        finally:
            log.append("finally")
        return a * 3

    run = eagerly(program)
    for fail in (False, True, False):
        logs: tuple[list[str], list[str]] = ([], [])
        for function, log in zip((program, run), logs, strict=True):
            if fail:
                with pytest.raises(KeyError, match="asked for"):
                    function(torch.ones(2), log, fail)
            else:
                assert equal(function(torch.ones(2), log, fail), torch.full((2,), 9.0))
        assert logs[0] == logs[1]


def test_guards_notice_what_a_graph_relied_on_and_nothing_else() -> None:
    settings = {"rate": 2, "unrelated": 0}

    def program(a: Tensor) -> Tensor:
        return a * settings["rate"]

    run = eagerly(program)
    for rate, count in ((2, 1), (3, 2), (2, 2)):
        settings["rate"], settings["unrelated"] = rate, settings["unrelated"] + 1
        assert equal(run(torch.ones(2)), torch.full((2,), float(rate)))
        assert versions(run) == count


def test_a_size_that_varies_becomes_a_symbol_and_other_recompiles_end_at_a_limit() -> None:
    run = eagerly(lambda a, k: a.sum() * a.shape[0] + len(k), options={"recompile_limit": 3})
    for size in range(2, 9):
        assert run(torch.ones(size), "").item() == size**2
    assert versions(run) == 2
    with pytest.warns(UserWarning, match="in eager from here on"):
        for k in ("a", "bc", "def"):
            assert run(torch.ones(2), k).item() == 4 + len(k)
    assert versions(run) == 3 and mc.timeline(run)[0].answered[0]


def test_a_break_gives_the_reason_the_users_line_and_a_way_out() -> None:
    def program(a: Tensor) -> Tensor:
        if a.sum() > 0:
            return a + 1
        return a - 1

    for a in (torch.ones(2), -torch.ones(2)):
        assert_as_eager(eagerly(program), program, a, rtol=0, atol=0)
    [found] = mc.explain(program)(torch.ones(2)).breaks
    assert found.id == "branch-on-tensor" and found.hint
    assert found.user_line is not None and found.user_line.text == "if a.sum() > 0:"
    with pytest.raises(mc.Unsupported, match=r"branch-on-tensor(?s:.*)a\.sum\(\) > 0"):
        eagerly(program, fullgraph=True)(torch.ones(2))


def test_nothing_happens_twice_when_a_capture_is_given_up() -> None:
    def program(a: Tensor, log: list[int]) -> Any:
        log.append(1)
        a.add_(1)
        return a.sum().item()

    a, log = torch.zeros(2), list[int]()
    assert eagerly(program)(a, log) == 2.0 and log == [1]


def test_what_is_one_object_in_eager_is_one_object() -> None:
    def program(a: Tensor, items: list[Any]) -> Any:
        shared = [a * 2]
        loop: list[Any] = [shared]
        loop.append(loop)
        return a, [a, items], a.contiguous(), a[1:], {"same": shared}, loop

    a, items = torch.randn(3, 4), [1]
    first, (again, given), contiguous, view, named, loop = eagerly(program, fullgraph=True)(
        a, items
    )
    assert first is again is contiguous is a and given is items
    assert view.data_ptr() == a[1:].data_ptr() and view._base is a
    assert loop[0] is named["same"] and loop[1] is loop


def test_inputs_that_come_to_share_memory_run_in_eager() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return a + b

    run, base = eagerly(program), torch.zeros(4)
    assert_as_eager(run, program, torch.zeros(3), torch.zeros(3))
    assert_as_eager(run, program, base[:3], base[1:])
    assert versions(run) == 1


@pytest.mark.parametrize("fail", [False, True])
def test_exceptions_are_eagers_with_cause_and_context(fail: bool) -> None:
    def program(a: Tensor) -> Tensor:
        try:
            {}["missing"]
        except KeyError as error:
            if fail:
                raise ValueError(f"{a.shape[0]} rows") from error
        return a @ torch.ones(5, 5)

    caught = []
    for function in (program, eagerly(program)):
        with pytest.raises((ValueError, RuntimeError)) as info:
            function(torch.ones(3, 4))
        error = info.value
        caught.append((type(error), str(error), type(error.__cause__), type(error.__context__)))
    assert caught[0] == caught[1]


def test_closures_share_their_cells_across_breaks_and_calls() -> None:
    def make() -> Callable[[Tensor], Any]:
        calls = 0

        def program(a: Tensor) -> Any:
            nonlocal calls
            count = 0

            def more() -> int:
                nonlocal count
                count += 1
                return count

            more()
            print(end="")
            count, calls = count + 10, calls + 1
            return a * more(), count, calls

        return program

    plain, run = make(), eagerly(make())
    for _ in range(3):
        assert equal(run(torch.ones(2)), plain(torch.ones(2)))


def test_modules_are_themselves_and_train_with_their_buffers_and_hooks() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        module[0].register_forward_hook(lambda m, args, out: out + 1)
        return module

    plain, module, x = make(), make(), torch.randn(3, 4)
    run = eagerly(module, fullgraph=True)
    assert isinstance(run, nn.Sequential) and list(run.state_dict()) == list(plain.state_dict())
    for training in (True, True, False):
        for call in (plain.train(training), run.train(training)):
            torch.manual_seed(1)
            call(x).sum().backward()
    assert equal(module.state_dict(), plain.state_dict())
    assert equal([p.grad for p in module.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("fail", [False, True])
def test_modes_of_torch_hold_inside_and_end_with_their_block(fail: bool) -> None:
    def program(a: Tensor) -> Any:
        try:
            with torch.no_grad(), torch.autocast("cpu"):
                b = a @ a.T
                print(end="")
                if fail:
                    raise ValueError
        except ValueError:
            b = a
        return b, a @ a.T, torch.is_grad_enabled()

    run = eagerly(program)
    for mode in (torch.enable_grad, torch.no_grad, torch.enable_grad):
        with mode():
            a = torch.randn(3, 4, requires_grad=True)
            assert equal(run(a), program(a))
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_random_numbers_are_the_ones_that_eager_draws() -> None:
    def program(a: Tensor) -> Tensor:
        return torch.rand(3) + nn.functional.dropout(a, 0.5).sum()

    run, found = eagerly(program), []
    for function in (run, program, run):
        torch.manual_seed(3)
        found.append((function(torch.ones(4)), torch.rand(1)))
    assert equal(found[0], found[1]) and equal(found[1], found[2])
