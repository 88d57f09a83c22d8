"""Threads that compile and call the same and different functions.

Every result is compared with eager's. Each thread draws from programs that recompile, break, run whole frames
in eager with captured functions below, train modules and change objects; from shared compiled functions and
fresh ones, whose global it changes; now and then one resets everything.
"""

from __future__ import annotations

import collections
import contextlib
import random
import sys
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import minicompile as mc
from tests.comparing import assert_same
from tests.dynamo.helpers import equal, explained

SCALE = 3.0


def scaled(a: torch.Tensor, k: int) -> torch.Tensor:
    return a * k + SCALE


def of_many_sizes(a: torch.Tensor, k: int) -> torch.Tensor:
    return a.repeat(k + 1, 2).softmax(0)[:, : k + 1].sum(1) * a.shape[0]


def with_breaks(a: torch.Tensor, k: int) -> Any:
    b = a.relu() * k
    largest = b.max().item()
    c = b + (b.sin() if largest > 1 else b.cos())
    print(end="")
    return c * 2, largest


def below(a: torch.Tensor, k: int, *rest: Any, sign: float = -1.0) -> torch.Tensor:
    return a.sin() * sign + sum(rest) + k


def below_too(a: torch.Tensor) -> torch.Tensor:
    b = a * 2
    print(end="")
    return b.cos()


def in_eager(a: torch.Tensor, k: int) -> Any:
    try:
        raise KeyError(k)
    except KeyError:
        print(end="")
        found = [below(a, k), below(a, k, 1, 2, sign=0.5)]
    for row in (a, a + 1):
        print(end="")
        found.append(below_too(row))
    return found


def by_callback(a: torch.Tensor, k: int) -> Any:
    keys = {i: i * k % 3 for i in range(4)}
    rows = sorted(range(4), key=lambda i: (keys[i], round(float(below(a, i).sum()), 3)))
    return [a * row for row in rows]


def recursive(a: torch.Tensor, k: int) -> torch.Tensor:
    print(end="")
    return a if k == 0 else recursive(a.sin(), k - 1) + k


def raises(a: torch.Tensor, k: int) -> torch.Tensor:
    b = below_too(a)
    print(end="")
    if k % 2:
        raise ValueError(f"k is {k}")
    return b


class Thing:
    def __init__(self) -> None:
        self.count, self.kept = 0, list[torch.Tensor]()

    def note(self, a: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.kept.append(a * 2)
        return a + self.count


def changes_objects(a: torch.Tensor, k: int) -> Any:
    thing = Thing()
    for _ in range(k % 3):
        print(end="")
        a = thing.note(a)
    return a, thing.count, thing.kept


class Net(nn.Module):
    unrelated = 0
    """Written all the time: what was noted about the class must be looked at again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            a = layer(a).relu()
            print(end="")
        return a


shared_net = Net()


def calls_a_module(a: torch.Tensor, k: int) -> torch.Tensor:
    return shared_net(a) * k


def trains(a: torch.Tensor, k: int) -> Any:
    leaf = a.clone().requires_grad_()
    loss = (shared_net.layers[k % 3](leaf) ** 2).sum()
    return torch.autograd.grad(loss, leaf)


def under_no_grad(a: torch.Tensor, k: int) -> Any:
    with torch.no_grad():
        b = shared_net(a)
    return b, b.requires_grad, torch.is_grad_enabled()


PROGRAMS: list[Callable[[torch.Tensor, int], Any]] = [
    *(scaled, of_many_sizes, with_breaks, in_eager, by_callback, recursive, raises),
    *(changes_objects, calls_a_module, trains, under_no_grad),
]


def alike(found: Any, wanted: Any) -> bool:
    """Equal but for roundings, which are a kernel's own."""
    try:
        assert_same(found, wanted, rtol=1e-5, atol=1e-5)
    except AssertionError:
        return False
    return True


def with_own_globals(function: Any) -> Any:
    """The same code reading another SCALE."""
    return types.FunctionType(function.__code__, {**globals()}, function.__name__)


def outcome(function: Callable[..., Any], a: torch.Tensor, k: int) -> Any:
    try:
        return function(a.clone(), k)
    except ValueError as error:
        return str(error)


@dataclass
class Report:
    calls: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    graphs: int = 0

    def __str__(self) -> str:
        total = sum(self.calls.values())
        each = ", ".join(f"{name} {count}" for name, count in sorted(self.calls.items()))
        lines = [f"{total} calls ({each}), {self.graphs} graphs at the end"]
        lines += [*self.wrong[:5], *self.errors[:3]]
        return "\n".join([*lines, f"{len(self.wrong)} wrong, {len(self.errors)} errors"])


def compile_all(backends: list[str], functions: list[Any]) -> list[tuple[Any, Any]]:
    return [(f, mc.compile(f, backend=backend)) for f in functions for backend in backends]


def work(
    seed: int, report: Report, shared: list[Any], backends: list[str], more: Callable[[int], bool]
) -> None:
    """One thread. `more(i)`: whether to make call number i."""
    chosen = random.Random(seed)
    own, same = compile_all(backends[:1], PROGRAMS), alike if "inductor" in backends else equal
    mine = with_own_globals(scaled)
    own += compile_all(backends[:1], [mine])
    number = 0
    try:
        while more(number):
            number += 1
            Net.unrelated = number
            if number % 1_000 == 0:
                own = compile_all([chosen.choice(backends)], [*PROGRAMS, mine])
                if seed == 0:
                    mc.reset()
            plain, compiled = chosen.choice(shared if chosen.random() < 0.6 else own)
            mine.__globals__["SCALE"] = chosen.choice([1.0, 2.5, seed])
            rows, k = chosen.randint(1, 3), chosen.randint(0, 6)
            a = torch.linspace(-2, 2, rows * 4).reshape(rows, 4) * chosen.randint(1, 3)
            with contextlib.nullcontext() if chosen.random() < 0.7 else torch.no_grad():
                if plain is trains and not torch.is_grad_enabled():
                    number -= 1
                    continue
                found, wanted = outcome(compiled, a, k), outcome(plain, a, k)
            report.calls[plain.__name__] += 1
            if not same(found, wanted):
                report.wrong.append(f"{plain.__name__}({rows} rows, {k}): {found}, not {wanted}")
    except BaseException:
        report.errors.append(traceback.format_exc())


def run(threads: int, backends: list[str], more: Callable[[int], bool]) -> Report:
    """Start the threads, wait for them, and say what came out."""
    reports = [Report() for _ in range(threads)]
    shared = compile_all(backends, PROGRAMS)
    workers = [
        threading.Thread(target=work, args=(seed, report, shared, backends, more))
        for seed, report in enumerate(reports)
    ]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change places as often as they can
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(switch)
    whole = Report(graphs=sum(explained(compiled).graph_count for _, compiled in shared))
    for report in reports:
        whole.calls += report.calls
        whole.wrong += report.wrong
        whole.errors += report.errors
    return whole
