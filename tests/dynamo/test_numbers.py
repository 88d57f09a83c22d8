"""Ints, floats and tuples of them as symbols: one graph for many values, the results Python's own."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.dynamo.helpers import equal, explained, graphs, lenient, outcome

X = torch.arange(24.0).reshape(4, 6)
INTS = (3, 5, 7, 2, 1, 0, -2, -5, 9)
FLOATS = (2.5, 0.1 + 0.2, 1e-3, 7.75, -1.25, 1.0, 0.0, math.inf, math.nan, 1e300, -3.0)


def unrolled(x: torch.Tensor, n: int) -> torch.Tensor:
    for i in range(n):
        x = x + i
    return x


OF_INTS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, n: x + n,
    "algebra": lambda x, n: (x * n, n + 1, n * 2 - 3, n // 3, n % 3, n // 3 * 3, -n, +n),
    "sizes": lambda x, n: (torch.arange(n) + x.sum(), torch.zeros(n, 2), x.new_zeros(x.size(0), n)),
    "true division": lambda x, n: (x * (n / 2), n / 4),
    "powers": lambda x, n: (x + n**2, n**0.5, n**-1, 2**n, (x * 0 + 1) * n**5, n**6),
    "math": lambda x, n: (x / math.sqrt(n), math.floor(n / 2), math.ceil(n / 2), round(n / 3)),
    "bits": lambda x, n: (x * (n << 1), n >> 1, n & 3, n | 8, n ^ 5, ~n, n.bit_length()),
    "text": lambda x, n: (
        x,
        f"{n}",
        str(n),
        "%d" % n,  # noqa: UP031
        f"{n}",
        repr((n, x.shape)),
        "{} {a}".format([n], a={n: [n]}),  # noqa: UP032
        "%s %d" % (x.shape, n),  # noqa: UP031
        f"{[n, (n,)]}",
        str(ValueError([n], n)),
        f"{n:>5}",
    ),
    "lists": lambda x, n: ([x] * n, [0] * n, list(range(n)), [*range(10)][n % 10], (1, 2) * n),
    "keys": lambda x, n: (
        {n: x},
        {1: 2, 5: 6}.get(n, 0),
        {n, 3},
        n in {3: 1},
        dict.fromkeys((n,), 1),
    ),
    "kinds": lambda x, n: (isinstance(n, int), type(n), n is None, hash(n), isinstance(n, float)),
    "comparisons": lambda x, n: (n == 3, n == "a", n in (3, 5), bool(n), n >= x.shape[0], n != 4),
    "loop": unrolled,
    "branch": lambda x, n: x * 2 if n > 4 else x * n,
    "builtins": lambda x, n: (
        min(n, 5) * x,
        max(n, 3),
        abs(-n),
        divmod(n, 3),
        sum([n, n]),
        pow(n, 2),
    ),
    "conversions": lambda x, n: (int(n), float(n), complex(n, 1), n * 1j, bool(n)),
    "scalars": lambda x, n: (
        torch.add(x, x, alpha=n),
        x**n,
        x.clamp(max=n),
        n - x,
        torch.full((2,), n),
    ),
    "shapes": lambda x, n: (torch.Size((n, 2)), (n, x.shape), x.shape),
    "signs": lambda x, n: (n // -2, n % -3, -n // 2, -n % 4),
    "slices": lambda x, n: (x[n % 4], x[:n], x[..., n % 6 :], x.flatten()[n]),
}
OF_FLOATS: dict[str, Callable[..., Any]] = {
    "scale": lambda x, f: x * f,
    "algebra": lambda x, f: (x * (f * 2 + 1) - f / 3, f + 1, f**2, -f, f // 2, f % 3, 1 / f),
    "math": lambda x, f: (x * math.sqrt(abs(f)), math.exp(f), math.floor(f), f.is_integer()),
    "rounding": lambda x, f: (round(f), int(f), round(f, 2), float(f)),
    "branch": lambda x, f: x * f if f > 1.5 else x - f,
    "comparisons": lambda x, f: (f == 2.5, f < 1, f >= 0.1 + 0.2, bool(f), min(f, 1.0), max(f, 2)),
    "kinds": lambda x, f: (isinstance(f, float), type(f), isinstance(f, int), {f: x}, [f, f + 1]),
    "text": lambda x, f: (x, f"{f:.3f} {f}", str(f)),
    "torch": lambda x, f: (torch.where(x > 3, x, f), x.clamp(max=f), F.leaky_relu(x - 4, f), x > f),
    "tensors": lambda x, f: (torch.full((2,), f), torch.tensor([f, 1.0]), torch.add(x, x, alpha=f)),
    "with sizes": lambda x, f: (x * (x.shape[0] * f), x.size(1) / f, x.shape[0] ** f),
    "as a size": lambda x, f: x[: int(f)],
}
CASES = [
    *((f"int: {name}", f, INTS) for name, f in OF_INTS.items()),
    *((f"float: {name}", f, FLOATS) for name, f in OF_FLOATS.items()),
]


LARGE: tuple[Callable[..., Any], ...] = (
    lambda x, n: x.double() * (n * n * n),
    lambda x, n: x.double() * ((n * n + 1) * (n * n + 1)),
    lambda x, n: x.double() + (n * 2**40 - 3),
)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("f", LARGE)
def test_ints_larger_than_a_graphs_are_pythons(f: Any, backend: str) -> None:
    run = lenient(f, backend=backend)
    for n in (2, 3, 100, 2**20, 2**22, 2**30, -(2**30)):
        assert equal(outcome(run, X, n), outcome(f, X, n)), n


def plain(value: Any) -> Any:
    """The same with NaN as a text, so that it equals itself."""
    if isinstance(value, tuple | list):
        return [type(value).__name__, *map(plain, value)]
    return "nan" if isinstance(value, float) and math.isnan(value) else value


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("f", "values"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_what_python_makes_of_numbers(f: Any, values: Any, dynamic: bool | None) -> None:
    run = lenient(f, dynamic=dynamic, options={"recompile_limit": 20})
    for value in values:
        assert equal(plain(outcome(run, X, value)), plain(outcome(f, X, value))), value
    report = explained(run)
    assert report.eager_calls == 0 or report.breaks


@pytest.mark.parametrize(("dynamic", "count"), [(None, 2), (True, 1), (False, 6)])
def test_a_varying_number_is_compiled_once_more(dynamic: bool | None, count: int) -> None:
    for f, values in (
        (lambda x, n: x * n + n // 2, range(2, 8)),
        (lambda x, a: x * a, range(2, 8)),
    ):
        run = lenient(f, dynamic=dynamic)
        for value in map(float, values) if f.__code__.co_varnames[1] == "a" else values:
            assert equal(run(X, value), f(X, value))
        assert graphs(run) == count


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step, self.rate = 0, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        self.rate *= 0.9
        return x * self.step * self.rate


def test_what_a_module_counts_is_symbolic_and_written_back() -> None:
    mine, theirs = Counter(), Counter()
    run = lenient(mine)
    for _ in range(12):
        assert equal(run(X), theirs(X))
        assert (mine.step, mine.rate) == (theirs.step, theirs.rate)
    assert graphs(run) == 3  # step 0, step 1, others


def broken(x: torch.Tensor) -> Any:
    n = x.sum().item()
    return x * n + n, x[: int(n) % 3]


def test_a_value_of_a_tensor_goes_on_as_a_symbol_after_the_break() -> None:
    run = lenient(broken)
    for value in range(2, 14):
        given = torch.full((4,), float(value))
        assert equal(run(given), broken(given))
    assert explained(run).breaks[0].id == "item"


def test_each_shape_passed_as_an_argument_has_a_version_of_its_own() -> None:
    f = lambda x, shape: (x.reshape(shape), shape[0] + 1, len(shape), shape)  # noqa: E731
    for kind in (tuple, torch.Size):
        run = lenient(f)
        for rows, columns in ((2, 3), (4, 5), (6, 7), (8, 2)):
            x, shape = torch.arange(float(rows * columns)).reshape(rows, columns), (columns, rows)
            assert equal(run(x, kind(shape)), f(x, kind(shape)))
        assert graphs(run) == 4


def inside(x: torch.Tensor, n: int) -> Any:
    return checkpoint(lambda t: t.sin() * n * t.shape[0], x, use_reentrant=False)


def test_a_number_used_in_a_function_that_torch_calls_keeps_its_value() -> None:
    run = lenient(inside)
    for n in range(2, 7):
        x = torch.randn(n, 3, requires_grad=True)
        assert equal(run(x, n), inside(x, n))
    assert graphs(run) == 5


class Level(enum.IntEnum):
    LOW, HIGH = -5, 7

    def __repr__(self) -> str:
        return f"<{self.name}>"


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_number_of_another_class_is_not_the_symbol(dynamic: bool | None) -> None:
    f = lambda x, n: (n, str(n), repr(n), x * n)  # noqa: E731
    run = lenient(f, dynamic=dynamic, options={"recompile_limit": 20})
    for n in (3, 4, -3, -4, Level.LOW, Level.HIGH, -5, 7, True):
        assert equal(run(X, n), f(X, n)), repr(n)


def test_the_identity_of_small_ints_is_a_guard() -> None:
    f = lambda x, n, m: (x * n, n is m, n is not m, n is True, n is x.shape[0])  # noqa: E731
    run = lenient(f, dynamic=True)
    for n, m in ((5, 4), (5, 5), (4, 6), (3, 6), (9, 9)):
        assert equal(run(X, n, m), f(X, n, m)), (n, m)


def read_at(x: torch.Tensor, n: int, m: int) -> Any:
    t = torch.tensor([1, 0])
    end = torch.select_scatter(x, x[0] * 3, 0, n - m), x[n - m : n - m + 2] * 2, x[-n:] + 1
    return x[n - m] * 2, x[-n] + 1, x[-m, 1] * 3, x[..., -1] + n, x[n % 3, t] + 1, *end


def write_at(x: torch.Tensor, n: int, m: int) -> Any:
    x[n - m : n - m + 3] = 7.0
    x[-n:] = 2.0
    x[n - m] = torch.arange(4.0)
    x[-m, 1] *= 3
    x[m] += x[-n]
    return x * 2


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("f", [read_at, write_at])
def test_positions_count_from_the_end_where_they_are_negative(f: Any, backend: str) -> None:
    run = lenient(f, backend=backend)
    for n, m in ((5, 3), (6, 4), (3, 6), (4, 9), (9, 5), (8, 2), (2, 7), (7, 7)):
        mine, theirs = (torch.arange(80.0).reshape(20, 4) for _ in range(2))
        assert equal(run(mine, n, m), f(theirs, n, m)), (n, m)
        assert equal(mine, theirs)
    assert explained(run).eager_calls == 0


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_position_is_symbolic(backend: str) -> None:
    f = lambda c, x, n: c[n] * x + c[0, n]  # noqa: E731
    run = lenient(f, backend=backend)
    for n in range(2, 8):
        given = torch.arange(81.0).reshape(9, 9), torch.ones(9), n
        assert equal(run(*given), f(*given))
    assert graphs(run) == 2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_number_that_divides_is_known_by_its_quotient(backend: str) -> None:
    def f(x: torch.Tensor, n: int) -> Any:
        if (n + 3) % 2:
            return x
        return x[: n + 1].sum(0), x[::n], x.new_zeros((n + 3) // 2), x * ((n + 3) // 2 * 2)

    run = lenient(f, backend=backend)
    for n in (3, 4, 5, 6, 7, 9, 11):
        given = torch.arange(48.0).reshape(12, 4), n
        assert equal(run(*given), f(*given)), n
    report = explained(run)
    assert report.eager_calls == 0 and report.graph_count == 3


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_inputs_that_start_inside_a_larger_tensor_are_symbolic(backend: str) -> None:
    f = lambda x: (x.view(-1) * 2, x[1:].t() + 1)  # noqa: E731
    run = lenient(f, backend=backend)
    for rows, start in ((3, 2), (4, 2), (5, 0), (6, 1), (7, 3)):
        x = torch.arange(6.0 * (rows + start)).reshape(rows + start, 6)[start:]
        assert equal(run(x), f(x))
    assert graphs(run) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_where_memory_starts_is_guarded_if_as_strided_counts_from_there(backend: str) -> None:
    f = lambda x: x.as_strided((2, 2), (1, 2), 1) + 1  # noqa: E731
    run = lenient(f, backend=backend)
    for start in (0, 2, 1, 0):
        x = torch.arange(24.0).reshape(6, 4)[start : start + 3]
        assert equal(run(x), f(x)), start


def adam(params: list[torch.Tensor], lr: float, betas: Any, step: int) -> list[torch.Tensor]:
    return [p - lr * (1 - betas[0] ** step) * p for p in params]


def test_a_step_of_an_optimizer_is_compiled_twice() -> None:
    run, params = lenient(adam), [torch.randn(3) for _ in range(3)]
    for step in range(1, 12):
        given = params, 0.1 / step, (0.9, 0.99), step
        assert equal(run(*given), adam(*given))
    assert graphs(run) == 2
    assert "f0 is lr, a float (was 0.1, then 0.05)" in explained(run).captures[1].size_lines[1]
